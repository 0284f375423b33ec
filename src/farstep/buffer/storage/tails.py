"""The tails of a store: the observations after rows that have no next row."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from farstep.core import Array
from farstep.schema import Schema


class Tails:
    """Observations after cut rows, by cell."""

    def __init__(self, schema: Schema, cells: int) -> None:
        self.schema = schema
        self._of: Array = np.full(cells, -1, np.int32)
        self._pool = {name: np.zeros((0, *spec.shape), spec.dtype) for name, spec in schema.items()}
        self._free: list[int] = []
        self._kept: list[int] | None = None
        """Places of tails that were removed while `keep` is in effect; they are not reused yet."""

    def put(self, cells: Array, values: Mapping[str, Array]) -> None:
        """Store one observation for each cell."""
        if len(self._free) < len(cells):
            self._grow(len(cells))
        places = np.array([self._free.pop() for _ in range(len(cells))], np.int32)
        self._of[cells] = places
        for name, value in values.items():
            self._pool[name][places] = value

    def _grow(self, wanted: int) -> None:
        held = len(next(iter(self._pool.values())))
        more = max(64, wanted, held)
        self._free += range(held + more - 1, held - 1, -1)
        for name, values in self._pool.items():
            self._pool[name] = np.concatenate([values, np.zeros((more, *values.shape[1:]), values.dtype)])

    def drop(self, cells: Array) -> None:
        """Remove the tails of these cells."""
        places = self._of[cells]
        removed = places[places >= 0].tolist()
        if self._kept is None:
            self._free += removed
        else:
            self._kept += removed
        self._of[cells] = -1

    def fill(self, name: str, cells: Array, values: Array) -> None:
        """Overwrite the entries of `values` whose cells have a tail."""
        places = self._of.take(cells)
        have = np.flatnonzero(places >= 0)
        if len(have):
            values[have] = self._pool[name][places[have]]

    def equal(self, cells: Array, values: Mapping[str, Array]) -> Array:
        """Return for each cell whether its tail equals the observation in `values`; False for -1 (no cell)."""
        places = np.where(cells >= 0, self._of[cells], -1)
        same = places >= 0
        for name, pool in self._pool.items():
            if same.any():
                unlike = pool[places[same]] != values[name][same]
                same[same] = ~unlike.reshape(len(unlike), -1).any(axis=1)
        return same

    def state(self) -> dict[str, Array]:
        """Return the cells that have tails, and their tails, for a checkpoint."""
        cells = self.cells
        return {"tails": cells, **{f"tails.{name}": pool[self._of[cells]] for name, pool in self._pool.items()}}

    def keep(self) -> Callable[[str, slice], Array]:
        """Do not overwrite any present tail before `stop_keeping`, even if it is removed.

        Returns:
            A function that returns some of the present tails: of one array, in the order of `cells`. It needs no lock.
        """
        self._kept = []
        places, pool = self._of[self.cells], dict(self._pool)  # a growing pool is copied, so its old arrays stay valid
        return lambda name, some: pool[name][places[some]]

    def stop_keeping(self) -> None:
        """Allow to overwrite removed tails again."""
        self._free += self._kept or []
        self._kept = None

    @property
    def cells(self) -> Array:
        """The cells that have tails, in ascending order."""
        return np.flatnonzero(self._of >= 0)

    def restore(self, state: Mapping[str, Array]) -> None:
        self.put(state["tails"], {name: state[f"tails.{name}"] for name in self._pool})
