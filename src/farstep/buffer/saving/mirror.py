"""Copies an array in blocks while it changes, and afterwards only what has changed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from farstep.core import Array


class Mirror:
    """A copy of an array that other threads change, or of a part of an array that grows at its end.

    Args:
        array: The array. Its elements are copied by `copy`.
    """

    def __init__(self, array: Array) -> None:
        self._live = array.reshape(-1)
        self._copy = np.empty_like(self._live)

    def blocks(self, block_bytes: int) -> Iterator[slice]:
        """Divide the elements into blocks, for `copy`."""
        return slices(len(self._live), self._live.itemsize, block_bytes)

    def copy(self, block: slice) -> None:
        """Copy one block; the array must not change during the call."""
        self._copy[block] = self._live[block]

    def catch_up(self, array: Array, block_bytes: int, max_bytes: float) -> tuple[list[Array], int] | None:
        """Apply the changes since `copy` was called for each block. The array must not change during the call.

        Args:
            array: The array now; it may be another part of the same memory.
            block_bytes: Bytes that are compared at a time.
            max_bytes: Maximum number of bytes to copy.

        Returns:
            The elements in one or more pieces, and the number of bytes that were copied. None: more than `max_bytes`
            would have to be copied.
        """
        flat = array.reshape(-1)
        first = self._place(flat)
        common = slice(max(first, 0), max(first, 0, min(first + len(flat), len(self._copy))))
        now, known = flat[common.start - first : common.stop - first], self._copy[common]
        changed = [
            np.flatnonzero(now[block] != known[block]) + block.start
            for block in slices(len(now), now.itemsize, block_bytes)
        ]
        before, after = flat[: common.start - first], flat[common.stop - first :]
        size = (sum(map(len, changed)) + len(before) + len(after)) * flat.itemsize
        if size > max_bytes:
            return None
        for cells in changed:
            known[cells] = now[cells]
        return [piece for piece in (before.copy(), known, after.copy()) if len(piece)], size

    def _place(self, flat: Array) -> int:
        """Return the index of the first element in the copied array; its length for an array in other memory."""
        if _owner(flat) is not _owner(self._live):
            return len(self._copy)
        return (flat.ctypes.data - self._live.ctypes.data) // flat.itemsize


def slices(count: int, item_bytes: int, block_bytes: int) -> Iterator[slice]:
    """Divide `count` items into blocks of at most `block_bytes`, but at least one item."""
    size = max(1, block_bytes // max(1, item_bytes))
    return (slice(start, start + size) for start in range(0, count, size))


def _owner(array: Array) -> Array:
    """Return the array whose memory this array is a part of."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
