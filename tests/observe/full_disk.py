"""Simulates a full disk, for tests of files that runs write."""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from farstep.observe import line_file


@contextmanager
def full_disk(monkeypatch: pytest.MonkeyPatch, size: int) -> Iterator[None]:
    """Context manager: limit the size of files. The first write beyond it is partial, the next ones fail."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr(line_file, "FULL_DISK_ERRORS", (errno.EFBIG,))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
