"""The replay buffer: stored rows, a sampler that draws batches, and a limiter that paces inserts and samples."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from farstep.batch import Batch
from farstep.buffer.bound_arrays import BoundArrays
from farstep.buffer.gate import check_timeout
from farstep.buffer.inserting import Inserter
from farstep.buffer.limiter import RateLimiter
from farstep.buffer.options import make_options
from farstep.buffer.samplers import FIFO, Sampler, with_beta
from farstep.buffer.sampling import SampleInfo
from farstep.buffer.saving.contents_state import restore_contents
from farstep.buffer.saving.saved_buffer import (
    SavedBuffer,
    check_counts,
    check_sizes,
    describe_buffer,
    load_buffer,
    refusing_invalid_options,
    save_buffer,
)
from farstep.buffer.saving.snapshot import Snapshot
from farstep.buffer.storage.frames import FrameStack
from farstep.buffer.storage.rows import as_keys, as_priorities, as_schema, nested
from farstep.config.env import check_count
from farstep.core import Array, Nested


class Buffer(BoundArrays):
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
        max_bytes: Maximum number of bytes of all rows; lowers `capacity` if necessary. Keys, priorities, the
            observations after the last row of an episode, and frames that `frame_stack` stores separately do not
            count. Default: no limit.
        max_times_sampled: Remove an item after this many samples; 0: never. Default: 1 for `FIFO`, `LIFO` and
            `FullBatch`, otherwise 0.
        pooled: Whether all environment slots share the capacity: the oldest rows are evicted first, whichever slot they
            are from, and slots may be added at any time. Otherwise each slot has an equal share, in which it evicts its
            own rows. Triggers that take rows, and other processes, cannot read pooled rows. Default: False.
        frame_stack: Stores stacked observations once per frame, in a fraction of the memory; samples stay the same.
            `max_bytes` and the check of the available memory count one frame per row. The older frames of a row whose
            stack is not that of the row before, shifted by one frame, are stored in addition: if this applies to all
            rows, the buffer grows to up to 1.25 times the memory that it takes without `frame_stack`, and a warning
            reports it. Other processes read single frames. Default: None, observations are stored as they are.
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
        frame_stack: FrameStack | None = None,
        seed: int | None = None,
    ) -> None:
        options = make_options(
            capacity,
            sampler,
            remover=remover,
            limiter=limiter,
            max_bytes=max_bytes,
            max_times_sampled=max_times_sampled,
            pooled=pooled,
            frame_stack=frame_stack,
        )
        super().__init__(options, np.random.default_rng(seed))
        self._inserter = Inserter(self)
        self._saving = threading.Lock()
        self._warned_unused_priorities = False
        self.marker: Mapping[str, object] = {}
        """The `marker` with which this buffer was saved, if `restore` made it."""
        if spec is not None:
            self.bind(as_schema(spec))
        self.limiter.take()

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
        return self._inserter.insert(rows, timeout_s)

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
            chosen = self._chooser.choose(self._internals.allocated, count)
            if chosen is None and not self.limiter.has_starved_reader:
                self.limiter.has_starved_reader = True  # allows one insert, to avoid a deadlock
                self._gate.notify_room()
            return chosen is not None

        with self._gate.between_updates(), self._lock:
            self._gate.wait(
                "sample",
                ready,
                timeout_s,
                lambda is_deadlock: self._chooser.missing(self._internals.allocated, count, is_deadlock),
            )
            contents = self._internals.contents
            assert chosen is not None
            cells, probabilities = chosen
            batch = self.sampler.rows(contents.store, cells)
            info = self._chooser.taken(contents, cells, probabilities)
            self.limiter.sample(self.sampler.count_rows(batch))
            if self.max_times_sampled:
                used_up = cells[info.times_sampled >= self.max_times_sampled]
                used_up = np.sort(used_up) if contents.selector.distinct else np.unique(used_up)
                self._internals.count_removed(
                    "sampled", contents.remove(used_up, are_oldest=isinstance(self.sampler, FIFO))
                )
            if self._gate.refused_rows is not None and self.limiter.can_insert(self._gate.refused_rows):
                self._gate.notify_room()
            else:
                self._gate.notify()
        return nested(batch, self._internals.structures), info

    # ---- items ----

    def keys(self) -> Array:
        """Return the keys of all items that could be sampled now if the limiter allowed it.

        With `DPER`, these are the complete episodes; with `NStep` and `Sequence`, the rows at which an item can start.

        Returns:
            Keys, oldest item first in each environment slot; in any order if `is_cyclic` is False. Empty before the
            first insert.

        Raises:
            ClosedError: The buffer is closed.
        """
        with self._lock:
            self._gate.check_open()
            if (contents := self._internals.allocated) is None:
                return np.zeros(0, np.int64)
            cells = contents.by_age(self._chooser.usable_items(contents))
            return contents.store.table.keys.take(cells)

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
            contents = self._internals.contents
            cells = keys % contents.store.table.cells
            is_present = (keys >= 0) & (contents.store.table.keys.take(cells) == keys)
            is_present[is_present] = self._chooser.can_sample(contents, cells[is_present])
            batch = self.sampler.rows(contents.store, cells[is_present])
        return nested(batch, self._internals.structures), is_present

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
            return self._internals.contents.update(keys, priorities)

    def set_beta(self, beta: float) -> None:
        """Change the exponent of importance weights for all further samples, e.g. to anneal it towards 1.

        Args:
            beta: The new exponent, at least 0.

        Raises:
            ConfigError: `beta` is invalid, or the sampler has no importance weights.
        """
        with self._lock:
            self._set_options(replace(self.options, sampler=with_beta(self.sampler, beta)))

    def delete(self, keys: ArrayLike) -> int:
        """Remove items. With `DPER`, an item is an episode with all its rows.

        Args:
            keys: Keys of the items. Keys of removed items are ignored.

        Returns:
            The number of items removed. `removed["deleted"]` counts rows.
        """
        keys = as_keys(keys)
        with self._lock:
            contents = self._internals.contents
            cells = np.unique(contents.store.table.find(keys))
            self._internals.count_removed("deleted", contents.remove(cells))
            self._gate.notify_room()
            return len(cells)

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
            self.limiter.change(changes, self.capacity, self.options.uses_per_row, self.sampler.item_rows[0])
            self._gate.notify_room()

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
            return describe_buffer(
                self.options,
                self._internals.store,
                self._internals.structures,
                self.removed,
                {} if marker is None else marker(),
            )

        _ = self._internals.contents  # raises before a folder is made
        with self._saving:
            return save_buffer(Snapshot(lambda: self._internals.contents, self._lock, describe), path, keep)

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

    def __repr__(self) -> str:
        return f"Buffer({len(self)} of {self.capacity}, {self.sampler!r})"


def _restored(saved: SavedBuffer) -> Buffer:
    """Return the buffer of a checkpoint.

    Raises:
        Refused: The checkpoint is inconsistent; no memory stays allocated.
    """
    with refusing_invalid_options():
        options = saved.options
        buffer = Buffer(
            options.capacity,
            options.sampler,
            remover=options.remover,
            limiter=options.limiter,
            max_times_sampled=options.max_times_sampled,
            pooled=options.pooled,
            frame_stack=options.frame_stack,
        )
        check_sizes(saved)
        buffer.bind(saved.schema, saved.columns, saved.structures)
    try:
        restore_contents(buffer._internals.contents, saved.arrays, saved.plain)
        buffer.removed.update(saved.removed)
        buffer.marker = saved.marker
        check_counts(saved, buffer._internals.store.table)
    except BaseException:
        buffer.close()
        raise
    return buffer
