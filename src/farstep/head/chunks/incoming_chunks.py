"""A remote worker's chunk on its way into its columns, whole or in parts; nothing that does not fit is taken in."""

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
    """Stages of a chunk that are complete."""

    ticket: IssuedTicket
    key: int
    """Consecutive for chunks of one worker process that follow each other without a gap."""
    version: int
    """What the chunk counts as, for its age."""
    part: Part


class IncomingChunk:
    """What is here of one chunk."""

    def __init__(self, rows: Rows, steps: int, ticket: int = 0, index: int = 0) -> None:
        self.id = (ticket, index)
        self.stages = 0
        """How many are complete."""
        self.ends: Array | None = None
        """Known once the first stage is here."""
        self.nbytes = 0
        self._num_envs = rows.num_envs
        self._tables = rows.tables(steps)
        self._per_step = {name for name in rows.row if not is_final(name)}
        """Arrays that may arrive some rows at a time."""
        self._rows: Counter[str] = Counter()
        """Per array, how many are here."""

    def add(self, keys: Sequence[str], frames: Sequence[BytesLike], first: int = 0, codecs: Sequence[str] = ()) -> None:
        """Copy a message's arrays to where they belong; those with a row per step begin with row `first`."""
        codecs = codecs or [""] * len(keys)
        if len(frames) != len(keys) or len(codecs) != len(keys):
            raise WireError("a chunk without all of its arrays.")
        for name, frame, codec in zip(keys, frames, codecs, strict=True):
            table = self._tables.get(name)
            if table is None:
                raise WireError(f"a chunk with the unknown array {name!r}.")
            if not table.nbytes:
                if len(frame):
                    raise WireError(f"a chunk whose {name!r} is not as empty as it must be.")
                continue
            start, here = first if name in self._per_step else 0, self._rows[name]
            if start != here:
                raise WireError(f"a chunk whose {name!r} goes on with row {start} after {here} rows.")
            self.nbytes += len(frame)
            row_bytes = table[0].nbytes
            if codec:
                pieces: Iterable[Array] = unpack(codec, frame, (len(table) - start) * row_bytes, row_bytes)
            elif len(frame) % row_bytes or len(frame) > (len(table) - start) * row_bytes:
                raise WireError(f"a chunk whose {name!r} has {len(frame)} bytes from row {start} on.")
            else:
                pieces = [np.frombuffer(frame, np.uint8).reshape(-1, row_bytes)]
            for rows in pieces:
                target = table[here : here + len(rows)]
                target[...] = rows.view(table.dtype).reshape(target.shape)
                here += len(rows)
            self._rows[name] = here

    def complete(self, stages: Sequence[Iterable[str]]) -> None:
        """The worker says that these are here, the ones before it included; believed only where it is true."""
        assert self.ends is not None
        for name in (name for names in stages[self.stages :] for name in names):
            table = self._tables[name]
            needed = -(-len(self.ends) // self._num_envs) if is_final(name) else len(table)
            if table.nbytes and self._rows[name] != needed:
                raise WireError(f"a chunk with {self._rows[name]} of the {needed} rows of its {name!r}.")
        self.stages = len(stages)


def records_of(ends: BytesLike, record: WorkerRecord, steps: int) -> Array:
    """Episode ends, believed only where they can be true."""
    if len(ends) % ENDS.itemsize or len(ends) // ENDS.itemsize > steps * record.num_envs:
        raise WireError("a chunk with more episode ends than steps.")
    records = np.frombuffer(ends, ENDS).copy()  # a view would keep the whole message
    if len(records):
        rows_fit = records["row"].min() >= 0 and records["row"].max() < steps
        if not rows_fit or records["slot"].min() < record.first or records["slot"].max() >= record.stop:
            raise WireError("a chunk with episode ends outside its rows or columns.")
    return records
