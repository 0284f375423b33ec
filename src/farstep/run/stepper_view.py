"""What the status page shows of a vector environment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farstep.head.events import EventLog
from farstep.head.stepping.stepper import Stepper
from farstep.run.launch_monitor import LaunchMonitor
from farstep.run.run_page import RunPage

if TYPE_CHECKING:
    from farstep.observe.diagnosis import Diagnosis


class StepperView:
    """The `RunView` of a vector environment; also closes it."""

    kl_threshold: float | None = None

    def __init__(self, stepper: Stepper, events: EventLog, title: str) -> None:
        self._stepper, self.stats, self.events, self.title = stepper, stepper.stats, events.events, title
        self.monitor: LaunchMonitor | None = None
        """Not that of `diagnose`: a diagnosis covers the time since the last one. Set before the page can be opened."""

    def diagnoses(self) -> list[Diagnosis]:
        assert self.monitor is not None
        return self.monitor.diagnoses(self.stats())

    def unconnected_nodes(self) -> str:
        return self._stepper.server.unconnected_nodes()

    def close(self, page: RunPage) -> None:
        """Close the page, then end the workers."""
        try:
            page.close()
        finally:
            self._stepper.close()
