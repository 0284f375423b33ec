"""Copies the contents of a buffer for a checkpoint, while other threads insert and sample.

The lock of the buffer is held for one block at a time. Rows that were replaced after they were copied are copied again,
until they fit into one block. The item table, the order of rows and the selectors are copied in blocks, too. At the
end, the lock is held once to find and copy what has changed since then: the last rows, entries of the other arrays, and
the counters. So the checkpoint has the contents of that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from math import inf
from typing import Any

import numpy as np

from farstep.buffer.saving.contents_state import contents_state
from farstep.buffer.saving.mirror import Mirror, slices
from farstep.buffer.storage.contents import Contents
from farstep.buffer.storage.table import Table, latest_of
from farstep.checkpoint.files import ArrayParts
from farstep.core import Array
from farstep.errors import CheckpointError

BLOCK_BYTES = 2**23
"""Bytes that are copied at a time."""
_TRIES = 4
"""How often the arrays besides rows are copied in blocks, if more than one block of them changes meanwhile. After that,
they are copied at once; so are heaps of more than one block, which compute a new array for each checkpoint."""
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
            used = int(store.table.used.max())
        seen = self._copy_keys(store.table)
        schema, cells = store.blocks.schema, np.arange(used * store.columns)
        for name, spec in schema.items():
            yield f"rows/{name}", self._copied(name, cells, (used, store.columns, *spec.shape))

        row_bytes = max(1, sum(spec.nbytes for spec in schema.values()))
        left, number, tries = max(len(cells), _MIN_BLOCKS * BLOCK_BYTES // row_bytes), 1, _TRIES
        while True:
            mirrors = self._mirrored()
            with self._lock:
                contents, cells = self._contents(), _replaced(store.table.keys, seen)
                room = BLOCK_BYTES - len(cells) * row_bytes
                if room >= 0:
                    arrays = self._copy_rest(contents, mirrors, room if tries else inf)
                    if arrays is not None:
                        rows = {name: store.take_stored(name, cells) for name in schema}
                        break
                    tries -= 1
                    continue
            keys = self._copy_keys(store.table)
            cells = _replaced(keys, seen)
            seen, left = keys, left - len(cells)
            if left < 0:
                raise CheckpointError(
                    "the buffer could not be saved: its rows are replaced faster than they are written. Write to a "
                    "faster disk, or save when fewer rows are inserted."
                )
            yield f"cells/{number}", cells
            for name, spec in schema.items():
                yield f"rows{number}/{name}", self._copied(name, cells, (len(cells), *spec.shape))
            number += 1
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
            for some in slices(len(cells), spec.nbytes, BLOCK_BYTES):
                with self._lock:
                    block = self._contents().store.take_stored(name, cells[some])
                yield block

        return ArrayParts(shape, np.dtype(spec.dtype), blocks())

    def _copy_keys(self, table: Table) -> Array:
        """Copy the keys of all cells, block by block."""
        keys = np.empty_like(table.keys)
        for cells in slices(len(keys), keys.itemsize, BLOCK_BYTES):
            with self._lock:
                self._contents()
                keys[cells] = table.keys[cells]
        return keys

    def _mirrored(self) -> dict[str, Mirror]:
        """Copy everything except rows, block by block; `_copy_rest` applies later changes."""
        with self._lock:
            state, _ = contents_state(self._contents())
        mirrors = {name: Mirror(array) for name, array in state.items()}
        for mirror in mirrors.values():
            for block in mirror.blocks(BLOCK_BYTES):
                with self._lock:
                    self._contents()
                    mirror.copy(block)
        return mirrors

    def _copy_rest(
        self, contents: Contents, mirrors: Mapping[str, Mirror], room: float
    ) -> dict[str, Array | ArrayParts] | None:
        """Copy everything except rows; sparse rows are copied when they are written. The lock must be held.

        Args:
            contents: The contents.
            mirrors: Earlier copies.
            room: Maximum number of bytes to copy.

        Returns:
            The arrays; None if more than `room` bytes have changed since the earlier copies.
        """
        state, plain = contents_state(contents)
        arrays: dict[str, Array | ArrayParts] = {}
        for name, array in state.items():
            mirror = mirrors.get(name) or Mirror(array[:0])  # links may have been made meanwhile
            found = mirror.catch_up(array, BLOCK_BYTES, room)
            if found is None:
                return None
            pieces, size = found
            arrays[name], room = ArrayParts(array.shape, array.dtype, pieces), room - size
        self.description = self._describe() | plain
        for part, sparse in contents.store.sparse.items():
            cells, read = sparse.cells, sparse.keep()
            arrays[f"store/{part}"] = cells
            for name, spec in sparse.schema.items():
                blocks = map(partial(read, name), slices(len(cells), spec.nbytes, BLOCK_BYTES))
                arrays[f"store/{part}.{name}"] = ArrayParts((len(cells), *spec.shape), np.dtype(spec.dtype), blocks)
        return arrays


def _replaced(keys: Array, seen: Array) -> Array:
    """Return the cells whose row is not the one that they had with the keys `seen`."""
    changed = [
        np.flatnonzero(keys[cells] != seen[cells]) + cells.start
        for cells in slices(len(keys), keys.itemsize, BLOCK_BYTES)
    ]
    cells = np.concatenate(changed)
    is_other = latest_of(keys[cells]) != latest_of(seen[cells])  # a row whose item was removed is still the same
    replaced: Array = cells[is_other]
    return replaced
