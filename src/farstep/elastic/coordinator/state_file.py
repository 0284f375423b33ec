"""The file from which a restarted coordinator knows what it has granted."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from farstep.checkpoint.files import sync_folder, write_file

_MAX_BYTES = 2**20


class StateFile:
    """A file of states, one per line; the last complete line counts.

    An appended line survives the death of the process, but is not synced to disk, which would take milliseconds. That
    suffices: a crash of the machine ends the runs, too. When the file has grown to 1 MiB, it is replaced by a file with
    the newest line, which is synced.

    Args:
        folder: Folder of the file, which is named `state.json`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._file = folder, folder / "state.json"
        self._descriptor = -1
        self._size = 0

    def read(self) -> bytes | None:
        """Return the newest state, or None if there is no file."""
        try:
            *lines, rest = self._file.read_bytes().split(b"\n")
        except FileNotFoundError:
            return None
        # Only a crash of the machine can have damaged a complete line; the last one that was synced is undamaged.
        return next(filter(_is_json, reversed(lines)), lines[-1] if lines else rest)

    def append(self, line: bytes) -> None:
        """Store a state, so that `read` returns it even if this process is killed."""
        if self._descriptor < 0 or self._size > _MAX_BYTES:
            self.replace(line)
            return
        self._size += os.write(self._descriptor, line + b"\n")

    def replace(self, line: bytes) -> None:
        """Store a state in a new file, and sync it to disk."""
        self.close()
        partial = self._folder / ".state.json.partial"
        partial.unlink(missing_ok=True)
        self._size = write_file(partial, [line, b"\n"]).size
        partial.replace(self._file)
        sync_folder(self._folder)
        self._descriptor = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1


def _is_json(line: bytes) -> bool:
    try:
        msgspec.json.decode(line)
    except msgspec.MsgspecError:
        return False
    return True
