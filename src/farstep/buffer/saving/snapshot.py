"""Copies the contents of a buffer for a checkpoint, while other threads insert and sample.

The lock of the buffer is held for one block of rows at a time. Rows that were replaced after they were copied are
copied again, until they fit into one block. This last block is copied together with the item table, the selectors and
the counters, so the checkpoint has the contents of that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np

from farstep.buffer.saving.contents_state import contents_state
from farstep.buffer.storage.contents import Contents
from farstep.checkpoint.files import ArrayParts
from farstep.core import Array
from farstep.errors import CheckpointError
from farstep.schema import ArraySpec

BLOCK_BYTES = 2**23
"""Bytes of rows that are copied at a time."""
_MIN_BLOCKS = 16  # blocks that may be copied again, however small the buffer is


class Snapshot:
    """One copy of the contents of a buffer.

    Args:
        contents: Returns the contents, or raises an error if the buffer is closed.
        lock: The lock of the buffer.
        describe: Returns the options and counters of the buffer; called with the lock held, at the moment of the copy.
    """

    def __init__(
        self,
        contents: Callable[[], Contents],
        lock: AbstractContextManager[object],
        describe: Callable[[], dict[str, Any]],
    ) -> None:
        self._contents, self._lock, self._describe = contents, lock, describe
        self.description: dict[str, Any] = {}
        """What `describe` returned and the plain data of the contents; empty until `arrays` has ended."""

    def arrays(self) -> Generator[tuple[str, Array | ArrayParts], None, None]:
        """Yield the names and arrays of the copy. Each must be written before the next is requested.

        Raises:
            CheckpointError: Rows are replaced faster than the caller writes them.
        """
        with self._lock:
            store = self._contents().store
            used, seen = int(store.table.used.max()), store.table.latest
        schema, cells = store.blocks.schema, np.arange(used * store.columns)
        for name, spec in schema.items():
            yield f"rows/{name}", self._copied(name, cells, (used, store.columns, *spec.shape))

        row_bytes = max(1, sum(spec.nbytes for spec in schema.values()))
        left, number = max(len(cells), _MIN_BLOCKS * BLOCK_BYTES // row_bytes), 0
        while True:
            number += 1
            with self._lock:
                contents, latest = self._contents(), store.table.latest
                cells = np.flatnonzero(latest != seen)
                if len(cells) * row_bytes <= BLOCK_BYTES:
                    rows = {name: store.take_stored(name, cells) for name in schema}
                    arrays = self._copy_rest(contents)
                    break
            seen, left = latest, left - len(cells)
            if left < 0:
                raise CheckpointError(
                    "the buffer could not be saved: its rows are replaced faster than they are written. Write to a "
                    "faster disk, or save when fewer rows are inserted."
                )
            yield f"cells/{number}", cells
            for name, spec in schema.items():
                yield f"rows{number}/{name}", self._copied(name, cells, (len(cells), *spec.shape))
        try:
            if len(cells):
                yield f"cells/{number}", cells
                for name, copied in rows.items():
                    yield f"rows{number}/{name}", copied
            yield from arrays.items()
        finally:
            with self._lock:
                for sparse in store.sparse.values():
                    sparse.stop_keeping()

    def _copied(self, name: str, cells: Array, shape: tuple[int, ...]) -> ArrayParts:
        """Return the rows of one array, which are copied block by block when they are written."""
        spec = self._contents().store.blocks.schema[name]

        def blocks() -> Iterator[Array]:
            for some in _slices(len(cells), spec):
                with self._lock:
                    block = self._contents().store.take_stored(name, cells[some])
                yield block

        return ArrayParts(shape, np.dtype(spec.dtype), blocks())

    def _copy_rest(self, contents: Contents) -> dict[str, Array | ArrayParts]:
        """Copy everything except rows; sparse rows are copied when they are written. The lock must be held."""
        state, plain = contents_state(contents)
        arrays: dict[str, Array | ArrayParts] = {name: array.copy() for name, array in state.items()}
        self.description = self._describe() | plain
        for part, sparse in contents.store.sparse.items():
            cells, read = sparse.cells, sparse.keep()
            arrays[f"store/{part}"] = cells
            for name, spec in sparse.schema.items():
                blocks = map(partial(read, name), _slices(len(cells), spec))
                arrays[f"store/{part}.{name}"] = ArrayParts((len(cells), *spec.shape), np.dtype(spec.dtype), blocks)
        return arrays


def _slices(count: int, spec: ArraySpec) -> Iterator[slice]:
    """Divide `count` rows of an array into blocks."""
    size = max(1, BLOCK_BYTES // max(1, spec.nbytes))
    return (slice(start, start + size) for start in range(0, count, size))
