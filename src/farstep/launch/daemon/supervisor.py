"""Restarts a killed node daemon inside its allocation, because a new allocation could take hours."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import signal
import sys
import time
from collections import deque
from types import FrameType

from farstep.config.launch import RESTART_WINDOW_S

log = logging.getLogger("farstep.node")
_PR_SET_PDEATHSIG = 1


def keep_alive(restarts: int, shared_bytes: int) -> mmap.mmap:
    """Fork. The parent becomes the supervisor and never returns; the child returns and does the work.

    A child that is killed by a signal is replaced at once, unless the supervisor itself got SIGTERM. The
    supervisor exits with the status of its last child.

    Args:
        restarts: Maximum number of replacements within ten minutes.
        shared_bytes: Size of the memory that all children share.

    Returns:
        The shared memory. The first child sees zeros; a later child sees what its predecessor wrote.
    """
    shared = mmap.mmap(-1, shared_bytes)
    supervisor = _Supervisor(restarts)
    if supervisor.run():
        return shared
    sys.exit(supervisor.status)


class _Supervisor:
    def __init__(self, restarts: int) -> None:
        self._restarts = restarts
        self._restarted: deque[float] = deque()
        self._child, self._terminated = 0, False
        self.status = 0

    def run(self) -> bool:
        """Return True in each child, and False in the supervisor after its last child has ended."""
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        default = signal.signal(signal.SIGTERM, self._terminate)
        while not self._terminated:
            parent = os.getpid()
            self._child = os.fork()
            if not self._child:
                signal.signal(signal.SIGTERM, default)
                _end_with(parent)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
            if not self._child:
                return True
            # Reap the child only while SIGTERM is blocked, so that `_terminate` cannot signal a reused process id.
            os.waitid(os.P_PID, self._child, os.WEXITED | os.WNOWAIT)
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
            if not self._should_replace(os.waitpid(self._child, 0)[1]):
                break
        return False

    def _should_replace(self, wait_status: int) -> bool:
        if not os.WIFSIGNALED(wait_status):
            self.status = os.WEXITSTATUS(wait_status)
            return False
        number, now = os.WTERMSIG(wait_status), time.monotonic()
        self.status = 128 + number
        while self._restarted and now - self._restarted[0] >= RESTART_WINDOW_S:
            self._restarted.popleft()
        if self._terminated or len(self._restarted) >= self._restarts:
            return False
        self._restarted.append(now)
        log.warning(
            "the node daemon was killed (%s); restart %d of at most %d within %g minutes",
            *(signal.Signals(number).name, len(self._restarted), self._restarts, RESTART_WINDOW_S / 60),
        )
        return True

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        """Forward SIGTERM, with which the engine reclaims the node. The engine may also signal the child directly."""
        self._terminated = True
        os.kill(self._child, number)


def _end_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
