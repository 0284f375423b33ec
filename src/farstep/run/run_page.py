"""The status page of a run of this process: started when it is first asked for, closed once."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from farstep.errors import ClosedError

if TYPE_CHECKING:
    from farstep.observe.status import RunView, StatusPage


class RunPage:
    """The status page of a run. Any thread may call its methods."""

    def __init__(self, run: RunView) -> None:
        self._run = run
        self._pid = os.getpid()
        self._page: StatusPage | None = None
        """None before the first call of `open`."""
        self._lock = threading.RLock()  # `close` may run in any thread during a garbage collection
        self._closed = False

    def open(self) -> StatusPage:
        """Return the page. The first call starts its server.

        Raises:
            ClosedError: The page is closed, or this is a fork of the process that launched the run.
            RunError: The server could not be started.
        """
        from farstep.observe.status import StatusPage  # not at launch: most programs show no page

        with self._lock:
            if self._closed:
                raise ClosedError("this run is closed; make a new one.")
            if self._pid != os.getpid():
                self._run.stats()  # raises if the run belongs to the other process
                self._page, self._pid = None, os.getpid()
            if self._page is None:
                self._page = StatusPage(self._run)
            return self._page

    def close(self) -> None:
        """Show the last data, then end the server. Further calls do nothing."""
        with self._lock:
            self._closed = True
            if self._page is not None:
                self._page.close()
