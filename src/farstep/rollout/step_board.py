"""Memory and doorbells through which `make_vec` and its local workers exchange steps without messages.

Actions and results are in the rollout blocks (`blocks.py`). The board has the words that say which step is requested
and which one is done, and a buffer for each worker's infos. A doorbell is an eventfd: the head rings each worker's
own doorbell, and the last worker to finish rings the head's.

Head and workers write data first, then the word that announces the data, then ring. The system call that rings, and the
one that the reader sleeps in, order these writes. Without a system call in between, only processors that keep the
order of stores (x86) allow reading the data; others do not poll (see `num_polling`).
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence

import numpy as np

from farstep.core import Array
from farstep.resources import usable_cpus
from farstep.wire.channels.memory import SharedMemory

INFO_BUFFER_BYTES = 256 * 1024
"""Room for one worker's infos of one step; larger ones travel as a message. Untouched pages take no memory."""
NO_INFOS, BY_MESSAGE, FAILED = 0, -1, -2
"""Values of `StepBoard.infos`: the step has no infos; a `StepInfos` message has them; a `Failure` message was sent
instead of results. A positive value is the number of bytes in the info buffer."""
LAST_TOKEN = b"L"
"""The byte that the last worker to finish reads (see `completion_tokens`)."""
POLL_S = 2e-3
"""Seconds for which head and workers poll the board before they sleep, if they may (see `num_polling`)."""
_CROWDED_S = 50e-6
"""If there are more seconds between two polls, another process has used the core."""
MOST_SKIPPED = 64
"""After failures, at most this many waits are not polled."""


class StepBoard:
    """Views of the board's memory.

    Args:
        memory: The shared memory, of `nbytes(workers, slots)` bytes.
        workers: Number of workers.
        slots: Number of environments of all workers.
    """

    def __init__(self, memory: memoryview, workers: int, slots: int) -> None:
        words = memory[: _words(workers, slots) * 8].cast("q")
        parts = [words[k * workers : (k + 1) * workers] for k in range(6)]
        self.requested_step, self.done, self.infos, self.partial_requests, self.env_ns, self.wait_ns = parts
        """One word per worker: the number of the last step that the head requested of all environments; the last one
        that is done; its infos (see `NO_INFOS`); how often the head requested steps of some environments; nanoseconds
        of stepping environments and of waiting for steps, in all steps so far."""
        by_slot = np.frombuffer(words, np.int64)[6 * workers :].reshape(3, slots)
        self.env_requests: Array = by_slot[0]
        """For each environment, how often the head requested a step of it alone."""
        self.stepped: Array = by_slot[1]
        """The last value of `env_requests` whose step is done."""
        self.env_info_status: Array = by_slot[2]
        """The infos of that step: `NO_INFOS`, `BY_MESSAGE` or `FAILED`."""
        info_buffers = memory[_words(workers, slots) * 8 :]
        self.info_buffers = [info_buffers[k * INFO_BUFFER_BYTES : (k + 1) * INFO_BUFFER_BYTES] for k in range(workers)]

    @staticmethod
    def nbytes(workers: int, slots: int) -> int:
        return _words(workers, slots) * 8 + workers * INFO_BUFFER_BYTES

    @classmethod
    def attach(cls, fd: int, workers: int, slots: int) -> StepBoard:
        """Map the board of another process. The descriptor is closed."""
        memory = SharedMemory(fd, cls.nbytes(workers, slots))
        board = cls(memory.map, workers, slots)
        memory.close()
        return board


def _words(workers: int, slots: int) -> int:
    return 6 * workers + 3 * slots


def doorbell() -> int:
    """A new doorbell. Waiters use edge-triggered epoll, so they need not read it."""
    return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)


def completion_tokens(workers: int) -> bytes:
    """What the head writes into the completion pipe before each step. A worker that finishes reads one byte; the last
    worker reads `LAST_TOKEN`."""
    return b"-" * (workers - 1) + LAST_TOKEN


def ring(fd: int) -> None:
    os.eventfd_write(fd, 1)


def num_polling(processes: int) -> int:
    """How many of a run's processes may poll the board before they sleep.

    If each has a core of its own, all may. Otherwise all cores but one may be used for polling, and the head does not
    poll. On processors that reorder stores, no process may poll.
    """
    if platform.machine() not in ("x86_64", "AMD64", "i686"):
        return 0
    cores = usable_cpus()
    return processes if processes <= cores else cores - 1


class Polling:
    """Polls the board for a short time, because a process that sleeps is woken only after tens of microseconds.

    Between two polls, other processes get the core. If polling fails, or if another process needs the core, the next
    waits are not polled: one, then two, four, and so on up to `MOST_SKIPPED`, until polling succeeds.
    """

    def __init__(self) -> None:
        self._skip, self._skipped = 0, 0
        """How many waits are not polled after the last failure, and how many of them are over."""

    def succeeds(self, is_ready: Callable[[], bool]) -> bool:
        """Poll until `is_ready()` is True, at most `POLL_S` seconds. Return whether it is."""
        if self._skipped < self._skip:
            self._skipped += 1
            return False
        now = time.perf_counter()
        deadline = now + POLL_S
        while now < deadline:
            if is_ready():
                self._skip = 0
                return True
            os.sched_yield()
            before, now = now, time.perf_counter()
            if now - before > _CROWDED_S:
                break
        self._skip, self._skipped = min(2 * self._skip or 1, MOST_SKIPPED), 0
        return is_ready()


def close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
