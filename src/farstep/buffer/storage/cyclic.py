"""Cyclic blocks: one array `[rows, columns, ...]` per key in shared memory, and a header of cursors.

Every column (an environment slot) has one writer and its own cursors. Cursors count rows from 0 and never decrease; row
`p` of a column is stored at `p % rows`. A writer first *claims* rows, which invalidates their old contents, then writes
the rows, and finally *commits* them, all keys at once or key by key. So a reader never uses a half-written row, even if
the writer was killed while writing. When a column changes its writer, it gets a new generation, and the new writer
continues after the last committed row.

A reader in another process maps the memory and copies rows. After copying, `read` checks the claim again, and discards
the copy if the rows were overwritten. The header also has read cursors of registered consumers, for `backlog`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from farstep.core import Array
from farstep.errors import ClosedError, ConfigError
from farstep.rollout.blocks import Layout
from farstep.schema import Schema
from farstep.wire.channels.memory import SharedMemory

_MAGIC = 0x6661727374657031  # "farstep1"
_WORDS = 8  # magic and the length of the description in bytes; the rest is reserved
_PAGE = 4096
_own = threading.local()


class _Description(msgspec.Struct):
    """The information that a process needs to map the blocks."""

    rows: Annotated[int, msgspec.Meta(ge=1)]
    columns: Annotated[int, msgspec.Meta(ge=1)]
    consumers: Annotated[int, msgspec.Meta(ge=0)]
    schema: Schema


class CyclicBlocks:
    """The blocks of one buffer, of this process or mapped from another process."""

    def __init__(self, memory: SharedMemory, description: _Description) -> None:
        self.memory = memory
        self.rows, self.columns, self.schema = description.rows, description.columns, description.schema
        self.keys = {name: i for i, name in enumerate(self.schema)}
        words = np.frombuffer(memory.map, np.int64, offset=_PAGE, count=_header_words(description))
        columns, keys = self.columns, max(1, len(self.keys))
        self.generation: Array = words[:columns]
        """For each column, how often a writer joined or left; odd while the column has a writer."""
        self.claimed: Array = words[columns : 2 * columns]
        """For each column, the end of the rows that may be half written."""
        self.written: Array = words[2 * columns : (2 + keys) * columns].reshape(keys, columns)
        """For each key and column, the number of committed rows."""
        self.cursors: Array = words[(2 + keys) * columns :].reshape(description.consumers, columns)
        """For each consumer and column, the number of rows that the consumer has read."""
        start = _PAGE + _pages(words.nbytes)
        blocks = _layout(description).views(memory.map[start:])
        self.arrays: dict[str, Array] = {name: block[0] for name, block in blocks.items()}

    @classmethod
    def create(cls, schema: Schema, rows: int, columns: int = 1, consumers: int = 0) -> CyclicBlocks:
        """Allocate shared memory for blocks; other processes attach to their `path`."""
        description = _Description(rows, columns, consumers, dict(schema))
        encoded = msgspec.msgpack.encode(description)
        if len(encoded) > _PAGE - 8 * _WORDS:
            raise ConfigError(
                f"the description of {len(schema)} arrays does not fit into the header; combine some of them."
            )
        memory = SharedMemory.create(cls.nbytes_of(schema, rows, columns, consumers), "farstep-buffer")
        np.frombuffer(memory.map, np.int64, 2)[:] = _MAGIC, len(encoded)
        memory.map[8 * _WORDS : 8 * _WORDS + len(encoded)] = encoded
        return cls(memory, description)

    @staticmethod
    def nbytes_of(schema: Schema, rows: int, columns: int = 1, consumers: int = 0) -> int:
        """Return the bytes of shared memory that `create` allocates."""
        description = _Description(rows, columns, consumers, dict(schema))
        return _PAGE + _pages(8 * _header_words(description)) + _layout(description).nbytes

    @classmethod
    def attach(cls, path: str | Path) -> CyclicBlocks:
        """Map the blocks of another process of this host. No code from the memory is executed.

        Args:
            path: `Buffer.path` of the other process, e.g. `message["path"]` of a workflow.

        Returns:
            The same blocks, for `read`.

        Raises:
            ConfigError: The file does not hold blocks of farstep.
            OSError: The file cannot be opened, e.g. because the other process has ended.
        """
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            nbytes = os.fstat(fd).st_size
            if nbytes < _PAGE:
                raise ConfigError(f"{path} does not hold blocks of farstep.")
            memory = SharedMemory(fd, nbytes)
        except BaseException:
            os.close(fd)
            raise
        magic, length = np.frombuffer(memory.map, np.int64, 2).tolist()
        try:
            if magic != _MAGIC or not 0 < length <= _PAGE - 8 * _WORDS:
                raise ConfigError(f"{path} does not hold blocks of farstep.")
            description = msgspec.msgpack.decode(memory.map[8 * _WORDS : 8 * _WORDS + length], type=_Description)
            if cls.nbytes_of(description.schema, description.rows, description.columns, description.consumers) > nbytes:
                raise ConfigError(f"{path} is smaller than the blocks it describes.")
            return cls(memory, description)
        except (msgspec.DecodeError, ConfigError) as error:
            memory.close()
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{path} does not hold blocks of farstep: {error}") from None

    @property
    def path(self) -> str:
        """Path of the memory, for other processes of this user. Valid while this process lives."""
        if self.memory.fd < 0:
            raise ClosedError("these blocks are closed.")
        return f"/proc/{os.getpid()}/fd/{self.memory.fd}"

    # ---- columns ----

    def join(self, first: int, count: int) -> Writer:
        """Become the writer of these columns and keep their committed rows."""
        if not 0 <= first <= first + count <= self.columns or count < 1:
            raise ConfigError(f"columns {first} to {first + count} are not within the {self.columns} reserved columns.")
        columns = slice(first, first + count)
        if (self.generation[columns] % 2).any():
            raise ConfigError(f"columns {first} to {first + count} have a writer; it must leave first.")
        self.generation[columns] += 1
        # A dead writer may have committed only some keys of its last rows: discard these rows.
        self.written[:, columns] = self.committed(columns)
        return Writer(self, first, count)

    def leave(self, first: int, count: int) -> None:
        """Release columns whose writer has ended. The next writer continues after the last committed row."""
        columns = slice(first, first + count)
        self.generation[columns] += self.generation[columns] % 2

    def committed(self, columns: slice = slice(None)) -> Array:
        """Return for each column the number of rows that are committed with all keys."""
        committed: Array = self.written[:, columns].min(axis=0)
        return committed

    # ---- reading ----

    def oldest(self, column: int) -> int:
        """Return the first row of a column that is neither overwritten nor being overwritten."""
        return max(0, int(self.claimed[column]) - self.rows)

    def read(self, column: int, start: int, count: int, keys: Sequence[str] | None = None) -> dict[str, Array] | None:
        """Copy committed rows `[start, start + count)` of a column.

        Args:
            column: The environment slot.
            start: Index of the first row, counted from the start of the column.
            count: Number of rows.
            keys: Names of the arrays; default: all.

        Returns:
            Arrays `[count, ...]` by name. None if some of the rows are not committed yet, or are already overwritten.
        """
        names = list(self.schema if keys is None else keys)
        generation = self.generation[column]
        places = np.arange(start, start + count) % self.rows
        if any(start + count > self.written[self.keys[name], column] for name in names):
            return None
        fence()
        copies = {name: self.arrays[name][places, column] for name in names}
        fence()
        # A new writer may have withdrawn rows that its predecessor committed only in part.
        return copies if start >= self.oldest(column) and self.generation[column] == generation else None

    def backlog(self, consumer: int) -> Array:
        """Return for each column the number of committed rows that a consumer has not read."""
        backlog: Array = self.committed() - self.cursors[consumer]
        return backlog

    def close(self) -> None:
        """Close the memory. It is unmapped when no array views it any more."""
        self.memory.close()


class _Run:
    """Adjacent columns of one writer that have equal cursors, and their part of the header."""

    __slots__ = ("claimed", "columns", "start", "written")

    def __init__(self, blocks: CyclicBlocks, columns: slice, start: int) -> None:
        self.columns, self.start = columns, start
        self.claimed, self.written = blocks.claimed[columns], blocks.written[:, columns]


class Writer:
    """The only writer of some columns, until it leaves."""

    def __init__(self, blocks: CyclicBlocks, first: int, count: int) -> None:
        self._blocks, self._columns = blocks, slice(first, first + count)
        self._ours = blocks.generation[self._columns]
        self._generation = self._ours.tobytes()
        self._first = first
        self._runs = [_Run(blocks, *run) for run in self._of(blocks.committed(self._columns))]
        self._reached = int(blocks.claimed[self._columns].max())
        """The highest end of all claims so far, in any of these columns."""

    def claim(self, rows: int) -> list[tuple[slice, int]]:
        """Invalidate the next `rows` rows before writing them.

        Returns:
            Runs of adjacent columns with equal cursors, each with the index of the first row to write.
        """
        blocks = self._blocks
        if rows > blocks.rows:
            raise ConfigError(f"{rows} rows at once do not fit into a block of {blocks.rows} rows.")
        self._check_ours()
        for run in self._runs:
            # Never decrease the claim: a dead writer may have started to overwrite later rows.
            until = run.start + rows
            if until >= self._reached:
                run.claimed.fill(until)
                self._reached = until
            else:
                np.maximum(run.claimed, until, out=run.claimed)
        fence()
        return [(run.columns, run.start) for run in self._runs]

    def commit(self, rows: int, keys: Sequence[str] | None = None) -> None:
        """Make the claimed rows readable: all arrays, or only those in `keys`."""
        self._check_ours()
        fence()
        if keys is None:
            for run in self._runs:
                run.start += rows
                run.written.fill(run.start)
            return
        for name in keys:
            self._blocks.written[self._blocks.keys[name], self._columns] += rows
        if self._complete(rows):
            for run in self._runs:
                run.start += rows

    def _check_ours(self) -> None:
        if self._ours.tobytes() != self._generation:
            raise ClosedError("these columns now belong to another writer.")

    def _complete(self, rows: int) -> bool:
        least = self._blocks.committed(self._columns)
        return all(least[run.columns.start - self._first] == run.start + rows for run in self._runs)

    def write(self, values: Mapping[str, Array]) -> None:
        """Claim, write and commit arrays `[T, n, ...]`."""
        if values.keys() != self._blocks.keys.keys():
            raise ConfigError(f"write got {', '.join(values)}; expected the arrays {', '.join(self._blocks.keys)}.")
        rows = len(next(iter(values.values())))
        for columns, start in self.claim(rows):
            part = slice(columns.start - self._first, columns.stop - self._first)
            for here, there in spans(start % self._blocks.rows, rows, self._blocks.rows):
                for name, value in values.items():
                    self._blocks.arrays[name][here, columns] = value[there, part]
        self.commit(rows)

    def _of(self, cursors: Array) -> list[tuple[slice, int]]:
        cuts = np.flatnonzero(np.diff(cursors)) + 1
        edges = [0, *cuts.tolist(), len(cursors)]
        return [(slice(self._first + a, self._first + b), int(cursors[a])) for a, b in pairwise(edges)]

    def leave(self) -> None:
        self._ours += self._ours == np.frombuffer(self._generation, np.int64)


def spans(place: int, count: int, rows: int) -> Iterator[tuple[slice, slice]]:
    """Split `count` rows from `place` on at the point where a cyclic block wraps around.

    Yields:
        One or two pairs (rows of the block, rows of the values).
    """
    until = min(count, rows - place)
    yield slice(place, place + until), slice(0, until)
    if until < count:
        yield slice(0, count - until), slice(until, count)


def fence() -> None:
    """Issue a full memory barrier: earlier reads and writes of this thread complete before later reads and writes.

    Releasing and acquiring a lock is a full barrier on all processors that Python supports. NumPy has no barrier, and
    ARM may reorder plain stores.
    """
    try:
        gate = _own.gate
    except AttributeError:
        gate = _own.gate = threading.Lock()
        gate.acquire()
    gate.release()
    gate.acquire()


def _layout(description: _Description) -> Layout:
    # A lane has `steps + 1` rows.
    return Layout(1, description.rows - 1, description.columns, description.schema)


def _header_words(description: _Description) -> int:
    return (2 + max(1, len(description.schema)) + description.consumers) * description.columns


def _pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE
