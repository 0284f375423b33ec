"""`farstep status`: shows a run in the browser, while it trains or after it has ended."""

from __future__ import annotations

import http.client
import json
import signal
import sys
import threading
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from farstep.cli.options.parsing import parse
from farstep.config.field_docs import show_fields
from farstep.errors import ConfigError
from farstep.observe.files import as_run_error, replace_file
from farstep.observe.run_folder import RunFolder
from farstep.observe.status import FolderSource, PageServer, as_json, page
from farstep.observe.status.grafana import dashboard
from farstep.observe.status.page_server import SERVER_NAME

_ANSWER_S = 3.0
"""Seconds in which the page of a running run must answer."""


@show_fields
@dataclass(frozen=True, kw_only=True)
class Options:
    """Print the address of a page that shows a run. If the run does not serve one, serve it from the run folder until
    Ctrl-C."""

    run: Annotated[Path | None, tyro.conf.Positional] = None
    """Folder of the run. Not needed with --grafana."""
    html: Path | None = None
    """Write the page with the run's data to this file instead of serving it, for example to send it by mail."""
    grafana: Path | None = None
    """Write a Grafana dashboard for all runs to this file, as JSON to import, instead of showing a run."""
    port: int = 0
    """Port of a page that is served from the run folder; 0: a free one."""


def main(arguments: Sequence[str]) -> int:
    """Find or serve the page of a run. Return the exit status."""
    options = parse(Options, arguments, "farstep status")
    if options.grafana is not None:
        if options.run is not None or options.html is not None or options.port:
            raise ConfigError("--grafana is for all runs; leave the run folder, --html and --port out.")
        return _write(options.grafana, json.dumps(dashboard(), indent=2) + "\n")
    if not 0 <= options.port <= 65535:
        raise ConfigError(f"--port is {options.port}; expected 1 to 65535, or 0 for a free port.")
    if options.run is None:
        raise ConfigError("'farstep status' needs the folder of a run, e.g. farstep status runs/NAME.")
    folder = RunFolder.open(options.run)
    if options.html is not None:
        return _write(options.html, page(as_json(FolderSource(folder).read())))
    if url := _live_page(folder):
        _announce(url, "the run serves this page while it trains")
        return 0
    ended = threading.Event()
    server = PageServer(FolderSource(folder), options.port)
    try:
        signal.signal(signal.SIGTERM, lambda *_: ended.set())
        _announce(
            server.url,
            "No page of a running run answers on this machine, so this page shows the files of the folder. "
            "Ctrl-C ends it.",
        )
        ended.wait()
    except KeyboardInterrupt:
        pass
    finally:
        server.close()
    return 0


def _write(file: Path, text: str) -> int:
    with as_run_error(file):
        replace_file(file, text.encode())
    sys.stdout.write(f"written: {file}\n")
    return 0


def _live_page(folder: RunFolder) -> str:
    """Return the address of the page that the run itself serves; empty if none answers on this machine."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy must not see the token
    try:
        url = folder.status_file.read_text()
        if not url.startswith("http://127.0.0.1:"):
            return ""
        with direct.open(url, timeout=_ANSWER_S) as answer:
            return url if answer.headers["Server"].split() == [SERVER_NAME] else ""
    except (OSError, ValueError, AttributeError, http.client.HTTPException):
        return ""


def _announce(url: str, text: str) -> None:
    sys.stdout.write(f"{url}\n{text}\n")
    sys.stdout.flush()
