"""Writes and reads `events.jsonl`, the events of a run: one JSON object per line, oldest first.

events = EventFile(run.events_file)
subscription = event_log_of(env).subscribe(events.write)
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO

import msgspec

from farstep.checkpoint.files import no_follow
from farstep.event import Event
from farstep.observe.files import as_run_error, read_valid_lines, replace_file

MAX_BYTES = 5_000_000
"""When the file reaches this size in bytes, its older half is dropped."""


class EventFile:
    """Appends events to a file of at most `max_bytes`. When the file is full, its older half is dropped atomically.

    Args:
        path: The file. If it exists, as in a resumed run, events are appended.
        max_bytes: Maximum size of the file; default 5 MB.

    Raises:
        RunError: The file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], max_bytes: int = MAX_BYTES) -> None:
        self.path, self._max_bytes = Path(path), max_bytes
        with as_run_error(self.path):
            self._stream = self._open()
            self._end_last_line()

    def _open(self) -> IO[bytes]:
        return open(self.path, "a+b", buffering=0, opener=no_follow)

    def _end_last_line(self) -> None:
        """End a line that a crash cut off, so that it does not damage the next line."""
        if size := self._stream.seek(0, os.SEEK_END):
            self._stream.seek(size - 1)
            if self._stream.read(1) != b"\n":
                self._stream.write(b"\n")

    def write(self, event: Event) -> None:
        """Append an event.

        Args:
            event: The event.

        Raises:
            RunError: The file cannot be written.
        """
        line = msgspec.json.encode(event) + b"\n"
        with as_run_error(self.path):
            size = self._stream.seek(0, os.SEEK_END)
            if size and size + len(line) > self._max_bytes:
                self._drop_older_half(size)
            written = self._stream.write(line)
            if written != len(line):
                raise OSError(f"only {written} of {len(line)} bytes were written")

    def _drop_older_half(self, size: int) -> None:
        self._stream.seek(max(size - self._max_bytes // 2, 0))
        self._stream.readline()  # skip the rest of a line whose start is dropped
        kept = self._stream.read()
        replace_file(self.path, kept)
        self._stream.close()
        self._stream = self._open()

    def close(self) -> None:
        """Close the file. `write` must not be called after this."""
        self._stream.close()


def read_events(path: str | os.PathLike[str]) -> list[Event]:
    """Read the events of a run. Incomplete or damaged lines are skipped with a warning.

    Args:
        path: The file `events.jsonl` of a run.

    Returns:
        The events, oldest first.

    Raises:
        OSError: The file cannot be read.
    """
    return [event for _, event in read_valid_lines(Path(path), _event)]


def _event(line: bytes) -> Event | None:
    """Decode a line. Return None if it is incomplete, or if farstep did not write it."""
    if not line.endswith(b"\n"):
        return None
    try:
        return msgspec.json.decode(line, type=Event)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
