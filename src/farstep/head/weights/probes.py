"""Evaluates the new policy, once per publish, on rows that workers have sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from farstep.agents.divergence import Comparison
from farstep.core import Array
from farstep.head.members.worker_records import WorkerRecord
from farstep.rollout.probe_rows import ProbeRows, RecentProbeRows, joined, probe_rows_of
from farstep.rollout.rows import Rows
from farstep.wire.messages import Chunk

_MAX_UNANSWERED = 64
"""Maximum number of probes sent to a worker between two of its chunks. It uses only the latest few; each takes
memory."""


@dataclass(frozen=True)
class ProbeRequest:
    """The rows for one worker's probe."""

    worker: int
    incarnation: int
    probed: Sequence[ProbeRows]

    @property
    def indices(self) -> list[int]:
        return [rows_of_chunk.index for rows_of_chunk in self.probed]


class Prober:
    """Keeps rows of every worker's latest chunks, and evaluates the learner's policy on them.

    Args:
        comparison: Describes the policy on given rows.
        records: All workers.
        rows: Rows per chunk.
    """

    def __init__(self, comparison: Comparison, records: Sequence[WorkerRecord], rows: int) -> None:
        self._comparison, self._rows = comparison, rows
        self._records = records
        self._recent = [RecentProbeRows(rows) for _ in records]
        self._incarnations = [-1] * len(records)
        self._unanswered = [0] * len(records)
        """Probes sent to each worker since its last chunk."""

    @property
    def method(self) -> str:
        """The agent's method that describes the policy."""
        return self._comparison.method

    def remember(self, record: WorkerRecord, chunk: Chunk, rows: Rows, steps: int) -> None:
        """Keep rows of an accepted chunk for later probes."""
        probed = self._recent[record.worker]
        if self._incarnations[record.worker] != record.incarnation:
            probed.clear()  # a restarted worker does not have the rows of its predecessor
            self._incarnations[record.worker] = record.incarnation
        probed.add(probe_rows_of(self._comparison, chunk.index, chunk.version, rows, steps, self._rows))
        self._unanswered[record.worker] = 0

    def requests(self) -> list[ProbeRequest]:
        """A request for each ready worker, except workers that sent no chunk during the last `_MAX_UNANSWERED`
        probes."""
        found = []
        for record in self._records:
            self._unanswered[record.worker] += 1
            if not record.ready or self._unanswered[record.worker] > _MAX_UNANSWERED:
                continue
            same = self._incarnations[record.worker] == record.incarnation
            probed = self._recent[record.worker].all() if same else ()
            found.append(ProbeRequest(record.worker, record.incarnation, probed))
        return found

    def answers(self, requests: Sequence[ProbeRequest]) -> list[dict[str, Array]]:
        """Describe the policy on the rows of all requests in one evaluation; empty for a request without rows."""
        probed = [rows_of_chunk for request in requests for rows_of_chunk in request.probed]
        if not probed:
            return [{} for _ in requests]
        described = self._comparison.describe(joined(probed))
        ends = np.cumsum([sum(rows_of_chunk.rows for rows_of_chunk in request.probed) for request in requests])
        parts = {name: np.split(array, ends[:-1]) for name, array in described.items()}
        return [
            {name: part[i] for name, part in parts.items()} if request.probed else {}
            for i, request in enumerate(requests)
        ]
