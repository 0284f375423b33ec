"""The rows of a buffer in cyclic blocks, and their order.

A row without a next row is *cut*: its episode ended, the rows after it were lost, or it is the newest row of its
column. The next row is in the next cell of the column or, if the store is linked (see `links.py`), in any cell. The
observation after a cut row is stored separately, as the *tail* of the row. So every row of a rollout has a next
observation, and no observation is stored twice. With a `FrameStack`, no frame is stored twice either (see `frames.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from farstep.buffer.storage.cyclic import CyclicBlocks, Writer, spans
from farstep.buffer.storage.frames import Frames, FrameStack, Older
from farstep.buffer.storage.links import Links
from farstep.buffer.storage.sparse_rows import SparseRows
from farstep.buffer.storage.table import Table
from farstep.core import Array
from farstep.schema import Schema

CONSUMERS = 16
"""Maximum number of readers with cursors in the header of the blocks."""

_MANY, _RUNS = 128, 8  # if at least 128 cells form at most 9 runs of adjacent cells, copy run by run

ENDINGS = ("terminated", "truncated", "done")
"""Arrays that mark the last row of an episode."""


class Store:
    """Blocks, item table, tails and frames of one buffer.

    In a ring, each environment slot has a column of its own. A linked store may have one column for `num_slots` slots.
    """

    def __init__(
        self,
        schema: Schema,
        rows: int,
        columns: int,
        tails: Sequence[str] = (),
        num_slots: int | None = None,
        frame_stack: FrameStack | None = None,
    ) -> None:
        self.schema, self.rows, self.columns = schema, rows, columns
        self.num_slots = columns if num_slots is None else num_slots
        stored = schema if frame_stack is None else frame_stack.stored(schema)
        self.blocks = CyclicBlocks.create(stored, rows, columns, CONSUMERS)
        self.table = Table(rows, columns)
        self.flat: dict[str, Array] = {
            name: block.reshape(self.table.cells, *block.shape[2:]) for name, block in self.blocks.arrays.items()
        }
        self.cut: Array = np.ones((rows, columns), bool)
        self.flat_cut: Array = self.cut.reshape(-1)
        self.is_open: Array = np.zeros(self.num_slots, bool)
        """For each slot, whether the episode of its newest row is still running."""
        self.newest: Array = np.full(self.num_slots, -1, np.int64)
        """For each slot, the cell of its newest row."""
        self.links: Links | None = None
        """The links between rows; None for a ring, in which the next row is in the next cell of the column."""
        self._writers: dict[tuple[int, int], Writer] = {}
        self.kinds = [(name, np.dtype(spec.dtype), spec.shape) for name, spec in schema.items()]
        """Name, dtype and shape of each array of a row."""
        self._endings = [name for name in ENDINGS if name in schema]
        self.tails = SparseRows({name: schema[name] for name in tails}, self.table.cells) if tails else None
        self.frames = None if frame_stack is None else Frames(frame_stack, schema, self.flat, self.preceding)
        older = {} if self.frames is None else self.frames.older
        self.sparse = {f"older.{name}": rows for name, rows in older.items()}
        """The arrays that only some rows have, by their name in a checkpoint."""
        if self.tails is not None:
            self.sparse["tails"] = self.tails

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays that hold rows and frames. The observations after episodes (`tails`) do not count."""
        older = 0 if self.frames is None else sum(rows.nbytes for rows in self.frames.older.values())
        return older + sum(array.nbytes for array in self.blocks.arrays.values())

    # ---- writing ----

    def add_slots(self, num_slots: int) -> None:
        """Extend a linked store to `num_slots` environment slots."""
        more = num_slots - self.num_slots
        self.is_open = np.append(self.is_open, np.zeros(more, bool))
        self.newest = np.append(self.newest, np.full(more, -1, np.int64))
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
        older = Older()
        if self.frames is not None:
            follows = self._follows(values, slice(first, first + width), continues)
            follows[0] &= count < self.rows  # otherwise the previous row is overwritten
            values, older = self._split(values, follows, slice(first, first + width))
        for columns, start in writer.claim(count):
            part = slice(columns.start - first, columns.stop - first)
            if self.frames is not None and start + count >= self.rows > count:
                oldest = (start + count) % self.rows
                self.frames.detach(self.cells(slice(oldest, oldest + 1), columns))
            for rows, times in spans(start % self.rows, count, self.rows):
                for sparse in self.sparse.values():
                    sparse.drop(self.cells(rows, columns))
                for name, block in self.blocks.arrays.items():
                    block[rows, columns] = values[name][times, part]
                keys[times, part], replaced = self.table.put(rows, columns)
                evicted += replaced
                self.cut[rows, columns] = self.ended_in(rows, columns)
            starts = None if begins is None else begins[:, part]
            self._update_cuts(start, count, columns, starts, None if continues is None else continues[part])
        if self.frames is not None:
            self.frames.put(older, keys % self.table.cells)
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
        if count < self.rows and self.is_open[0] and (begins is None or not begins[0]):
            cut[place - 1] = False
        newest = (start + count - 1) % self.rows
        self.is_open[0] = not cut[newest]
        cut[newest] = True
        self.newest[0] = newest
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
        follows = self._follows(values, columns, continues)
        values, older = self._split(values, follows, columns)
        self.write(flat, {name: values[name].reshape(-1, *held.shape[1:]) for name, held in self.flat.items()})
        keys = self.table.put_cells(flat).reshape(cells.shape)
        if self.frames is not None:
            self.frames.put(older, cells)
        self.links.join(cells[:-1][follows[1:]], cells[1:][follows[1:]])

        newest, follows = self.newest[columns], follows[0]
        if self.tails is not None:
            self.tails.drop(newest[follows])
        self.links.join(newest[follows], cells[0, follows])
        ended = self.ended(cells[-1])
        self.is_open[columns], self.newest[columns] = True if ended is None else ~ended, cells[-1]
        return keys

    def _follows(self, values: Mapping[str, Array], columns: slice, continues: Array | None) -> Array:
        """Return for each new row `[T, n]` whether it follows the row before it."""
        follows = np.ones(next(iter(values.values())).shape[:2], bool)
        for name in self._endings:
            follows[1:] &= ~values[name][:-1].astype(bool)
        if "episode_start" in values:
            follows &= ~values["episode_start"].astype(bool)
        follows[0] &= self.is_open[columns]
        if continues is not None:
            follows[0] &= continues
        return follows

    def _split(self, values: Mapping[str, Array], follows: Array, columns: slice) -> tuple[Mapping[str, Array], Older]:
        """Return the arrays to store for new rows, and the older frames of those that need them."""
        if self.frames is None:
            return values, {}
        return self.frames.split(values, follows, self.newest[columns])

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
        if self.frames is not None:
            after = self.links.after[cells]
            self.frames.detach(after[~is_free[after]])
        self.links.release(cells)
        for sparse in self.sparse.values():
            sparse.drop(cells)
        gone = is_free[self.newest] & (self.newest >= 0)
        self.newest[gone], self.is_open[gone] = -1, False

    def ended_in(self, rows: slice, columns: slice) -> Array | bool:
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
        follows = self.is_open[columns]
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
        np.logical_not(self.cut[newest, columns], out=self.is_open[columns])
        self.cut[newest, columns] = True
        self.newest[columns] = newest * self.columns + np.arange(columns.start, columns.stop)

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
        return True if self.tails is None else self.tails.equal(self.newest[columns], first)

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

    def preceding(self, cells: Array) -> Array:
        """Return the cells of the previous rows in the same environment; arbitrary for rows after a cut row."""
        if self.links is not None:
            return self.links.before.take(cells)
        before = cells - self.columns
        return np.where(before < 0, before + self.table.cells, before)

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
        if self.frames is not None and name in self.frames:
            return self.frames.take(name, cells)
        return self.take_stored(name, cells)

    def take_stored(self, name: str, cells: Array) -> Array:
        """Copy rows of one array as they are stored: only the newest frame of a stack."""
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
        own = {"cut": self.cut, "open": self.is_open, "newest": self.newest, "written": self.blocks.written}
        links = {} if self.links is None else {"after": self.links.after}
        return {**own, **links}

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
