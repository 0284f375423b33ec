"""The cells of a store that hold no row."""

from __future__ import annotations

import numpy as np

from farstep.core import Array


class FreeCells:
    """A stack of free cells."""

    def __init__(self, cells: int) -> None:
        self._stack: Array = np.zeros(cells, np.int64)
        self._count = 0
        self.is_free: Array = np.zeros(cells, bool)
        """For each cell, whether it is on the stack."""

    def __len__(self) -> int:
        return self._count

    @property
    def next(self) -> int:
        """The cell that `pop` returns next."""
        return int(self._stack[self._count - 1])

    @property
    def cells(self) -> Array:
        """All free cells; `pop` starts with the last."""
        return self._stack[: self._count]

    def push(self, cells: Array) -> None:
        """Add distinct cells; `pop` returns them in the given order."""
        self._stack[self._count : self._count + len(cells)] = cells[::-1]
        self._count += len(cells)
        self.is_free[cells] = True

    def pop(self, count: int) -> Array:
        """Remove and return `count` cells."""
        start = self._count - count
        taken: Array = self._stack[start : self._count][::-1].copy()
        self._count = start
        self.is_free[taken] = False
        return taken
