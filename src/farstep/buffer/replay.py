"""The buffer: contents that threads share, a chooser that makes batches of them, and a limiter that says when."""

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
    load_buffer,
    refusing_invalid_options,
    save_buffer,
)
from farstep.buffer.storage.contents import Contents, fitting_capacity
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
from farstep.buffer.storage.store import Store
from farstep.config.env import check_count
from farstep.core import Array, Nested
from farstep.errors import ConfigError
from farstep.schema import Schema, Structure


class Buffer:
    """Rows for a learner. `capacity` is in transitions; without `spec` the arrays are those of the first insert.

    `max_bytes` makes it hold fewer if their arrays would take more; what is kept beside rows (keys, priorities, the
    observation after an episode's last row) is not counted.

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
        self.sampler, self.remover = check_sampler("sampler", sampler), check_sampler("remover", remover or FIFO())
        self.limiter = check_limiter(limiter) if limiter is not None else MinSize(1)
        self.max_bytes = None if max_bytes is None else check_count("max_bytes", max_bytes)
        limit = int(sampler.once) if max_times_sampled is None else max_times_sampled
        self.max_times_sampled = check_count("max_times_sampled", limit, minimum=0)
        check_remover(self.remover, self.sampler)
        in_turn = self.sampler.needs_order or not self.max_times_sampled or isinstance(self.sampler, FIFO)
        # Items that are not removed oldest first would leave holes in a ring, so their cells must be reused.
        self._cyclic = type(self.remover) is FIFO and in_turn
        self._check_limiter(self.capacity)
        self.sampler.check_room(self.capacity)
        self._rng = np.random.default_rng(seed)
        self._structures: dict[str, Structure] = {}
        self._contents: Contents | None = None
        self._chooser = Chooser(self.sampler, self.max_times_sampled)
        self._gate = Gate()
        self._lock = self._gate.lock
        self.waited_s = self._gate.waited_s
        self.filled_by: int | None = None
        """The one thread that inserts, where that is known: it must not wait for itself."""
        self.told: Callable[[], None] | None = None
        """Called when another thread than that took samples or changed the limiter: there may be room again."""
        self.between_updates: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        """Entered during `sample`: a workflow may publish then, since a sampling consumer is between two updates."""
        self._told_unused = False
        self.removed: dict[str, int] = {"evicted": 0, "sampled": 0, "deleted": 0}
        if spec is not None:
            self.bind(as_schema(spec))
        self.limiter.take()

    # ---- what it holds ----

    def bind(self, schema: Schema, columns: int = 1, structures: Mapping[str, Structure] | None = None) -> None:
        """Decide which arrays it holds, and for how many environment slots; done by the first insert if nobody else
        does."""
        self._gate.check_open()
        check_count("columns", columns)
        if self._contents is not None:
            raise ConfigError("this buffer has its arrays already; make another one for other arrays.")
        if not schema:
            raise ConfigError("a buffer needs at least one array.")
        self.sampler.check(schema)
        if columns > 1 and not self._cyclic:
            raise ConfigError(f"{self.unordered_reason}, so rows of all environments share one column.")
        capacity = fitting_capacity(schema, self.capacity, columns, self._cyclic, self.max_bytes)
        self._check_limiter(capacity)
        self.sampler.check_room(capacity // columns)
        self.capacity, self._structures = capacity, dict(structures or {})
        remover = None if self._cyclic else self.remover
        self._contents = Contents(schema, capacity, columns, self._structures, self.sampler, remover, self._rng)

    @property
    def is_cyclic(self) -> bool:
        """Whether rows stay in the order of insertion and the oldest are evicted first.

        Otherwise a row has no neighbours, and the remover chooses which item a full buffer removes.
        """
        return self._cyclic

    @property
    def unordered_reason(self) -> str:
        """Why rows do not stay in order, as the beginning of an error; only valid if they do not."""
        if type(self.remover) is not FIFO:
            return f"remover={self.remover!r} removes rows in any order"
        return f"{self.sampler!r} with max_times_sampled={self.max_times_sampled} takes rows out in any order"

    def keep_in_place(self) -> None:
        """Keep rows in the cells that they were written to, for readers that access the cells directly.

        From now on the cell of a removed row is reused only when it is the oldest. Call it after the buffer has got its
        arrays, by `spec`, `bind` or the first insert.

        Raises:
            ConfigError: The rows of this buffer are not, or no longer, in the order of their cells.
        """
        if not self._cyclic or self.contents.is_linked:
            reason = "rows were removed by delete() or max_times_sampled" if self._cyclic else self.unordered_reason
            raise ConfigError(
                f"{reason}, but a DataKeyTrigger takes rows in order of insertion. Give the trigger consume=False and "
                "min_new=k, or use a new buffer with FIFO() as remover and a sampler without max_times_sampled."
            )
        self.contents.is_pinned = True

    @property
    def _uses_per_row(self) -> float:
        """Most samples that a row gives before it is removed."""
        return self.max_times_sampled * self.sampler.item_rows[1] or math.inf

    def _check_limiter(self, capacity: int) -> None:
        self.limiter.check_reachable(capacity, self._uses_per_row, self.sampler.item_rows[0])

    @property
    def is_halted(self) -> bool:
        """Whether nobody may wait here."""
        return self._gate.is_halted

    @property
    def is_bound(self) -> bool:
        """Whether it has its arrays."""
        return self._contents is not None

    @property
    def contents(self) -> Contents:
        """What it holds; look at it only while the buffer is `locked`."""
        self._gate.check_open()
        if self._contents is None:
            raise ConfigError("this buffer has no arrays yet: insert rows first, or give it a spec.")
        return self._contents

    @property
    def store(self) -> Store:
        """Where its rows are."""
        return self.contents.store

    @property
    def structures(self) -> Mapping[str, Structure]:
        """How arrays of an environment nest."""
        return self._structures

    def __len__(self) -> int:
        return 0 if self._contents is None else self._contents.size

    @property
    def schema(self) -> Schema:
        """The arrays of a row."""
        return self.store.schema

    # ---- inserting ----

    def insert(self, rows: Mapping[str, ArrayLike] | Batch, timeout_s: float | None = None) -> Array:
        """Insert rows, waiting while the limiter allows none.

        Rows follow each other unless `terminated`, `truncated`, `done` or `episode_start` say otherwise.

        Args:
            rows: Arrays `[n, ...]` by name, inserted in as many steps as the limiter allows; or a `Batch`, inserted at
                once.
            timeout_s: Seconds to wait; 0: do not wait; None: no limit.

        Returns:
            The key of each row; those of a `Batch` are time-major.

        Raises:
            BufferTimeout: The limiter did not allow all rows in time; the message says how many are inserted.
            ConfigError: The rows do not fit the buffer's arrays, or the batch never fits the limiter.
            ClosedError: The buffer is closed.
        """
        if (contents := self._contents) is not None and contents.is_plain:
            store = contents.store
            count = count_plain(rows, store.kinds)
            with self._lock:
                if 0 < count <= store.rows and self.limiter.has_room(count) and not self._gate.is_closed:
                    keys, evicted = contents.put_rows(rows, count)  # type: ignore[arg-type]  # count_plain has looked
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
                    self._wait("insert", self.limiter.can_insert, left, f"{done} of {total} rows are inserted")
                    continue
                contents = self.contents
                count = min(count, contents.store.rows)
                found.append(self._put(contents, {name: value[done : done + count] for name, value in values.items()}))
                done += count
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def _checked(self, rows: Mapping[str, ArrayLike]) -> dict[str, Array]:
        """Rows as arrays of the right kind, or an error and nothing changed."""
        values = as_arrays(rows)
        with self._lock:
            if self._contents is None and not self._gate.is_closed:
                self.bind(schema_of(values))
        self.contents.check(values)
        return values

    def _put(self, contents: Contents, values: Mapping[str, Array]) -> Array:
        """Rows `[n, ...]` for which there is room; their keys."""
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
                # Where rows have no neighbours, each has its next observation itself.
                schema = schema_of(arrays_of(batch, with_next=not self._cyclic), leading=2)
                self.bind(schema, int(batch.slots.max()) + 1 if self._cyclic else 1, batch.structures)
        contents = self.contents
        store, values = contents.store, contents.rows_of(batch)
        if not self._cyclic:
            return self.insert({n: values[n].reshape(-1, *spec.shape) for n, spec in store.schema.items()}, timeout_s)
        steps, width = batch.shape
        if self.limiter.never_inserts(steps * width):
            raise ConfigError(f"a batch of {steps * width} rows never fits this limiter ({self.limiter}); widen it.")
        contents.warn_if_shared(batch)
        with self._lock:
            self._wait("insert", lambda: self.limiter.can_insert(steps * width), timeout_s, "none inserted")
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
        """Sample items, waiting until the limiter allows it and there are enough items.

        Args:
            batch_size: Number of items; with `FullBatch` the minimum number, and the batch has all items.
            timeout_s: Seconds to wait; 0: do not wait; None: no limit.

        Returns:
            Arrays by name, nested as the environment's, and keys, probabilities and further facts about the items.

        Raises:
            BufferTimeout: There were no such samples in time.
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
                self.limiter.has_starved_reader = True  # otherwise a writer that waits for samples would deadlock
                self._notify()
            return chosen is not None

        with self.between_updates(), self._lock:
            self._gate.wait("sample", ready, timeout_s, lambda alone: self._missing(count, alone), self.filled_by)
            contents = self.contents
            assert chosen is not None
            cells, probabilities = chosen
            batch = self.sampler.rows(contents.store, cells)
            info = self._chooser.taken(contents, cells, probabilities)
            self.limiter.sample(self.sampler.count_rows(batch))
            if self.max_times_sampled:
                used_up = cells[info.times_sampled >= self.max_times_sampled]
                used_up = np.sort(used_up) if contents.selector.distinct else np.unique(used_up)
                in_turn = isinstance(self.sampler, FIFO)
                self._removed("sampled", contents.remove(used_up, in_turn))
            self._notify()
        return nested(batch, self._structures), info

    def _choose(self, count: int) -> tuple[Array, Array] | None:
        """Cells of the items to hand out, and their probabilities; None while that cannot be."""
        contents = self._contents
        rows = self._chooser.least_rows(count)
        if rows > self.limiter.most_samples() or count > self._chooser.most(self.capacity, contents):
            raise ConfigError(
                f"{count} items of {rows} rows at once can never be sampled here (capacity {self.capacity}, "
                f"max_times_sampled {self.max_times_sampled}; {self.limiter}). Ask for fewer, or allow more."
            )
        return None if contents is None else self._chooser.choose(contents, count, self.limiter.can_sample)

    def _missing(self, count: int, alone: bool) -> str:
        """Why nothing is sampled, and what to do; `alone`: who asks is also who inserts."""
        contents, limiter, rows = self._contents, self.limiter, self._chooser.least_rows(count)
        asked = f"{count} items for {self.sampler!r} are asked for"
        asked += f", of {rows} rows in all" if rows > count else ""
        if contents is None or not contents.size or not limiter.can_sample(rows):
            if not alone:
                return (
                    f"{asked}, it holds {len(self)} items ({limiter}). Who inserts must go on, or widen the limiter "
                    "with buffer.limit(...)."
                )
            return (
                f"{asked}, and the buffer does not give them ({len(self)} items; {limiter}). Who asks is also who "
                "inserts, so waiting would be for ever: let the consumer be called when the limiter gives as many "
                f"(flow.on(..., samples={rows})), ask for fewer, let the trigger fire later (its size), widen the "
                "limiter, or sample in a thread of its own (flow.on(..., thread=True))."
            )
        usable = len(self._chooser.usable_items(contents))
        often = f" at most {self.max_times_sampled} times each" if self.max_times_sampled else ""
        said = f"{asked}; of the {contents.size} that it holds {usable} can be handed out{often}"
        if self.sampler.needs_order and usable < contents.size:
            said += ": at the others nothing so long can begin, or what follows them is not there yet"
        ends = "waiting would be for ever, since who asks is also who inserts: sample later" if alone else "insert more"
        return f"{said}. The limiter would give them ({limiter}), so {ends}, or ask for fewer or shorter ones."

    # ---- items ----

    def update_priorities(self, keys: Array, priorities: Array) -> int:
        """Give items new priorities; those that are gone are passed over. How many were there."""
        keys = as_keys(keys)
        priorities = as_priorities(priorities, keys)
        with self._lock:
            if not (self._told_unused or self.sampler.uses_priorities or self.remover.uses_priorities):
                self._told_unused = True
                warnings.warn(
                    f"neither {self.sampler!r} nor remover={self.remover!r} looks at priorities, so update_priorities "
                    "changes nothing; sample by Prioritized(), MinHeap(), MaxHeap() or DPER(), or leave it out.",
                    stacklevel=2,
                )
            return self.contents.update(keys, priorities)

    def set_beta(self, beta: float) -> None:
        """Change the exponent of importance weights while it is in use, e.g. towards 1; for samples from now on."""
        with self._lock:
            self.sampler = with_beta(self.sampler, beta)
            self._chooser = Chooser(self.sampler, self.max_times_sampled)

    def delete(self, keys: Array) -> int:
        """Remove items; with `DPER`, an episode with all its rows.

        Args:
            keys: Keys of the items; keys of items that are already removed are ignored.

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
            changes: New values by option, e.g. `limit(max_diff=math.inf)`.

        Raises:
            ConfigError: An option is unknown, or this buffer could never satisfy the limiter; nothing has changed.
        """
        with self._lock:
            self.limiter.change(changes, self.capacity, self._uses_per_row, self.sampler.item_rows[0])
            self._notify()

    def _wait(self, what: str, ready: Callable[[], bool], timeout_s: float | None, how_far: str) -> None:
        def explain(alone: bool) -> str:
            return (
                f"{how_far}, it holds {len(self)} items ({self.limiter}). Who samples must go on, or widen the limiter "
                "with buffer.limit(...)."
            )

        self._gate.wait(what, ready, timeout_s, explain, self.filled_by)

    def halted(self) -> contextlib.AbstractContextManager[None]:
        """Meanwhile nobody waits here: who would has a ClosedError."""
        return self._gate.halted()

    def locked(self) -> contextlib.AbstractContextManager[object]:
        """Nobody inserts or samples for a moment."""
        return self._lock

    def _notify(self) -> None:
        self._gate.notify()
        if self.told is not None and self.filled_by != threading.get_ident():
            self.told()

    # ---- life ----

    def checkpoint(self, path: str | os.PathLike[str]) -> Path:
        """Save everything into a new numbered folder under `path`, atomically; the two newest are kept."""
        with self._lock:
            arrays, plain = self.contents.state()
            saved = SavedBuffer(
                capacity=self.capacity,
                max_times_sampled=self.max_times_sampled,
                sampler=self.sampler,
                remover=self.remover,
                limiter=self.limiter,
                schema=self.schema,
                structures=self._structures,
                columns=self.store.columns,
                removed=self.removed,
                arrays=arrays,
                plain=plain,
            )
            return save_buffer(saved, path)

    @classmethod
    def restore(cls, path: str | os.PathLike[str], sampler: Sampler | None = None) -> Buffer:
        """The newest intact checkpoint under `path`; with a sampler of your own class, an equal one."""
        return load_buffer(path, sampler, _restored)

    @property
    def path(self) -> str:
        """Path of the shared memory, for `CyclicBlocks.attach(path)` in another process of this host.

        That process can read rows until `delete` or `max_times_sampled` removes a row other than the oldest.
        """
        return self.store.blocks.path

    def close(self) -> None:
        """Free the memory; whoever waits gets a ClosedError. Idempotent."""
        with self._lock:
            self._gate.is_closed = True
            if self._contents is not None:
                self._contents.store.close()
                self._contents = None  # the memory goes with the last array over it
            self._gate.notify()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Buffer({len(self)} of {self.capacity}, {self.sampler!r})"


def _restored(saved: SavedBuffer) -> Buffer:
    """The buffer of a checkpoint.

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
        )
        check_sizes(saved, buffer.is_cyclic)
        buffer.bind(saved.schema, saved.columns, saved.structures)
    try:
        buffer.contents.restore(saved.arrays, saved.plain)
        buffer.removed.update(saved.removed)
        check_counts(saved, buffer.store.table)
    except BaseException:
        buffer.close()
        raise
    return buffer
