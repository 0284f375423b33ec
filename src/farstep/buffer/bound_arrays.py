"""The arrays of a buffer: allocates them for the rows of a schema, counts their rows, and frees them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Self

import numpy as np

from farstep.buffer.gate import Gate
from farstep.buffer.options import BufferOptions
from farstep.buffer.samplers import Sampler
from farstep.buffer.sampling import Chooser
from farstep.buffer.saving.contents_state import contents_state
from farstep.buffer.storage.contents import Contents
from farstep.buffer.storage.store import Store
from farstep.errors import ConfigError
from farstep.schema import Schema, Structure


class BoundArrays:
    """The part of a buffer that does not depend on how rows are inserted and sampled.

    Args:
        options: The checked options of the buffer.
        rng: Generator of random draws.
    """

    def __init__(self, options: BufferOptions, rng: np.random.Generator) -> None:
        self.options = options
        """The checked options, with defaults filled in; `bind` may lower the capacity."""
        self.limiter = options.limiter
        self.gate = Gate()
        """The lock of this buffer, and what a workflow tells it."""
        self.waited_s = self.gate.waited_s
        """Seconds that threads have waited so far, by call: `insert` and `sample`."""
        self.removed: dict[str, int] = {"evicted": 0, "sampled": 0, "deleted": 0}
        """Rows removed so far: evicted from a full buffer, sampled `max_times_sampled` times, or deleted."""
        self._rng = rng
        self._structures: dict[str, Structure] = {}
        self._contents: Contents | None = None
        self._chooser = Chooser(options)
        self._lock = self.gate.lock

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
        self.gate.check_open()
        if self._contents is not None:
            raise ConfigError("this buffer already has its arrays; create another buffer for other arrays.")
        options = self.options.fitted(schema, columns)
        self._structures = dict(structures or {})
        self._contents = options.allocate(schema, columns, self._structures, self._rng)
        self._set_options(options)

    def _set_options(self, options: BufferOptions) -> None:
        self.options, self._chooser = options, Chooser(options)

    def keep_in_place(self) -> None:
        """Keep rows in their cells, for readers that access the cells directly.

        From now on, the cell of a removed row is reused only when it is the oldest cell. Call this method after the
        arrays were allocated (by `spec`, `bind` or the first insert).

        Raises:
            ConfigError: The rows of this buffer are not in the order of their cells.
        """
        self.options.check_in_place(self.is_cyclic and self.contents.is_linked)
        self.contents.is_pinned = True

    @property
    def capacity(self) -> int:
        """Maximum number of rows."""
        return self.options.capacity

    @property
    def sampler(self) -> Sampler:
        """Which rows `sample` returns."""
        return self.options.sampler

    @property
    def remover(self) -> Sampler:
        """Which rows a full buffer evicts."""
        return self.options.remover

    @property
    def max_bytes(self) -> int | None:
        """Maximum number of bytes of all rows; None: no limit."""
        return self.options.max_bytes

    @property
    def max_times_sampled(self) -> int:
        """Number of samples after which an item is removed; 0: never."""
        return self.options.max_times_sampled

    @property
    def is_pooled(self) -> bool:
        """Whether all environment slots share the capacity although their rows stay in order."""
        return self.options.is_pooled

    @property
    def is_cyclic(self) -> bool:
        """Whether rows stay in the order of insertion and the oldest are evicted first.

        Otherwise a row has no neighbors, and the remover chooses which item a full buffer removes.
        """
        return self.options.is_cyclic

    @property
    def is_halted(self) -> bool:
        """Whether calls raise `ClosedError` instead of waiting (see `halted`)."""
        return self.gate.is_halted

    @property
    def is_bound(self) -> bool:
        """Whether the arrays are allocated."""
        return self._contents is not None

    @property
    def contents(self) -> Contents:
        """The stored items; hold `locked` while you access them."""
        self.gate.check_open()
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
        return 0 if contents is None else contents.store.nbytes

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes on disk of a checkpoint of the full buffer, without the observations after episodes; 0 before the
        arrays are allocated."""
        if self._contents is None:
            return 0
        with self._lock:
            state, _ = contents_state(self.contents)
            index = sum(array.nbytes for array in state.values())
            log = 8 * (self.capacity - len(self)) if self.contents.is_linked else 0  # grows by a key per row
            return self.nbytes + index + log

    @property
    def schema(self) -> Schema:
        """Shape and dtype of each array of a row.

        Raises:
            ConfigError: The buffer has no arrays yet.
        """
        return self.store.schema

    # ---- counting ----

    def count_inserted(self, inserted: int, evicted: int) -> None:
        """Count new rows and the rows that they evicted, and wake waiting threads. The lock must be held."""
        self.limiter.insert(inserted)
        if evicted:
            self.count_removed("evicted", evicted)
        self.gate.notify()

    def count_removed(self, cause: str, count: int) -> None:
        """Count removed rows; `cause` is a key of `removed`. The lock must be held."""
        self.removed[cause] += count
        self.limiter.delete(count)

    # ---- locking and closing ----

    def halted(self) -> contextlib.AbstractContextManager[None]:
        """Context manager: every call that would have to wait raises `ClosedError` instead."""
        return self.gate.halted()

    def locked(self) -> contextlib.AbstractContextManager[object]:
        """Context manager: prevents other threads from inserting and sampling."""
        return self._lock

    @property
    def path(self) -> str:
        """Path of the shared memory, for `CyclicBlocks.attach(path)` in another process of this host.

        The other process can read rows until `delete` or `max_times_sampled` removes a row that is not the oldest.
        """
        return self.store.blocks.path

    def close(self) -> None:
        """Free the memory. Waiting threads raise `ClosedError`. Idempotent."""
        with self._lock:
            self.gate.is_closed = True
            if self._contents is not None:
                self._contents.store.close()
                self._contents = None  # the memory is unmapped when no array views it any more
            self.gate.notify()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
