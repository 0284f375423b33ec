"""Where to connect and with which keys: read from a descriptor or a file of mode 0600."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path
from typing import Any


def read_bootstrap(fd: int | None, path: Path | None) -> dict[str, Any]:
    if path is not None:
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            sys.exit(f"{path} holds keys but has mode {mode:o}; it must be 600.")
        return dict(json.loads(path.read_bytes()))
    assert fd is not None
    with os.fdopen(fd, "rb") as file:
        return dict(json.loads(file.read()))
