"""Writes and reads `events.jsonl`, the events of a run: one JSON object per line, oldest first.

events = EventFile(run.events_file)
subscription = event_log_of(env).subscribe(events.write)
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec

from farstep.event import Event
from farstep.observe.files import as_run_error, read_valid_lines, replace_file
from farstep.observe.line_file import LineFile, is_disk_full

log = logging.getLogger("farstep")
MAX_BYTES = 5_000_000
"""When the file reaches this size in bytes, its older half is dropped."""


class EventFile:
    """Appends events to a file of at most `max_bytes`. When the file is full, its older half is dropped atomically.

    While the disk is full, up to 64 MiB of events are kept in memory, with a warning. Once the disk has space, they are
    written, and the file may be larger until the next event.

    Args:
        path: The file. If it exists, as in a resumed run, events are appended.
        max_bytes: Maximum size of the file; default 5 MB.

    Raises:
        RunError: The file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], max_bytes: int = MAX_BYTES) -> None:
        self.path, self._max_bytes = Path(path), max_bytes
        with as_run_error(self.path):
            self._lines = LineFile(self.path, "events")
            if self._lines.tail(1) not in (b"", b"\n"):
                self._lines.append(b"\n")  # end a line that a crash cut off, so that it does not damage the next line

    def write(self, event: Event) -> None:
        """Append an event.

        Args:
            event: The event.

        Raises:
            RunError: The file cannot be written.
        """
        line = msgspec.json.encode(event) + b"\n"
        with as_run_error(self.path):
            if (size := self._lines.size) and size + len(line) > self._max_bytes:
                self._drop_older_half()
            self._lines.append(line)

    def _drop_older_half(self) -> None:
        _, _, kept = self._lines.tail(self._max_bytes // 2).partition(b"\n")  # without the rest of a dropped line
        try:
            replace_file(self.path, kept)
        except OSError as error:
            if not is_disk_full(error):
                raise
        else:
            self._lines.reopen()

    def close(self) -> None:
        """Close the file. Events that still cannot be written are lost, with a warning. Do not call `write` after
        this."""
        try:
            self._lines.close()
        except OSError as error:
            log.warning("the last events could not be written to %s: %s", self.path, error)


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
