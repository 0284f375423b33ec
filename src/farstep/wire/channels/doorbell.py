"""A doorbell: wakes a process of the same host that waits for a change in shared memory."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Sequence


class Fence:
    """A full memory barrier: what is written before a call is visible to other processes before what is written after.

    Processors such as ARM reorder plain reads and writes. Python has no barrier, but releasing a lock and acquiring it
    again acts as one. For one thread only.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def __call__(self) -> None:
        self._lock.release()
        self._lock.acquire()


class Doorbell:
    """An eventfd. Any number of processes may ring it; one process waits.

    Rings are not counted: a ring before the wait ends the wait at once. A peer that polls the shared memory may see a
    change before the ring, so use a `Fence` between data and the word that announces it.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @classmethod
    def create(cls) -> Doorbell:
        return cls(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))

    def ring(self) -> None:
        os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """Forget earlier rings."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            pass

    def poll_with(self, others: Sequence[int]) -> select.poll:
        """Return a poll object that waits for a ring, or until one of the other descriptors is readable."""
        poll = select.poll()
        for fd in (self.fd, *others):
            poll.register(fd, select.POLLIN)
        return poll

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
