"""The terminal as a logger: a live display where it can be drawn on, else a line now and then.

The live display is drawn by a thread of its own. The training thread only puts things into queues, which takes no
lock: Ctrl-C may come at any moment, and a terminal that is stopped stops no training. What is printed or logged
meanwhile goes into such a queue, too, and appears above the display.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from farstep.errors import ClosedError
from farstep.observe.loggers import Logger
from farstep.observe.panel import panel
from farstep.observe.run_status import RunStatus, line

_LINE_EVERY_S = 10.0
_REFRESH_S = 0.25
_PATIENCE_S = 5.0
_LINES_KEPT = 10_000


def console_logger(total_steps: int, title: str = "farstep", console: Console | None = None) -> Logger:
    """The live display on a terminal that can show it, else plain lines."""
    console = Console() if console is None else console
    drawable = console.is_terminal and not console.is_dumb_terminal and console.encoding.startswith("utf")
    return LiveDisplay(total_steps, title, console) if drawable else PlainLines(total_steps, console)


class PlainLines:
    """One line at most every ten seconds, besides the first and the last one."""

    def __init__(
        self, total_steps: int, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._standing = RunStatus(total_steps)
        self._console = Console() if console is None else console
        self._clock = clock
        self._next_s = float("-inf")
        self._shown = 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = self._clock()
        self._standing.update(step, metrics, now)
        if now >= self._next_s:
            self._show()
            self._next_s = now + _LINE_EVERY_S

    def close(self) -> None:
        if self._shown != self._standing.updates:
            self._show()

    def _show(self) -> None:
        self._shown = self._standing.updates
        encoding = self._console.encoding
        text = line(self._standing).encode(encoding, "replace").decode(encoding)
        self._console.print(text, soft_wrap=True, highlight=False, markup=False, emoji=False)


class LiveDisplay:
    """A picture of the run at the bottom of the terminal, drawn anew a few times per second."""

    def __init__(self, total_steps: int, title: str = "farstep", console: Console | None = None) -> None:
        self._standing = RunStatus(total_steps)
        self._title = title
        self._console = Console() if console is None else console
        self._console.file = self._console.file  # the stream of now; sys.stdout leads into the queue from here on
        self._started_s = time.monotonic()
        self._updates: deque[tuple[int, Mapping[str, float], float]] = deque()
        self._lines: deque[str] = deque(maxlen=_LINES_KEPT)
        self._closing = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._draw, name="farstep-display", daemon=True)
        self._redirection = contextlib.ExitStack()
        atexit.register(self.close)
        self._redirection.enter_context(_redirected(self._lines.append))
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._failure is not None:
            raise ClosedError(f"the terminal cannot be drawn on any more: {self._failure}") from self._failure
        self._updates.append((step, dict(metrics), time.monotonic()))

    def close(self) -> None:
        """Draw a last time, below it the cursor; streams and handlers are what they were."""
        atexit.unregister(self.close)
        self._redirection.close()
        self._closing.set()
        if self._thread.ident is not None:  # else Ctrl-C came before it was started
            self._thread.join(_PATIENCE_S)  # a terminal that is stopped may take for ever
        with contextlib.suppress(OSError):
            while self._lines and not self._thread.is_alive():
                sys.stderr.write(f"{self._lines.popleft()}\n")  # said after the terminal was gone

    def _draw(self) -> None:
        try:
            # Without its own thread and redirection: both take locks that Ctrl-C could find the main thread in.
            live = Live(console=self._console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
            with live:
                while not self._closing.wait(_REFRESH_S):
                    self._refresh(live)
                self._refresh(live)
        except Exception as error:
            self._failure = error
            self._redirection.close()

    def _refresh(self, live: Live) -> None:
        now = time.monotonic()
        # What is there now and no more: whoever prints without end must not keep us from drawing.
        for _ in range(len(self._updates)):
            self._standing.update(*self._updates.popleft())
        if lines := [self._lines.popleft() for _ in range(len(self._lines))]:
            self._console.print(Text.from_ansi("\n".join(lines)), soft_wrap=True)
        picture = panel(self._standing, self._title, now - self._started_s, now, self._console.width)
        live.update(picture, refresh=True)


class _Above(io.TextIOBase):
    """A stream whose lines are put somewhere else; all else is the terminal's."""

    def __init__(self, put: Callable[[str], None], stream: TextIO) -> None:
        self._put, self._stream = put, stream
        self._of_thread = threading.local()
        self._pid = os.getpid()

    def write(self, text: str) -> int:
        if os.getpid() != self._pid:  # a fork of this process, where nobody draws
            return self._stream.write(text)
        *lines, self._of_thread.begun = (getattr(self._of_thread, "begun", "") + text).split("\n")
        for each in lines:
            self._put(each)
        return len(text)

    def flush(self) -> None:
        if os.getpid() != self._pid:
            self._stream.flush()
            return
        begun, self._of_thread.begun = getattr(self._of_thread, "begun", ""), ""
        if begun:
            self._put(begun)

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding


@contextlib.contextmanager
def _redirected(put: Callable[[str], None]) -> Iterator[None]:
    """What is printed goes elsewhere, also through handlers of logging that were made for the terminal earlier."""
    before: dict[str, TextIO] = {"stdout": sys.stdout, "stderr": sys.stderr}
    above = {name: _Above(put, stream) for name, stream in before.items()}
    moved: list[tuple[logging.StreamHandler[Any], TextIO]] = []
    for name, stream in before.items():
        setattr(sys, name, above[name])
        for handler in [*logging.getLogger("farstep").handlers, *logging.getLogger().handlers]:
            if isinstance(handler, logging.StreamHandler) and handler.stream is stream:
                handler.stream = above[name]
                moved.append((handler, stream))
    try:
        yield
    finally:
        for handler, stream in moved:
            handler.stream = stream
        for name, stream in before.items():
            above[name].flush()
            if getattr(sys, name) is above[name]:
                setattr(sys, name, stream)
