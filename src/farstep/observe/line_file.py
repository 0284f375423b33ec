"""A file of lines, such as metrics or events, that survives a full disk."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import IO

from farstep.checkpoint.files import no_follow

log = logging.getLogger("farstep")
FULL_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of writes that fail because the disk or the user's quota is full."""
MAX_UNWRITTEN_BYTES = 64 * 2**20
"""Bytes of lines that are kept in memory while the disk is full; more are an error."""


def is_disk_full(error: OSError) -> bool:
    """Return whether a write failed because the disk or the user's quota is full."""
    return error.errno in FULL_DISK_ERRORS


class LineFile:
    """Appends lines to a file. While the disk is full, up to 64 MiB of lines are kept in memory, with a warning.

    Args:
        path: The file. If it exists, lines are appended.
        contents: What the lines are, in the plural, for the warning.

    Raises:
        OSError: The file cannot be opened.
    """

    def __init__(self, path: Path, contents: str) -> None:
        self.path, self._contents = path, contents
        self._unwritten, self._is_full = bytearray(), False
        self._stream = self._open()

    def _open(self) -> IO[bytes]:
        return open(self.path, "a+b", buffering=0, opener=no_follow)

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return self._stream.seek(0, os.SEEK_END)

    def tail(self, count: int) -> bytes:
        """Return at most this number of bytes from the end of the file."""
        self._stream.seek(max(self.size - count, 0))
        return self._stream.read(count)

    def append(self, line: bytes) -> None:
        """Append a line, after the lines that are still in memory.

        Args:
            line: The line, with its newline.

        Raises:
            OSError: The file cannot be written, or the disk is full and over 64 MiB of lines are in memory.
            ValueError: The file is closed.
        """
        self._unwritten += line
        try:
            self._write()
        except OSError as error:
            if not is_disk_full(error) or len(self._unwritten) > MAX_UNWRITTEN_BYTES:
                raise
            if not self._is_full:
                log.warning(
                    "%s are kept in memory until %s can be written; free disk space: %s",
                    self._contents,
                    self.path,
                    error,
                )
            self._is_full = True

    def _write(self) -> None:
        while self._unwritten:
            del self._unwritten[: self._stream.write(self._unwritten)]
        self._is_full = False

    def reopen(self) -> None:
        """Append to the file that is now at `path`."""
        self._stream.close()
        self._stream = self._open()

    def close(self) -> None:
        """Write the lines that are still in memory, and close the file.

        Raises:
            OSError: They cannot be written.
        """
        try:
            self._write()
        finally:
            self._stream.close()
