"""The counters of `env.stats()`; every logger uses the same names."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from farstep.batch import Batch
from farstep.head.members.membership import State
from farstep.head.server import Server
from farstep.head.stats.learner_times import LearnerTimes
from farstep.head.stats.rates import Rate
from farstep.head.stats.worker_times import WorkerTimes
from farstep.head.tickets.records import AcceptedChunk
from farstep.rollout.progress import REQUESTS, SERVED_BATCHES, SERVED_ROWS, WAITED_US
from farstep.wire.messages import Chunk

_STATE_NAMES = {state: state.value for state in State} | {
    State.CONSTRUCTING: "starting",
    State.WAITING: "starting",
    State.DYING: "lost",
}
"""What users see of a worker's state; a worker that waits for a node is `queued`."""
_STARTING = (State.STARTING, State.CONSTRUCTING, State.WAITING)
_WINDOW = 100
"""Number of latest episodes over which returns and lengths are averaged."""


class Counters:
    """Counters of a run, updated as chunks arrive and batches are delivered."""

    def __init__(self, num_workers: int) -> None:
        self.steps = self.chunks = self.episodes = self.stagger_steps = 0
        self.weights_sent = self.probes_sent = self.rollouts_received = 0
        self.pulls = [0] * num_workers
        self.divergence: dict[int, float] = {}
        self.receive_s = 0.0
        """Seconds that the head spent on copying arrays of workers without shared memory."""
        self.learner, self.workers = LearnerTimes(), WorkerTimes(num_workers)
        self._rate = Rate()
        self._returns: deque[float] = deque(maxlen=_WINDOW)
        self._lengths: deque[float] = deque(maxlen=_WINDOW)
        self._lag_sum = self._lag_rows = self._lag_max = 0
        self._lags: list[Counter[int]] = [Counter() for _ in range(num_workers)]
        self._oldest: int | None = None

    def received(self, worker: int, nbytes: int, steps: int) -> None:
        """Count the bytes and the environment steps of an accepted chunk."""
        self.rollouts_received += nbytes
        if steps:
            self.workers.arrived(worker, steps, time.monotonic())

    def reported(self, worker: int, chunk: Chunk) -> None:
        """Add a worker's report on pulls, waiting times and divergence. Even a cancelled chunk has a report."""
        if chunk.divergence is not None:
            self.divergence[worker] = chunk.divergence
        self.pulls[worker] += chunk.syncs
        self.weights_sent += chunk.synced_bytes
        self.workers.add(worker, chunk.times)
        self.stagger_steps += chunk.stagger_steps

    def forget(self, worker: int) -> None:
        """Forget the divergence and the rate of a worker that has ended."""
        self.divergence.pop(worker, None)
        self.workers.forget(worker)

    def batch(self, batch: Batch, accepted: Sequence[AcceptedChunk], version: int) -> None:
        """Count a batch that is delivered to the learner."""
        rows, slots = batch.shape
        self.steps += rows * slots
        self.chunks += len(accepted) if rows else 0  # a reset has no rows
        self._rate.add(rows * slots, time.monotonic())
        self.episodes += len(batch.episodes["return"])
        self._returns.extend(batch.episodes["return"].tolist())
        self._lengths.extend(batch.episodes["length"].tolist())
        if rows:
            versions = np.asarray(batch["version"]).min(axis=0)  # an acting server may mix versions within a chunk
            lags = version - versions
            for chunk in accepted:
                self._lags[chunk.ticket.worker][_bucket(version - chunk.info.version)] += 1
            self._lag_sum += int(lags.sum())
            self._lag_rows += len(lags)
            self._lag_max = max(self._lag_max, int(lags.max()))
            oldest = int(versions.min())
            self._oldest = oldest if self._oldest is None else min(self._oldest, oldest)

    def snapshot(self, server: Server, version: int, inference: str) -> dict[str, Any]:
        """All counters as plain data, as `ClusterEnv.stats` returns them."""
        tickets, now = server.tickets, time.monotonic()
        return {
            "steps": self.steps,
            "stagger_steps": self.stagger_steps,
            "chunks": self.chunks,
            "rolled": tickets.issued,
            "delivered": tickets.delivered,
            "buffered": tickets.buffered,
            "in_flight": tickets.in_flight,
            "dropped": dict(tickets.dropped),
            "steps_per_second": self._rate.per_second(now),
            **members_snapshot(server, self.workers, now),
            "pulls": {"total": self._total_pulls(server), "per_worker": list(self.pulls)},
            "bytes": {
                "weights_sent": self.weights_sent,
                "base_sent": server.outbox.base_sent,
                "probes_sent": self.probes_sent,
                "rollouts_received": self.rollouts_received,
            },
            "versions": {
                "current": version,
                "oldest_consumed": self._oldest,
                "lag_mean": self._lag_sum / self._lag_rows if self._lag_rows else 0.0,
                "lag_max": self._lag_max,
                "lag_histogram": [dict(sorted(lags.items())) for lags in self._lags],
            },
            "divergence": dict(self.divergence),
            "inference": inference,
            "acting": self._acting(server, now) if server.outbox.is_served else [],
            "start": dict(server.handshake.start_s),
            "time": {
                "workers": self.workers.total(),
                "per_worker": self.workers.per_worker(),
                "learner": self.learner.snapshot(),
                "head": {"receive": self.receive_s, "held": self.workers.held_s},
            },
            "episodes": {
                "count": self.episodes,
                "return_mean": float(np.mean(self._returns)) if self._returns else None,
                "length_mean": float(np.mean(self._lengths)) if self._lengths else None,
            },
        }

    def _total_pulls(self, server: Server) -> int:
        """Pulls of all workers or, if acting servers pull, of all servers. Workers of one server count the same."""
        if not server.outbox.is_served:
            return sum(self.pulls)
        return sum(max((self.pulls[worker] for worker in clients), default=0) for clients in server.clients())

    def _acting(self, server: Server, now: float) -> list[dict[str, Any]]:
        """What each acting server has done for its workers, from their progress words."""
        rates, found = self.workers.rates(now), []
        for record, clients in zip(server.servers, server.clients(), strict=True):
            rows, batches = int(record.words[SERVED_ROWS]), int(record.words[SERVED_BATCHES])
            words = [server.records[worker].words for worker in clients]
            requests, waited = (sum(int(each[i]) for each in words) for i in (REQUESTS, WAITED_US))
            found.append(
                {
                    "host": record.host,
                    "pid": record.pid,
                    "rows": rows,
                    "batches": batches,
                    "batch_size": rows / batches if batches else 0.0,
                    "wait_ms": waited / requests / 1000 if requests else 0.0,
                    "rows_per_second": sum(rates[worker] for worker in clients),
                    "restarts": record.incarnation,
                }
            )
        return found


