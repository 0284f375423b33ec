"""The rows of a buffer in cyclic blocks, and their order.

A row without a next row is *cut*: its episode ended, the rows after it were lost, or it is the newest row of its
column. The next row is in the next cell of the column or, if the store is linked (see `links.py`), in any cell. The
observation after a cut row is stored separately, as the *tail* of the row. So every row of a rollout has a next
observation, and no observation is stored twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from farstep.buffer.storage.cyclic import CyclicBlocks, Writer, spans
from farstep.buffer.storage.links import Links
from farstep.buffer.storage.table import Table
from farstep.buffer.storage.tails import Tails
from farstep.checkpoint.checks import check_like, require
from farstep.core import Array
from farstep.schema import Schema

CONSUMERS = 16
"""Maximum number of readers with cursors in the header of the blocks."""

_MANY, _RUNS = 128, 8  # if at least 128 cells form at most 9 runs of adjacent cells, copy run by run

ENDINGS = ("terminated", "truncated", "done")
"""Arrays that mark the last row of an episode."""


class Store:
    """Blocks, item table and tails of one buffer.

    In a ring, each environment slot has a column of its own. A linked store may have one column for `num_slots` slots.
    """

    def __init__(
        self, schema: Schema, rows: int, columns: int, tails: Sequence[str] = (), num_slots: int | None = None
    ) -> None:
        self.schema, self.rows, self.columns = schema, rows, columns
        self.num_slots = columns if num_slots is None else num_slots
        self.blocks = CyclicBlocks.create(schema, rows, columns, CONSUMERS)
        self.table = Table(rows, columns)
        self.flat: dict[str, Array] = {
            name: block.reshape(self.table.cells, *block.shape[2:]) for name, block in self.blocks.arrays.items()
        }
        self.cut: Array = np.ones((rows, columns), bool)
        self.flat_cut: Array = self.cut.reshape(-1)
        self._open: Array = np.zeros(self.num_slots, bool)
        """For each slot, whether the episode of its newest row is still running."""
        self._newest: Array = np.full(self.num_slots, -1, np.int64)
        """For each slot, the cell of its newest row."""
        self.links: Links | None = None
        """The links between rows; None for a ring, in which the next row is in the next cell of the column."""
        self._writers: dict[tuple[int, int], Writer] = {}
        self.kinds = [(name, np.dtype(spec.dtype), spec.shape) for name, spec in schema.items()]
        """Name, dtype and shape of each array of a row."""
        self._endings = [name for name in ENDINGS if name in schema]
        self.tails = Tails({name: schema[name] for name in tails}, self.table.cells) if tails else None

    # ---- writing ----

    def add_slots(self, num_slots: int) -> None:
        """Extend a linked store to `num_slots` environment slots."""
        more = num_slots - self.num_slots
        self._open = np.append(self._open, np.zeros(more, bool))
        self._newest = np.append(self._newest, np.full(more, -1, np.int64))
        self.num_slots = num_slots

    def append(self, values: Mapping[str, Array], first: int = 0, continues: Array | None = None) -> tuple[Array, int]:
        """Append rows to a ring.

        Args:
            values: Arrays `[T, n, ...]`; T must not exceed the number of rows of a column.
            first: The first column.
            continues: For each column, whether the first new row follows the previous newest row; None: all do.

        Returns:
            The keys `[T, n]` of the rows, and the number of evicted items.
        """
        count, width = next(iter(values.values())).shape[:2]
        writer = self._writer(first, width)
        keys = np.empty((count, width), np.int64)
        evicted = 0
        begins = values.get("episode_start")
        for columns, start in writer.claim(count):
            part = slice(columns.start - first, columns.stop - first)
            for rows, times in spans(start % self.rows, count, self.rows):
                if self.tails is not None:
                    self.tails.drop(self.cells(rows, columns))
                for name, block in self.blocks.arrays.items():
                    block[rows, columns] = values[name][times, part]
                keys[times, part], replaced = self.table.put(rows, columns)
                evicted += replaced
                self.cut[rows, columns] = self._ended(rows, columns)
            starts = None if begins is None else begins[:, part]
            self._update_cuts(start, count, columns, starts, None if continues is None else continues[part])
        writer.commit(count)
        return keys, evicted

    def append_rows(self, values: Mapping[str, Array], count: int) -> tuple[Array, int]:
        """Append rows `[n, ...]` to the only column; faster than `append` for few rows."""
        writer = self._writer(0, 1)
        ((_, start),) = writer.claim(count)
        place, cut = start % self.rows, self.flat_cut
        if place + count <= self.rows:
            keys, evicted = self._put_rows(values, slice(place, place + count))
        else:
            keys, evicted = np.empty(count, np.int64), 0
            for rows, times in spans(place, count, self.rows):
                part = {name: values[name][times] for name in self.flat}
                keys[times], replaced = self._put_rows(part, rows)
                evicted += replaced
        begins = values.get("episode_start")
        if begins is not None:
            cut[(start + np.flatnonzero(begins[1:])) % self.rows] = True
        if count < self.rows and self._open[0] and (begins is None or not begins[0]):
            cut[place - 1] = False
        newest = (start + count - 1) % self.rows
        self._open[0] = not cut[newest]
        cut[newest] = True
        self._newest[0] = newest
        writer.commit(count)
        return keys, evicted

    def _put_rows(self, values: Mapping[str, Array], rows: slice) -> tuple[Array, int]:
        """Write adjacent rows of the only column as new items."""
        for name, flat in self.flat.items():
            flat[rows] = values[name]
        self.flat_cut[rows] = values[self._endings[0]] if self._endings else False
        for name in self._endings[1:]:
            self.flat_cut[rows] |= values[name].astype(bool, copy=False)
        return self.table.put_rows(rows)

    # ---- linked ----

    def link(self) -> Links:
        """Switch from a ring to links, so that a row can be put into any cell.

        Other processes can no longer read the rows in place.
        """
        assert self.links is None
        for first, width in list(self._writers):
            self._release(first, width)
        self.blocks.written[:] = 0
        self.blocks.generation[:] += 2  # makes readers that are copying rows discard their copies
        follows = np.flatnonzero(~self.flat_cut)
        after = self.following(follows)
        self.links = Links(self.table, self.flat_cut)
        self.links.join(follows, after)
        return self.links

    def rows_by_age(self) -> Array:
        """Return the cells of all rows in a ring. Rows with more newer rows in their column come first."""
        written = self.blocks.committed()
        cells = np.arange(self.table.cells)
        row, column = np.divmod(cells, self.columns)
        rows_since = (written[column] - 1 - row) % self.rows
        is_written = row < written[column]
        return cells[is_written][np.argsort(-rows_since[is_written], kind="stable")]

    def put_linked(
        self, values: Mapping[str, Array], cells: Array, first: int = 0, continues: Array | None = None
    ) -> Array:
        """Append rows to a linked store, in the given free cells `[T, n]`. Return the keys."""
        assert self.links is not None
        columns, flat = slice(first, first + cells.shape[1]), cells.reshape(-1)
        self.write(flat, {name: values[name].reshape(-1, *held.shape[1:]) for name, held in self.flat.items()})
        keys = self.table.put_cells(flat).reshape(cells.shape)
        found = self.ended(flat)
        ended = np.zeros(cells.shape, bool) if found is None else found.reshape(cells.shape)
        begins = values["episode_start"].astype(bool) if "episode_start" in values else np.zeros_like(ended)
        follows = ~(ended[:-1] | begins[1:])
        self.links.join(cells[:-1][follows], cells[1:][follows])

        newest = self._newest[columns]
        follows = self._open[columns] & ~begins[0]
        if continues is not None:
            follows &= continues
        if self.tails is not None:
            self.tails.drop(newest[follows])
        self.links.join(newest[follows], cells[0, follows])
        self._open[columns], self._newest[columns] = ~ended[-1], cells[-1]
        return keys

    def write(self, cells: Array, values: Mapping[str, Array]) -> None:
        """Copy rows `[n, ...]` into `n` cells."""
        for here, there in runs(cells):
            for name, held in self.flat.items():
                held[here] = values[name][there]

    def release(self, cells: Array, is_free: Array) -> None:
        """Remove rows from a linked store.

        Args:
            cells: The cells of the rows.
            is_free: For each cell of the store, whether it is free; the given cells already count as free.
        """
        assert self.links is not None
        self.links.release(cells)
        if self.tails is not None:
            self.tails.drop(cells)
        gone = is_free[self._newest] & (self._newest >= 0)
        self._newest[gone], self._open[gone] = -1, False

    def _ended(self, rows: slice, columns: slice) -> Array | bool:
        ended: Array | bool = False
        for name in self._endings:
            ended = self.blocks.arrays[name][rows, columns].astype(bool, copy=False) | ended
        return ended

    def _update_cuts(
        self, start: int, count: int, columns: slice, begins: Array | None, continues: Array | None
    ) -> None:
        """Mark the rows that are cut after an append: rows before the start of an episode, and the newest of each
        column."""
        before, newest = (start - 1) % self.rows, (start + count - 1) % self.rows
        follows = self._open[columns]
        if begins is not None:  # the start of an episode cuts the row before it
            follows = follows & ~begins[0].astype(bool)
            t, k = np.nonzero(begins[1:])
            self.cut[(start + t) % self.rows, columns.start + k] = True
        if continues is not None:
            follows = follows & continues
        if count < self.rows:  # otherwise the previous row is overwritten
            self.cut[before, columns] &= ~follows
            if self.tails is not None and follows.any():
                self.tails.drop(before * self.columns + columns.start + np.flatnonzero(follows))
        np.logical_not(self.cut[newest, columns], out=self._open[columns])
        self.cut[newest, columns] = True
        self._newest[columns] = newest * self.columns + np.arange(columns.start, columns.stop)

    def ended(self, cells: Array) -> Array | None:
        """Return for each row whether it is the last of its episode; None if no array marks the ends of episodes."""
        ended = None
        for name in self._endings:
            flags = self.flat[name].take(cells).astype(bool, copy=False)
            ended = flags if ended is None else ended | flags
        return ended

    def continues_with(self, columns: slice, first: Mapping[str, Array]) -> Array | bool:
        """Return for each column whether `first` is the observation after its newest row; True if there are no
        tails."""
        return True if self.tails is None else self.tails.equal(self._newest[columns], first)

    def keep_tails(self, cells: Array, values: Mapping[str, Array]) -> None:
        """Store the observations after these rows."""
        assert self.tails is not None
        self.tails.put(cells, values)

    def _writer(self, first: int, width: int) -> Writer:
        writer = self._writers.get((first, width))
        if writer is None:
            self._release(first, width)  # an earlier writer may own some of these columns
            writer = self._writers[first, width] = self.blocks.join(first, width)
        return writer

    def _release(self, first: int, width: int) -> None:
        for start, count in list(self._writers):
            if start < first + width and first < start + count:
                self._writers.pop((start, count)).leave()

    # ---- reading ----

    def cells(self, rows: slice, columns: slice) -> Array:
        """Return the indices of a rectangle of cells, row by row."""
        grid = np.arange(rows.start, rows.stop)[:, None] * self.columns + np.arange(columns.start, columns.stop)
        return grid.reshape(-1)

    def following(self, cells: Array) -> Array:
        """Return the cells of the next rows in the same environment; arbitrary for cut rows."""
        if self.links is not None:
            return self.links.after.take(cells)
        after = cells + self.columns
        return np.where(after < self.table.cells, after, after - self.table.cells)

    def rows_after(self) -> Array:
        """Return for each cell the number of rows after it up to and including the next cut row."""
        if self.links is not None:
            return self.links.rows_after()
        at = np.arange(self.rows, dtype=np.int32)[:, None]
        cuts = np.where(self.cut, at, np.int32(2 * self.rows))
        first = cuts.min(axis=0) + np.int32(self.rows)  # the first cut after wrapping around
        after: Array = np.minimum(np.minimum.accumulate(cuts[::-1])[::-1], first) - at
        return after.reshape(-1)

    def ahead(self, steps: Array) -> Array:
        """Return for each cell the cell `steps` rows later; `steps` is at most `rows_after()`."""
        if self.links is not None:
            return self.links.ahead(steps)
        ahead: Array = (np.arange(len(steps)) + steps * self.columns) % len(steps)
        return ahead

    def take(self, name: str, cells: Array) -> Array:
        """Copy rows of one array."""
        taken: Array = self.flat[name].take(cells, axis=0)
        return taken

    def observed_after(self, name: str, cells: Array) -> Array:
        """Return the next observation of each row, for one observation array."""
        values = self.take(name, self.following(cells))
        if self.tails is not None:
            self.tails.fill(name, cells, values)
        return values

    def state(self) -> dict[str, Array]:
        """Return the state for a checkpoint, without rows, item table and tails."""
        own = {"cut": self.cut, "open": self._open, "newest": self._newest, "written": self.blocks.written}
        links = {} if self.links is None else {"after": self.links.after}
        return {**own, **links}

    def restore(self, state: Mapping[str, Array]) -> None:
        """Apply a state to a store whose rows are already restored."""
        self._check(state)
        if self.links is not None:
            self.flat_cut[:] = state["cut"].reshape(-1)
            self.links.restore(state["after"])
        self.cut[:], self._open[:], self._newest[:] = state["cut"], state["open"], state["newest"]
        self.blocks.written[:] = state["written"]
        self.blocks.claimed[:] = self.blocks.committed()
        if self.tails is not None:
            self.tails.restore(state)

    def _check(self, state: Mapping[str, Array]) -> None:
        """Refuse a state that does not fit these rows, or that no sequence of insertions can produce."""
        check_like(state, self.state() | ({} if self.tails is None else self.tails.state()))
        cut, written = state["cut"], state["written"][0]
        require((state["written"] == written).all(), "written differs between arrays of the same rows")
        require(((written >= 0) & (written <= 2**62)).all(), "written is not a number of rows")
        if self.tails is not None:
            cells = state["tails"]
            is_cell = ((cells >= 0) & (cells < self.table.cells)).all() and (np.diff(cells) > 0).all()
            require(is_cell and cut.reshape(-1)[cells].all(), "tails names a row that cannot have a tail")
            require(
                all(len(v) == len(cells) for n, v in state.items() if n.startswith("tails")), "tails differ in length"
            )
        if self.links is None:
            self._check_ring(state, written)
        else:
            require(not written.any(), "written counts rows, but the rows are linked")

    def _check_ring(self, state: Mapping[str, Array], written: Array) -> None:
        columns = np.flatnonzero(written)
        newest = np.full(self.columns, -1)
        newest[columns] = (written[columns] - 1) % self.rows * self.columns + columns
        require((state["newest"] == newest).all(), "newest is not the last written row")
        cut, is_used = state["cut"], np.arange(self.rows)[:, None] < written
        ended, starts = self._ends_and_starts()
        must = ~is_used | (ended & is_used) | np.roll(starts & is_used, -1, axis=0)
        must.reshape(-1)[newest[columns]] = True
        require((cut | ~must).all(), "cut lets a row follow the last one of its episode or column")
        self._check_open(state, ended)
        if self.tails is not None:
            require(is_used.reshape(-1)[state["tails"]].all(), "tails names a row that cannot have a tail")

    def _ends_and_starts(self) -> tuple[Array, Array]:
        """Return for each cell whether its row is the last row, and whether it is the first row, of an episode."""
        ended, starts = np.zeros_like(self.cut), np.zeros_like(self.cut)
        ended[...] = self._ended(slice(None), slice(None))
        if "episode_start" in self.schema:
            starts[...] = self.blocks.arrays["episode_start"].astype(bool)
        return ended, starts

    def _check_open(self, state: Mapping[str, Array], ended: Array) -> None:
        newest = state["newest"]
        is_open = (newest >= 0) & ~ended.reshape(-1)[newest]
        require((state["open"] == is_open).all(), "open does not match the episodes that are still running")

    def check_free(self, is_free: Array) -> None:
        """Raise `Refused` if a restored linked store does not agree with the free cells."""
        assert self.links is not None
        state, (ended, starts) = self.state(), self._ends_and_starts()
        newest = state["newest"]
        is_cell = ((newest >= -1) & (newest < self.table.cells)).all()
        held = newest[newest >= 0]
        is_last = is_cell and (self.flat_cut & ~is_free)[held].all() and len(np.unique(held)) == len(held)
        require(is_last, "newest is not the last row of an environment")
        self._check_open(state, ended)
        linked = np.flatnonzero(~self.flat_cut)
        after = self.links.after[linked]
        require(not (is_free[linked] | is_free[after]).any(), "after names a cell that is free")
        is_end = ended.reshape(-1)[linked] | starts.reshape(-1)[after]
        require(not is_end.any(), "after lets a row follow the last one of its episode")
        if self.tails is not None:
            require(not is_free[self.tails.cells].any(), "tails names a row that cannot have a tail")

    def close(self) -> None:
        self.blocks.close()


def runs(cells: Array) -> list[tuple[slice | Array, slice]]:
    """Split cells into runs of adjacent cells, if there are many cells in few runs.

    Returns:
        Pairs (cells, slice of the entries of `cells`). The cells of a run are a slice, because slices are faster to
        copy.
    """
    ends = np.flatnonzero(cells[1:] - cells[:-1] != 1) + 1 if len(cells) >= _MANY else ()
    if len(cells) < _MANY or len(ends) > _RUNS:
        return [(cells, slice(None))]
    edges = [0, *ends, len(cells)]
    return [(slice(int(cells[a]), int(cells[a]) + b - a), slice(a, b)) for a, b in pairwise(edges)]
