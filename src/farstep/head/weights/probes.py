"""Evaluates the new policy, once per publish, on rows that workers have sent."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

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
    """The rows for the probe of one worker or one acting server."""

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
        servers: Acting servers, each with the workers for which it acts; empty if workers act themselves.
    """

    def __init__(
        self,
        comparison: Comparison,
        records: Sequence[WorkerRecord],
        rows: int,
        servers: Sequence[tuple[WorkerRecord, Sequence[int]]] = (),
    ) -> None:
        self._comparison, self._rows, self._servers = comparison, rows, servers
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
        found = probe_rows_of(self._comparison, chunk.index, chunk.version, rows, steps, self._rows)
        if self._servers:  # their probes have chunks of several workers, in which several versions may have acted
            versions = rows.row["version"][:steps]
            is_mixed = bool((versions != chunk.version).any())
            unique = chunk.index * len(self._records) + record.worker
            found = replace(found, index=unique, version=-1 if is_mixed else chunk.version)
        probed.add(found)
        self._unanswered[record.worker] = 0

    def requests(self) -> list[ProbeRequest]:
        """A request for each ready worker, except workers that sent no chunk during the last `_MAX_UNANSWERED`
        probes; or for each acting server."""
        if self._servers:
            return [self._of_server(server, clients) for server, clients in self._servers if server.ready]
        found = []
        for record in self._records:
            self._unanswered[record.worker] += 1
            if not record.ready or self._unanswered[record.worker] > _MAX_UNANSWERED:
                continue
            same = self._incarnations[record.worker] == record.incarnation
            probed = self._recent[record.worker].all() if same else ()
            found.append(ProbeRequest(record.worker, record.incarnation, probed))
        return found

    def late_requests(self, requests: Sequence[ProbeRequest]) -> list[ProbeRequest]:
        """Requests without rows for the acting servers that have become ready since `requests`. A server waits for the
        probe of every version that it has not pulled."""
        known = {(request.worker, request.incarnation) for request in requests}
        ready = [server for server, _ in self._servers if server.ready]
        return [ProbeRequest(s.worker, s.incarnation, ()) for s in ready if (s.worker, s.incarnation) not in known]

    def _of_server(self, server: WorkerRecord, clients: Sequence[int]) -> ProbeRequest:
        """A request with the newest rows of all workers for which a server acts."""
        newest_first = [reversed(self._recent[worker].all()) for worker in clients]
        alternating = itertools.chain.from_iterable(itertools.zip_longest(*newest_first))
        probed: list[ProbeRows] = []
        for rows_of_chunk in alternating:
            if rows_of_chunk is not None and sum(each.rows for each in probed) < self._rows:
                probed.append(rows_of_chunk)
        return ProbeRequest(server.worker, server.incarnation, probed)

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
