"""Runs workers inside the caller's process and thread, so that `breakpoint()` works in environments."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

from farstep.core import Ended, Launcher, Received, Started
from farstep.rollout.progress import ProgressBoard
from farstep.wire.channels.in_process import InProcessLink, inproc_pair
from farstep.worker.loop import Worker


class InProcessLauncher(Launcher):
    """Runs all workers in the head's thread."""

    shares_memory = True
    driven = True

    def __init__(self, workers: int, envs: int) -> None:
        self._board = ProgressBoard(workers, envs)

    def start(self, worker: int, incarnation: int, run: str) -> Started:
        words = self._board.words(worker)
        link, theirs = inproc_pair()
        return Started(
            InProcessWorker(Worker(theirs, worker, incarnation, run, words), link, theirs),
            link,
            words,
            socket.gethostname(),
        )

    def filenos(self) -> Sequence[int]:
        return ()

    def drain(self, receive: Callable[[int, Received], None]) -> bool:
        return False

    def close(self) -> None:
        self._board.close()


class InProcessWorker:
    """A worker that runs when the head reads its link."""

    output_fd = exit_fd = -1
    pid = 0
    leaving = False

    def __init__(self, worker: Worker, head_link: InProcessLink, link: InProcessLink) -> None:
        self._worker, self._link = worker, link
        self._ended: Ended | None = None
        self._suspended = False
        head_link.drive = self._drive
        worker.hello()

    def _drive(self) -> bool:
        """Let the worker handle one message or ticket. Return False if it has nothing to do."""
        if self._ended is not None or self._suspended:
            return False
        try:
            received = self._link.receive()
            if received is not None:
                self._worker.handle(received)
            elif not self._worker.work():
                return False
        except SystemExit as error:
            self._ended = Ended(error.code if isinstance(error.code, int) else 1)
        if not self._worker.running:
            self._ended = Ended(0)
        return True

    def poll(self) -> Ended | None:
        return self._ended

    def kill(self) -> None:
        self._ended = self._ended or Ended(-9)

    def suspend(self, parked: bool = False) -> None:
        self._suspended = True

    def resume(self) -> None:
        self._suspended = False

    def dump_stacks(self) -> None:
        """Do nothing: a debugger in the caller's process shows the stack."""

    def read_output(self) -> bytes | None:
        return None

    def output(self) -> str:
        return ""

    def close(self) -> None:
        self._worker.close()
        self._link.close()
