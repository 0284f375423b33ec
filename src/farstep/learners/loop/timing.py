"""Measures the phases of an update, and how workers spent their time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

WORKER_METRICS = {
    "env": "time/env/env_interact_step",
    "inference": "time/rollout/predict",
    "tickets": "time/rollout/tickets",
    "send": "time/rollout/send",
    "weights": "time/rollout/weights",
}
"""Name of the metric for each part of `stats()["time"]["workers"]`. The first two names are RLinf's."""


class Timer:
    """Sums seconds by name.

    Example:
        >>> with timer("actor_training"):
        ...     learn()
        >>> timer.take()
        {'time/actor_training': 0.31}
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the seconds spent inside the context to `name`."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - start

    def take(self) -> dict[str, float]:
        """Return the seconds since the last call as metrics `time/<name>`, and reset them to 0."""
        taken, self._seconds = self._seconds, {}
        return {f"time/{name}": seconds for name, seconds in taken.items()}


class WorkerTimer:
    """How workers spent their time between two updates, from `ClusterEnv.stats`."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}

    def take(self, stats: Mapping[str, Any]) -> dict[str, float]:
        """Return the seconds since the last call as metrics, averaged over the live workers."""
        now, alive = stats["time"]["workers"], max(1, stats["workers"]["alive"])
        before, self._before = self._before, now
        return {name: (now[part] - before.get(part, 0.0)) / alive for part, name in WORKER_METRICS.items()}
