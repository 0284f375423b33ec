"""The arrays of a buffer: allocates them for the rows of a schema, counts their rows, and frees them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import numpy as np

from farstep.buffer.internals import Internals
from farstep.buffer.options import BufferOptions
from farstep.buffer.samplers import Sampler
from farstep.buffer.sampling import Chooser
from farstep.buffer.saving.contents_state import contents_state
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
        self._internals = Internals(options.limiter)
        self._gate, self._lock = self._internals.gate, self._internals.gate.lock
        self.waited_s = self._gate.waited_s
        """Seconds that threads have waited so far, by call: `insert` and `sample`."""
        self.removed = self._internals.removed
        """Rows removed so far: evicted from a full buffer, sampled `max_times_sampled` times, or deleted."""
        self._rng = rng
        self._chooser = Chooser(options)

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
        if self.is_bound:
            raise ConfigError("this buffer already has its arrays; create another buffer for other arrays.")
        options = self.options.fitted(schema, columns)
        self._internals.structures = dict(structures or {})
        self._internals.allocated = options.allocate(schema, columns, self._internals.structures, self._rng)
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
        self.options.check_in_place(self.is_cyclic and self._internals.contents.is_linked)
        self._internals.contents.is_pinned = True

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
        """Whether calls raise `ClosedError` instead of waiting, because the workflow that inserts has ended."""
        return self._gate.is_halted

    @property
    def is_bound(self) -> bool:
        """Whether the arrays are allocated."""
        return self._internals.allocated is not None

    def __len__(self) -> int:
        """Number of items in the buffer."""
        contents = self._internals.allocated
        return 0 if contents is None else contents.size

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays that hold the rows; 0 before they are allocated."""
        contents = self._internals.allocated
        return 0 if contents is None else contents.store.nbytes

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes on disk of a checkpoint of the full buffer, without the observations after episodes; 0 before the
        arrays are allocated."""
        if not self.is_bound:
            return 0
        with self._lock:
            contents = self._internals.contents
            state, _ = contents_state(contents)
            index = sum(array.nbytes for array in state.values())
            log = 8 * (self.capacity - len(self)) if contents.is_linked else 0  # grows by a key per row
            return self.nbytes + index + log

    @property
    def schema(self) -> Schema:
        """Shape and dtype of each array of a row.

        Raises:
            ConfigError: The buffer has no arrays yet.
        """
        return self._internals.store.schema

    @property
    def path(self) -> str:
        """Path of the shared memory, for `CyclicBlocks.attach(path)` in another process of this host.

        The other process can read rows until `delete` or `max_times_sampled` removes a row that is not the oldest.
        """
        return self._internals.store.blocks.path

    def close(self) -> None:
        """Free the memory. Waiting threads raise `ClosedError`. Idempotent."""
        with self._lock:
            self._gate.is_closed = True
            if (contents := self._internals.allocated) is not None:
                contents.store.close()
                self._internals.allocated = None  # the memory is unmapped when no array views it any more
            self._gate.notify()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def internals_of(buffer: BoundArrays) -> Internals:
    """Return the state of a buffer that is not public, for other modules of farstep."""
    return buffer._internals
