"""Links within one process and thread, for debugging. Messages are copied from one queue to another."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence

from farstep.core import BytesLike, Received


class InProcessLink:
    """One end of a link. When no message waits, the head's end calls its `drive` function, which runs the worker."""

    def __init__(
        self, inbox: deque[Received], outbox: deque[Received], drive: Callable[[], bool] | None = None
    ) -> None:
        self._inbox, self._outbox, self.drive = inbox, outbox, drive
        self.closed = False

    def fileno(self) -> int:
        return -1

    def send(self, frames: Sequence[BytesLike], fds: Sequence[int] = ()) -> None:
        # Copy, as any other link does: the receiver must not see later changes of the sender's buffers.
        self._outbox.append(Received([bytes(frame) for frame in frames], [os.dup(fd) for fd in fds]))

    def receive(self, timeout_s: float | None = None) -> Received | None:
        while not self._inbox and self.drive is not None and self.drive():
            pass
        return self._inbox.popleft() if self._inbox else None

    def flush(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True
        for received in self._inbox:
            for fd in received.fds:
                os.close(fd)
        self._inbox.clear()


def inproc_pair() -> tuple[InProcessLink, InProcessLink]:
    """The head's end and the worker's end of a new link."""
    to_head: deque[Received] = deque()
    to_worker: deque[Received] = deque()
    return InProcessLink(to_head, to_worker), InProcessLink(to_worker, to_head)
