"""The status page of a run of this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from farstep.event import Event
from farstep.observe.diagnosis import Diagnosis
from farstep.observe.status.page_server import PageServer
from farstep.observe.status.sources import LiveSource


class StatusPage:
    """Shows a run until `close`; the arguments are those of `LiveSource`."""

    def __init__(
        self,
        stats: Callable[[], dict[str, Any]],
        events: Callable[[], list[Event]],
        diagnose: Callable[[], Sequence[Diagnosis]],
        kl_threshold: float | None,
        title: str,
    ) -> None:
        self.source = LiveSource(stats, events, diagnose, kl_threshold, title)
        try:
            self._server = PageServer(self.source)
        except BaseException:
            self.source.close()
            raise

    @property
    def url(self) -> str:
        """Address of the page, with its token."""
        return self._server.url

    def close(self) -> None:
        """Show the last data, then disconnect. May be called twice."""
        try:
            self.source.close()
        finally:
            self._server.close()
