"""The head's records of connected nodes and their workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from farstep.core import UNKNOWN_STATUS, Ended, Received
from farstep.errors import WireError
from farstep.rollout.progress import PHASE, Phase, check_words, copy_words
from farstep.wire import node_messages as n
from farstep.wire.channels.zmq import NODE, Hub
from farstep.wire.messages import Progress, encode

_TAIL_BYTES = 16 * 1024
_UNREAD_BYTES = 1 << 20
"""Maximum number of bytes of a worker's output that wait to be logged; older bytes are dropped."""
NO_BLOCK = -1
"""The block of a node that runs only acting servers."""
_STRAYS = 64
"""Maximum number of kill messages per heartbeat for unknown workers, because a broken daemon could list any number."""
_UNREPORTED_S = 3.0
"""Seconds after a start message during which heartbeats may lack the worker. After that, the message is resent, or the
worker counts as ended."""


def send_to_node(hub: Hub, name: str, message: n.ToNode) -> None:
    """Send a message to a node daemon, even if it was not admitted."""
    hub.send_to(name.encode() + NODE, [n.encode(message)])


def host_of(place: str) -> str:
    """The last word of a place: with ssh, the host as in `SSHConfig.hosts`."""
    return place.rpartition(" ")[2]


@dataclass
class Node:
    """A connected node and its workers."""

    hub: Hub
    name: str
    group: int
    host: str
    pid: int
    place: str
    address: str
    heard_at: float
    """When its last message arrived."""
    block: int
    """Which workers it runs (see `cluster.py`), or `NO_BLOCK`."""
    workers: dict[int, RemoteWorker] = field(default_factory=dict)
    leaving: bool = False
    """Whether the node is draining. It is released when its workers have sent their chunks and ended."""
    relay: n.RelayKeys | None = None
    """The keys with which its daemon relays for its workers; None if these connect to the head themselves."""
    on_disk: dict[int, int] = field(default_factory=dict)
    """Its workers that were on disk at its last heartbeat, and their sizes in bytes."""
    released: bool = False
    """Whether the head released the node. In contrast, a node that its engine reclaimed may return."""

    def is_named(self, name: str) -> bool:
        """Whether `name` is the node's host name or its name in the engine."""
        return name in (self.host, host_of(self.place))

    def send(self, message: n.ToNode) -> None:
        send_to_node(self.hub, self.name, message)

    def excuse(self, seconds: float, now: float) -> None:
        """Do not count the silence of a time in which the head was not reading. It may have read a message since."""
        self.heard_at = min(now, self.heard_at + seconds)

    def start(self, worker: RemoteWorker, now: float) -> None:
        worker.words[PHASE] = Phase.CONNECT
        worker.node, worker.sent_at = self, now
        self.workers[worker.worker] = worker
        worker.start_message.relay = self.relay
        if self.relay is not None:
            self.hub.relay_for(worker.worker, self.relay.public)
        self.send(worker.start_message)

    def reconcile(self, running: set[tuple[int, int]], suspended: set[tuple[int, int]], now: float) -> None:
        """Reconcile the workers of this node with the list in a heartbeat, because other messages may be lost.

        Args:
            running: Number and incarnation of every worker process on the node.
            suspended: Those of them that are suspended.
            now: Time in seconds.
        """
        for worker in self.workers.values():
            if (worker.worker, worker.incarnation) in running:
                worker.seen = True
                if worker.killed:
                    worker.kill()
                elif worker.suspended is not ((worker.worker, worker.incarnation) in suspended):
                    worker.send_suspended()
            elif worker.poll() is None and now - worker.sent_at > _UNREPORTED_S:
                if worker.seen or worker.killed:
                    worker.end(Ended(UNKNOWN_STATUS, "its end was not reported"))
                else:
                    worker.sent_at = now
                    self.send(worker.start_message)
        strays = running - {(worker.worker, worker.incarnation) for worker in self.workers.values()}
        for stray in list(strays)[:_STRAYS]:  # later heartbeats list the others again
            self.send(n.KillWorker(*stray))

    def store_progress(self, beat: n.NodeBeat, receive: Callable[[int, Received], None]) -> None:
        """Store the progress words in a heartbeat of a daemon that relays.

        Args:
            beat: The heartbeat.
            receive: Receives invalid words as a message of the worker, which is then replaced, since it has written
                these words itself.
        """
        returning = set(beat.returning)
        for key, words in zip(beat.workers, beat.progress, strict=False):
            if (worker := self.worker(*key)) is None:
                continue
            try:
                check_words(words, len(worker.words))
            except WireError:
                receive(worker.worker, Received([encode(Progress(words))], heartbeat=True))
            else:
                copy_words(words, worker.words)
                if key in returning:
                    worker.words[PHASE] = Phase.QUEUED  # the only phase without a time limit

    def worker(self, number: int, incarnation: int) -> RemoteWorker | None:
        """The worker, or None if the number is unknown or the incarnation is not the current one."""
        worker = self.workers.get(number)
        return worker if worker is not None and worker.incarnation == incarnation else None

    def __str__(self) -> str:
        return f"node {self.host}" + (f" ({self.place})" if self.place else "")


class RemoteWorker:
    """A worker that runs on a node, or waits for a node (see `core.WorkerHandle`).

    It has no descriptors, because there may be thousands of workers. It calls `on_change` when it has printed or ended.
    """

    exit_fd = output_fd = -1

    def __init__(
        self,
        worker: int,
        incarnation: int,
        bootstrap: bytes,
        words: memoryview,
        on_change: Callable[[int], None],
        on_close: Callable[[RemoteWorker], None],
    ) -> None:
        self.worker, self.incarnation, self.words = worker, incarnation, words
        self._on_change, self._on_close = on_change, on_close
        self.start_message = n.StartWorker(worker, incarnation, bootstrap)
        self.node: Node | None = None
        self.sent_at, self.seen, self.leaving, self.killed, self.suspended = 0.0, False, False, False, False
        self._parked = False
        self._new, self._tail = b"", b""
        self._ended: Ended | None = None

    @property
    def pid(self) -> int:
        return 0  # not known yet; the worker sends it in its `Hello`

    def poll(self) -> Ended | None:
        return self._ended

    def end(self, how: Ended) -> None:
        if self._ended is None:
            self._ended = how
            self._on_change(self.worker)

    def kill(self) -> None:
        self.killed = True
        if self.node is None:
            self.end(Ended(0))
        elif self._ended is None:
            self.node.send(n.KillWorker(self.worker, self.incarnation))

    def suspend(self, parked: bool = False) -> None:
        self.suspended, self._parked = True, parked
        self.send_suspended()

    def resume(self) -> None:
        if self.suspended:
            self.suspended = False
            self.send_suspended()

    def send_suspended(self) -> None:
        """Send the node daemon whether the worker is to be suspended."""
        if self.node is not None and self._ended is None:
            self.node.send(n.SetSuspended(self.worker, self.incarnation, self.suspended, self._parked))

    def dump_stacks(self) -> None:
        if self.node is not None:
            self.node.send(n.DumpStacks(self.worker, self.incarnation))

    def printed(self, data: bytes) -> None:
        self._new = (self._new + data)[-_UNREAD_BYTES:]
        if self._ended is None:  # otherwise its end, which is reported once, was a change already
            self._on_change(self.worker)

    def read_output(self) -> bytes | None:
        new, self._new = self._new, b""
        self._tail = (self._tail + new)[-_TAIL_BYTES:]
        return new

    def output(self) -> str:
        self.read_output()
        return self._tail.decode(errors="replace")

    def close(self) -> None:
        self._on_close(self)
