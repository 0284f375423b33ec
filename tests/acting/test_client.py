"""A worker's side of served inference, without an acting server."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from farstep.acting.client import ServedActor
from farstep.acting.connections import LocalServer
from farstep.rollout.progress import EPISODES
from farstep.rollout.rows import Slots
from farstep.worker.connection.inbox import TicketCancelled
from tests.cluster.checks import within


def served_actor(address: str, idle: Callable[[], None] = lambda: None) -> ServedActor:
    words = memoryview(array("q", [0] * EPISODES))
    return ServedActor(0, LocalServer(address, "secret"), 0, Slots(0, [0], [0]), "obs", ({}, {}), [1], idle, words)


@contextlib.contextmanager
def refusing_server() -> Iterator[str]:
    """Context manager: the address of a server that closes every connection."""
    address = f"farstep-test-{os.urandom(8).hex()}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("\0" + address)
    listener.listen()

    def refuse() -> None:
        with contextlib.suppress(OSError):
            while True:
                listener.accept()[0].close()

    thread = threading.Thread(target=refuse)
    thread.start()
    with listener:
        yield address
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_worker_whose_server_closes_every_connection_can_still_be_stopped() -> None:
    calls: list[None] = []

    def idle() -> None:
        calls.append(None)
        if len(calls) == 3:
            raise TicketCancelled

    with refusing_server() as address:
        actor = served_actor(address, idle)
        with pytest.raises(TicketCancelled):
            within(lambda: actor.join({}), 20)
        actor.close()


def test_state_is_restored_although_the_calls_in_between_are_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    restored: list[Any] = []
    actor = served_actor("unused")
    monkeypatch.setattr(actor, "save", lambda: {"state": [1]})
    monkeypatch.setattr(actor, "resume", restored.append)
    with pytest.raises(TicketCancelled), actor.restoring_state():
        raise TicketCancelled
    assert restored == [{"state": [1]}]
