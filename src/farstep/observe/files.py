"""Files of a run: replaced as a whole, and metrics read line by line."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from farstep.errors import RunError

log = logging.getLogger("farstep")
_SHOWN = 5
_LARGEST = 1e300


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
    except (ValueError, RecursionError):
        return None
    step = row.get("step") if isinstance(row, dict) else None
    return row if isinstance(step, int) and all(_is_metric(value) for value in row.values()) else None


def _is_metric(value: object) -> bool:
    return value is None or (isinstance(value, (int, float)) and abs(value) < _LARGEST)


def read_lines(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """The lines of a run's metrics, as bytes and decoded; a warning names the lines that are left out."""
    with path.open("rb") as stream:
        lines = [(line, read_row(line)) for line in stream]
    odd = [number for number, (_, row) in enumerate(lines, 1) if row is None]
    if odd:
        shown = ", ".join(map(str, odd[:_SHOWN])) + (f" and {len(odd) - _SHOWN} more" if len(odd) > _SHOWN else "")
        log.warning("%s: left out line %s: truncated, or not written by farstep", path, shown)
    return [(line, row) for line, row in lines if row is not None]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The metrics of a run; lines that are cut off or damaged are left out."""
    return [row for _, row in read_lines(path)]


@contextlib.contextmanager
def as_run_error(path: Path) -> Iterator[None]:
    """Turn the error of a write that failed into `RunError`."""
    try:
        yield
    except RunError:
        raise
    except OSError as error:
        raise RunError(
            f"{path} cannot be written: {error}. Make room there (df -h), or choose a folder that you may write to."
        ) from error
