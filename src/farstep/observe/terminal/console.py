"""Shows metrics in the terminal: a live display, or plain lines if the terminal cannot show a display.

A separate thread draws the live display. The training thread only appends to lock-free queues, so Ctrl-C is safe at any
moment, and a blocked terminal does not block training. Printed and logged lines also go through such a queue, and
appear above the display.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from farstep.errors import ClosedError
from farstep.event import Event
from farstep.observe.diagnosis import Diagnosis
from farstep.observe.run_status import RunStatus, line
from farstep.observe.terminal.panel import panel

log = logging.getLogger("farstep")

_LINE_EVERY_S = 5.0
_REFRESH_S = 0.25
_CLOSE_S = 5.0
"""Maximum seconds that `close` waits for the drawing thread."""
_MAX_LINES = 10_000
"""Maximum number of printed lines that wait to be shown; older lines are dropped."""


def console_logger(
    total_steps: int,
    title: str = "farstep",
    console: Console | None = None,
    target_return: float | None = None,
) -> LiveDisplay | PlainLines:
    """Create a logger that writes to the terminal.

    Args:
        total_steps: Environment steps of the whole run.
        title: Heading of the live display.
        console: Where to write; None: standard output.
        target_return: Mean return at which the run ends earlier; None: it does not.

    Returns:
        A `LiveDisplay` if the terminal can show it, otherwise `PlainLines`.
    """
    console = OutputConsole() if console is None else console
    drawable = console.is_terminal and not console.is_dumb_terminal and console.encoding.startswith("utf")
    if drawable:
        return LiveDisplay(total_steps, title, console, target_return)
    return PlainLines(total_steps, console, target_return=target_return)


def discard_output(stream: IO[str]) -> None:
    """Discard what is written to a stream from now on, because its reader has ended."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, stream.fileno())
    os.close(devnull)


def continue_unread(stream: IO[str]) -> None:
    """Discard what is written to a stream whose reader has ended, with a warning, so that training continues."""
    discard_output(stream)
    log.warning("the program that read the output of this run has ended; training continues without printing")


class OutputConsole(Console):
    """A console that discards its output when the reader has ended; rich's own console would end the process."""

    def on_broken_pipe(self) -> None:
        continue_unread(self.file)


class PlainLines:
    """Prints at most one line every five seconds, and a last line at the end."""

    def __init__(
        self,
        total_steps: int,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        target_return: float | None = None,
    ) -> None:
        self._status = RunStatus(total_steps, target_return)
        self._console = OutputConsole() if console is None else console
        self._clock = clock
        self._next_s = float("-inf")
        self._shown = 0
        self._diagnosis: Diagnosis | None = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = self._clock()
        self._status.update(step, metrics, now)
        if now >= self._next_s:
            self._show()
            self._next_s = now + _LINE_EVERY_S

    def show(self, diagnosis: Diagnosis | None = None, events: Sequence[Event] = ()) -> None:
        """Add a diagnosis to the lines from now on if it is a problem; events have log lines of their own."""
        self._diagnosis = diagnosis

    def close(self) -> None:
        if self._shown != self._status.updates:
            self._show()

    def _show(self) -> None:
        self._shown = self._status.updates
        encoding = self._console.encoding
        problem = self._diagnosis.text if self._diagnosis is not None and self._diagnosis.is_problem else None
        text = line(self._status, self._clock(), problem).encode(encoding, "replace").decode(encoding)
        self._console.print(text, soft_wrap=True, highlight=False, markup=False, emoji=False)


