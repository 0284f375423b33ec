"""A doorbell: wakes a process of the same host that waits for a change in shared memory."""

from __future__ import annotations

import os
import select
from collections.abc import Sequence


class Doorbell:
    """An eventfd. Any number of processes may ring it; one process waits.

    Rings are not counted: a ring before `wait` makes it return at once. Whoever rings writes the shared memory first,
    and whoever waits reads it after `clear`; the system calls order both on every architecture.
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
