"""Handles SIGINT, SIGTERM and SIGHUP during training: the run stops after the update in progress, with a checkpoint."""

from __future__ import annotations

import os
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from farstep.event import RUN_STOPPING, Emit

_GRACE_S = 10.0
"""Maximum seconds to wait for the rollout in progress, if the run can resume exactly."""


class Stopped(BaseException):
    """A signal stopped the run. Not an `Exception`, so that `except Exception` does not catch it."""


class StopSignals:
    """Requests a stop on the first signal; raises KeyboardInterrupt on the second.

    A SIGHUP after another signal has no effect, because both the shell and the kernel may send it. A SIGTERM may
    accompany it, so the first one after a SIGHUP has no effect either.

    Args:
        waits_for_rollout: True: wait up to 10 s for the rollout in progress. False: abandon it at once.
        on_abandon: Called before a rollout in progress is abandoned.
        emit: Receives an event when the first signal arrives.
    """

    def __init__(self, waits_for_rollout: bool, on_abandon: Callable[[], None], emit: Emit) -> None:
        self._waits, self._on_abandon, self._emit = waits_for_rollout, on_abandon, emit
        self._received: signal.Signals | None = None
        self._has_hung_up = False
        self.collecting = False
        """Whether the run waits for a batch. No row of this batch has been used, so it can be abandoned."""

    @property
    def is_received(self) -> bool:
        """Whether a signal was received."""
        return self._received is not None

    def check(self) -> None:
        """Raise `Stopped` if a signal was received."""
        if self._received is not None:
            raise Stopped(self._received.name)

    def check_before_rollout(self) -> None:
        """Raise `Stopped` if a signal was received and the next rollout would be abandoned."""
        if not self._waits:
            self.check()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Context manager: handle signals. It does nothing outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handlers: dict[int, Callable[[int, FrameType | None], None]] = {signal.SIGALRM: self._on_alarm}
        handlers |= dict.fromkeys((signal.SIGINT, signal.SIGTERM), self._on_signal)
        if hangup_ends_process():
            handlers[signal.SIGHUP] = self._on_signal
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            for number, handler in before.items():
                # Another SIGHUP must not interrupt what the caller does after the checkpoint.
                signal.signal(number, signal.SIG_IGN if number == signal.SIGHUP and self._has_hung_up else handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        is_hangup, is_first = number == signal.SIGHUP, self._received is None
        if is_hangup:
            leave_terminal()
            self._has_hung_up = True
        if not is_first:
            if is_hangup:
                return
            if self._received == signal.SIGHUP and number == signal.SIGTERM:
                self._received = signal.SIGTERM
                return
            raise KeyboardInterrupt
        self._received = signal.Signals(number)
        second = "" if is_hangup else "; a second signal stops at once, without one"
        self._emit("warned", f"{self._received.name}{RUN_STOPPING}, with a checkpoint{second}")
        if self._waits:
            signal.setitimer(signal.ITIMER_REAL, _GRACE_S)
        else:
            self._on_alarm(number, frame)

    def _on_alarm(self, number: int, frame: FrameType | None) -> None:
        if self.collecting and self._received is not None:
            self._waits = False
            self._on_abandon()
            raise Stopped(self._received.name)


def hangup_ends_process() -> bool:
    """Whether SIGHUP would end this process: False if it is ignored, as with `nohup`, or handled by the user."""
    return signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


def leave_terminal() -> None:
    """Discard further output if it goes to a terminal: after its end, writing to it raises an error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for fd in (1, 2):
        with suppress(OSError):  # it may be closed
            if stat.S_ISCHR(os.fstat(fd).st_mode):
                os.dup2(nowhere, fd)
    os.close(nowhere)
