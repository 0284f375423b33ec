"""The versions that head and worker must share. The handshake compares them."""

from __future__ import annotations

import platform
from collections.abc import Mapping

import gymnasium
import numpy as np

from farstep.version import VERSION
from farstep.wire.messages import PROTOCOL

OTHER_VERSIONS = "has different versions from the head"


def versions() -> dict[str, str]:
    """The versions in this process."""
    return {
        "protocol": str(PROTOCOL),
        "farstep": VERSION,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "numpy": np.__version__,
        "gymnasium": gymnasium.__version__,
    }


def mismatches(worker: Mapping[str, str]) -> list[str]:
    """A clause for each version of a worker that differs from this process."""
    mine = versions()
    return [
        f"{name} {mine.get(name, '?')} here and {worker.get(name, '?')} on the worker"
        for name in sorted(mine.keys() | worker.keys())
        if mine.get(name) != worker.get(name)
    ]
