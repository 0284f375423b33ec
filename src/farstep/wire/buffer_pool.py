"""Recycled receive buffers for large messages. Recycling avoids that the kernel zeroes fresh pages."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

_SMALL_BYTES = 1 << 18
"""Smaller buffers are not pooled, because malloc recycles them itself."""
RawBuffer = np.ndarray[Any, np.dtype[np.uint8]]


def _references(buffers: list[RawBuffer], i: int) -> int:
    return sys.getrefcount(buffers[i])


_UNUSED = _references([np.empty(1, np.uint8)], 0)


class BufferPool:
    """Hands out buffers. A buffer is reused when no view of it is left.

    Args:
        most_bytes: Maximum number of bytes that the pool keeps.
    """

    def __init__(self, most_bytes: int = 1 << 28) -> None:
        self._most_bytes = most_bytes
        self._buffers: list[RawBuffer] = []

    @property
    def kept_bytes(self) -> int:
        """Total size of the buffers that the pool keeps."""
        return sum(map(len, self._buffers))

    def take(self, length: int) -> memoryview:
        """A buffer of `length` bytes, not cleared. The kernel allocates memory only when it is written to."""
        if not _SMALL_BYTES <= length <= self._most_bytes:
            return np.empty(length, np.uint8).data
        for i in range(len(self._buffers)):
            if length <= len(self._buffers[i]) <= 2 * length and _references(self._buffers, i) == _UNUSED:
                return self._buffers[i].data[:length]
        buffer = np.empty(length, np.uint8)
        self._buffers.append(buffer)
        while self.kept_bytes > self._most_bytes:
            del self._buffers[0]  # views keep its memory alive
        return buffer.data
