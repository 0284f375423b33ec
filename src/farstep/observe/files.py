"""Writes files atomically, and reads the lines of a run's metrics and events."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from farstep.errors import RunError

log = logging.getLogger("farstep")
T = TypeVar("T")
_SHOWN = 5
_LARGEST = 1e300


def replace_file(path: Path, content: bytes, *, private: bool = False) -> None:
    """Write a file atomically: after a crash, it has either its old or its new content.

    Args:
        path: The file.
        content: Its new content.
        private: Whether only this user may read it.
    """

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags, 0o600 if private else 0o666)

    with replacing(path) as partial, open(partial, "xb", opener=opener) as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Context manager: yield a temporary path. Rename it to `path` at the end, or remove it after an exception."""
    partial = path.with_name(f".{path.stem}.{os.getpid()}.partial{path.suffix}")
    partial.unlink(missing_ok=True)
    try:
        yield partial
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def read_row(line: bytes) -> dict[str, Any] | None:
    """Decode one line of metrics. Return None if it is incomplete, or if farstep did not write it."""
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
    """Return the valid lines of a run's metrics, as bytes and decoded. A warning names the skipped lines."""
    return read_valid_lines(path, read_row)


def read_valid_lines(path: Path, decode: Callable[[bytes], T | None]) -> list[tuple[bytes, T]]:
    """Return the lines that `decode` accepts, as bytes and decoded. A warning names the other lines."""
    with path.open("rb") as stream:
        lines = [(line, decode(line)) for line in stream]
    invalid = [number for number, (_, row) in enumerate(lines, 1) if row is None]
    if invalid:
        more = f" and {len(invalid) - _SHOWN} more" if len(invalid) > _SHOWN else ""
        shown = ", ".join(map(str, invalid[:_SHOWN])) + more
        log.warning("%s: skipped line %s: truncated, or not written by farstep", path, shown)
    return [(line, row) for line, row in lines if row is not None]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run. Skip incomplete or damaged lines."""
    return [row for _, row in read_lines(path)]


@contextlib.contextmanager
def as_run_error(path: Path) -> Iterator[None]:
    """Context manager: convert an `OSError` of a write to `path` into `RunError`."""
    try:
        yield
    except RunError:
        raise
    except OSError as error:
        missing = isinstance(error, FileNotFoundError | NotADirectoryError | FileExistsError)
        if missing and not path.parent.is_dir():
            raise RunError(
                f"{path} cannot be written: {path.parent} is no folder. Create it, or choose another."
            ) from error
        raise RunError(
            f"{path} cannot be written: {error}. Free disk space (df -h), or choose a folder that you may write to."
        ) from error
