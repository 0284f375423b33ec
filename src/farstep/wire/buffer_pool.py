"""Memory for large messages, used again: what the kernel gives anew it has to clear first, page by page."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

_SMALL_BYTES = 1 << 18
"""Below this, malloc has memory that was used before."""
_KEPT_BYTES = 1 << 28
RawBuffer = np.ndarray[Any, np.dtype[np.uint8]]


def _references(buffers: list[RawBuffer], i: int) -> int:
    return sys.getrefcount(buffers[i])


_UNUSED = _references([np.empty(1, np.uint8)], 0)


class BufferPool:
    """Those that were handed out. One is free again when the last view of it has gone."""

    def __init__(self) -> None:
        self._buffers: list[RawBuffer] = []

    def take(self, length: int) -> memoryview:
        """Not cleared; what is only promised costs nothing, since the kernel gives memory when it is written to."""
        if not _SMALL_BYTES <= length <= _KEPT_BYTES:
            return np.empty(length, np.uint8).data
        for i in range(len(self._buffers)):
            if length <= len(self._buffers[i]) <= 2 * length and _references(self._buffers, i) == _UNUSED:
                return self._buffers[i].data[:length]
        buffer = np.empty(length, np.uint8)
        self._buffers.append(buffer)
        while sum(map(len, self._buffers)) > _KEPT_BYTES:
            del self._buffers[0]  # who still looks into it keeps it
        return buffer.data