def members_snapshot(server: Server, times: WorkerTimes, now: float) -> dict[str, Any]:
    """The entries `workers`, `slots` and `nodes` of `ClusterEnv.stats`. Call it with the server's lock."""
    members, tickets = server.supervisor.membership, server.tickets
    absent = sum(members.members[worker].state in _STARTING for worker in tickets.presence.absent)
    held_s, on_disk = members.slots.held_seconds(now), server.supervisor.launcher.on_disk()
    return {
        "workers": {
            "alive": members.count(State.ALIVE, State.RELEASED),
            "starting": members.count(*_STARTING) - absent,
            "queued": max(0, absent - server.supervisor.launcher.spare()),  # spare workers may have stopped
            "parked": members.count(State.PARKED),
            "on_disk": len(on_disk),
            "disk_bytes": sum(on_disk.values()),
            "lost": members.count(State.DYING),
            "restarts": members.restarts,
            "states": _states(server),
            "hosts": [record.host for record in server.records],
            "cores": [record.cores for record in server.records],
            "steps_per_second": times.rates(now),
        },
        "slots": {
            "held": members.slots.held,
            "held_seconds": held_s,
            "used_seconds": times.used_s(),
            "gpu_seconds": held_s * server.gpus_per_worker,
        },
        "nodes": server.supervisor.launcher.nodes(),
    }


def _states(server: Server) -> list[str]:
    """The state of each worker, in words of `stats`."""
    members, absent = server.supervisor.membership.members, server.tickets.presence.absent
    names = [_STATE_NAMES[members[record.worker].state] for record in server.records]
    return ["queued" if k in absent and name == "starting" else name for k, name in enumerate(names)]


def _bucket(lag: int) -> int:
    """Round lags of 16 and more down to a power of two, to keep the histogram short."""
    return lag if lag < 16 else 1 << lag.bit_length() - 1


def scalars(stats: Mapping[str, Any], prefix: str = "farstep") -> dict[str, float]:
    """Flatten the numbers of `env.stats()`, for TensorBoard and similar tools.

    Args:
        stats: The result of `stats` of an environment or a workflow; may be nested.
        prefix: First part of each name. Default: "farstep".

    Returns:
        The numbers by path, e.g. `farstep/bytes/weights_sent`. Other values, numbers that are not finite,
        and `lag_histogram` are left out.
    """
    return dict(_numbers(stats, prefix))


def _numbers(value: Any, path: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            if key != "lag_histogram":  # not a scalar
                yield from _numbers(part, f"{path}/{key}")
    elif isinstance(value, list):
        for i, part in enumerate(value):
            yield from _numbers(part, f"{path}/{i}")
    elif isinstance(value, (int, float)) and math.isfinite(value):
        yield path, float(value)
