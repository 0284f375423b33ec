"""Counters of a run at two moments, and the shares and rates between them; `diagnosis.py` judges them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from farstep.resources import MachineUse
from farstep.rollout.progress import ChunkProgress

MIN_WINDOW_S = 5.0
"""Seconds of a window from which shares of time mean something."""
PARTS = ("env", "inference", "tickets", "send", "weights")


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The counters of a run at one moment."""

    time_s: float
    """Any monotonic clock."""
    stats: Mapping[str, Any]
    """What `ClusterEnv.stats` returns; parts may be missing."""
    kl_threshold: float | None = None
    """Divergence above which workers pull weights; None: they do not pull by divergence."""
    restarts: Mapping[int, int] | None = None
    """Restarts of each worker in the last ten minutes; workers without one may be missing."""
    lost_node: bool = False
    """Whether a node was lost, or connected after such a loss, since the snapshot with which this one is compared."""
    machine: MachineUse | None = None
    """Processes and memory of the head's machine; None: not measured."""
    slowest_chunk: ChunkProgress | None = None
    """The chunk in progress that takes longest to complete; None: no worker rolls one."""
    metrics: Sequence[Mapping[str, float]] = ()
    """Metrics of the latest updates, as `farstep train` logs them, oldest first."""


class Window:
    """What happened between two snapshots."""

    def __init__(self, before: Snapshot, after: Snapshot) -> None:
        self.before, self.after = before, after
        self.seconds = after.time_s - before.time_s

    def grown(self, *path: str) -> float:
        """Return by how much a counter of `stats` has grown; 0 if it does not exist."""
        return _at(self.after.stats, path) - _at(self.before.stats, path)

    @cached_property
    def alive(self) -> int:
        """Workers that are alive now; at least 1."""
        found = self.after.stats.get("workers", {}).get("alive")
        return max(1, len(self.per_worker) if found is None else int(found))

    # ---- times ----

    @cached_property
    def per_worker(self) -> list[dict[str, float]]:
        """Seconds of each part of each worker's time, as reported with its chunks."""
        after = self.after.stats.get("time", {}).get("per_worker", [])
        before = self.before.stats.get("time", {}).get("per_worker", [])
        return [
            {part: max(0.0, now[part] - (before[i][part] if i < len(before) else 0.0)) for part in PARTS}
            for i, now in enumerate(after)
        ]

    @cached_property
    def workers(self) -> dict[str, float]:
        """Share of each part of the workers' time; all 0 if no worker has reported."""
        seconds = {part: sum(worker[part] for worker in self.per_worker) for part in PARTS}
        total = sum(seconds.values())
        return {part: each / total if total else 0.0 for part, each in seconds.items()}

    @cached_property
    def busy(self) -> list[float]:
        """For each worker that has reported, the share of its time in which it had a ticket."""
        totals = [(sum(worker.values()), worker["tickets"]) for worker in self.per_worker]
        return [(total - tickets) / total for total, tickets in totals if total > 0]

    @cached_property
    def on_the_way(self) -> float:
        """Share of the workers' time in which their tickets and chunks were on their way; 0 with shared memory."""
        total = sum(sum(worker.values()) for worker in self.per_worker)
        busy = sum(sum(worker.values()) - worker["tickets"] for worker in self.per_worker)
        return max(0.0, self.grown("time", "head", "held") - busy) / total if total else 0.0

    @cached_property
    def learner(self) -> dict[str, float]:
        """Share of each part of the learner's time.

        With `make_vec` the learner is not measured. Environments are then stepped in lock-step, so that it waits while
        the busiest worker is busy.
        """
        seconds = {part: max(0.0, self.grown("time", "learner", part)) for part in self._learner_parts}
        total = sum(seconds.values())
        if not total:
            waits = 0.0 if self._learner_parts else max(self.busy, default=0.0)
            return {"wait": waits, "prepare": 0.0, "update": 1 - waits, "publish": 0.0}
        return {part: each / total for part, each in seconds.items()}

    @property
    def _learner_parts(self) -> Sequence[str]:
        return tuple(self.after.stats.get("time", {}).get("learner", ()))

    # ---- processes ----

    @cached_property
    def cores_wanted(self) -> dict[str, float]:
        """For each local process, how many of its threads ran or waited for a core, on average."""
        before, after = self.before.machine, self.after.machine
        if before is None or after is None or self.seconds <= 0:
            return {}
        return {
            key[0]: max(0.0, use.runnable_s - before.processes[key].runnable_s) / self.seconds
            for key, use in after.processes.items()
            if key in before.processes
        }

    @cached_property
    def memory_growth(self) -> dict[str, float]:
        """For each local process, bytes by which its memory has grown."""
        before, after = self.before.machine, self.after.machine
        if before is None or after is None:
            return {}
        return {
            key[0]: use.anonymous_bytes - before.processes[key].anonymous_bytes
            for key, use in after.processes.items()
            if key in before.processes
        }

    # ---- metrics of updates ----

    def mean(self, name: str) -> float | None:
        """Return the mean of a metric over the updates in which it is finite; None if there is none."""
        values = [metrics[name] for metrics in self.after.metrics if math.isfinite(metrics.get(name, math.nan))]
        return sum(values) / len(values) if values else None


def _at(stats: Mapping[str, Any], path: Sequence[str]) -> float:
    value: Any = stats
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return 0.0 if value is None else float(value)
