"""Diagnoses a run while it trains, and warns once about each cause."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping

from farstep.cluster_env import ClusterEnv, diagnoses_of
from farstep.observe.diagnosis import Diagnosis
from farstep.observe.diagnosis.rules import UPDATES

EVERY_S = 2.5
"""Seconds between two diagnoses."""


class RunDiagnosis:
    """Diagnoses a run every few seconds; emits a `warned` event for a cause that two diagnoses in a row have found.

    Args:
        env: The environments of the run.
        clock: Returns seconds.
    """

    def __init__(self, env: ClusterEnv, clock: Callable[[], float] = time.monotonic) -> None:
        self._env, self._clock = env, clock
        self._metrics: deque[Mapping[str, float]] = deque(maxlen=UPDATES)
        self._next_s = clock() + EVERY_S
        self._found: set[str] = set()
        """Causes that the last diagnosis found."""
        self._warned: set[str] = set()
        self.on_diagnosis: Callable[[Diagnosis], None] | None = None
        """Called with each diagnosis."""

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Add the metrics of an update, and diagnose the run if it is time.

        Args:
            metrics: Values by name, as logged.
        """
        self._metrics.append(metrics)
        if self._clock() < self._next_s:
            return
        self._next_s = self._clock() + EVERY_S
        found = diagnoses_of(self._env, self._metrics)
        for each in found:
            if each.is_problem and each.cause in self._found - self._warned:
                self._warned.add(each.cause)
                self._env.emit_event("warned", str(each))
        self._found = {each.cause for each in found}
        if self.on_diagnosis is not None:
            self.on_diagnosis(found[0])
