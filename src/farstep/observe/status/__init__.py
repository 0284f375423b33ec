"""The status page: shows a run, live or finished, in a browser."""

from __future__ import annotations

from farstep.observe.status.page_server import PageServer, as_json, page
from farstep.observe.status.sources import FolderSource, LiveSource, RunView
from farstep.observe.status.status_page import StatusPage

__all__ = ["FolderSource", "LiveSource", "PageServer", "RunView", "StatusPage", "as_json", "page"]
