"""Nodes that are there and the workers on them, as the head sees them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

from farstep.core import Ended
from farstep.rollout.progress import PHASE, Phase
from farstep.wire import node_messages as n
from farstep.wire.channels.zmq import NODE, Hub

_TAIL_BYTES = 16 * 1024
_UNREAD_BYTES = 1 << 20
"""Of a worker's output, at most so much waits for being logged."""
_STRAYS = 64
"""How many workers that nobody asked for are told to end at a time: their agent may have made them up."""
_UNSAID_S = 3.0
"""A worker that its node's agent does not mention for so long after it was asked for is asked for again, or over."""


def tell(hub: Hub, name: str, message: n.ToNode) -> None:
    """Send to the agent of that name, whether it was let in or not."""
    hub.send_to(name.encode() + NODE, [n.encode(message)])


@dataclass
class Node:
    """An agent that said hello."""

    hub: Hub
    name: str
    group: int
    host: str
    pid: int
    place: str
    address: str
    heard: float
    block: int
    workers: dict[int, RemoteWorker] = field(default_factory=dict)
    leaving: bool = False
    """It is to go once its workers have handed over what they have."""
    given_back: bool = False
    """By us, not taken back by its engine, which may then bring it again."""

    def tell(self, message: n.ToNode) -> None:
        tell(self.hub, self.name, message)

    def start(self, worker: RemoteWorker, now: float) -> None:
        worker.words[PHASE] = Phase.CONNECT
        worker.node, worker.asked_at = self, now
        self.workers[worker.worker] = worker
        self.tell(worker.order)

    def compare(self, running: set[tuple[int, int]], now: float) -> None:
        """Messages may be lost when a connection breaks; what the agent says it runs is what counts."""
        for worker in self.workers.values():
            if (worker.worker, worker.incarnation) in running:
                worker.seen = True
                if worker.killed:
                    worker.kill()
            elif worker.poll() is None and now - worker.asked_at > _UNSAID_S:
                if worker.seen or worker.killed:
                    worker.end(Ended(1, "its end was not reported"))
                else:
                    worker.asked_at = now
                    self.tell(worker.order)
        strays = running - {(worker.worker, worker.incarnation) for worker in self.workers.values()}
        for stray in list(strays)[:_STRAYS]:  # the others are told at the next beats
            self.tell(n.KillWorker(*stray))

    def worker(self, number: int, incarnation: int) -> RemoteWorker | None:
        """That worker, unless it is another incarnation of it by now."""
        worker = self.workers.get(number)
        return worker if worker is not None and worker.incarnation == incarnation else None

    def __str__(self) -> str:
        return f"node {self.host}" + (f" ({self.place})" if self.place else "")


class RemoteWorker:
    """A worker that an agent runs, or will run (see `core.WorkerHandle`)."""

    def __init__(
        self,
        worker: int,
        incarnation: int,
        bootstrap: bytes,
        words: memoryview,
        given_up: Callable[[RemoteWorker], None],
    ) -> None:
        self.worker, self.incarnation, self.words, self._given_up = worker, incarnation, words, given_up
        self.order = n.StartWorker(worker, incarnation, bootstrap)
        self.node: Node | None = None
        self.asked_at, self.seen, self.leaving, self.killed = 0.0, False, False, False
        # Readable when there is something to know, as descriptors of a local process are.
        self.exit_fd, self.output_fd = (os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(2))
        self._new, self._tail = b"", b""
        self._ended: Ended | None = None

    @property
    def pid(self) -> int:
        return 0  # said by the worker itself, when it is there

    def poll(self) -> Ended | None:
        return self._ended

    def end(self, how: Ended) -> None:
        if self._ended is None:
            self._ended = how
            os.eventfd_write(self.exit_fd, 1)

    def kill(self) -> None:
        self.killed = True
        if self.node is None:
            self.end(Ended(0))
        elif self._ended is None:
            self.node.tell(n.KillWorker(self.worker, self.incarnation))

    def dump_stacks(self) -> None:
        if self.node is not None:
            self.node.tell(n.DumpStacks(self.worker, self.incarnation))

    def printed(self, data: bytes) -> None:
        self._new = (self._new + data)[-_UNREAD_BYTES:]
        os.eventfd_write(self.output_fd, 1)

    def read_output(self) -> bytes | None:
        try:
            os.eventfd_read(self.output_fd)
        except BlockingIOError:
            return b""
        new, self._new = self._new, b""
        self._tail = (self._tail + new)[-_TAIL_BYTES:]
        return new

    def output(self) -> str:
        self.read_output()
        return self._tail.decode(errors="replace")

    def close(self) -> None:
        self._given_up(self)
        os.close(self.exit_fd)
        os.close(self.output_fd)
