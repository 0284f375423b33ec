"""Who reads the connections: whoever waits, and a thread of our own while nobody does.

A call that needs an answer reads the descriptors itself, in its own thread, so that a reply costs one wake-up.
All descriptors are in an inner epoll set, which is itself the only member of an outer one; the thread sleeps on the
outer. Taking the lead is therefore one system call (hide the inner set from the outer), and so is giving it back.
"""

from __future__ import annotations

import contextlib
import select
import threading
from collections.abc import Callable, Iterator

_PATIENCE_S = 0.05


class Switchboard:
    """Descriptors with their readers, one lock, and at most one thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._inner, self._outer = select.epoll(), select.epoll()
        self._outer.register(self._inner.fileno(), select.EPOLLIN)
        self._readers: dict[int, Callable[[], None]] = {}
        self._thread: threading.Thread | None = None
        self._running = True

    def register(self, fd: int, reader: Callable[[], None]) -> None:
        """Call `reader` whenever `fd` can be read."""
        self._readers[fd] = reader
        self._inner.register(fd, select.EPOLLIN)

    def unregister(self, fd: int) -> None:
        if self._readers.pop(fd, None) is not None:
            with contextlib.suppress(OSError, ValueError):
                self._inner.unregister(fd)

    @contextlib.contextmanager
    def lead(self) -> Iterator[None]:
        """The caller reads; the thread sleeps on."""
        with self._lock:
            if self._inner.closed:
                yield
                return
            self._outer.modify(self._inner.fileno(), 0)
            try:
                yield
            finally:
                if not self._inner.closed:
                    self._outer.modify(self._inner.fileno(), select.EPOLLIN)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude the thread for a moment."""
        with self._lock:
            yield

    def poll(self, timeout_s: float) -> None:
        """Wait for something to read and read it. The lock is held."""
        for fd, _ in self._inner.poll(timeout_s):
            reader = self._readers.get(fd)
            if reader is not None:
                reader()

    def start_thread(self, pump: Callable[[], None], tick_s: float) -> None:
        """From now on, `pump` runs when there is something to read or a tick has passed, and nobody leads."""
        self._thread = threading.Thread(target=self._serve, args=(pump, tick_s), name="farstep-head", daemon=True)
        self._thread.start()

    def _serve(self, pump: Callable[[], None], tick_s: float) -> None:
        while self._running:
            try:
                self._outer.poll(tick_s)
            except (OSError, ValueError):
                return
            # Not for long: whoever leads does the same work, and close() waits for this thread.
            if self._lock.acquire(timeout=_PATIENCE_S):
                try:
                    if self._running:
                        pump()
                finally:
                    self._lock.release()

    def close(self) -> None:
        """End the thread and free the descriptors; the caller may hold the lock."""
        self._running = False
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._inner.close()
        self._outer.close()
