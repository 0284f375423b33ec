"""Knows which slots of a chunk continue the rows that the learner received last."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from farstep.core import Array
from farstep.head.members.worker_records import WorkerRecord
from farstep.head.tickets.records import AcceptedChunk


class Continuity:
    """For each slot, the key of the last chunk that the learner received; -1 if the next chunk cannot continue it."""

    def __init__(self, records: Sequence[WorkerRecord]) -> None:
        self._records = records
        self.last = np.full(records[-1].stop, -1, np.int64)

    def continues(self, worker: int, key: int) -> Array:
        """For each slot of a worker, whether the chunk with this key directly follows the last delivered chunk."""
        continues: Array = self.last[self._records[worker].columns] == key - 1
        return continues

    def deliver(self, accepted: AcceptedChunk, steps: int) -> Array:
        """Record that the learner receives a chunk; return `continues` of this chunk."""
        columns = self._records[accepted.ticket.worker].columns
        key = accepted.info.key
        continues: Array = self.last[columns] == key - 1
        if steps:  # a reset has no rows to continue
            self.last[columns] = key
        return continues

    def interrupt(self, slots: Array | slice = slice(None)) -> None:
        """Record that the next chunk of these slots does not continue earlier rows."""
        self.last[slots] = -1
