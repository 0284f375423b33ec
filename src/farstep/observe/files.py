"""Files of a run: replaced as a whole, and metrics read line by line."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that after a crash there is the old one or the new one, never a part."""
    with replacing(path) as partial, partial.open("xb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name to write to, which becomes `path` at the end, or is removed if something is raised."""
    partial = path.with_name(f".{path.stem}.{os.getpid()}.partial{path.suffix}")
    partial.unlink(missing_ok=True)
    try:
        yield partial
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def read_row(line: bytes) -> dict[str, Any] | None:
    """One line of metrics, or None if it is torn or not of ours."""
    if not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line)
    except ValueError:
        return None
    step = row.get("step") if isinstance(row, dict) else None
    return row if isinstance(step, int) else None


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The metrics of a run; lines that are torn are left out."""
    with path.open("rb") as stream:
        return [row for row in map(read_row, stream) if row is not None]
