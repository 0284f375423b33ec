"""Arrays for a few cells of a store, e.g. the observations after rows that have no next row (tails)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from farstep.core import Array
from farstep.schema import Schema


class SparseRows:
    """Arrays of `schema`, by cell. Memory grows with the number of cells that have an entry."""

    def __init__(self, schema: Schema, cells: int) -> None:
        self.schema = schema
        self._of: Array = np.full(cells, -1, np.int32)
        self._pool = {name: np.zeros((0, *spec.shape), spec.dtype) for name, spec in schema.items()}
        self._free: list[int] = []
        self._kept: list[int] | None = None
        """Places of entries that were removed while `keep` is in effect; they are not reused yet."""

    def put(self, cells: Array, values: Mapping[str, Array]) -> None:
        """Store one entry for each of these cells. They must not have entries yet."""
        if len(self._free) < len(cells):
            self._grow(len(cells))
        places = np.array([self._free.pop() for _ in range(len(cells))], np.int32)
        self._of[cells] = places
        for name, value in values.items():
            self._pool[name][places] = value

    def _grow(self, wanted: int) -> None:
        held = len(next(iter(self._pool.values())))
        more = max(64, wanted, held // 4)
        self._free += range(held + more - 1, held - 1, -1)
        for name, values in self._pool.items():
            self._pool[name] = np.concatenate([values, np.zeros((more, *values.shape[1:]), values.dtype)])

    def drop(self, cells: Array) -> None:
        """Remove the entries of these cells, if they have any."""
        places = self._of[cells]
        removed = places[places >= 0].tolist()
        if self._kept is None:
            self._free += removed
        else:
            self._kept += removed
        self._of[cells] = -1

    def fill(self, name: str, cells: Array, values: Array) -> None:
        """Overwrite the entries of `values` whose cells have an entry."""
        places = self._of.take(cells)
        have = np.flatnonzero(places >= 0)
        if len(have):
            values[have] = self._pool[name][places[have]]

    def equal(self, cells: Array, values: Mapping[str, Array]) -> Array:
        """Return for each cell whether its entry equals that in `values`; False for -1 (no cell)."""
        places = np.where(cells >= 0, self._of[cells], -1)
        same = places >= 0
        for name, pool in self._pool.items():
            if same.any():
                unlike = pool[places[same]] != values[name][same]
                same[same] = ~unlike.reshape(len(unlike), -1).any(axis=1)
        return same

    def places(self, cells: Array) -> Array:
        """Return for each cell the place of its entry, for `take`; -1 if it has none."""
        places: Array = self._of.take(cells)
        return places

    def take(self, name: str, places: Array) -> Array:
        """Copy entries of one array."""
        taken: Array = self._pool[name][places]
        return taken

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays that hold the entries."""
        return sum(pool.nbytes for pool in self._pool.values())

    def keep(self) -> Callable[[str, slice], Array]:
        """Do not overwrite any present entry before `stop_keeping`, even if it is removed.

        Returns:
            A function that returns some of the present entries of one array, in the order of `cells`. It needs no lock.
        """
        self._kept = []
        places, pool = self._of[self.cells], dict(self._pool)  # a growing pool is copied, so its old arrays stay valid
        return lambda name, some: pool[name][places[some]]

    def stop_keeping(self) -> None:
        """End the effect of `keep`: removed entries may be overwritten."""
        self._free += self._kept or []
        self._kept = None

    @property
    def cells(self) -> Array:
        """The cells that have entries, in ascending order."""
        return np.flatnonzero(self._of >= 0)

    def empty_state(self, name: str) -> dict[str, Array]:
        """Return the arrays that a checkpoint stores under `name` if there are no entries."""
        arrays = {f"{name}.{array}": np.zeros((0, *spec.shape), spec.dtype) for array, spec in self.schema.items()}
        return {name: np.zeros(0, np.int64), **arrays}

    def restore(self, name: str, state: Mapping[str, Array]) -> None:
        """Restore the entries that a checkpoint stores under `name`."""
        self.put(state[name], {array: state[f"{name}.{array}"] for array in self.schema})
