"""What must agree between head and worker before anything else is said."""

from __future__ import annotations

import platform
from collections.abc import Mapping

import gymnasium
import numpy as np

from farstep.version import VERSION
from farstep.wire.messages import PROTOCOL


def versions() -> dict[str, str]:
    """This side's."""
    return {
        "protocol": str(PROTOCOL),
        "farstep": VERSION,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "numpy": np.__version__,
        "gymnasium": gymnasium.__version__,
    }


def mismatches(worker: Mapping[str, str]) -> list[str]:
    """Where a worker differs from this side, a clause each."""
    mine = versions()
    return [
        f"{name} {mine.get(name, '?')} here and {worker.get(name, '?')} on the worker"
        for name in sorted(mine.keys() | worker.keys())
        if mine.get(name) != worker.get(name)
    ]
