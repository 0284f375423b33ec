"""The contents of a buffer: keeps its rows and the selectors of its sampler and remover consistent.

`Buffer` does the waiting, limiting and locking. Methods that put rows return the numbers of new and evicted items, for
the counters of the limiter.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from farstep.batch import PRIORITY, Batch
from farstep.buffer.samplers import FIFO, EpisodeSelector, Sampler
from farstep.buffer.selectors import Selector
from farstep.buffer.storage.capacity import spare_rows
from farstep.buffer.storage.cyclic import spans
from farstep.buffer.storage.episodes import Episodes
from farstep.buffer.storage.frames import FrameStack
from farstep.buffer.storage.free_cells import FreeCells
from farstep.buffer.storage.rows import arrays_of, as_priorities, check_names, check_rows
from farstep.buffer.storage.store import Store
from farstep.core import Array
from farstep.errors import ConfigError, warn_caller
from farstep.schema import Schema, Structure, leaves


class Contents:
    """Up to `capacity` rows of `schema`, of `columns` environment slots.

    Without `remover`, rows stay in order, and the oldest rows are evicted. Each slot has a column of its own, in which
    rows form a ring until a row that is not the oldest is removed; from then on, links record their order. With
    `pooled`, links record it from the start, and all slots share the capacity.

    With `remover`, a new row goes into any free cell. If there is no free cell, the remover chooses an item to evict.
    """

    def __init__(
        self,
        schema: Schema,
        capacity: int,
        columns: int,
        structures: Mapping[str, Structure],
        sampler: Sampler,
        remover: Sampler | None,
        rng: np.random.Generator,
        pooled: bool = False,
        frame_stack: FrameStack | None = None,
    ) -> None:
        self.capacity, self.structures, self.rng = capacity, structures, rng
        self.is_cyclic, self.is_pooled = remover is None, pooled
        rows = (capacity if pooled else capacity // columns) + spare_rows(self.is_cyclic)
        follow = self.is_cyclic and "obs" in structures
        tails = [name for name in schema if name.split(".")[0] == "obs"] if follow else []
        self.store = Store(schema, rows, 1 if pooled else columns, tails, columns, frame_stack)
        self.is_pinned = False
        """Whether rows must stay in ring order, because readers access the cells directly. The cell of a removed row is
        then reused only when it is the oldest cell."""
        self.span = sampler.span(self.store)
        self.selector: Selector = sampler.selector(self.store.table)
        """Chooses the items of batches."""
        self._remover = None if remover is None else remover.selector(self.store.table)
        self._removes_oldest = isinstance(remover, FIFO)
        self.free = FreeCells(self.store.table.cells)
        """Cells for new rows; always empty for a ring, because a ring overwrites its oldest rows."""
        if not self.is_cyclic:
            self.free.push(np.arange(rows))
        self.episodes = Episodes(self.store)
        self.slots: Array = np.full(columns, -1, np.int64)
        """For each column, or with `pooled` for each slot, the environment slot of its newest row."""
        self._has_priorities = PRIORITY in schema and schema[PRIORITY].shape == ()
        """Whether rows are inserted with their initial priorities."""
        further = tails or "valid" in schema or self._has_priorities or isinstance(self.selector, EpisodeSelector)
        self.is_plain = columns == 1 and not further and frame_stack is None
        """Whether contents are plain: items are single rows of one column, without filler rows, episodes, stacked
        frames or initial priorities."""
        if pooled:
            self.link()

    @property
    def size(self) -> int:
        """Number of items."""
        return self.store.table.size

    @property
    def items(self) -> Array:
        """The cells of all items."""
        if isinstance(self.selector, EpisodeSelector):
            return self.selector.episodes
        return np.flatnonzero(self.store.table.keys >= 0)

    def by_age(self, cells: Array) -> Array:
        """Sort the cells of items, oldest first in each column, if rows stay in order."""
        if not self.is_cyclic:
            return cells
        if not self.is_linked:
            return cells[np.argsort(self.store.table.keys.take(cells))]  # a ring reuses its cells in order
        assert self._remover is not None
        ordered, _ = self._remover.select(self.size, self.rng)
        return ordered[np.isin(ordered, cells)]

    def selectors(self) -> list[Selector]:
        """Return the selectors that follow every change: that of batches and, if there is one, that of evictions."""
        return [self.selector] if self._remover is None else [self.selector, self._remover]

    # ---- inserting ----

    def check(self, values: Mapping[str, Array]) -> None:
        """Raise `ConfigError` if rows `[n, ...]` do not match the schema."""
        check_names(values, self.store.schema)
        check_rows(values, self.store.schema)
        self._check_priorities(values)
        if self.store.tails is not None:
            raise ConfigError("this buffer stores the next observations of batches: insert batches, not rows.")

    def rows_of(self, batch: Batch) -> dict[str, Array]:
        """Return the arrays `[T, N, ...]` of a batch to store. Raise `ConfigError` if they do not match or do not
        fit."""
        store = self.store
        values = arrays_of(batch, with_next=any(name.startswith("next_obs") for name in store.schema))
        check_rows(values, store.schema, leading=2, slots=batch.slots.tolist())
        self._check_priorities(values)
        if self.is_pooled and batch.shape[0] * batch.shape[1] > store.rows:
            raise ConfigError(
                f"a batch of {batch.shape[0]} steps of {batch.shape[1]} environments does not fit into a capacity of "
                f"{self.capacity} rows. Raise capacity."
            )
        if self.is_cyclic and batch.shape[0] > store.rows:
            raise ConfigError(
                f"a batch of {batch.shape[0]} steps does not fit: a capacity of {self.capacity} rows for "
                f"{store.columns} environment slots gives only {store.rows} rows per slot. Raise capacity."
            )
        return values

    def _check_priorities(self, values: Mapping[str, Array]) -> None:
        if self._has_priorities:
            given = np.asarray(values[PRIORITY]).reshape(-1)
            as_priorities(given, np.arange(len(given)))

    def warn_if_shared(self, batch: Batch) -> None:
        """Warn the caller of `Buffer.insert` if two slots share a column."""
        if batch.slots.max() >= self.store.num_slots and not self.is_pooled:
            warn_caller(
                f"slot {batch.slots.max()} was inserted into a buffer for {self.store.columns} slots and shares a "
                "column with another slot, so sequences end at each chunk. Call buffer.bind for all slots first."
            )

    def put_rows(self, values: Mapping[str, Array], count: int) -> tuple[Array, int]:
        """Put rows `[count, ...]` into plain contents. Return their keys and the number of evicted items."""
        if not self.is_cyclic:
            keys, _, evicted = self.put_anywhere(values, count)
            return keys, evicted
        if self.store.links is not None:
            keys, _, evicted = self.put({name: values[name][:, None] for name in self.store.schema})
            return keys.reshape(-1), evicted
        keys, evicted = self.store.append_rows(values, count)
        if self.selector.listens:
            cells = self.store.table.cells
            for rows, times in spans(int(keys[0]) % cells, count, cells):
                self.selector.inserted(rows, keys[times])
        return keys, evicted

    def put(
        self, values: Mapping[str, Array], first: int = 0, continues: Array | None = None
    ) -> tuple[Array, int, int]:
        """Put rows `[T, n, ...]`, in order, into `n` columns from `first` on.

        Args:
            values: The arrays of the rows.
            first: The first column.
            continues: For each column, whether the first new row follows the previous newest row; None: all do.

        Returns:
            The keys `[T, n]` of the rows, the number of new items, and the number of evicted items.
        """
        table = self.store.table
        if self.is_linked:
            shape = next(iter(values.values())).shape[:2]
            evicted = self._make_room(shape[0] * shape[1])
            keys = self.store.put_linked(values, self.free.pop(shape[0] * shape[1]).reshape(shape), first, continues)
        else:
            keys, evicted = self.store.append(values, first, continues)
        new = keys.reshape(-1)
        cells = new % table.cells
        valid = values.get("valid")
        filler: Array | None = None
        if valid is not None and valid.ndim == 2 and not valid.all():  # filler rows are resets, not steps
            filler = ~valid.astype(bool).reshape(-1)
            self._take_out(cells[filler])  # selectors may still list the old items of these cells
            cells, new = cells[~filler], new[~filler]
        for selector in self.selectors():
            selector.inserted(cells, new)
        if self._has_priorities:
            given = values[PRIORITY].reshape(-1)
            self._prioritize(cells, given if filler is None else given[~filler])
        if isinstance(self.selector, EpisodeSelector):
            columns = slice(first, first + keys.shape[1])
            self.selector.completed(self.episodes.completed(keys, columns, continues))
        return keys, len(cells), evicted

    def put_anywhere(self, values: Mapping[str, Array], count: int) -> tuple[Array, int, int]:
        """Put rows `[count, ...]`, in order, each into a free cell.

        If the contents are full, the remover chooses an item to evict after each row; it may choose the new row.

        Returns:
            The keys of the rows, the number of new items, and the number of evicted items.
        """
        valid = values.get("valid")
        if valid is None or valid.ndim != 1 or valid.all():
            keys, evicted = self._put_steps(values, count)
            return keys, count, evicted
        table, keys = self.store.table, np.empty(count, np.int64)
        filler, steps = np.flatnonzero(valid == 0), np.flatnonzero(valid)  # filler rows are resets, not steps
        cells = np.full(len(filler), self.free.next)
        keys[filler] = table.put_cells(cells, is_distinct=False)
        table.remove(cells[:1])
        keys[steps], evicted = self._put_steps({name: values[name][steps] for name in self.store.schema}, len(steps))
        return keys, len(steps), evicted

    def _put_steps(self, values: Mapping[str, Array], count: int) -> tuple[Array, int]:
        """Put rows `[count, ...]` without filler; return their keys and the number of evicted items."""
        table, keys, evicted = self.store.table, np.empty(count, np.int64), 0
        missing = count - (self.capacity - table.size)
        if (
            missing > 0 and count <= self.capacity and self._removes_oldest
        ):  # evict all at once, because no new row is among the oldest
            assert self._remover is not None
            oldest, _ = self._remover.select(missing, self.rng)
            self._take_out(oldest)
            evicted = missing
        fitting = min(count, self.capacity - table.size)
        if fitting:
            self._fill(self.free.pop(fitting), values, slice(0, fitting), keys)
        if fitting < count:
            evicted += self._displace(values, np.arange(fitting, count), keys)
        return keys, evicted

    def _fill(self, cells: Array, values: Mapping[str, Array], rows: slice | Array, keys: Array) -> None:
        """Put rows into free cells, one each, and record their keys in `keys`."""
        keys[rows] = new = self.store.table.put_cells(cells)
        self._write(cells, values, rows, new)

    def _write(self, cells: Array, values: Mapping[str, Array], rows: slice | Array, keys: Array) -> None:
        self.store.write(cells, {name: values[name][rows] for name in self.store.flat})
        for selector in self.selectors():
            selector.inserted(cells, keys)
        if self._has_priorities:
            self._prioritize(cells, values[PRIORITY][rows])

    def _prioritize(self, cells: Array, priorities: Array) -> None:
        """Set the initial priorities of new rows; episodes get theirs when they are complete."""
        for selector in self.selectors():
            if not isinstance(selector, EpisodeSelector):
                selector.updated(cells, priorities)

    def _displace(self, values: Mapping[str, Array], rows: Array, keys: Array) -> int:
        """Put rows into a full store, one after the other. Return the number of evicted items."""
        assert self._remover is not None
        table, evicted = self.store.table, 0
        while evicted < len(rows):
            self._fill(self.free.pop(1), values, rows[evicted : evicted + 1], keys)
            path = self._remover.displaced(len(rows) - evicted, self.rng)
            gone = np.unique(path) if len(path) > 1 else path
            if len(path) > 1:
                further, cells = rows[evicted + 1 : evicted + len(path)], path[:-1]
                is_distinct = len(gone) == len(path)
                keys[further] = new = table.put_cells(cells, is_distinct)
                for selector in self.selectors():
                    selector.removed(gone)
                if not is_distinct:
                    stay = _last_occurrences(cells)
                    stay = stay[cells[stay] != path[-1]]
                    cells, further, new = cells[stay], further[stay], new[stay]
                if len(cells):
                    self._write(cells, values, further, new)
                gone = path[-1:]
            self._take_out(gone)
            evicted += len(path)
        return evicted

    def put_batch(self, batch: Batch, values: Mapping[str, Array]) -> tuple[Array, int, int]:
        """Put the rows `[T, N, ...]` of a batch, each slot into its own column, or with `pooled` into free cells."""
        store = self.store
        if self.is_pooled and (num_slots := int(batch.slots.max()) + 1) > store.num_slots:
            more = np.full(num_slots - store.num_slots, -1, np.int64)
            self.slots, self.episodes.begun = np.append(self.slots, more), np.append(self.episodes.begun, more)
            store.add_slots(num_slots)
        keys = np.empty(batch.shape, np.int64)
        inserted = evicted = 0
        columns = batch.slots % store.num_slots
        for a, b in _neighbors(columns):
            first = int(columns[a])
            slots = self.slots[first : first + b - a]
            part = {name: values[name][:, a:b] for name in store.schema}
            follows = batch.continues[a:b] & (slots == batch.slots[a:b])
            # The previous batch of these slots may be missing in this buffer.
            follows &= store.continues_with(slice(first, first + b - a), {name: v[0] for name, v in part.items()})
            slots[:] = batch.slots[a:b]
            found, new_items, evicted_items = self.put(part, first, follows)
            keys[:, a:b] = found
            inserted, evicted = inserted + new_items, evicted + evicted_items
            if store.tails is not None:
                self._keep_tails(batch, a, b, found % store.table.cells)
        return keys, inserted, evicted

    def _keep_tails(self, batch: Batch, a: int, b: int, cells: Array) -> None:
        """Store the observations after the ends of episodes and after the last row, for slots `a` to `b`."""
        structure, final = self.structures["obs"], batch.final_obs
        ours = np.flatnonzero((final.slot >= a) & (final.slot < b))
        rows, columns = final.row[ours], final.slot[ours] - a
        ends = cells[rows, columns]
        # A filler row that no item needs has already been removed, and its cell is free.
        is_open = ~self.free.is_free[cells[-1]]
        is_open[columns[rows == len(cells) - 1]] = False
        unfinished = np.flatnonzero(is_open)
        last = {name: value[unfinished + a] for name, value in leaves(structure, batch.last_obs)}
        self.store.keep_tails(cells[-1, unfinished], last)
        if len(ends):
            self.store.keep_tails(ends, {name: value[ours] for name, value in leaves(structure, final.obs)})

    # ---- updating and removing ----

    def update(self, keys: Array, priorities: Array) -> int:
        """Set the priorities of items. Return how many of these items still exist."""
        table = self.store.table
        cells = keys % table.cells
        exists = (keys >= 0) & (table.keys.take(cells) == keys)
        if not exists.all():
            cells, priorities = cells[exists], priorities[exists]
        for selector in self.selectors():
            selector.updated(cells, priorities)
        return len(cells)

    def remove(self, cells: Array, are_oldest: bool = False) -> int:
        """Remove items. If items are episodes, remove all their rows.

        Args:
            cells: The cells of the items, without duplicates.
            are_oldest: Whether these are the oldest items. A ring reuses their cells next anyway.

        Returns:
            The number of rows removed.
        """
        if not len(cells):
            return 0
        if isinstance(self.selector, EpisodeSelector):
            cells = self._with_episodes(cells, self.selector)
        if self.is_cyclic and not (are_oldest or self.is_linked or self.is_pinned):
            self.link()
        self._take_out(cells)
        return len(cells)

    def _take_out(self, cells: Array) -> None:
        """Remove the items of distinct cells, and free the cells of all rows that no other item needs."""
        self.store.table.remove(cells)
        for selector in self.selectors():
            selector.removed(cells)
        if (links := self.store.links) is not None:
            self._release(links.unneeded_after(cells, self.span))
        elif not self.is_cyclic:
            self.free.push(cells)

    def _with_episodes(self, cells: Array, selector: EpisodeSelector) -> Array:
        """Return the cells of all rows of the episodes that start at the given cells."""
        table, found = self.store.table, [cells]
        at = cells[selector.weights[cells] > 0]
        while len(at := self.store.following(at[~self.store.flat_cut[at]])):
            found.append(at[table.keys[at] >= 0])
        return np.unique(np.concatenate(found))

    # ---- linked rows ----

    @property
    def is_linked(self) -> bool:
        """Whether links record the order of rows, instead of the order of their cells."""
        return self.store.links is not None

    def link(self) -> None:
        """Record the order of rows in links, so that any free cell can hold the next row."""
        table, by_age = self.store.table, self.store.rows_by_age()
        links = self.store.link()
        self._remover = FIFO().selector(table)
        items = by_age[table.keys[by_age] >= 0]
        self._remover.inserted(items, table.keys[items])
        never_used = ~table.is_used
        self.free.push(np.flatnonzero(never_used))
        unneeded = links.unneeded(self.span)
        self._release(unneeded[~never_used[unneeded]])

    def _release(self, cells: Array) -> None:
        self.free.push(cells)
        self.store.release(cells, self.free.is_free)

    def _make_room(self, count: int) -> int:
        """Evict the oldest items until `count` cells are free; return the number of evicted items."""
        if (missing := count - len(self.free)) <= 0:
            return 0
        assert self._remover is not None and self.store.links is not None
        oldest, _ = self._remover.select(missing, self.rng)
        # Evicting an item also frees the rows that were kept for it, because all older items are already evicted.
        freed = np.cumsum(1 + self.store.links.rows_kept_for(oldest))
        evicted = oldest[: int(np.searchsorted(freed, missing)) + 1]
        self._take_out(evicted)
        return len(evicted)


def _last_occurrences(values: Array) -> Array:
    """Return the index of the last occurrence of each distinct value, in ascending order."""
    _, from_end = np.unique(values[::-1], return_index=True)
    return np.sort(len(values) - 1 - from_end)


def _neighbors(slots: Array) -> list[tuple[int, int]]:
    """Return the ranges of entries whose slots are consecutive."""
    cuts = [0, *(np.flatnonzero(np.diff(slots) != 1) + 1).tolist(), len(slots)]
    return [(a, b) for a, b in pairwise(cuts) if b > a]
