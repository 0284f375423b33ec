"""Reads the bootstrap of a worker or node daemon: where to connect, and with which keys."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path
from typing import Any


def read_bootstrap(fd: int | None, path: Path | None) -> dict[str, Any]:
    """Read JSON from `path` or, without a path, from the descriptor `fd`. Exit if other users may read the file."""
    if path is not None:
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            sys.exit(f"{path} contains keys but has mode {mode:o}; it must be 600.")
        return dict(json.loads(path.read_bytes()))
    assert fd is not None
    with os.fdopen(fd, "rb") as file:
        return dict(json.loads(file.read()))
