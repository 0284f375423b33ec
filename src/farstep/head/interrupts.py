"""Ctrl-C at the right moment.

Python raises KeyboardInterrupt between any two instructions. In the middle of handling a message that would leave
a chunk half accepted; so it is held back while state changes and let in while we sleep, which is nearly always.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any


class Interrupts:
    """SIGINT of the main thread; elsewhere Python delivers none, and this does nothing."""

    def __init__(self) -> None:
        self._depth = 0
        self._open = False
        self._before: Any = None
        self._waiting = False
        """One came at a bad moment."""

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Interrupts wait until the end of this, or until somebody lets them in."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        if not self._depth:
            self._before = signal.getsignal(signal.SIGINT)
            if callable(self._before):
                signal.signal(signal.SIGINT, self._handle)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth and callable(self._before):
                signal.signal(signal.SIGINT, self._before)
                self._deliver()

    @contextlib.contextmanager
    def let_in(self) -> Iterator[None]:
        """Interrupts are raised here as usual; nothing in here may be cut short with harm."""
        if threading.current_thread() is not threading.main_thread() or not self._depth:
            yield
            return
        self._open = True
        try:
            self._deliver()
            yield
        finally:
            self._open = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._open:
            self._before(number, frame)
        else:
            self._waiting = True

    def _deliver(self) -> None:
        if self._waiting:
            self._waiting = False
            self._before(signal.SIGINT, None)
