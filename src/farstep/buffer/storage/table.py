"""The item table: which cells of a store hold an item, the key of each item, and how often it was sampled.

A cell is the place of one row, with the index `row * columns + column`. A key identifies an item for the lifetime of
the buffer: `key = cell + lap * cells`, where `lap` grows each time the cell is reused. So the cell of a key can be
computed without a dictionary, and keys of removed items are recognized.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from farstep.checkpoint.checks import check_like, require
from farstep.core import Array


class Table:
    """Items in the cells of a store of `rows x columns`."""

    def __init__(self, rows: int, columns: int) -> None:
        self.rows, self.columns, self.cells = rows, columns, rows * columns
        # A cell without an item keeps its last key as `~key`, which is negative.
        self.keys: Array = ~np.arange(self.cells, dtype=np.int64)
        self.times, self._mark = np.zeros(
            (2, self.cells), np.int32
        )  # one allocation, because larger allocations get huge pages
        self.size = 0
        self.used: Array = np.zeros(columns, np.int64)
        """For each column, the number of rows that have ever held an item."""
        self._full = False
        self._keys, self._times = self.keys.reshape(rows, columns), self.times.reshape(rows, columns)
        self._lap, self._next = 0, -1
        """The highest lap of any key and, with one column, the first row whose key has a lower lap (-1: unknown)."""

    def put(self, rows: slice, columns: slice) -> tuple[Array, int]:
        """Put new items into a rectangle of cells.

        Returns:
            Their keys `[rows, columns]`, and the number of items that they replaced.
        """
        self._lap, self._next = self._lap + 1, -1
        keys, replaced = self._keys[rows, columns], 0
        if self.size:
            present = keys >= 0
            replaced = int(np.count_nonzero(present))
        if replaced == keys.size:
            keys += self.cells
        elif replaced:
            keys[...] = np.where(present, keys, ~keys) + self.cells
        else:
            keys[...] = ~keys + self.cells
        self._times[rows, columns] = 0
        self.size += keys.size - replaced
        if not self._full:
            self.used[columns] = np.maximum(self.used[columns], rows.stop)
            self._full = bool((self.used == self.rows).all())
        return keys, replaced

    def put_rows(self, rows: slice) -> tuple[Array, int]:
        """Like `put`, for a table with one column."""
        if rows.start != self._next:
            self._lap += 1
        self._next = rows.stop
        count, first = rows.stop - rows.start, self._lap * self.cells + rows.start
        keys, replaced = np.arange(first, first + count), count
        if self.size < self.cells:
            replaced = int(np.count_nonzero(self.keys[rows] >= 0))
            self.size += count - replaced
            self.used[0] = max(int(self.used[0]), rows.stop)
            self._full = bool(self.used[0] == self.rows)
        self.keys[rows] = keys
        self.times[rows] = 0
        return keys, replaced

    def put_cells(self, cells: Array, is_distinct: bool = True) -> Array:
        """Put new items into cells, in order; return their keys.

        With `is_distinct=False`, a cell may occur more than once; its last item stays.
        """
        held = self.keys[cells]
        empty = held < 0
        laps = 1 if is_distinct else occurrences(cells) + 1
        keys: Array = np.where(empty, ~held, held) + laps * self.cells
        self.size += int(np.count_nonzero(empty)) if is_distinct else len(np.unique(cells[empty]))
        self.keys[cells], self.times[cells] = keys, 0
        if not self._full:
            if self.columns == 1:
                self.used[0] = max(int(self.used[0]), int(cells.max()) + 1)
            else:
                np.maximum.at(self.used, cells % self.columns, cells // self.columns + 1)
            self._full = bool((self.used == self.rows).all())
        self._lap, self._next = self._lap + int(np.max(laps)), -1
        return keys

    def remove(self, cells: Array) -> None:
        """Remove the items of distinct cells."""
        self.keys[cells] = ~self.keys[cells]
        self.size -= len(cells)

    def count(self, cells: Array) -> Array:
        """Count one sample per entry of `cells`; cells may repeat. Return the new count of each entry's item."""
        times: Array = self.times.take(cells)
        times += 1
        self.times[cells] = times
        if not np.logical_and.reduce(cells[1:] > cells[:-1]):  # otherwise all cells are distinct
            places = np.arange(len(cells), dtype=np.int32)
            self._mark[cells] = places
            again = self._mark.take(cells) != places  # all but the last occurrence of each cell
            if again.any():
                np.add.at(self.times, cells[again], 1)
                times = self.times.take(cells)
        return times

    def state(self) -> dict[str, Array]:
        """Return the whole table, for a checkpoint."""
        laps = np.array([self._lap, self._next])
        return {"keys": self.keys, "times": self.times, "used": self.used, "laps": laps}

    def restore(self, state: Mapping[str, Array]) -> None:
        self._check(state)
        self.keys[:], self.times[:], self.used[:] = state["keys"], state["times"], state["used"]
        self.size = int(np.count_nonzero(self.keys >= 0))
        self._lap, self._next = map(int, state["laps"])

    def _check(self, state: Mapping[str, Array]) -> None:
        """Refuse a state that no sequence of insertions and removals can produce."""
        check_like(state, self.state())
        keys, used, (lap, first_left) = state["keys"], state["used"], state["laps"].tolist()
        cells = np.arange(self.cells)
        latest = np.maximum(keys, ~keys)
        require((latest % self.cells == cells).all(), "keys has a key that belongs to another cell")
        require(((used >= 0) & (used <= self.rows)).all(), f"used is not within 0 and {self.rows}")
        laps, is_used = latest // self.cells, (cells // self.columns < used[cells % self.columns])
        require((np.where(is_used, laps > 0, keys == ~cells)).all(), "keys and used do not agree")
        require(laps.max() <= lap <= 2**62 // self.cells, f"laps has {lap}, at least {laps.max()} expected")
        is_free = first_left == -1 or (
            self.columns == 1 and 0 <= first_left <= self.rows and (laps[first_left:] < lap).all()
        )
        require(is_free, f"laps has row {first_left}, but keys from that row on are already in use")
        require((state["times"] >= 0).all(), "times has a negative number")

    @property
    def is_used(self) -> Array:
        """For each cell, whether it has ever held an item."""
        rows, columns = np.divmod(np.arange(self.cells), self.columns)
        return rows < self.used[columns]

    @property
    def latest(self) -> Array:
        """For each cell, the key of its item or, without an item, of its last item; a new row gets a higher one."""
        return latest_of(self.keys)

    def was_issued(self, keys: Array) -> Array:
        """Return which of these keys belong to an item that is, or was, in the table."""
        issued: Array = (keys >= self.cells) & (self.latest[keys % self.cells] >= keys)
        return issued

    def find(self, keys: Array) -> Array:
        """Return the cells of those keys whose items are in the table. Ignore other keys."""
        keys = keys[keys >= 0]
        cells = keys % self.cells
        found: Array = cells[self.keys[cells] == keys]
        return found

    def draw(self, n: int, rng: np.random.Generator) -> Array:
        """Draw the cells of `n` items uniformly, with replacement."""
        cells = self._candidates(n, rng)
        if self.size == int(self.used.sum()):
            return cells
        for _ in range(8):  # some cells are empty: draw these again
            empty = np.flatnonzero(self.keys[cells] < 0)
            if not len(empty):
                return cells
            cells[empty] = self._candidates(len(empty), rng)
        live = np.flatnonzero(self.keys >= 0)
        empty = np.flatnonzero(self.keys[cells] < 0)
        cells[empty] = live[rng.integers(len(live), size=len(empty))]
        return cells

    def _candidates(self, n: int, rng: np.random.Generator) -> Array:
        used, columns = self.used, self.columns
        if columns == 1 or used[0] == used[-1] == used.max() == used.min():
            return rng.integers(int(used[0]) * columns, size=n)
        ends = np.cumsum(used)
        place = rng.integers(int(ends[-1]), size=n)
        column = np.searchsorted(ends, place, side="right")
        row = place - np.where(column > 0, ends[column - 1], 0)
        cells: Array = row * columns + column
        return cells


def latest_of(keys: Array) -> Array:
    """Return the keys of cells; for a cell without an item, the key of its last item."""
    latest: Array = np.maximum(keys, ~keys)
    return latest


def occurrences(values: Array) -> Array:
    """Return for each entry the number of equal entries before it."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    ranks = np.empty(len(values), np.int64)
    ranks[order] = np.arange(len(values)) - np.searchsorted(ordered, ordered, side="left")
    return ranks
