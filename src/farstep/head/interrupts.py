"""Signals at the right moment.

Python raises KeyboardInterrupt, and whatever handlers of other signals raise, between any two instructions. In the
middle of handling a message that would leave a chunk half accepted; so signals are held back while state changes and
let in while we sleep, which is nearly always.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

# `signal` makes enums of what `_signal` says, which takes longer than all else that is done to lock something.
_get_handler: Callable[[int], Any] = _signal.getsignal
_set_handler: Callable[[int, Any], Any] = _signal.signal
_HELD = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
"""What handlers of a run that is to end raise from."""


class Interrupts:
    """Signals of the main thread; elsewhere Python delivers none, and this does nothing."""

    def __init__(self) -> None:
        self._depth = 0
        self._open = False
        self._before: dict[int, Callable[[int, FrameType | None], Any]] = {}
        """The handlers that are not called for now."""
        self._waiting: list[int] = []
        """Signals that came at a bad moment."""

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Interrupts wait until the end of this, or until somebody lets them in."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        if not self._depth:
            self._before = {number: handler for number in _HELD if callable(handler := _get_handler(number))}
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
            self._before[number](number, frame)
        else:
            self._waiting.append(number)

    def _deliver(self) -> None:
        while self._waiting:
            number = self._waiting.pop(0)
            if (handler := self._before.get(number)) is not None:  # else whoever wanted it is gone meanwhile
                handler(number, None)
