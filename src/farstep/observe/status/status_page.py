"""The status page of a run of this process."""

from __future__ import annotations

from farstep.observe.status.page_server import PageServer
from farstep.observe.status.sources import LiveSource, RunView


class StatusPage:
    """Shows a run until `close`."""

    def __init__(self, run: RunView) -> None:
        self.source = LiveSource(run)
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
