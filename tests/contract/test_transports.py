"""Every link passes the same contract."""

from __future__ import annotations

import contextlib
import os
import select
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import pytest

from farstep.core import BytesLike, Received
from farstep.testing.transport import Ends, check_transport, take
from farstep.wire.channels.dealer import DealerLink
from farstep.wire.channels.in_process import inproc_pair
from farstep.wire.channels.local import LocalLink, local_pair
from farstep.wire.channels.zmq import MAIN, Hub


@contextlib.contextmanager
def local() -> Iterator[Ends]:
    head, theirs = local_pair()
    worker = LocalLink(theirs)
    with contextlib.closing(head), contextlib.closing(worker):
        yield Ends(head, worker, carries_descriptors=True, reports_end=True)


@contextlib.contextmanager
def inproc() -> Iterator[Ends]:
    head, worker = inproc_pair()
    with contextlib.closing(head), contextlib.closing(worker):
        yield Ends(head, worker, carries_descriptors=True)


class HubEnd:
    """The hub's end for one worker, as a link."""

    def __init__(self, hub: Hub, worker: int) -> None:
        self._hub, self._worker = hub, worker
        self._inbox: deque[Received] = deque()
        self._poll = select.poll()
        for fd in hub.filenos():
            self._poll.register(fd, select.POLLIN)

    def send(self, frames: Sequence[BytesLike], fds: Sequence[int] = ()) -> None:
        self._hub.send(self._worker, frames)

    def receive(self, timeout_s: float | None = None) -> Received | None:
        self._drain()
        if not self._inbox:
            self._poll.poll(None if timeout_s is None else timeout_s * 1000)
            self._drain()
        return self._inbox.popleft() if self._inbox else None

    def _drain(self) -> None:
        for peer, received in self._hub.drain():
            assert peer.worker == self._worker
            self._inbox.append(received)

    def close(self) -> None:
        self._hub.expel(self._worker)


@contextlib.contextmanager
def zmq_ends(address: str) -> Iterator[Ends]:
    hub = Hub(address)
    try:
        pair = hub.admit(3, 0)
        worker = DealerLink(hub.address, hub.keys.public, pair, MAIN)
        with contextlib.closing(worker):
            head = HubEnd(hub, 3)
            worker.send([b"hello"])  # a worker always speaks first: then the hub knows the way to it
            assert bytes(take(head).frames[0]) == b"hello"
            yield Ends(head, worker)
    finally:
        hub.close()


FACTORIES: dict[str, Callable[[], contextlib.AbstractContextManager[Ends]]] = {
    "local": local,
    "inproc": inproc,
    "tcp": lambda: zmq_ends("tcp://127.0.0.1:*"),
    "ipc": lambda: zmq_ends(f"ipc://@farstep-test-{os.getpid()}"),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_transport(name: str) -> None:
    check_transport(FACTORIES[name])