class LiveDisplay:
    """A panel at the bottom of the terminal that is redrawn four times per second."""

    def __init__(
        self,
        total_steps: int,
        title: str = "farstep",
        console: Console | None = None,
        target_return: float | None = None,
    ) -> None:
        self._status = RunStatus(total_steps, target_return)
        self._title = title
        self._console = OutputConsole() if console is None else console
        self._console.file = self._console.file  # keeps the current stream: sys.stdout is redirected below
        self._started_s = time.monotonic()
        self._updates: deque[tuple[int, Mapping[str, float], float]] = deque()
        self._remarks: tuple[Diagnosis | None, tuple[Event, ...]] = (None, ())
        """Diagnosis and events; replaced as a whole, because another thread draws them."""
        self._lines: deque[str] = deque(maxlen=_MAX_LINES)
        self._closing = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._draw, name="farstep-display", daemon=True)
        self._redirection = contextlib.ExitStack()
        atexit.register(self.close)
        self._redirection.enter_context(_redirected(self._lines.append))
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._failure is not None:
            raise ClosedError(f"the live display has failed: {self._failure}") from self._failure
        self._updates.append((step, dict(metrics), time.monotonic()))

    def show(self, diagnosis: Diagnosis | None = None, events: Sequence[Event] = ()) -> None:
        """Replace the diagnosis and the events that the panel shows.

        Args:
            diagnosis: What the run is waiting for; None: not known.
            events: What happened, oldest first; the latest three are shown.
        """
        self._remarks = (diagnosis, tuple(events))

    def close(self) -> None:
        """Draw a last time, and restore streams and log handlers. The cursor ends below the panel."""
        atexit.unregister(self.close)
        self._redirection.close()
        self._closing.set()
        if self._thread.ident is not None:  # None if Ctrl-C arrived before the thread was started
            self._thread.join(_CLOSE_S)  # a blocked terminal might never return
        with contextlib.suppress(OSError):
            while self._lines and not self._thread.is_alive():
                sys.stderr.write(f"{self._lines.popleft()}\n")  # printed after the display failed

    def _draw(self) -> None:
        try:
            # Do not use rich's own thread and redirection, because both take locks that Ctrl-C could leave held.
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
        # Process only the entries that are queued now, so that a program that prints without pause cannot prevent
        # drawing.
        for _ in range(len(self._updates)):
            self._status.update(*self._updates.popleft())
        if lines := [self._lines.popleft() for _ in range(len(self._lines))]:
            self._console.print(Text.from_ansi("\n".join(lines)), soft_wrap=True)
        diagnosis, events = self._remarks
        elapsed_s, width = now - self._started_s, self._console.width
        drawn = panel(self._status, self._title, elapsed_s, now, width, diagnosis=diagnosis, events=events)
        live.update(drawn, refresh=True)


class _LineStream(io.TextIOBase):
    """A stream that passes complete lines to `put`. In all else it behaves like the terminal's stream."""

    def __init__(self, put: Callable[[str], None], stream: TextIO) -> None:
        self._put, self._stream = put, stream
        self._local = threading.local()
        """For each thread, the line that is not complete yet."""
        self._pid = os.getpid()

    def write(self, text: str) -> int:
        if os.getpid() != self._pid:  # a fork of this process has no drawing thread
            return self._stream.write(text)
        *lines, self._local.partial = (getattr(self._local, "partial", "") + text).split("\n")
        for each in lines:
            self._put(each)
        return len(text)

    def flush(self) -> None:
        if os.getpid() != self._pid:
            self._stream.flush()
            return
        partial, self._local.partial = getattr(self._local, "partial", ""), ""
        if partial:
            self._put(partial)

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
    """Context manager: redirect stdout, stderr and the logging handlers that write to them."""
    before: dict[str, TextIO] = {"stdout": sys.stdout, "stderr": sys.stderr}
    redirected = {name: _LineStream(put, stream) for name, stream in before.items()}
    moved: list[tuple[logging.StreamHandler[Any], TextIO]] = []
    for name, stream in before.items():
        setattr(sys, name, redirected[name])
        for handler in [*logging.getLogger("farstep").handlers, *logging.getLogger().handlers]:
            if isinstance(handler, logging.StreamHandler) and handler.stream is stream:
                handler.stream = redirected[name]
                moved.append((handler, stream))
    try:
        yield
    finally:
        for handler, stream in moved:
            handler.stream = stream
        for name, stream in before.items():
            redirected[name].flush()
            if getattr(sys, name) is redirected[name]:
                setattr(sys, name, stream)
