"""Workers inside the caller's process and thread: the same code path, and `breakpoint()` works in it."""

from __future__ import annotations

from farstep.core import Ended
from farstep.wire.inproc import InprocLink
from farstep.worker.loop import Worker


class InprocessWorker:
    """A worker that runs when the head waits for it."""

    output_fd = exit_fd = -1
    pid = 0

    def __init__(
        self, worker: int, incarnation: int, run: str, links: tuple[InprocLink, InprocLink], words: memoryview
    ) -> None:
        self._head_link, self._link = links
        self._worker = Worker(self._link, worker, incarnation, run, words)
        self._ended: Ended | None = None
        self._head_link.drive = self._drive
        self._worker.hello()

    def _drive(self) -> bool:
        """Let the worker go on by one message or one ticket; False when it has nothing to do."""
        if self._ended is not None:
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

    def dump_stacks(self) -> None:
        """The caller's own debugger is there for that."""

    def read_output(self) -> bytes:
        return b""

    def output(self) -> str:
        return ""

    def close(self) -> None:
        self._worker.close()
        self._link.close()
