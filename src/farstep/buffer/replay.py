"""The buffer: rows in cyclic blocks, a sampler that chooses among them, a remover, and a limiter that says when."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import numpy as np

from farstep.batch import Batch, is_final
from farstep.buffer.limiter import MinSize, RateLimiter
from farstep.buffer.samplers import FIFO, EpisodeSelector, FullBatch, Sampler
from farstep.buffer.selectors import Selector
from farstep.buffer.store import Store
from farstep.config import available_memory, check_count
from farstep.core import Array, Nested
from farstep.errors import BufferTimeout, ClosedError, ConfigError, unknown_name
from farstep.spec import ArraySpec, Schema, Structure, leaves, nest

WAIT_S = 60.0
"""How long `insert` and `sample` wait for the limiter unless told otherwise."""
_DRAWS = 64  # attempts to find rows that something longer can begin at, before they are looked for one by one


@dataclass(frozen=True)
class SampleInfo:
    """What is known of sampled items, an entry each."""

    keys: Array
    """Names of the items, for `update_priorities` and `delete`."""
    probabilities: Array
    weights: Array
    """Importance weights, at most 1; all 1 unless the sampler is prioritised."""
    times_sampled: Array
    """How often the item was sampled, this time included."""
    versions: Array
    """The policy's version, if rows have one; else -1."""
    size: int
    """Items in the buffer."""


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
        self._rng = np.random.default_rng(seed)
        self._changed = threading.Condition(threading.RLock())
        self._structures: dict[str, Structure] = {}
        self._store: Store | None = None
        self._free: list[int] = []
        self._closed = False
        self.waited_s = {"insert": 0.0, "sample": 0.0}
        self.removed: dict[str, int] = {"evicted": 0, "sampled": 0, "deleted": 0}
        if spec is not None:
            self.bind({str(name): _array_spec(name, value) for name, value in spec.items()})

    # ---- what it holds ----

    def bind(self, schema: Schema, columns: int = 1, structures: Mapping[str, Structure] | None = None) -> None:
        """Decide which arrays it holds, and for how many environment slots; done by the first insert if nobody else
        does."""
        if self._store is not None:
            raise ConfigError("this buffer has its arrays already; make another one for other arrays.")
        if not schema:
            raise ConfigError("a buffer needs at least one array.")
        if columns > 1 and not self._cyclic:
            raise ConfigError(f"with remover={self.remover!r} rows of all environments share one column.")
        row_bytes = max(1, sum(spec.nbytes for spec in schema.values()))
        if self.max_bytes is not None and self.capacity * row_bytes > self.max_bytes:
            self.capacity = self.max_bytes // row_bytes
        if self.capacity < columns:
            raise ConfigError(
                f"room for {self.capacity} rows of {row_bytes} bytes is less than one for each of {columns} "
                "environment slots. Raise capacity or max_bytes."
            )
        if (needed := self.capacity * row_bytes) > available_memory():
            raise ConfigError(
                f"{self.capacity} rows of {row_bytes} bytes need {needed / 2**30:,.1f} GiB; this machine has "
                f"{available_memory() / 2**30:,.1f} GiB available. Lower capacity."
            )
        # Without a fixed order one row more: a new item competes with the others for its place.
        rows = self.capacity // columns if self._cyclic else self.capacity + 1
        self._structures = dict(structures or {})
        tails = [name for name in schema if name.split(".")[0] == "obs"] if "obs" in self._structures else []
        self._store = Store(schema, rows, columns, tails)
        self._free = [] if self._cyclic else list(range(rows - 1, -1, -1))
        self._selector: Selector = self.sampler.selector(self._store.table)
        self._remover: Selector | None = None if self._cyclic else self.remover.selector(self._store.table)
        self._begun: Array = np.full(columns, -1, np.int64)
        """Per column, where the episode under way began: its first cell; -1 where nobody knows."""

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
        if isinstance(rows, Batch):
            return self._insert_batch(rows, timeout_s)
        values = self._checked(rows)
        total = len(next(iter(values.values())))
        keys: list[Array] = []
        done = 0
        deadline = _deadline(timeout_s)
        while done < total:
            with self._changed:
                self._wait("insert", lambda: self.limiter.room(1) > 0, deadline, f"{done} of {total} rows are inserted")
                count = min(self.limiter.room(total - done), self._need_store().rows)
                part = {name: value[done : done + count, None] for name, value in values.items()}
                keys.append(self._put(part)[0] if self._cyclic else self._put_anywhere(part))
                done += count
        return np.concatenate(keys) if keys else np.zeros(0, np.int64)

    def _checked(self, rows: Mapping[str, Nested]) -> dict[str, Array]:
        """Rows as arrays of the right kind, or an error and nothing changed."""
        if not isinstance(rows, Mapping) or not rows:
            raise ConfigError(f"insert got {type(rows).__name__}; expected a mapping of arrays [n, ...], or a Batch.")
        values = {str(name): np.asarray(value) for name, value in rows.items()}
        lengths = {name: value.shape[0] if value.ndim else None for name, value in values.items()}
        if len(set(lengths.values())) > 1 or None in lengths.values():
            raise ConfigError(f"insert got arrays of different lengths: {lengths}. Each needs one entry per row.")
        with self._changed:
            if self._store is None and not self._closed:
                self.bind({name: ArraySpec.of(value) for name, value in values.items()})
        schema = self._need_store().schema
        for name in values:
            if name not in schema:
                raise ConfigError(unknown_name("array", name, schema))
        for name, spec in schema.items():
            if name not in values:
                raise ConfigError(f"insert got no {name!r}; every row has {', '.join(schema)}.")
            got = values[name]
            if got.shape[1:] != spec.shape or not np.can_cast(got.dtype, spec.dtype, "same_kind"):
                raise ConfigError(f"insert got {name!r} as {ArraySpec.of(got)}; this buffer holds {spec}.")
        return values

    def _put(self, values: Mapping[str, Array], first: int = 0, continues: Array | None = None) -> tuple[Array, Array]:
        """Rows `[T, n, ...]` into columns from `first` on; their keys and cells."""
        store = self._need_store()
        keys, gone = store.append(values, first, continues)
        flat = keys.reshape(-1)
        cells = flat % store.table.cells
        self.limiter.insert(len(flat))
        self._count("evicted", gone)
        kept = cells
        if "valid" in values and not values["valid"].all():  # filler rows of an environment's reset
            filler = ~np.asarray(values["valid"], bool).reshape(-1)
            store.table.remove(cells[filler])
            self.limiter.delete(int(filler.sum()))
            kept, flat = cells[~filler], flat[~filler]
        self._selector.inserted(kept, flat)
        if isinstance(self._selector, EpisodeSelector):
            self._complete(cells.reshape(keys.shape), first)
        self._changed.notify_all()
        return keys.reshape(-1), cells

    def _complete(self, cells: Array, first: int) -> None:
        """Find the episodes that ended within new rows; only whole ones count."""
        store, whole = self._need_store(), []
        starts, ends = store.flat.get("episode_start"), store.flat_cut
        for k in range(cells.shape[1]):
            column = first + k
            known = starts is not None
            for cell in cells[:, k].tolist():
                begins = bool(starts[cell]) if starts is not None else False
                if begins or (not known and self._begun[column] < 0):
                    self._begun[column] = cell
                if (ends[cell] and cell != cells[-1, k]) or (cell == cells[-1, k] and not store.is_open(column)):
                    if self._begun[column] >= 0:
                        whole.append(int(self._begun[column]))
                    self._begun[column] = -1
        assert isinstance(self._selector, EpisodeSelector)
        if whole:
            self._selector.completed(np.array(whole, np.int64))

    def _put_anywhere(self, values: Mapping[str, Array]) -> Array:
        """Rows one by one into free cells; a full buffer's remover decides who goes, perhaps the new row."""
        store, remover = self._need_store(), self._remover
        assert remover is not None
        keys = np.empty(len(next(iter(values.values()))), np.int64)
        for i in range(len(keys)):
            cell = self._free.pop()
            for name, flat in store.flat.items():
                flat[cell] = values[name][i, 0]
            key, _ = store.table.put(slice(cell, cell + 1), slice(0, 1))
            cells, keys[i] = np.array([cell]), key[0, 0]
            self.limiter.insert()
            self._selector.inserted(cells, keys[i : i + 1])
            remover.inserted(cells, keys[i : i + 1])
            if store.table.size > self.capacity:
                self._remove(remover.select(1, self._rng)[0], "evicted")
        self._changed.notify_all()
        return keys

    def _insert_batch(self, batch: Batch, timeout_s: float | None) -> Array:
        with self._changed:
            if self._store is None and not self._closed:
                schema = {n: ArraySpec(a.shape[2:], a.dtype.str) for n, a in batch.arrays.items() if not is_final(n)}
                self.bind(schema, int(batch.slots.max()) + 1 if self._cyclic else 1, batch.structures)
        store = self._need_store()
        steps, width = batch.shape
        if not self._cyclic:
            flat = {n: batch.arrays[n].reshape(steps * width, *batch.arrays[n].shape[2:]) for n in store.schema}
            return self.insert(flat, timeout_s)
        if steps > store.rows:
            raise ConfigError(
                f"a batch of {steps} steps does not fit: {self.capacity} rows for {store.columns} environment slots "
                f"are {store.rows} each. Raise capacity."
            )
        if self.limiter.never_inserts(steps * width):
            raise ConfigError(f"a batch of {steps * width} rows never fits this limiter ({self.limiter}); widen it.")
        with self._changed:
            self._wait("insert", lambda: self.limiter.can_insert(steps * width), _deadline(timeout_s), "none inserted")
            keys = np.empty((steps, width), np.int64)
            for a, b in _neighbours(batch.slots):
                part = {name: batch.arrays[name][:, a:b] for name in store.schema}
                found, cells = self._put(part, int(batch.slots[a]), batch.continues[a:b])
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
        last = np.setdiff1d(cells[-1], ends)
        columns = np.searchsorted(cells[-1], last) + a
        store.keep_tails(last, {name: value[columns] for name, value in leaves(structure, batch.last_obs)})
        if len(ends):
            store.keep_tails(ends, {name: value[ours] for name, value in leaves(structure, final.obs)})

    # ---- sampling ----

    def sample(self, batch_size: int, timeout_s: float | None = None) -> tuple[dict[str, Nested], SampleInfo]:
        """A batch of `batch_size` items (of `FullBatch`: of all items, as soon as there are so many), and what is known
        of them. Waits while the limiter, or an empty buffer, has nothing to give."""
        count = check_count("batch_size", batch_size)
        if count > self.limiter.most_samples() or (self.max_times_sampled and count > self._most()):
            raise ConfigError(
                f"{count} rows at once can never be sampled here (capacity {self.capacity}, max_times_sampled "
                f"{self.max_times_sampled}; {self.limiter}). Ask for fewer, or allow more."
            )
        with self._changed:
            self._wait("sample", lambda: self._can_sample(count), _deadline(timeout_s), f"{count} items are asked for")
            store = self._need_store()
            if isinstance(self.sampler, FullBatch):
                count = store.table.size
            cells, probabilities = self._select(store, count)
            batch = self.sampler.rows(store, cells)
            info = self._sampled(store, cells, probabilities, batch)
            self._changed.notify_all()
        for name, structure in self._structures.items():
            if not isinstance(structure, str):
                batch[name] = nest(structure, batch)
                if name == "obs" and store.tails is not None:
                    batch["next_obs"] = nest(
                        structure, {n: batch["next_" + n] for n, _ in leaves(structure, structure)}
                    )
        return batch, info

    def _most(self) -> int:
        return self.capacity * self.max_times_sampled

    def _can_sample(self, count: int) -> bool:
        if self._store is None or not self.limiter.can_sample(count):
            return False
        if isinstance(self._selector, EpisodeSelector):
            return self._selector.episodes > 0
        if self._selector.distinct:
            return self._store.table.size >= count
        if self.max_times_sampled:
            live = self._store.table.keys >= 0
            return int((self.max_times_sampled - self._store.table.times[live]).sum()) >= count
        return self._store.table.size > 0

    def _select(self, store: Store, count: int) -> tuple[Array, Array]:
        """Cells of the items to hand out."""
        if self.max_times_sampled and not self._selector.distinct:
            return self._select_sparingly(store, count)
        cells, probabilities = self._selector.select(count, self._rng)
        for attempt in range(_DRAWS + 1):
            usable = self.sampler.usable(store, cells)
            if usable is None or usable.all():
                break
            if attempt == _DRAWS or self._selector.distinct:
                raise ConfigError(
                    f"{self.sampler!r} finds too few rows to begin at among {store.table.size}: episodes are shorter, "
                    "or not yet long enough. Insert more rows first (limiter=MinSize(...)), or ask for less."
                )
            bad = np.flatnonzero(~usable)
            cells[bad], probabilities[bad] = self._selector.select(len(bad), self._rng)
        return cells, probabilities

    def _select_sparingly(self, store: Store, count: int) -> tuple[Array, Array]:
        """As `_select`, no item more often than it may be: what a draw has too many of is drawn again without it."""
        found: list[tuple[Array, Array]] = []
        times = store.table.times.copy()
        spent: list[Array] = []
        while count:
            cells, probabilities = self._selector.select(count, self._rng)
            order = np.argsort(cells, kind="stable")
            rank = np.empty(len(cells), np.int64)  # which occurrence of its item each is
            ordered = cells[order]
            rank[order] = np.arange(len(cells)) - np.searchsorted(ordered, ordered, side="left")
            allowed = rank < self.max_times_sampled - times[cells]
            found.append((cells[allowed], probabilities[allowed]))
            np.add.at(times, cells[allowed], 1)
            count -= int(allowed.sum())
            used_up = np.unique(cells[times[cells] >= self.max_times_sampled])
            spent.append(used_up)
            store.table.remove(used_up)
            self._selector.removed(used_up)
        for cells in spent:  # they go when they are counted
            store.table.keys[cells] = ~store.table.keys[cells]
            store.table.size += len(cells)
        return np.concatenate([c for c, _ in found]), np.concatenate([p for _, p in found])

    def _sampled(self, store: Store, cells: Array, probabilities: Array, batch: Mapping[str, Array]) -> SampleInfo:
        table = store.table
        keys = table.keys.take(cells)
        times = table.count(cells)
        weights = np.ones(len(cells))
        if self.sampler.beta:
            weights = (table.size * probabilities) ** -self.sampler.beta
            weights /= weights.max()
        versions = store.take("version", cells) if "version" in store.schema else np.full(len(cells), -1)
        info = SampleInfo(keys, probabilities, weights, times, versions, table.size)
        self.limiter.sample(len(cells))
        if self.max_times_sampled:
            self._remove(np.unique(cells[times >= self.max_times_sampled]), "sampled")
        return info

    # ---- items ----

    def update_priorities(self, keys: Array, priorities: Array) -> int:
        """Give items new priorities; those that are gone are passed over. How many were there."""
        keys, values = np.atleast_1d(np.asarray(keys, np.int64)), np.atleast_1d(np.asarray(priorities, np.float64))
        if keys.shape != values.shape or keys.ndim != 1:
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
        with self._changed:
            cells = np.unique(self._need_store().table.find(np.atleast_1d(np.asarray(keys, np.int64))))
            self._remove(cells, "deleted")
            self._changed.notify_all()
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
        with self._changed:
            before = {name: getattr(self.limiter, name) for name in known}
            for name, value in changes.items():
                if name not in known:
                    raise ConfigError(unknown_name("option of a limiter", name, known))
                setattr(self.limiter, name, value)
            try:
                self.limiter.check()
            except ConfigError:
                for name, value in before.items():
                    setattr(self.limiter, name, value)
                raise
            self._changed.notify_all()

    def _wait(self, what: str, ready: Callable[[], bool], deadline: float, how_far: str) -> None:
        """Until it may be done. The lock is held."""
        if ready():
            self._check_open()
            return
        began = time.monotonic()
        while not ready():
            self._check_open()
            left = deadline - time.monotonic()
            if left <= 0:
                self.waited_s[what] += time.monotonic() - began
                raise BufferTimeout(
                    f"{what} waited {time.monotonic() - began:.1f} s for the buffer; {how_far}, it holds {len(self)} "
                    f"items ({self.limiter}). Who {'samples' if what == 'insert' else 'inserts'} must go on, or widen "
                    "the limiter with buffer.limit(...)."
                )
            self._changed.wait(left)
        self.waited_s[what] += time.monotonic() - began
        self._check_open()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this buffer is closed; make a new one.")

    # ---- life ----

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


def _neighbours(slots: Array) -> list[tuple[int, int]]:
    """Ranges of entries whose slots follow each other."""
    cuts = [0, *(np.flatnonzero(np.diff(slots) != 1) + 1).tolist(), len(slots)]
    return [(a, b) for a, b in pairwise(cuts) if b > a]


def _deadline(timeout_s: float | None) -> float:
    return time.monotonic() + (WAIT_S if timeout_s is None else timeout_s)
