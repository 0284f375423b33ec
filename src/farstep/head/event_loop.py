"""Who reads the connections: whoever waits, and a thread of our own while nobody does.

A call that needs an answer reads the descriptors itself, in its own thread, so that a reply costs one wake-up.
All descriptors are in an inner epoll set, which is itself a member of an outer one; the thread sleeps on the outer.
Taking the lead is therefore one system call (hide the inner set from the outer), and so is giving it back.
State changes under one lock, with Ctrl-C held back; both are let go while somebody sleeps.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable, Iterator
from typing import Any

from farstep.head.interrupts import Interrupts

_PATIENCE_S = 0.05


class EventLoop:
    """Descriptors with their readers, one lock, and at most one thread."""

    def __init__(self) -> None:
        self._turn, self._interrupts = _Turn(), Interrupts()
        self._inner, self._outer = select.epoll(), select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._inner.register(self._wake, select.EPOLLIN)
        self._outer.register(self._wake, select.EPOLLIN)
        self._outer.register(self._inner.fileno(), select.EPOLLIN)
        self._leaders = 0
        self._readers: dict[int, Callable[[], None]] = {}
        self._thread: threading.Thread | None = None
        self.running = True

    def register(self, fd: int, reader: Callable[[], None]) -> None:
        """Call `reader` whenever `fd` can be read; -1 is nothing to wait on."""
        if fd >= 0:
            self._readers[fd] = reader
            self._inner.register(fd, select.EPOLLIN)

    def unregister(self, fd: int) -> None:
        if self._readers.pop(fd, None) is not None:
            with contextlib.suppress(OSError, ValueError):
                self._inner.unregister(fd)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else changes anything, and no Ctrl-C cuts this short."""
        with self._interrupts.held(), self._turn:
            yield

    @contextlib.contextmanager
    def lead(self) -> Iterator[None]:
        """Locked, and the caller reads; the thread sleeps on."""
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
        """Let Ctrl-C in, although the lock is held: for code of the user that runs in our thread."""
        return self._interrupts.let_in()

    def poll(self, timeout_s: float) -> None:
        """Wait for something to read and read it. The lock is held, but not while it waits."""
        # Only who waits lets go: the thread never does, so close() can wait for it with the lock in hand.
        asleep = self._turn.let_go() if timeout_s else contextlib.nullcontext()
        events = []
        with asleep, self._interrupts.let_in(), contextlib.suppress(ValueError, OSError):  # closed meanwhile
            events = self._inner.poll(timeout_s)
        for fd, _ in events if self.running else ():
            reader = self._readers.get(fd)
            if reader is not None:
                reader()

    def wait_for(self, event: threading.Event) -> None:
        """Wait with the lock let go, and Ctrl-C let in."""
        with self._turn.let_go(), self._interrupts.let_in():
            event.wait()

    def start_thread(self, pump: Callable[[], None], tick_s: float) -> None:
        """From now on, `pump` runs when there is something to read or a tick has passed, and nobody leads."""
        thread = threading.Thread(target=self._serve, args=(pump, tick_s), name="farstep-head", daemon=True)
        thread.start()
        self._thread = thread

    def _serve(self, pump: Callable[[], None], tick_s: float) -> None:
        while self.running:
            self._outer.poll(tick_s)
            # Not for long: whoever leads does the same work, and close() waits for this thread.
            if self._turn.acquire(_PATIENCE_S):
                try:
                    if self.running and not self._leaders:
                        pump()
                finally:
                    self._turn.release()

    def close(self) -> None:
        """End the thread, wake whoever still sleeps here, and free the descriptors; the caller may hold the lock."""
        self.running = False
        os.eventfd_write(self._wake, 1)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._readers.clear()
        self._inner.close()
        self._outer.close()
        os.close(self._wake)


class _Turn:
    """A lock that its holder may take again, and let go altogether while it sleeps.

    Exceptions of a signal's handler (a SIGTERM that becomes a SystemExit) may come between any two lines here. So who
    holds it is known to C alone, which they cannot come between, and what is not held any more is not released.
    """

    def __init__(self) -> None:
        self._lock: Any = threading.RLock()  # with what threading.Condition uses of it

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
    def let_go(self) -> Iterator[None]:
        held = self._lock._release_save()
        try:
            yield
        finally:
            self._lock._acquire_restore(held)
