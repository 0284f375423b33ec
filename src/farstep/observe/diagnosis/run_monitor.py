"""Keeps the counters of the last half minute, and diagnoses a run from them."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, SupportsFloat

from farstep.config.launch import RESTART_WINDOW_S
from farstep.errors import ConfigError
from farstep.head.events import EventLog
from farstep.observe.diagnosis.diagnosis import Diagnosis, all_diagnoses
from farstep.observe.diagnosis.run_window import MIN_WINDOW_S, Snapshot, Window
from farstep.observe.glossary import METRICS
from farstep.resources import MachineUse
from farstep.rollout.progress import ChunkProgress

_WINDOW_S = 30.0
"""Seconds that a diagnosis looks back; longer if the last one was made earlier."""


class RunMonitor:
    """Diagnoses one run; costs nothing between two calls.

    Args:
        events: The events of the run.
        launched_s: When the workers were ready, in `time.monotonic()` seconds.
        machine: What its processes had used then.
    """

    def __init__(self, events: EventLog, launched_s: float, machine: MachineUse) -> None:
        self._events = events
        self._kept = deque([Snapshot(time_s=launched_s, stats={}, machine=machine)])

    def diagnoses(
        self,
        stats: Mapping[str, Any],
        machine: MachineUse,
        kl_threshold: float | None = None,
        metrics: Sequence[Mapping[str, float]] = (),
        slowest_chunk: ChunkProgress | None = None,
    ) -> list[Diagnosis]:
        """Diagnose the run since the oldest call of the last half minute; before a second call, since its launch.

        Args:
            stats: The counters now.
            machine: What the processes of the run have used.
            kl_threshold: As in `Snapshot`.
            metrics: As in `Snapshot`.
            slowest_chunk: As in `Snapshot`.

        Returns:
            The most important diagnosis, then further causes that are independent of it.

        Raises:
            ConfigError: `metrics` is not a list of mappings from names to numbers.
        """
        metrics = _checked(metrics)
        restarts = self._events.events(["restarted"], since=time.time() - RESTART_WINDOW_S)
        now = Snapshot(
            time_s=time.monotonic(),
            stats=stats,
            kl_threshold=kl_threshold,
            restarts=Counter(event.worker for event in restarts if event.worker is not None),
            machine=machine,
            slowest_chunk=slowest_chunk,
            metrics=metrics,
        )
        before = self._before(now)
        lost_node = self._lost_node(time.time() - (now.time_s - before.time_s))
        return all_diagnoses(Window(before, replace(now, lost_node=lost_node)))

    def _lost_node(self, since: float) -> bool:
        """Whether a node was lost after `since` (Unix time), or connected after such a loss."""
        nodes = [event for event in self._events.events(["lost", "joined"]) if event.worker is None]
        first = next((event.time for event in nodes if event.kind == "lost"), math.inf)
        return any(event.time >= max(first, since) for event in nodes)

    def _before(self, now: Snapshot) -> Snapshot:
        """Return the snapshot to compare with, and keep the new one; the start of a run is left out if possible."""
        kept = self._kept
        while len(kept) > 1 and now.time_s - kept[1].time_s >= (
            _WINDOW_S if kept[0].stats.get("steps") else MIN_WINDOW_S
        ):
            kept.popleft()
        before = kept[0]
        if now.time_s - kept[-1].time_s >= MIN_WINDOW_S:
            kept.append(now)
        return before


def _checked(metrics: Sequence[Mapping[str, float]]) -> tuple[Mapping[str, float], ...]:
    """Return the metrics of updates; raise `ConfigError` if they are anything else."""
    expected = "expected a list with the metrics of each update, such as [{'train/actor/ess': 0.9}]"
    if isinstance(metrics, Mapping | str) or not isinstance(metrics, Iterable):
        raise ConfigError(f"diagnose got {type(metrics).__name__} as metrics; {expected}.")
    updates = tuple(metrics)
    for update in updates:
        if not isinstance(update, Mapping):
            raise ConfigError(f"diagnose got {type(update).__name__} as the metrics of an update; {expected}.")
        for name, value in update.items():
            if name in METRICS and not isinstance(value, SupportsFloat):  # other names may have any values
                raise ConfigError(f"diagnose got the metric {name!r} as {type(value).__name__}; {expected}.")
    return updates
