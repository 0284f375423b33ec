"""An event loop that a waiting thread runs itself. A background thread runs it while no thread waits.

This is the leader/followers pattern. A call that waits for an answer becomes the leader: it reads the descriptors in
its own thread, so that an answer costs only one wake-up. All descriptors are members of an inner epoll set, and the
inner set is a member of an outer epoll set. The background thread sleeps on the outer set. To become the leader, a
thread masks the inner set in the outer set, which takes one system call; another call unmasks it. State changes only
under one lock, with Ctrl-C deferred. While a thread sleeps, the lock is free and Ctrl-C is delivered.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable, Iterator
from typing import Any

from farstep.head.interrupts import Interrupts

_LOCK_TIMEOUT_S = 0.05
"""Seconds that the background thread waits for the lock."""


class EventLoop:
    """Descriptors with their readers, one lock, and at most one background thread."""

    def __init__(self) -> None:
        self._lock, self._interrupts = _ReleasableLock(), Interrupts()
        with contextlib.ExitStack() as opened:
            self._inner, self._outer = opened.enter_context(select.epoll()), opened.enter_context(select.epoll())
            self._wake = os.eventfd(0, os.EFD_CLOEXEC)
            opened.pop_all()
        self._inner.register(self._wake, select.EPOLLIN)
        self._outer.register(self._wake, select.EPOLLIN)
        self._outer.register(self._inner.fileno(), select.EPOLLIN)
        self._leaders = 0
        """Number of leading threads, including sleeping ones. The background thread reads only while it is 0."""
        self._readers: dict[int, Callable[[], None]] = {}
        self._thread: threading.Thread | None = None
        self.running = True

    @property
    def input_fd(self) -> int:
        """The inner set: it can be read while one of the registered descriptors can."""
        return self._inner.fileno()

    def register(self, fd: int, reader: Callable[[], None]) -> None:
        """Call `reader` whenever `fd` can be read; a negative `fd` is ignored."""
        if fd >= 0:
            self._readers[fd] = reader
            self._inner.register(fd, select.EPOLLIN)

    def unregister(self, fd: int) -> None:
        if self._readers.pop(fd, None) is not None:
            with contextlib.suppress(OSError, ValueError):
                self._inner.unregister(fd)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock and defer Ctrl-C."""
        with self._interrupts.deferred(), self._lock:
            yield

    @contextlib.contextmanager
    def lead(self) -> Iterator[None]:
        """Hold the lock, defer Ctrl-C, and make the caller the leader, which reads instead of the background thread."""
        with self.locked():
            if not self.running:
                yield
                return
            self._leaders += 1
            self._outer.modify(self._inner.fileno(), 0)
            try:
                yield
            finally:
                self._leaders -= 1
                if self.running and not self._leaders:
                    self._outer.modify(self._inner.fileno(), select.EPOLLIN)

    def interruptible(self) -> contextlib.AbstractContextManager[None]:
        """Deliver Ctrl-C although the lock is held, for user code that runs in this thread."""
        return self._interrupts.allowed()

    def poll(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for readable descriptors and call their readers. The lock is released meanwhile."""
        # The background thread never waits here, so it never releases the lock. close() can therefore join it under the
        # lock.
        asleep = self._lock.released() if timeout_s else contextlib.nullcontext()
        events = []
        with asleep, self._interrupts.allowed(), contextlib.suppress(ValueError, OSError):  # closed by another thread
            events = self._inner.poll(timeout_s)
        for fd, _ in events if self.running else ():
            reader = self._readers.get(fd)
            if reader is not None:
                reader()

    def wait_for(self, event: threading.Event) -> None:
        """Wait for the event with the lock released and Ctrl-C delivered."""
        with self._lock.released(), self._interrupts.allowed():
            event.wait()

    def start_thread(self, pump: Callable[[], None], tick_s: float) -> None:
        """Start the background thread. While no other thread leads, it calls `pump` on input and every `tick_s`
        seconds."""
        thread = threading.Thread(target=self._serve, args=(pump, tick_s), name="farstep-head", daemon=True)
        thread.start()
        self._thread = thread

    def _serve(self, pump: Callable[[], None], tick_s: float) -> None:
        while self.running:
            self._outer.poll(tick_s)
            # Use a short timeout, because close() joins this thread. Whichever thread holds the lock does the same
            # work.
            if self._lock.acquire(_LOCK_TIMEOUT_S):
                try:
                    if self.running and not self._leaders:
                        pump()
                finally:
                    self._lock.release()

    def close(self) -> None:
        """End the background thread, wake sleeping threads, and free the descriptors. The caller may hold the lock."""
        self.running = False
        os.eventfd_write(self._wake, 1)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._readers.clear()
        self._inner.close()
        self._outer.close()
        os.close(self._wake)


class _ReleasableLock:
    """A reentrant lock that a thread can release completely while it sleeps.

    A signal handler may raise between any two lines here, e.g. SystemExit on SIGTERM. Therefore only C code, in which
    no handler runs, stores the owner, and `release` does nothing if the thread does not hold the lock.
    """

    def __init__(self) -> None:
        self._lock: Any = threading.RLock()  # Any: uses the private methods that threading.Condition uses

    def acquire(self, timeout_s: float = -1) -> bool:
        return bool(self._lock.acquire(timeout=timeout_s))

    def release(self) -> None:
        if self._lock._is_owned():
            self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        held = self._lock._release_save()
        try:
            yield
        finally:
            self._lock._acquire_restore(held)
