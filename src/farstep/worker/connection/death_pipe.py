"""The pipe that ends a worker with the process that started it."""

from __future__ import annotations

import fcntl
import os
import select
import signal

_F_SETSIG = 10


def die_with_starter(fd: int) -> None:
    """Have the kernel kill this process group when the starter's end of the pipe closes.

    A thread that watches the pipe would not suffice: an environment that holds the GIL blocks a thread, but not a
    signal.
    """
    fcntl.fcntl(fd, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(fd, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    if is_starter_dead(fd):  # before the signal was set up
        os._exit(1)


def is_starter_dead(fd: int, timeout_s: float = 0.0) -> bool:
    """Wait until the starter's end of the pipe closes; return whether it did."""
    hangup = select.poll()
    hangup.register(fd, 0)
    return bool(hangup.poll(timeout_s * 1000))
