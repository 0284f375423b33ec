"""The lock of a buffer, the condition on which threads wait for the limiter, and the settings of a workflow."""

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
"""Default of `timeout_s`: how many seconds `insert` and `sample` wait for the limiter."""
_gates: weakref.WeakSet[Gate] = weakref.WeakSet()


class Gate:
    """A lock with a condition. A timeout, `halted` or closing ends the waiting."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        """Condition over `lock`; every change of the buffer must call `notify`."""
        self._waiting = 0
        self.is_closed = self.is_halted = False
        self.waited_s = {"insert": 0.0, "sample": 0.0}
        """Seconds that threads have waited so far, by call."""
        self.inserting_thread: int | None = None
        """Id of the only thread that inserts, if known. This thread must not wait in `sample`: it would deadlock."""
        self.on_room: Callable[[], None] | None = None
        """Called when an insert of `refused_rows` may be possible again, because a thread other than `inserting_thread`
        sampled, deleted or changed the limiter."""
        self.refused_rows: int | None = 0
        """Fewest rows that the limiter refused to the inserting thread. None: the inserting thread does not wait for
        `on_room`."""
        self.between_updates: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        """Context manager, entered during `sample`. A workflow may publish meanwhile, because a sampling consumer is
        between two updates."""
        self._pid = os.getpid()
        self._is_forked = False
        _gates.add(self)

    def forked(self) -> None:
        """Close the buffer in a forked child, which shares the rows with its parent but not the bookkeeping."""
        self.lock._at_fork_reinit()  # type: ignore[attr-defined]  # a thread of the parent may have held the lock
        self.is_closed = self._is_forked = True

    def check_open(self) -> None:
        if self._is_forked:
            raise ClosedError(
                f"this buffer belongs to process {self._pid} but was used in its fork {os.getpid()}, which would "
                "overwrite rows of its parent; create a new buffer in the fork, or start processes with "
                "multiprocessing's spawn method."
            )
        if self.is_closed:
            raise ClosedError("this buffer is closed; create a new one.")

    def wait(
        self,
        what: str,
        ready: Callable[[], bool],
        timeout_s: float | None,
        explain: Callable[[bool], str],
    ) -> None:
        """Wait until `ready()` is True. The caller must hold the lock.

        Args:
            what: "insert" or "sample".
            ready: Whether the call may proceed.
            timeout_s: Seconds to wait; None: `WAIT_S`.
            explain: Returns the message of a `BufferTimeout`: what is missing and what to do. It is called with True if
                waiting would deadlock.

        Raises:
            BufferTimeout: The timeout has passed, or waiting would deadlock.
            ClosedError: The buffer was closed or halted.
        """
        self.check_open()
        if ready():
            return
        start = time.monotonic()
        deadline = start + (WAIT_S if timeout_s is None else timeout_s)
        while not ready():
            self.check_open()
            if self.is_halted:
                raise ClosedError("the workflow that fills this buffer has ended; no more rows will be inserted.")
            if what == "sample" and self.inserting_thread == threading.get_ident():
                raise BufferTimeout(explain(True))
            left = deadline - time.monotonic()
            if left <= 0:
                self.waited_s[what] += time.monotonic() - start
                raise BufferTimeout(f"{what} waited {time.monotonic() - start:.1f} s for the buffer; {explain(False)}")
            self._waiting += 1
            try:
                self.changed.wait(min(left, threading.TIMEOUT_MAX))
            finally:
                self._waiting -= 1
        self.waited_s[what] += time.monotonic() - start
        self.check_open()

    def notify(self) -> None:
        """Wake waiting threads, which then check whether they may proceed. The caller must hold the lock."""
        if self._waiting:
            self.changed.notify_all()

    def notify_room(self) -> None:
        """Wake waiting threads, and call `on_room` unless the calling thread is the one that inserts."""
        self.notify()
        if self.on_room is not None and self.inserting_thread != threading.get_ident():
            self.on_room()

    @contextlib.contextmanager
    def halted(self) -> Iterator[None]:
        """Context manager: every call that would have to wait raises `ClosedError` instead."""
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
