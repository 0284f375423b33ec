"""The buffer: rows in cyclic blocks, a sampler that chooses among them, a remover, and a limiter that says when."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np

from farstep.batch import Batch, is_final
from farstep.buffer.limiter import MinSize, RateLimiter
from farstep.buffer.rows import as_arrays, check_names, check_rows, count_plain, observed_after, schema_of
from farstep.buffer.samplers import FIFO, EpisodeSelector, FullBatch, Sampler
from farstep.buffer.selectors import Selector
from farstep.buffer.store import Store
from farstep.config import available_memory, check_count
from farstep.core import Array, Nested
from farstep.errors import BufferTimeout, ClosedError, ConfigError, unknown_name
from farstep.spec import ArraySpec, Schema, Structure, leaf_names, leaves, nest

WAIT_S = 60.0
"""How long `insert` and `sample` wait for the limiter unless told otherwise."""
_DRAWS = 64  # attempts to find rows that something longer can begin at, before they are looked for one by one


@dataclass(frozen=True)
class SampleInfo:
    """What is known of sampled items, an entry each."""

    keys: Array
    """Names of the items, for `update_priorities` and `delete`."""
    probabilities: Array
    times_sampled: Array
    """How often the item was sampled, this time included."""
    versions: Array
    """The policy's version, if rows have one; else -1."""
    size: int
    """Items in the buffer."""
    beta: float
    """Exponent of `weights`."""

    @cached_property
    def weights(self) -> Array:
        """Importance weights, at most 1; all 1 unless the sampler is prioritised."""
        if not self.beta:
            return np.ones(len(self.keys))
        weights = (self.size * self.probabilities) ** -self.beta
        weights /= weights.max()
        return weights


