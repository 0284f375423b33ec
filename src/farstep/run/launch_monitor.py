"""Monitors a run from its launch, to diagnose it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from farstep.head.server import Server
from farstep.resources import machine_use

if TYPE_CHECKING:
    from farstep.observe.diagnosis import Diagnosis, RunMonitor


class LaunchMonitor:
    """Notes what the machine has used when the workers have started; creates the `RunMonitor` when first needed."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._at_launch = (time.monotonic(), machine_use(server.local_pids()))
        self._monitor: RunMonitor | None = None
        """None before the first call of `diagnoses`."""

    def diagnoses(
        self,
        stats: Mapping[str, Any],
        kl_threshold: float | None = None,
        metrics: Sequence[Mapping[str, float]] = (),
    ) -> list[Diagnosis]:
        """Return the diagnoses of `RunMonitor.diagnoses`, with these arguments."""
        from farstep.observe.diagnosis import RunMonitor  # not at launch: `farstep.observe` imports the terminal

        if self._monitor is None:
            self._monitor = RunMonitor(self._server.events, *self._at_launch)
        with self._server.locked():
            chunk = self._server.supervisor.slowest_chunk()
        return self._monitor.diagnoses(stats, machine_use(self._server.local_pids()), kl_threshold, metrics, chunk)
