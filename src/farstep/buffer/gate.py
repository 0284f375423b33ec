"""The gate of a buffer: the lock around it, and the place where whoever may not go on yet waits."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator

from farstep.config.env import is_number
from farstep.errors import BufferTimeout, ClosedError, ConfigError

WAIT_S = 60.0
"""How long `insert` and `sample` wait for the limiter unless told otherwise."""
_gates: weakref.WeakSet[Gate] = weakref.WeakSet()


class Gate:
    """A lock that can be waited at until something has changed, is halted or is closed."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        """The lock, to wait at; whoever changes something tells so with `notify`."""
        self._waiting = 0
        self.is_closed = self.is_halted = False
        self.waited_s = {"insert": 0.0, "sample": 0.0}
        self._pid = os.getpid()
        self._is_forked = False
        _gates.add(self)

    def forked(self) -> None:
        """This process is a fork: rows are in memory that it shares, and who knows which are whose is the other one."""
        self.lock._at_fork_reinit()  # type: ignore[attr-defined]  # a thread that is not here may have held it
        self.is_closed = self._is_forked = True

    def check_open(self) -> None:
        if self._is_forked:
            raise ClosedError(
                f"this buffer belongs to process {self._pid} and was used in its fork {os.getpid()}, which would write "
                "over rows of the other one; make a new one there, or start processes with multiprocessing's spawn."
            )
        if self.is_closed:
            raise ClosedError("this buffer is closed; make a new one.")

    def wait(
        self,
        what: str,
        ready: Callable[[], bool],
        timeout_s: float | None,
        explain: Callable[[bool], str],
        filled_by: int | None,
    ) -> None:
        """Until it may be done (insert, sample). The lock is held.

        `explain` says in an error what is missing and what to do: True where who samples is `filled_by`, who inserts.
        """
        self.check_open()
        if ready():
            return
        began = time.monotonic()
        deadline = began + (WAIT_S if timeout_s is None else timeout_s)
        while not ready():
            self.check_open()
            if self.is_halted:
                raise ClosedError("the workflow that fills this buffer has ended; nothing more comes.")
            if what == "sample" and filled_by == threading.get_ident():
                raise BufferTimeout(explain(True))
            left = deadline - time.monotonic()
            if left <= 0:
                self.waited_s[what] += time.monotonic() - began
                raise BufferTimeout(f"{what} waited {time.monotonic() - began:.1f} s for the buffer; {explain(False)}")
            self._waiting += 1
            try:
                self.changed.wait(min(left, threading.TIMEOUT_MAX))
            finally:
                self._waiting -= 1
        self.waited_s[what] += time.monotonic() - began
        self.check_open()

    def notify(self) -> None:
        """Something has changed: whoever waits looks again. The lock is held."""
        if self._waiting:
            self.changed.notify_all()

    @contextlib.contextmanager
    def halted(self) -> Iterator[None]:
        """Meanwhile nobody waits here: who would has a ClosedError."""
        with self.lock:
            self.is_halted = True
            self.notify()
        try:
            yield
        finally:
            self.is_halted = False


def check_timeout(timeout_s: float | None) -> None:
    if timeout_s is not None and not (is_number(timeout_s) and timeout_s >= 0):
        raise ConfigError(f"timeout_s is {timeout_s!r}; it must be a number of seconds, at least 0.")


def _close_in_fork() -> None:
    for gate in _gates:
        gate.forked()


os.register_at_fork(after_in_child=_close_in_fork)
