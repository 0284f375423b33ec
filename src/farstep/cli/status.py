"""`farstep status`: shows a run in the browser, while it trains or after it has ended."""

from __future__ import annotations

import signal
import sys
import threading
import urllib.error
import urllib.request
import webbrowser
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
from farstep.observe.status import FolderSource, PageServer, page

_ANSWER_S = 3.0
"""Seconds in which the page of a running run must answer."""


@show_fields
@dataclass(frozen=True, kw_only=True)
class Options:
    """Print the address of a page that shows a run. For a run that has ended, serve the page until Ctrl-C."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of the run."""
    open: bool = False
    """Open the page in the default browser."""
    html: Path | None = None
    """Write the page with the run's data to this file instead of serving it, for example to send it to someone."""
    port: int = 0
    """Port for a run that has ended; 0: a free one."""


def main(arguments: Sequence[str]) -> int:
    """Find or serve the page of a run. Return the exit status."""
    if not arguments:
        raise ConfigError("'farstep status' needs the folder of a run, e.g. farstep status runs/NAME.")
    options = parse(Options, arguments, "farstep status")
    folder = RunFolder.open(options.run)
    if options.html is not None:
        with as_run_error(options.html):
            replace_file(options.html, page(data=FolderSource(folder).read()).encode())
        sys.stdout.write(f"written: {options.html}\n")
        return 0
    if url := _live_page(folder):
        _announce(url, options.open, "the run is training")
        return 0
    server = PageServer(FolderSource(folder), options.port)
    try:
        _announce(server.url, options.open, "the run is not training; Ctrl-C ends this page")
        ended = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: ended.set())
        try:
            ended.wait()
        except KeyboardInterrupt:
            pass
    finally:
        server.close()
    return 0


def _live_page(folder: RunFolder) -> str:
    """Return the address of the page that the run itself serves; empty if there is none."""
    try:
        url = folder.status_file.read_text()
        if not url.startswith("http://127.0.0.1:"):
            return ""
        with urllib.request.urlopen(url, timeout=_ANSWER_S):
            return url
    except (OSError, ValueError, urllib.error.URLError):
        return ""


def _announce(url: str, opens: bool, text: str) -> None:
    sys.stdout.write(f"{url}\n{text}\n")
    sys.stdout.flush()
    if opens and not webbrowser.open(url):
        sys.stdout.write("no browser was found; open the address yourself\n")
