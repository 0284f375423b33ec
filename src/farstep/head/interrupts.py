"""Defers signals while the head's state changes.

Python can raise KeyboardInterrupt, or an exception from another signal's handler, between any two instructions. If this
happens while a message is handled, a chunk could be half accepted. The head therefore defers signals while it changes
state. It delivers signals while its thread sleeps, which is most of the time.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

# `signal` wraps `_signal` and converts results to enums. This conversion takes more time than the rest of `deferred`.
_get_handler: Callable[[int], Any] = _signal.getsignal
_set_handler: Callable[[int, Any], Any] = _signal.signal
_DEFERRED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)
"""Signals whose handlers commonly raise to end a run."""


class Interrupts:
    """Defers signals in the main thread. Does nothing in other threads, because Python runs no handlers there."""

    def __init__(self) -> None:
        self._depth = 0
        self._allowed = False
        self._before: dict[int, Callable[[int, FrameType | None], Any]] = {}
        """The user's handlers, by signal."""
        self._waiting: list[int] = []
        """Signals that arrived while signals were deferred."""

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Context manager: defer signals until the end, or until `allowed` inside it."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        if not self._depth:
            self._before = {number: handler for number in _DEFERRED if callable(handler := _get_handler(number))}
            for number in self._before:
                _set_handler(number, self._handle)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                for number, handler in self._before.items():
                    _set_handler(number, handler)
                self._deliver()

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Context manager: deliver signals as usual. The code inside must be safe to interrupt."""
        if threading.current_thread() is not threading.main_thread() or not self._depth:
            yield
            return
        self._allowed = True
        try:
            self._deliver()
            yield
        finally:
            self._allowed = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._allowed:
            self._before[number](number, frame)
        else:
            self._waiting.append(number)

    def _deliver(self) -> None:
        while self._waiting:
            number = self._waiting.pop(0)
            if (handler := self._before.get(number)) is not None:  # otherwise the user has removed the handler
                handler(number, None)
