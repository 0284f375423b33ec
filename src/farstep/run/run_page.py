"""The status page of a run of this process: started when it is first asked for, closed once."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Protocol

from farstep.errors import ClosedError
from farstep.head.events import EventLog

if TYPE_CHECKING:
    from farstep.observe.diagnosis import Diagnosis
    from farstep.observe.status import StatusPage


class Shown(Protocol):
    """A run, as the page shows it."""

    def stats(self) -> dict[str, Any]:
        """Return the counters of the run, or some of them, as `ClusterEnv.stats`."""
        ...

    def diagnoses(self) -> list[Diagnosis]:
        """Return what the run is waiting for."""
        ...


class RunPage:
    """The status page of a run. Any thread may call its methods.

    Args:
        run: What to show.
        events: The events of the run.
        kl_threshold: The divergence above which workers pull weights; None: they do not pull by divergence.
        title: Name of the run.
    """

    def __init__(self, run: Shown, events: EventLog, kl_threshold: float | None, title: str) -> None:
        self._arguments = (run.stats, events.events, run.diagnoses, kl_threshold, title)
        self._page: StatusPage | None = None
        """None before the first call of `open`."""
        self._lock = threading.RLock()  # `close` may run in any thread during a garbage collection
        self._closed = False

    def open(self) -> StatusPage:
        """Return the page. The first call starts its server.

        Raises:
            ClosedError: The page is closed.
            RunError: The server could not be started.
        """
        from farstep.observe.status import StatusPage  # not at launch: most programs show no page

        with self._lock:
            if self._closed:
                raise ClosedError("this run is closed; make a new one.")
            if self._page is None:
                self._page = StatusPage(*self._arguments)
            return self._page

    def close(self) -> None:
        """Show the last data, then end the server. Further calls do nothing."""
        with self._lock:
            self._closed = True
            if self._page is not None:
                self._page.close()
