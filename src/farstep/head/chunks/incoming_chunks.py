"""Checks the arrays of a remote worker's chunk, and copies them into the worker's columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from farstep.batch import ENDS, Part, is_final
from farstep.core import Array, BytesLike
from farstep.errors import WireError
from farstep.head.members.worker_records import WorkerRecord
from farstep.head.tickets.records import IssuedTicket
from farstep.rollout.rows import Rows
from farstep.wire.compression import unpack


@dataclass(frozen=True)
class EarlyPart:
    """The complete stages of a chunk whose later stages may be missing."""

    ticket: IssuedTicket
    key: int
    """Key of the chunk; successive chunks of one worker process without a gap have consecutive keys."""
    version: int
    """The version from which the staleness of the chunk is counted."""
    part: Part


class IncomingChunk:
    """The arrays of one chunk that have arrived so far."""

    def __init__(self, rows: Rows, steps: int, ticket: int = 0, index: int = 0) -> None:
        self.id = (ticket, index)
        self.stages = 0
        """Number of complete stages."""
        self.ends: Array | None = None
        """Episode ends; they arrive with the first stage."""
        self.nbytes = 0
        self._num_envs = rows.num_envs
        self._tables = rows.tables(steps)
        self._per_step = {name for name in rows.row if not is_final(name)}
        """Arrays that may arrive in several messages."""
        self._rows: Counter[str] = Counter()
        """For each array, the number of rows that have arrived."""

    def add(self, keys: Sequence[str], frames: Sequence[BytesLike], first: int = 0, codecs: Sequence[str] = ()) -> None:
        """Copy a message's arrays into the columns.

        Args:
            keys: Names of the arrays.
            frames: Their bytes.
            first: Index of the first row, for arrays with one row per step.
            codecs: Compression of each array; empty: none is compressed.
        """
        codecs = codecs or [""] * len(keys)
        if len(frames) != len(keys) or len(codecs) != len(keys):
            raise WireError(f"a chunk of {len(keys)} arrays with {len(frames)} frames and {len(codecs)} codecs.")
        for name, frame, codec in zip(keys, frames, codecs, strict=True):
            table = self._tables.get(name)
            if table is None:
                raise WireError(f"a chunk with the unknown array {name!r}.")
            if not table.nbytes:
                if len(frame):
                    raise WireError(f"a chunk whose {name!r} has {len(frame)} bytes; expected none.")
                continue
            start, arrived = first if name in self._per_step else 0, self._rows[name]
            if start != arrived:
                raise WireError(f"a chunk whose {name!r} continues with row {start} after {arrived} rows.")
            self.nbytes += len(frame)
            row_bytes = table[0].nbytes
            if codec:
                pieces: Iterable[Array] = unpack(codec, frame, (len(table) - start) * row_bytes, row_bytes)
            elif len(frame) % row_bytes or len(frame) > (len(table) - start) * row_bytes:
                raise WireError(
                    f"a chunk whose {name!r} has {len(frame)} bytes from row {start} on; a row has {row_bytes}."
                )
            else:
                pieces = [np.frombuffer(frame, np.uint8).reshape(-1, row_bytes)]
            for rows in pieces:
                target = table[arrived : arrived + len(rows)]
                target[...] = rows.view(table.dtype).reshape(target.shape)
                arrived += len(rows)
            self._rows[name] = arrived

    def complete(self, stages: Sequence[Iterable[str]]) -> None:
        """Check that all arrays of the first `len(stages)` stages have arrived, as the worker claims."""
        assert self.ends is not None
        for name in (name for names in stages[self.stages :] for name in names):
            table = self._tables[name]
            needed = -(-len(self.ends) // self._num_envs) if is_final(name) else len(table)
            if table.nbytes and self._rows[name] != needed:
                raise WireError(f"a chunk with {self._rows[name]} of the {needed} rows of {name!r}.")
        self.stages = len(stages)


def decode_ends(ends: BytesLike, record: WorkerRecord, steps: int) -> Array:
    """Decode a chunk's episode ends. Raise `WireError` if an end lies outside the rows or columns of the chunk."""
    if len(ends) % ENDS.itemsize or len(ends) // ENDS.itemsize > steps * record.num_envs:
        raise WireError("a chunk with more episode ends than steps.")
    records = np.frombuffer(ends, ENDS).copy()  # a view would keep the whole message alive
    if len(records):
        rows_fit = records["row"].min() >= 0 and records["row"].max() < steps
        if not rows_fit or records["slot"].min() < record.first or records["slot"].max() >= record.stop:
            raise WireError("a chunk with episode ends outside its rows or columns.")
    return records
