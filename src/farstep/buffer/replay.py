"""The replay buffer: stored rows, a sampler that draws batches, and a limiter that paces inserts and samples."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import ArrayLike

from farstep.batch import Batch
from farstep.buffer.gate import Gate, check_timeout
from farstep.buffer.limiter import MinSize, RateLimiter, check_limiter
from farstep.buffer.samplers import FIFO, Sampler, check_remover, check_sampler, with_beta
from farstep.buffer.sampling import Chooser, SampleInfo
from farstep.buffer.saving import (
    SavedBuffer,
    check_counts,
    check_sizes,
    describe_buffer,
    load_buffer,
    refusing_invalid_options,
    save_buffer,
)
from farstep.buffer.storage.capacity import fitting_capacity
from farstep.buffer.storage.contents import Contents
from farstep.buffer.storage.rows import (
    arrays_of,
    as_arrays,
    as_keys,
    as_priorities,
    as_schema,
    count_plain,
    nested,
    schema_of,
)
from farstep.buffer.storage.snapshot import Snapshot
from farstep.buffer.storage.store import Store
from farstep.config.env import check_count
from farstep.core import Array, Nested
from farstep.errors import ConfigError
from farstep.schema import Schema, Structure


class Buffer:
    """A thread-safe replay buffer in shared memory.

    `insert` and `sample` block while the limiter does not allow them. A full buffer evicts rows to make room.

    Args:
        capacity: Maximum number of rows (transitions). Without `pooled`, rounded down to a multiple of the number of
            environment slots.
        sampler: Which rows `sample` returns.
        spec: Mapping from the name of each array to `(shape, dtype)` or an example row; default: the arrays of the
            first insert.
        remover: Which rows a full buffer evicts; default: `FIFO()`, the oldest.
        limiter: When inserting and sampling are allowed; default: `MinSize(1)`. Each buffer needs its own.
        max_bytes: Maximum number of bytes of all rows; lowers `capacity` if necessary. Keys, priorities and the
            observations after the last row of an episode do not count. Default: no limit.
        max_times_sampled: Remove an item after this many samples; 0: never. Default: 1 for `FIFO`, `LIFO` and
            `FullBatch`, otherwise 0.
        pooled: Whether all environment slots share the capacity: the oldest rows are evicted first, whichever slot they
            are from, and slots may be added at any time. Otherwise each slot has an equal share, in which it evicts its
            own rows. Triggers that take rows, and other processes, cannot read pooled rows. Default: False.
        seed: Seed of random draws; default: a random seed.

    Raises:
        ConfigError: An argument is invalid, arguments contradict each other, or inserting and sampling would deadlock.

    Example:
        buffer = Buffer(100_000, Prioritized(), limiter=MinSize(1_000))
        buffer.insert({"obs": obs, "reward": reward})  # arrays [n, ...]
        batch, info = buffer.sample(256)
        buffer.update_priorities(info.keys, td_errors)
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
        pooled: bool = False,
        seed: int | None = None,
    ) -> None:
        self.capacity = check_count("capacity", capacity)
        self.sampler, self.remover = check_sampler("sampler", sampler), check_sampler("remover", remover or FIFO())
        self.limiter = check_limiter(limiter) if limiter is not None else MinSize(1)
        self.max_bytes = None if max_bytes is None else check_count("max_bytes", max_bytes)
        limit = int(sampler.once) if max_times_sampled is None else max_times_sampled
        self.max_times_sampled = check_count("max_times_sampled", limit, minimum=0)
        check_remover(self.remover, self.sampler)
        keeps_order = self.sampler.needs_order or not self.max_times_sampled or isinstance(self.sampler, FIFO)
        # Otherwise items are removed in any order, which would leave holes in a ring.
        self._cyclic = type(self.remover) is FIFO and keeps_order
        if not isinstance(pooled, bool):
            raise ConfigError(f"pooled is {pooled!r}; expected True or False.")
        self._pooled = pooled and self._cyclic  # without order, slots share the capacity anyway
        self._check_limiter(self.capacity)
        self.sampler.check_room(self.capacity)
        self._rng = np.random.default_rng(seed)
        self._structures: dict[str, Structure] = {}
        self._contents: Contents | None = None
        self._chooser = Chooser(self.sampler, self.max_times_sampled)
        self._gate = Gate()
        self._lock = self._gate.lock
        self.waited_s = self._gate.waited_s
        """Seconds that threads have waited so far, by call: `insert` and `sample`."""
        self.inserting_thread: int | None = None
        """Id of the only thread that inserts, if known. This thread must not wait in `sample`: it would deadlock."""
        self.on_room: Callable[[], None] | None = None
        """Called when an insert of `refused_rows` may be possible again, because a thread other than `inserting_thread`
        sampled, deleted or changed the limiter."""
        self.refused_rows: int | None = 0
        """Fewest rows that the limiter refused to the inserting thread. None: the inserting thread does not wait for
        `on_room`."""
        self.between_updates: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        """Context manager, entered during `sample`. A workflow may publish meanwhile, because a sampling consumer is
        between two updates."""
        self._warned_unused_priorities = False
        self.removed: dict[str, int] = {"evicted": 0, "sampled": 0, "deleted": 0}
        """Rows removed so far: evicted from a full buffer, sampled `max_times_sampled` times, or deleted."""
        self.marker: Mapping[str, object] = {}
        """The `marker` with which this buffer was saved, if `restore` made it."""
        self._saving = threading.Lock()
        if spec is not None:
            self.bind(as_schema(spec))
        self.limiter.take()

    # ---- contents ----

    def bind(self, schema: Schema, columns: int = 1, structures: Mapping[str, Structure] | None = None) -> None:
        """Allocate the arrays. Without this call, the first insert allocates them.

        Args:
            schema: The arrays of a row.
            columns: Number of environment slots whose rows stay in order, one column each.
            structures: How arrays of observations and actions are nested, by name.

        Raises:
            ConfigError: The buffer already has arrays, the sampler cannot work with these arrays, or memory is too
                small.
            ClosedError: The buffer is closed.
        """
        self._gate.check_open()
        check_count("columns", columns)
        if self._contents is not None:
            raise ConfigError("this buffer already has its arrays; create another buffer for other arrays.")
        if not schema:
            raise ConfigError("a buffer needs at least one array.")
        self.sampler.check(schema)
        if columns > 1 and not self._cyclic:
            raise ConfigError(f"{self.unordered_reason}, so rows of all environments share one column.")
        shares = 1 if self._pooled else columns
        capacity = fitting_capacity(schema, self.capacity, shares, self._cyclic, self.max_bytes)
        self._check_limiter(capacity)
        self.sampler.check_room(capacity // shares)
        self.capacity, self._structures = capacity, dict(structures or {})
        remover = None if self._cyclic else self.remover
        self._contents = Contents(
            schema, capacity, columns, self._structures, self.sampler, remover, self._rng, self._pooled
        )

    @property
    def is_pooled(self) -> bool:
        """Whether all environment slots share the capacity although their rows stay in order."""
        return self._pooled

    @property
    def is_cyclic(self) -> bool:
        """Whether rows stay in the order of insertion and the oldest are evicted first.

        Otherwise a row has no neighbors, and the remover chooses which item a full buffer removes.
        """
        return self._cyclic

    @property
    def unordered_reason(self) -> str:
        """Why rows do not stay in order, as the start of an error message. Only valid if `is_cyclic` is False."""
        if type(self.remover) is not FIFO:
            return f"remover={self.remover!r} removes rows in any order"
        return f"{self.sampler!r} with max_times_sampled={self.max_times_sampled} removes rows in any order"

    def keep_in_place(self) -> None:
        """Keep rows in their cells, for readers that access the cells directly.

        From now on, the cell of a removed row is reused only when it is the oldest cell. Call this method after the
        arrays were allocated (by `spec`, `bind` or the first insert).

        Raises:
            ConfigError: The rows of this buffer are not in the order of their cells.
        """
        if not self._cyclic or self.contents.is_linked:
            reason = "rows were removed by delete() or max_times_sampled" if self._cyclic else self.unordered_reason
            reason = "the buffer is pooled" if self._pooled else reason
            raise ConfigError(
                f"{reason}, but a DataKeyTrigger takes rows in order of insertion. Give the trigger consume=False and "
                "min_new=k, or use a new buffer with FIFO() as remover and a sampler without max_times_sampled."
            )
        self.contents.is_pinned = True

    @property
    def _uses_per_row(self) -> float:
        """Maximum number of times that a row can be sampled before it is removed."""
        return self.max_times_sampled * self.sampler.item_rows[1] or math.inf

    def _check_limiter(self, capacity: int) -> None:
        self.limiter.check_reachable(capacity, self._uses_per_row, self.sampler.item_rows[0])

    @property
    def is_halted(self) -> bool:
        """Whether calls raise `ClosedError` instead of waiting (see `halted`)."""
        return self._gate.is_halted

    @property
    def is_bound(self) -> bool:
        """Whether the arrays are allocated."""
        return self._contents is not None

    @property
    def contents(self) -> Contents:
        """The stored items; hold `locked` while you access them."""
        self._gate.check_open()
        if self._contents is None:
            raise ConfigError("this buffer has no arrays yet: insert rows first, or give it a spec.")
        return self._contents

    @property
    def store(self) -> Store:
        """The stored rows; hold `locked` while you access them."""
        return self.contents.store

    @property
    def structures(self) -> Mapping[str, Structure]:
        """How arrays of observations and actions are nested, by name."""
        return self._structures

    def __len__(self) -> int:
        """Number of items in the buffer."""
        return 0 if self._contents is None else self._contents.size

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays that hold the rows; 0 before they are allocated."""
        contents = self._contents
        return 0 if contents is None else sum(array.nbytes for array in contents.store.blocks.arrays.values())

    @property
    def schema(self) -> Schema:
        """Shape and dtype of each array of a row.

        Raises:
            ConfigError: The buffer has no arrays yet.
        """
        return self.store.schema

    # ---- inserting ----

    def insert(self, rows: Mapping[str, ArrayLike] | Batch, timeout_s: float | None = None) -> Array:
        """Insert rows. Block while the limiter does not allow it.

        A row follows the row before it, unless `terminated`, `truncated`, `done` or `episode_start` marks the end or
        the start of an episode between them.

        Args:
            rows: Arrays `[n, ...]` by name, inserted a few rows at a time if the limiter requires it; or a `Batch`,
                inserted at once.
            timeout_s: Seconds to wait in total; 0: do not wait. Default: 60 s each time the limiter blocks.

        Returns:
            The key of each row; the keys of a `Batch` are time-major.

        Raises:
            BufferTimeout: The limiter did not allow all rows in time; the message says how many were inserted.
            ConfigError: The rows do not match the buffer's arrays, or the limiter can never admit the whole batch.
            ClosedError: The buffer is closed.
        """
        if (contents := self._contents) is not None and contents.is_plain:
            store = contents.store
            count = count_plain(rows, store.kinds)
            with self._lock:
                if 0 < count <= store.rows and self.limiter.has_room(count) and not self._gate.is_closed:
                    keys, evicted = contents.put_rows(rows, count)  # type: ignore[arg-type]  # checked by count_plain
                    self._inserted(count, evicted)
                    return keys
        check_timeout(timeout_s)
        if isinstance(rows, Batch):
            return self._insert_batch(rows, timeout_s)
        values = self._checked(rows)
        total = len(next(iter(values.values())))
        found: list[Array] = []
        done = 0
        deadline = None if timeout_s is None else time.monotonic() + timeout_s

        while done < total:
            with self._lock:
                if not (count := self.limiter.room(total - done)):
                    left = None if deadline is None else deadline - time.monotonic()
                    self._wait("insert", self.limiter.can_insert, left, f"{done} of {total} rows were inserted")
                    continue
                contents = self.contents
                count = min(count, contents.store.rows)
                found.append(self._put(contents, {name: value[done : done + count] for name, value in values.items()}))
                done += count
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def _checked(self, rows: Mapping[str, ArrayLike]) -> dict[str, Array]:
        """Return rows as arrays that match the schema. The first rows define the schema."""
        values = as_arrays(rows)
        with self._lock:
            if self._contents is None and not self._gate.is_closed:
                self.bind(schema_of(values))
        self.contents.check(values)
        return values

    def _put(self, contents: Contents, values: Mapping[str, Array]) -> Array:
        """Store rows `[n, ...]` that the limiter has admitted, and return their keys."""
        if contents.is_cyclic:
            found, inserted, evicted = contents.put({name: value[:, None] for name, value in values.items()})
            self._inserted(inserted, evicted)
            return found.reshape(-1)
        found, inserted, evicted = contents.put_anywhere(values, len(next(iter(values.values()))))
        self._inserted(inserted, evicted)
        return found

    def _insert_batch(self, batch: Batch, timeout_s: float | None) -> Array:
        with self._lock:
            if self._contents is None and not self._gate.is_closed:
                # Unordered rows have no next row, so each row stores its next observation.
                schema = schema_of(arrays_of(batch, with_next=not self._cyclic), leading=2)
                self.bind(schema, int(batch.slots.max()) + 1 if self._cyclic else 1, batch.structures)
        contents = self.contents
        store, values = contents.store, contents.rows_of(batch)
        if not self._cyclic:
            return self.insert({n: values[n].reshape(-1, *spec.shape) for n, spec in store.schema.items()}, timeout_s)
        steps, width = batch.shape
        if self.limiter.never_inserts(steps * width):
            raise ConfigError(
                f"this limiter ({self.limiter}) can never admit a batch of {steps * width} rows at once. Raise its "
                "max_diff or insert smaller batches."
            )
        contents.warn_if_shared(batch)
        with self._lock:
            self._wait("insert", lambda: self.limiter.can_insert(steps * width), timeout_s, "no row was inserted")
            keys, inserted, evicted = contents.put_batch(batch, values)
            self._inserted(inserted, evicted)
            return keys.reshape(-1)

    def _inserted(self, inserted: int, evicted: int) -> None:
        self.limiter.insert(inserted)
        if evicted:
            self._removed("evicted", evicted)
        self._gate.notify()

    # ---- sampling ----

    def sample(self, batch_size: int, timeout_s: float | None = None) -> tuple[dict[str, Nested], SampleInfo]:
        """Sample items. Block until the limiter allows it and the buffer has enough items.

        Args:
            batch_size: Number of items. With `FullBatch`, the minimum number; the batch then has all items.
            timeout_s: Seconds to wait; 0: do not wait; default: 60 s.

        Returns:
            Arrays by name, nested like the environment's observations and actions; and the keys, probabilities,
            importance weights and versions of the items.

        Raises:
            BufferTimeout: There were not enough samples in time, or waiting would deadlock because only the calling
                thread inserts.
            ConfigError: A batch of that size can never be sampled.
            ClosedError: The buffer is closed.
        """
        count = check_count("batch_size", batch_size)
        check_timeout(timeout_s)
        chosen: tuple[Array, Array] | None = None

        def ready() -> bool:
            nonlocal chosen
            chosen = self._choose(count)
            if chosen is None and not self.limiter.has_starved_reader:
                self.limiter.has_starved_reader = True  # allows one insert, to avoid a deadlock
                self._notify()
            return chosen is not None

        with self.between_updates(), self._lock:
            self._gate.wait(
                "sample", ready, timeout_s, lambda is_deadlock: self._missing(count, is_deadlock), self.inserting_thread
            )
            contents = self.contents
            assert chosen is not None
            cells, probabilities = chosen
            batch = self.sampler.rows(contents.store, cells)
            info = self._chooser.taken(contents, cells, probabilities)
            self.limiter.sample(self.sampler.count_rows(batch))
            if self.max_times_sampled:
                used_up = cells[info.times_sampled >= self.max_times_sampled]
                used_up = np.sort(used_up) if contents.selector.distinct else np.unique(used_up)
                self._removed("sampled", contents.remove(used_up, are_oldest=isinstance(self.sampler, FIFO)))
            if self.refused_rows is not None and self.limiter.can_insert(self.refused_rows):
                self._notify()
            else:
                self._gate.notify()
        return nested(batch, self._structures), info

    def _choose(self, count: int) -> tuple[Array, Array] | None:
        """Draw items. Return their cells and probabilities, or None if the batch cannot be sampled yet."""
        contents = self._contents
        rows = self._chooser.least_rows(count)
        if rows > self.limiter.most_samples() or count > self._chooser.most(self.capacity, contents):
            raise ConfigError(
                f"{count} items with {rows} rows can never be sampled at once from this buffer (capacity "
                f"{self.capacity}, max_times_sampled {self.max_times_sampled}; {self.limiter}). Lower batch_size, or "
                "raise capacity, max_times_sampled or the limiter's max_diff."
            )
        return None if contents is None else self._chooser.choose(contents, count, self.limiter.can_sample)

    def _missing(self, count: int, is_deadlock: bool) -> str:
        """Return an error message: why the batch cannot be sampled, and what to do.

        `is_deadlock`: only the calling thread inserts, so it must not wait.
        """
        contents, limiter, rows = self._contents, self.limiter, self._chooser.least_rows(count)
        wanted = f"the batch needs {count} items of {self.sampler!r}"
        wanted += f" ({rows} rows in total)" if rows > count else ""
        deadlock = "the sampling thread is the only one that inserts, so waiting would deadlock"
        if contents is None or not contents.size or not limiter.can_sample(rows):
            if not is_deadlock:
                return (
                    f"{wanted}; the buffer holds {len(self)} items ({limiter}). Keep inserting, or widen the limiter "
                    "with buffer.limit(...)."
                )
            return (
                f"{wanted}, and the buffer cannot provide them ({len(self)} items; {limiter}); {deadlock}. Remedies: "
                f"call the consumer only when the limiter allows this many samples (flow.on(..., samples={rows})), "
                "sample fewer items, raise the size of the trigger, widen the limiter, or sample in a separate thread "
                "(flow.on(..., thread=True))."
            )
        usable = len(self._chooser.usable_items(contents))
        often = f", at most {self.max_times_sampled} times each" if self.max_times_sampled else ""
        found = f"{wanted}; {usable} of the {contents.size} items in the buffer can be sampled{often}"
        if self.sampler.needs_order and usable < contents.size:
            found += ": the others are too close to the end of an episode or to the newest row"
        remedy = f"but {deadlock}: sample later" if is_deadlock else "so insert more rows"
        return f"{found}. The limiter allows the batch ({limiter}), {remedy}, or sample fewer or shorter items."

    # ---- items ----

    def keys(self) -> Array:
        """Return the keys of all items that could be sampled now, whatever the limiter allows.

        With `DPER`, these are the complete episodes; with `NStep` and `Sequence`, the rows at which an item can start.

        Returns:
            Keys, oldest item first in each environment slot; in any order if `is_cyclic` is False. Empty before the
            first insert.

        Raises:
            ClosedError: The buffer is closed.
        """
        with self._lock:
            self._gate.check_open()
            if self._contents is None:
                return np.zeros(0, np.int64)
            cells = self._contents.by_age(self._chooser.usable_items(self._contents))
            return self._contents.store.table.keys.take(cells)

    def read(self, keys: ArrayLike) -> tuple[dict[str, Nested], Array]:
        """Read items by their keys. This never waits, and does not count as sampling.

        Args:
            keys: Keys of items, from `keys`, `insert` or `SampleInfo.keys`; a key may occur more than once.

        Returns:
            The arrays of the items that can still be sampled, in the order of their keys and as `sample` returns them;
            and one bool per key: False if its item was removed, was never inserted, or cannot be sampled. The arrays
            have one entry per True.

        Raises:
            ConfigError: A key is not an integer, or the buffer has no arrays yet.
            ClosedError: The buffer is closed.

        Example:
            keys = buffer.keys()
            batch, is_present = buffer.read(keys)
            buffer.update_priorities(keys[is_present], priorities(batch))
        """
        keys = as_keys(keys)
        with self._lock:
            contents = self.contents
            cells = keys % contents.store.table.cells
            is_present = (keys >= 0) & (contents.store.table.keys.take(cells) == keys)
            is_present[is_present] = self._chooser.can_sample(contents, cells[is_present])
            batch = self.sampler.rows(contents.store, cells[is_present])
        return nested(batch, self._structures), is_present

    def update_priorities(self, keys: ArrayLike, priorities: ArrayLike) -> int:
        """Set the priorities of items.

        Args:
            keys: Keys of the items, from `insert` or `SampleInfo.keys`. Keys of removed items are ignored.
            priorities: One per key, finite and at least 0.

        Returns:
            The number of items that were still in the buffer.

        Raises:
            ConfigError: A key or priority is invalid, or their numbers differ.
        """
        keys = as_keys(keys)
        priorities = as_priorities(priorities, keys)
        with self._lock:
            if not (self._warned_unused_priorities or self.sampler.uses_priorities or self.remover.uses_priorities):
                self._warned_unused_priorities = True
                warnings.warn(
                    f"neither {self.sampler!r} nor remover={self.remover!r} uses priorities, so update_priorities has "
                    "no effect; sample with Prioritized(), MinHeap(), MaxHeap() or DPER(), or remove the call.",
                    stacklevel=2,
                )
            return self.contents.update(keys, priorities)

    def set_beta(self, beta: float) -> None:
        """Change the exponent of importance weights for all further samples, e.g. to anneal it towards 1.

        Args:
            beta: The new exponent, at least 0.

        Raises:
            ConfigError: `beta` is invalid, or the sampler has no importance weights.
        """
        with self._lock:
            self.sampler = with_beta(self.sampler, beta)
            self._chooser = Chooser(self.sampler, self.max_times_sampled)

    def delete(self, keys: ArrayLike) -> int:
        """Remove items. With `DPER`, an item is an episode with all its rows.

        Args:
            keys: Keys of the items. Keys of removed items are ignored.

        Returns:
            The number of items removed. `removed["deleted"]` counts rows.
        """
        keys = as_keys(keys)
        with self._lock:
            contents = self.contents
            cells = np.unique(contents.store.table.find(keys))
            self._removed("deleted", contents.remove(cells))
            self._notify()
            return len(cells)

    def _removed(self, cause: str, count: int) -> None:
        self.removed[cause] += count
        self.limiter.delete(count)

    # ---- waiting ----

    def limit(self, **changes: float) -> None:
        """Change options of the limiter while it is in use, and wake waiting readers and writers.

        Args:
            changes: New values of `samples_per_insert`, `min_size`, `min_diff` or `max_diff`, e.g.
                `limit(max_diff=math.inf)`.

        Raises:
            ConfigError: An option is unknown, or this buffer could never satisfy the limiter. No option was changed.
        """
        with self._lock:
            self.limiter.change(changes, self.capacity, self._uses_per_row, self.sampler.item_rows[0])
            self._notify()

    def _wait(self, what: str, ready: Callable[[], bool], timeout_s: float | None, progress: str) -> None:
        def explain(is_deadlock: bool) -> str:
            return (
                f"{progress}, and the buffer holds {len(self)} items ({self.limiter}). Keep sampling, or widen the "
                "limiter with buffer.limit(...)."
            )

        self._gate.wait(what, ready, timeout_s, explain, self.inserting_thread)

    def halted(self) -> contextlib.AbstractContextManager[None]:
        """Context manager: every call that would have to wait raises `ClosedError` instead."""
        return self._gate.halted()

    def locked(self) -> contextlib.AbstractContextManager[object]:
        """Context manager: prevents other threads from inserting and sampling."""
        return self._lock

    def _notify(self) -> None:
        self._gate.notify()
        if self.on_room is not None and self.inserting_thread != threading.get_ident():
            self.on_room()

    # ---- checkpoints and closing ----

    def checkpoint(
        self,
        path: str | os.PathLike[str],
        *,
        keep: int = 2,
        marker: Callable[[], Mapping[str, object]] | None = None,
    ) -> Path:
        """Save rows, options, counters and random state, for `restore`.

        Other threads may insert and sample meanwhile; they wait at most while a few megabytes are copied. The
        checkpoint has the contents of one moment, shortly before this call returns.

        Args:
            path: Folder of checkpoints. The new checkpoint is written atomically to a numbered subfolder.
            keep: Number of newest checkpoints to keep, at least 1; default: 2.
            marker: Returns plain data to save with the contents of that moment, e.g. the number of the learner's
                checkpoint; available as `marker` of the restored buffer. Default: none.

        Returns:
            The folder of the new checkpoint.

        Raises:
            CheckpointError: The checkpoint could not be written, or rows are replaced faster than they are written;
                earlier checkpoints are intact.
            ConfigError: The buffer has no arrays yet.
            ClosedError: The buffer was closed.
        """

        def describe() -> dict[str, object]:
            saved = SavedBuffer(
                capacity=self.capacity,
                max_times_sampled=self.max_times_sampled,
                sampler=self.sampler,
                remover=self.remover,
                limiter=self.limiter,
                schema=self.schema,
                structures=self._structures,
                columns=self.store.num_slots,
                pooled=self._pooled,
                removed=self.removed,
                marker={} if marker is None else marker(),
                arrays={},
                plain={},
            )
            return describe_buffer(saved)

        _ = self.contents  # raises before a folder is made
        with self._saving:
            return save_buffer(Snapshot(lambda: self.contents, self._lock, describe), path, keep)

    @classmethod
    def restore(cls, path: str | os.PathLike[str], sampler: Sampler | None = None) -> Buffer:
        """Restore a buffer from the newest intact checkpoint.

        Args:
            path: The folder that was passed to `checkpoint`.
            sampler: A sampler equal to the saved sampler; necessary only for a sampler class of your own.

        Returns:
            A new buffer, which continues exactly like the saved buffer.

        Raises:
            CheckpointError: No checkpoint under `path` can be used; the message has the reason for each.
        """
        return load_buffer(path, sampler, _restored)

    @property
    def path(self) -> str:
        """Path of the shared memory, for `CyclicBlocks.attach(path)` in another process of this host.

        The other process can read rows until `delete` or `max_times_sampled` removes a row that is not the oldest.
        """
        return self.store.blocks.path

    def close(self) -> None:
        """Free the memory. Waiting threads raise `ClosedError`. Idempotent."""
        with self._lock:
            self._gate.is_closed = True
            if self._contents is not None:
                self._contents.store.close()
                self._contents = None  # the memory is unmapped when no array views it any more
            self._gate.notify()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Buffer({len(self)} of {self.capacity}, {self.sampler!r})"


def _restored(saved: SavedBuffer) -> Buffer:
    """Return the buffer of a checkpoint.

    Raises:
        Refused: The checkpoint is inconsistent; no memory stays allocated.
    """
    with refusing_invalid_options():
        buffer = Buffer(
            saved.capacity,
            saved.sampler,
            remover=saved.remover,
            limiter=saved.limiter,
            max_times_sampled=saved.max_times_sampled,
            pooled=saved.pooled,
        )
        check_sizes(saved, buffer.is_cyclic)
        buffer.bind(saved.schema, saved.columns, saved.structures)
    try:
        buffer.contents.restore(saved.arrays, saved.plain)
        buffer.removed.update(saved.removed)
        buffer.marker = saved.marker
        check_counts(saved, buffer.store.table)
    except BaseException:
        buffer.close()
        raise
    return buffer