class Buffer:
    """Rows for a learner. `capacity` is in transitions; without `spec` the arrays are those of the first insert.

    Thread-safe: whoever inserts or samples when the limiter forbids it waits, at most `timeout_s`.
    """

    def __init__(
        self,
        capacity: int,
        sampler: Sampler,
        *,
        spec: Mapping[str, object] | None = None,
        remover: Sampler | None = None,
        limiter: RateLimiter | None = None,
        max_bytes: int | None = None,
        max_times_sampled: int | None = None,
        seed: int | None = None,
    ) -> None:
        self.capacity = check_count("capacity", capacity)
        self.sampler, self.remover = _is_sampler("sampler", sampler), _is_sampler("remover", remover or FIFO())
        self.limiter = limiter if limiter is not None else MinSize(1)
        self.max_bytes = None if max_bytes is None else check_count("max_bytes", max_bytes)
        limit = int(sampler.once) if max_times_sampled is None else max_times_sampled
        self.max_times_sampled = check_count("max_times_sampled", limit, minimum=0)
        self._cyclic = type(self.remover) is FIFO
        if sampler.needs_order and not self._cyclic:
            raise ConfigError(f"{sampler!r} needs rows in order, so only the oldest can be removed: leave remover out.")
        if self.remover.needs_order:
            raise ConfigError(f"remover={self.remover!r}; single rows are removed, so it must be a sampler of these.")
        self._check_reachable()
        self._rng = np.random.default_rng(seed)
        self._changed = threading.Condition(threading.RLock())
        self._structures: dict[str, Structure] = {}
        self._store: Store | None = None
        self._free: list[int] = []
        self._is_plain = False
        self._closed = False
        self.filled_by: int | None = None
        """The one thread that inserts, where that is known: it must not wait for itself."""
        self.told: Callable[[], None] | None = None
        """Called when another thread than that took samples or changed the limiter: there may be room again."""
        self._halted = False
        self.waited_s = {"insert": 0.0, "sample": 0.0}
        self.removed: dict[str, int] = {"evicted": 0, "sampled": 0, "deleted": 0}
        if spec is not None:
            self.bind({str(name): _array_spec(name, value) for name, value in spec.items()})

    # ---- what it holds ----

    def bind(self, schema: Schema, columns: int = 1, structures: Mapping[str, Structure] | None = None) -> None:
        """Decide which arrays it holds, and for how many environment slots; done by the first insert if nobody else
        does."""
        self._check_open()
        check_count("columns", columns)
        if self._store is not None:
            raise ConfigError("this buffer has its arrays already; make another one for other arrays.")
        if not schema:
            raise ConfigError("a buffer needs at least one array.")
        self.sampler.check(schema)
        if columns > 1 and not self._cyclic:
            raise ConfigError(f"with remover={self.remover!r} rows of all environments share one column.")
        row_bytes = max(1, sum(spec.nbytes for spec in schema.values()))
        # Without a fixed order one row more: a new item competes with the others for its place.
        spare = 0 if self._cyclic else 1
        capacity = self.capacity
        if self.max_bytes is not None:
            capacity = min(capacity, self.max_bytes // row_bytes - spare)
        if capacity < columns:
            raise ConfigError(
                f"room for {capacity} rows of {row_bytes} bytes is less than one for each of {columns} "
                "environment slots. Raise capacity or max_bytes."
            )
        capacity -= capacity % columns
        if (needed := capacity * row_bytes) > available_memory():
            raise ConfigError(
                f"{capacity} rows of {row_bytes} bytes need {needed / 2**30:,.1f} GiB; this machine has "
                f"{available_memory() / 2**30:,.1f} GiB available. Lower capacity."
            )
        self._check_reachable(capacity)
        self.capacity = capacity
        rows = capacity // columns + spare
        self._structures = dict(structures or {})
        follow = self._cyclic and "obs" in self._structures
        tails = [name for name in schema if name.split(".")[0] == "obs"] if follow else []
        self._store = Store(schema, rows, columns, tails)
        self._free = [] if self._cyclic else list(range(rows - 1, -1, -1))
        self._selector: Selector = self.sampler.selector(self._store.table)
        self._remover: Selector | None = None if self._cyclic else self.remover.selector(self._store.table)
        # Rows that are all there is to it: one column, in order, no filler among them, no episodes to put together.
        self._is_plain = (
            self._cyclic
            and columns == 1
            and not tails
            and "valid" not in schema
            and not isinstance(self._selector, EpisodeSelector)
        )
        self._begun: Array = np.full(columns, -1, np.int64)
        """Per column, the key of the row that the episode under way began with; -1 where nobody knows."""
        self._slots: Array = np.full(columns, -1, np.int64)
        """Per column, which environment slot wrote last."""

    @property
    def is_cyclic(self) -> bool:
        """Whether rows stay in order and the oldest make room; else its remover chooses."""
        return self._cyclic

    @property
    def is_halted(self) -> bool:
        return self._halted

    @property
    def is_bound(self) -> bool:
        """Whether it has its arrays."""
        return self._store is not None

    @property
    def store(self) -> Store:
        """Where its rows are."""
        return self._need_store()

    @property
    def structures(self) -> Mapping[str, Structure]:
        """How arrays of an environment nest."""
        return self._structures

    def __len__(self) -> int:
        return 0 if self._store is None else self._store.table.size

    @property
    def schema(self) -> Schema:
        """The arrays of a row."""
        return self._need_store().schema

    def _need_store(self) -> Store:
        if self._closed:
            raise ClosedError("this buffer is closed; make a new one.")
        if self._store is None:
            raise ConfigError("this buffer has no arrays yet: insert rows first, or give it a spec.")
        return self._store

    # ---- inserting ----

    def insert(self, rows: Mapping[str, Nested] | Batch, timeout_s: float | None = None) -> Array:
        """Add rows, `[n, ...]` arrays by name, or all rows of a `Batch`; returns a key for each (time-major).

        Rows follow each other unless `terminated`, `truncated`, `done` or `episode_start` say otherwise.
        """
        if (store := self._store) is not None and self._is_plain:
            count = count_plain(rows, store.kinds)
            with self._changed:
                if 0 < count <= store.rows and self.limiter.can_insert(count) and not self._closed:
                    return self._put_rows(store, rows, count)
        _check_timeout(timeout_s)
        if isinstance(rows, Batch):
            return self._insert_batch(rows, timeout_s)
        values = self._checked(rows)
        total = len(next(iter(values.values())))
        keys: list[Array] = []
        done = 0
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while done < total:
            with self._changed:
                if not (count := self.limiter.room(total - done)):
                    left = None if deadline is None else deadline - time.monotonic()
                    self._wait(
                        "insert",
                        self.limiter.can_insert,
                        left,
                        lambda: f"{done} of {total} rows are inserted",  # noqa: B023
                    )
                    continue
                count = min(count, self._need_store().rows)
                part = {name: value[done : done + count, None] for name, value in values.items()}
                keys.append(self._put(part)[0] if self._cyclic else self._put_anywhere(part))
                done += count
        return np.concatenate(keys) if keys else np.zeros(0, np.int64)

    def _put_rows(self, store: Store, values: Mapping[str, Array], count: int) -> Array:
        """As `_put`, for a buffer that holds nothing but rows."""
        keys, gone = store.append_rows(values, count)
        self.limiter.insert(count)
        if gone:
            self._count("evicted", gone)
        if self._selector.listens:
            self._selector.inserted(keys % store.table.cells, keys)
        self._changed.notify_all()
        return keys

    def _checked(self, rows: Mapping[str, Nested]) -> dict[str, Array]:
        """Rows as arrays of the right kind, or an error and nothing changed."""
        values = as_arrays(rows)
        with self._changed:
            if self._store is None and not self._closed:
                self.bind(schema_of(values))
        store = self._need_store()
        check_names(values, store.schema)
        check_rows(values, store.schema)
        if store.tails is not None:
            raise ConfigError("this buffer holds rows of batches and what came after each: insert batches, not rows.")
        return values

    def _put(self, values: Mapping[str, Array], first: int = 0, continues: Array | None = None) -> tuple[Array, Array]:
        """Rows `[T, n, ...]` into columns from `first` on; their keys and cells."""
        store = self._need_store()
        keys, gone = store.append(values, first, continues)
        flat = keys.reshape(-1)
        cells = flat % store.table.cells
        kept = cells
        self._count("evicted", gone)
        if (filler := _filler(values)) is not None:
            store.table.remove(cells[filler])
            self._selector.removed(cells[filler])  # what these cells held before
            kept, flat = cells[~filler], flat[~filler]
        self.limiter.insert(len(kept))
        self._selector.inserted(kept, flat)
        if isinstance(self._selector, EpisodeSelector):
            self._complete(self._selector, keys, slice(first, first + keys.shape[1]), continues)
        self._changed.notify_all()
        return keys.reshape(-1), cells

    def _complete(self, selector: EpisodeSelector, keys: Array, columns: slice, continues: Array | None) -> None:
        """Find the episodes that ended within new rows `[T, n]`; only whole ones count."""
        store = self._need_store()
        cells, begun = keys % store.table.cells, self._begun[columns]
        if continues is not None:
            begun = np.where(continues, begun, -1)
        starts, ends = store.flat.get("episode_start"), store.ended(cells)
        if starts is not None:
            begins = starts[cells].astype(bool)
        else:  # whatever follows an end
            assert ends is not None
            begins = np.vstack([begun < 0, ends[:-1]])
        whole = []
        if ends is None:  # an episode ended before each start
            ends = np.vstack([begins[1:], np.zeros_like(begins[:1])])
            whole.append(begun[begins[0]])
        # Row 0 stands for what was there before; an end belongs to the newest start, unless that has ended before.
        begins, all_keys = np.vstack([begun >= 0, begins]), np.vstack([begun, keys])
        ends = np.vstack([np.zeros_like(begins[:1]), ends])
        at = np.arange(len(begins))[:, None]
        start = np.maximum.accumulate(np.where(begins, at, -1))
        ended = np.maximum.accumulate(np.where(ends, at, -1))
        before = np.vstack([np.full_like(ended[:1], -1), ended[:-1]])
        t, k = np.nonzero(ends & (start > before))
        whole.append(all_keys[start[t, k], k])
        under_way = start[-1] > ended[-1]
        self._begun[columns] = np.where(under_way, np.take_along_axis(all_keys, start[-1:], 0)[0], -1)
        # Of an episode longer than the buffer, or than what came after it, the first row is gone again.
        selector.completed(store.table.find(np.concatenate(whole)))

    def _put_anywhere(self, values: Mapping[str, Array]) -> Array:
        """Rows one by one into free cells; a full buffer's remover decides who goes, perhaps the new row."""
        store, remover = self._need_store(), self._remover
        assert remover is not None
        keys = np.empty(len(next(iter(values.values()))), np.int64)
        filler = _filler(values)
        for i in range(len(keys)):
            cell = self._free.pop()
            for name, flat in store.flat.items():
                flat[cell] = values[name][i, 0]
            key, _ = store.table.put(slice(cell, cell + 1), slice(0, 1))
            cells, keys[i] = np.array([cell]), key[0, 0]
            if filler is not None and filler[i]:
                store.table.remove(cells)
                self._free.append(cell)
                continue
            self.limiter.insert()
            self._selector.inserted(cells, keys[i : i + 1])
            remover.inserted(cells, keys[i : i + 1])
            if store.table.size > self.capacity:
                self._remove(remover.select(1, self._rng)[0], "evicted")
        self._changed.notify_all()
        return keys

    def _insert_batch(self, batch: Batch, timeout_s: float | None) -> Array:
        values = {name: array for name, array in batch.arrays.items() if not is_final(name)}
        with self._changed:
            if self._store is None and not self._closed:
                if not self._cyclic:  # rows have no neighbours, so each has its next observation itself
                    values |= observed_after(batch)
                columns = int(batch.slots.max()) + 1 if self._cyclic else 1
                self.bind(schema_of(values, leading=2), columns, batch.structures)
        store = self._need_store()
        if any(name.startswith("next_obs") for name in store.schema):
            values |= observed_after(batch)
        check_rows(values, store.schema, leading=2)
        steps, width = batch.shape
        if not self._cyclic:
            return self.insert({n: values[n].reshape(-1, *spec.shape) for n, spec in store.schema.items()}, timeout_s)
        if steps > store.rows:
            raise ConfigError(
                f"a batch of {steps} steps does not fit: {self.capacity} rows for {store.columns} environment slots "
                f"are {store.rows} each. Raise capacity."
            )
        if self.limiter.never_inserts(steps * width):
            raise ConfigError(f"a batch of {steps * width} rows never fits this limiter ({self.limiter}); widen it.")
        if batch.slots.max() >= store.columns:
            warnings.warn(
                f"slot {batch.slots.max()} came to a buffer for {store.columns} slots and shares a column with another "
                "one, so rows of different chunks do not follow each other. Call buffer.bind for all slots first.",
                stacklevel=3,
            )
        columns_of = batch.slots % store.columns
        with self._changed:
            self._wait("insert", lambda: self.limiter.can_insert(steps * width), timeout_s, lambda: "none inserted")
            keys = np.empty((steps, width), np.int64)
            for a, b in _neighbours(columns_of):
                first = int(columns_of[a])
                slots = self._slots[first : first + b - a]
                part = {name: values[name][:, a:b] for name in store.schema}
                follows = batch.continues[a:b] & (slots == batch.slots[a:b])
                # The batch before may have gone elsewhere.
                follows &= store.goes_on(slice(first, first + b - a), {name: v[0] for name, v in part.items()})
                slots[:] = batch.slots[a:b]
                found, cells = self._put(part, first, follows)
                keys[:, a:b] = found.reshape(steps, b - a)
                if store.tails is not None:
                    self._keep_tails(batch, a, b, cells.reshape(steps, b - a))
            return keys.reshape(-1)

    def _keep_tails(self, batch: Batch, a: int, b: int, cells: Array) -> None:
        """What was observed after episodes' ends, and after the last row."""
        store, structure = self._need_store(), self._structures["obs"]
        final = batch.final_obs
        ours = np.flatnonzero((final.slot >= a) & (final.slot < b))
        ends = cells[final.row[ours], final.slot[ours] - a]
        goes_on = np.flatnonzero(~np.isin(cells[-1], ends))
        last = {name: value[goes_on + a] for name, value in leaves(structure, batch.last_obs)}
        store.keep_tails(cells[-1, goes_on], last)
        if len(ends):
            store.keep_tails(ends, {name: value[ours] for name, value in leaves(structure, final.obs)})

    # ---- sampling ----

    def sample(self, batch_size: int, timeout_s: float | None = None) -> tuple[dict[str, Nested], SampleInfo]:
        """A batch of `batch_size` items (of `FullBatch`: of all items, as soon as there are so many), and what is known
        of them. Waits while the limiter, or an empty buffer, has nothing to give."""
        count = check_count("batch_size", batch_size)
        _check_timeout(timeout_s)
        chosen: tuple[Array, Array] | None = None

        def ready() -> bool:
            nonlocal chosen
            chosen = self._choose(count)
            return chosen is not None

        with self._changed:
            self._wait("sample", ready, timeout_s, lambda: f"{count} items for {self.sampler!r} are asked for")
            store = self._need_store()
            assert chosen is not None
            cells, probabilities = chosen
            batch = self.sampler.rows(store, cells)
            info = self._sampled(store, cells, probabilities, batch)
            self._notify()
        for name, structure in self._structures.items():
            if not isinstance(structure, str):
                batch[name] = nest(structure, batch)
                after = {n: batch["next_" + n] for n in leaf_names(structure) if "next_" + n in batch}
                if after:
                    batch["next_" + name] = nest(structure, after)
        return batch, info

    def _choose(self, count: int) -> tuple[Array, Array] | None:
        """Cells of the items to hand out, and their probabilities; None while that cannot be."""
        if count > min(self.limiter.most_samples(), self._most()):
            raise ConfigError(
                f"{count} rows at once can never be sampled here (capacity {self.capacity}, max_times_sampled "
                f"{self.max_times_sampled}; {self.limiter}). Ask for fewer, or allow more."
            )
        if (store := self._store) is None:
            return None
        if isinstance(self.sampler, FullBatch):
            count = max(count, store.table.size)
        if not store.table.size or not self.limiter.can_sample(count):
            return None
        if self._selector.distinct:
            return self._first_ones(store, count)
        if self.max_times_sampled or isinstance(self._selector, EpisodeSelector):
            items = self._items(store)
            if not len(items) or self._left(store, items) < count:
                return None
        cells, probabilities = self._selector.select(count, self._rng)
        for _ in range(_DRAWS):
            refused = self._refused(store, cells)
            if refused is None or not len(refused):
                return cells, probabilities
            cells[refused], probabilities[refused] = self._selector.select(len(refused), self._rng)
        return self._search(store, count)

    def _most(self) -> float:
        """How many items there can be for one batch."""
        if self._store is not None and self._selector.distinct:
            return self.capacity
        return self.capacity * self.max_times_sampled or math.inf

    def _first_ones(self, store: Store, count: int) -> tuple[Array, Array] | None:
        """Of items that come in order, the first that can be handed out."""
        looked = count
        while True:
            cells, probabilities = self._selector.select(looked, self._rng)
            enough = len(cells) == looked
            if (usable := self.sampler.usable(store, cells)) is not None:
                cells, probabilities = cells[usable], probabilities[usable]
            if len(cells) >= count:
                return cells[:count], probabilities[:count]
            if not enough:
                return None
            looked *= 2

    def _refused(self, store: Store, cells: Array) -> Array | None:
        """Entries of a draw that cannot be handed out: nothing can begin there, or the item was sampled so often."""
        usable = self.sampler.usable(store, cells)
        if self.max_times_sampled:
            order = np.argsort(cells, kind="stable")
            rank, ordered = np.empty(len(cells), np.int64), cells[order]  # which occurrence of its item each is
            rank[order] = np.arange(len(cells)) - np.searchsorted(ordered, ordered, side="left")
            allowed = rank < self.max_times_sampled - store.table.times.take(cells)
            usable = allowed if usable is None else usable & allowed
        return None if usable is None else np.flatnonzero(~usable)

    def _search(self, store: Store, count: int) -> tuple[Array, Array] | None:
        """Draw among the items that can be handed out, where hardly any draw finds one."""
        items = self._items(store)
        if (usable := self.sampler.usable(store, items)) is not None:
            items = items[usable]
        if not len(items) or self._left(store, items) < count:
            return None
        cells, probabilities = self._selector.among(items, count, self._rng)
        while (refused := self._refused(store, cells)) is not None and len(refused):
            items = np.setdiff1d(items, cells[refused])  # they are in the batch as often as they may be
            cells[refused], probabilities[refused] = self._selector.among(items, len(refused), self._rng)
        return cells, probabilities

    def _items(self, store: Store) -> Array:
        """The cells of all items."""
        if isinstance(self._selector, EpisodeSelector):
            return self._selector.episodes
        return np.flatnonzero(store.table.keys >= 0)

    def _left(self, store: Store, items: Array) -> float:
        """How often these items may still be sampled."""
        if not self.max_times_sampled:
            return math.inf
        return self.max_times_sampled * len(items) - int(store.table.times[items].sum())

    def _sampled(self, store: Store, cells: Array, probabilities: Array, batch: Mapping[str, Array]) -> SampleInfo:
        table = store.table
        keys = table.keys.take(cells)
        times = table.count(cells)
        versions = store.take("version", cells) if "version" in store.schema else np.full(len(cells), -1)
        info = SampleInfo(keys, probabilities, times, versions, table.size, self.sampler.beta)
        self.limiter.sample(len(cells))
        if self.max_times_sampled:
            self._remove(np.unique(cells[times >= self.max_times_sampled]), "sampled")
        return info

    # ---- items ----

    def update_priorities(self, keys: Array, priorities: Array) -> int:
        """Give items new priorities; those that are gone are passed over. How many were there."""
        keys = _as_keys(keys)
        try:
            values = np.atleast_1d(np.asarray(priorities, np.float64))
        except (TypeError, ValueError):
            raise ConfigError(f"priorities are {priorities!r}; expected numbers.") from None
        if keys.shape != values.shape:
            raise ConfigError(f"{keys.shape} keys and {values.shape} priorities; one priority per key is expected.")
        if not np.isfinite(values).all() or (values < 0).any():
            bad = int(np.flatnonzero(~np.isfinite(values) | (values < 0))[0])
            raise ConfigError(f"priority {values[bad]} of key {keys[bad]}; priorities are finite and at least 0.")
        with self._changed:
            table = self._need_store().table
            cells = keys % table.cells
            there = (keys >= 0) & (table.keys[cells] == keys)
            for selector in self._selectors():
                selector.updated(cells[there], values[there])
            return int(there.sum())

    def delete(self, keys: Array) -> int:
        """Remove items; those that are gone are passed over. How many were there."""
        keys = _as_keys(keys)
        with self._changed:
            cells = np.unique(self._need_store().table.find(keys))
            self._remove(cells, "deleted")
            self._notify()
            return len(cells)

    def _remove(self, cells: Array, cause: str) -> None:
        if not len(cells):
            return
        self._need_store().table.remove(cells)
        for selector in self._selectors():
            selector.removed(cells)
        if not self._cyclic:
            self._free += cells.tolist()
        self._count(cause, len(cells))

    def _count(self, cause: str, number: int) -> None:
        self.removed[cause] += number
        self.limiter.delete(number)

    def _selectors(self) -> list[Selector]:
        return [self._selector] if self._remover is None else [self._selector, self._remover]

    # ---- waiting ----

    def limit(self, **changes: float) -> None:
        """Change options of the limiter while it is in use, e.g. `limit(max_diff=math.inf)`; whoever waits looks
        again."""
        known = ("samples_per_insert", "min_size", "min_diff", "max_diff")
        for name in changes:
            if name not in known:
                raise ConfigError(unknown_name("option of a limiter", name, known))
        with self._changed:
            before = {name: getattr(self.limiter, name) for name in known}
            for name, value in changes.items():
                setattr(self.limiter, name, value)
            try:
                self.limiter.check()
                self._check_reachable()
            except BaseException:  # also of a warning that is an error
                for name, value in before.items():
                    setattr(self.limiter, name, value)
                raise
            self._notify()

    def _wait(self, what: str, ready: Callable[[], bool], timeout_s: float | None, how_far: Callable[[], str]) -> None:
        """Until it may be done. The lock is held."""
        self._check_open()
        if ready():
            return
        began = time.monotonic()
        deadline = began + (WAIT_S if timeout_s is None else timeout_s)
        while not ready():
            self._check_open()
            if self._halted:
                raise ClosedError("the workflow that fills this buffer has ended; nothing more comes.")
            if what == "sample" and self.filled_by == threading.get_ident():
                raise BufferTimeout(
                    f"{how_far()}, and the buffer does not give them ({len(self)} items; {self.limiter}). Who asks is "
                    "also who inserts, so waiting would be for ever: ask for fewer, let the trigger fire later (its "
                    "size), widen the limiter, or sample in a thread of its own (flow.on(..., thread=True))."
                )
            left = deadline - time.monotonic()
            if left <= 0:
                self.waited_s[what] += time.monotonic() - began
                raise BufferTimeout(
                    f"{what} waited {time.monotonic() - began:.1f} s for the buffer; {how_far()}, it holds {len(self)} "
                    f"items ({self.limiter}). Who {'samples' if what == 'insert' else 'inserts'} must go on, or widen "
                    "the limiter with buffer.limit(...)."
                )
            self._changed.wait(min(left, threading.TIMEOUT_MAX))
        self.waited_s[what] += time.monotonic() - began
        self._check_open()

    @contextlib.contextmanager
    def halted(self) -> Iterator[None]:
        """Meanwhile nobody waits here: who would has a ClosedError."""
        with self._changed:
            self._halted = True
            self._changed.notify_all()
        try:
            yield
        finally:
            self._halted = False

    def locked(self) -> contextlib.AbstractContextManager[object]:
        """Nobody inserts or samples for a moment."""
        return self._changed

    def _notify(self) -> None:
        self._changed.notify_all()
        if self.told is not None and self.filled_by != threading.get_ident():
            self.told()

    def _check_reachable(self, capacity: int | None = None) -> None:
        if self.limiter.min_size > (capacity or self.capacity):
            raise ConfigError(
                f"min_size={self.limiter.min_size} of the limiter is more than the {capacity or self.capacity} rows "
                "there is room for, so nothing could ever be sampled. Raise capacity or lower min_size."
            )

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this buffer is closed; make a new one.")

    # ---- life ----

    def checkpoint(self, path: str | os.PathLike[str]) -> Path:
        """Save everything into a new numbered folder under `path`, atomically; the two newest are kept."""
        from farstep.buffer.saving import save_buffer

        with self._changed:
            return save_buffer(self, path)

    @classmethod
    def restore(cls, path: str | os.PathLike[str], sampler: Sampler | None = None) -> Buffer:
        """The newest intact checkpoint under `path`; with a sampler of your own class, an equal one."""
        from farstep.buffer.saving import load_buffer

        return load_buffer(path, sampler)

    @property
    def path(self) -> str:
        """Where another process of this host finds the rows: `CyclicBlocks.attach(path)`."""
        return self._need_store().blocks.path

    def close(self) -> None:
        """Free the memory; whoever waits gets a ClosedError. Idempotent."""
        with self._changed:
            self._closed = True
            if self._store is not None:
                self._store.close()
                self._store = None  # the memory goes with the last array over it
            self._changed.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Buffer({len(self)} of {self.capacity}, {self.sampler!r})"


def _is_sampler(what: str, value: Any) -> Sampler:
    if not isinstance(value, Sampler):
        hint = "; make one: add ()" if isinstance(value, type) else ""
        raise ConfigError(f"{what} is {value!r}; expected a sampler such as farstep.buffer.Uniform(){hint}.")
    return value


def _array_spec(name: object, value: object) -> ArraySpec:
    """`(shape, dtype)`, an ArraySpec, or an example of one row."""
    if isinstance(value, ArraySpec):
        return value
    try:
        if isinstance(value, tuple) and len(value) == 2:
            shape, dtype = value
            return ArraySpec(tuple(shape) if not isinstance(shape, int) else (shape,), np.dtype(dtype).str)
        example = np.asarray(value)
        return ArraySpec(example.shape, example.dtype.str)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"spec[{name!r}] is {value!r}; expected (shape, dtype) or an example row: {error}.") from None


def _check_timeout(timeout_s: float | None) -> None:
    if timeout_s is not None and not timeout_s >= 0:
        raise ConfigError(f"timeout_s is {timeout_s!r}; it must be a number of seconds, at least 0.")


def _as_keys(keys: object) -> Array:
    array = np.atleast_1d(np.asarray(keys))
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ConfigError(f"keys are {array.dtype}{list(array.shape)}; expected integers, as `insert` returned them.")
    return array.astype(np.int64)


def _filler(values: Mapping[str, Array]) -> Array | None:
    """Which rows `[T, n]` are no steps of an environment, but a reset's; None: none of them."""
    valid = values.get("valid")
    return None if valid is None or valid.ndim != 2 or valid.all() else ~valid.astype(bool).reshape(-1)


def _neighbours(slots: Array) -> list[tuple[int, int]]:
    """Ranges of entries whose slots follow each other."""
    cuts = [0, *(np.flatnonzero(np.diff(slots) != 1) + 1).tolist(), len(slots)]
    return [(a, b) for a, b in pairwise(cuts) if b > a]
