"""A worker's side of served inference, without an acting server."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from array import array
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from farstep.acting import client
from farstep.acting import messages as am
from farstep.acting.client import ServedActor, ServerLost, group_sizes
from farstep.acting.connections import LocalServer, ServerAddress
from farstep.acting.mailbox import (
    ANSWER,
    CONTINUES,
    HELD,
    IS_FIRST,
    MIN_VERSION,
    REQUEST,
    TICKET,
    WAITS,
    Mailbox,
    MailboxLayout,
)
from farstep.config.inference import ServedInference
from farstep.core import Received
from farstep.rollout.progress import EPISODES
from farstep.rollout.rows import Slots
from farstep.wire.codec import pack
from farstep.wire.messages import Ticket
from farstep.worker.connection.inbox import TicketCancelled
from tests.cluster.checks import within


def served_actor(address: str | ServerAddress, idle: Callable[[], None] = lambda: None) -> ServedActor:
    words = memoryview(array("q", [0] * EPISODES))
    server = LocalServer(address, "secret") if isinstance(address, str) else address
    return ServedActor(0, server, 0, Slots(0, [0], [0]), "obs", ({}, {}), [1], idle, words)


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


class FakeServer:
    """Lets one worker join. `on_wait` is called with the words of its group when it waits for its doorbell."""

    secret = "secret"

    def __init__(self, on_wait: Callable[[memoryview], None]) -> None:
        self._on_wait = on_wait

    def connect(self) -> Any:
        joined = am.Joined({}, pack({}), pack({}), {}, pack(""), "", False, am.proof(self.secret, "server"))
        received = Received([am.encode(joined)])
        self.receive: Callable[[float], Received] = lambda timeout_s: received
        return SimpleNamespace(send=lambda frames: None, receive=lambda timeout_s: self.receive(timeout_s))

    def exchange(self, received: Received, layout: MailboxLayout, index: int) -> Any:
        self.mailbox = Mailbox.create(layout)

        def wait(timeout_s: float) -> bool:
            self._on_wait(self.words)
            return True

        return SimpleNamespace(
            mailbox=self.mailbox,
            post=lambda group: None,
            update=lambda: None,
            wait=wait,
            check=lambda: None,
            close=self.mailbox.close,
        )

    @property
    def words(self) -> memoryview:
        return self.mailbox.group_words[0]

    def disconnect(self, link: Any) -> None: ...

    def is_current(self) -> bool:
        return True

    def connection_error(self, waited_s: float) -> str:
        return ""


def act_once(server: FakeServer) -> None:
    actor = begun(server)
    actor.act(0)
    actor.close()


def begun(server: FakeServer) -> ServedActor:
    """A worker that has joined and begun a chunk."""
    actor = served_actor(server)
    actor.join({})
    actor.begin(one_row())
    return actor


def one_row() -> Any:
    """The columns of one environment in a chunk of one row."""
    return SimpleNamespace(
        row={"episode_start": np.zeros((1, 1), bool), "version": np.zeros((1, 1), np.int64)}, chunk={}
    )


def answer(words: memoryview) -> None:
    words[ANSWER] = words[REQUEST]


def test_worker_sets_its_flag_while_it_waits() -> None:
    seen: list[int] = []

    def on_wait(words: memoryview) -> None:
        seen.append(words[WAITS])
        answer(words)

    server = FakeServer(on_wait)
    act_once(server)
    assert seen == [1] and server.words[WAITS] == 0


def test_a_worker_does_not_miss_an_answer_that_arrives_just_before_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server has not seen that the worker waits, so it does not ring."""

    def on_wait(words: memoryview) -> None:
        raise AssertionError("the worker waits although its answer has arrived")

    server = FakeServer(on_wait)

    def fence() -> None:
        if server.words[WAITS]:
            answer(server.words)

    monkeypatch.setattr(client, "Fence", lambda: fence)
    act_once(server)


def test_a_request_is_visible_before_the_end_of_its_chunk_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the server's window would not wait for the last request of a worker that is preempted."""
    server, seen = FakeServer(answer), set[tuple[int, int]]()
    monkeypatch.setattr(client, "Fence", lambda: lambda: seen.add((server.words[REQUEST], server.words[CONTINUES])))
    actor = begun(server)
    for continues in (True, False):
        actor.request(0, 0, continues)
        actor.receive(0, 0)
    assert seen == {(0, 1), (1, 1), (2, 1), (2, 0)}
    actor.close()


def test_only_the_first_request_of_a_chunk_is_marked_as_first() -> None:
    """The server records the recurrent state for it."""
    server, seen = FakeServer(answer), list[tuple[int, int, int]]()
    actor = begun(server)
    for ticket in (Ticket(5, 0, 2, min_version=3), Ticket(6, 0, 2, min_version=4)):
        actor.begin(one_row())
        actor.hold(ticket)
        for _ in range(2):
            actor.request(0, 0, True)
            seen.append((server.words[TICKET], server.words[MIN_VERSION], server.words[IS_FIRST]))
            actor.receive(0, 0)
    actor.close()
    assert seen == [(5, 3, 1), (5, 3, 0), (6, 4, 1), (6, 4, 0)]


def test_a_chunk_after_a_cancelled_one_announces_its_own_ticket() -> None:
    server = FakeServer(answer)
    actor = begun(server)
    actor.hold(Ticket(5, 0, 2, min_version=3))
    actor.request(0, 0, True)
    actor.release()  # its first request was never answered
    actor.begin(one_row())
    actor.hold(Ticket(6, 0, 2, min_version=4))
    actor.request(0, 0, True)
    assert (server.words[TICKET], server.words[MIN_VERSION], server.words[IS_FIRST]) == (6, 4, 1)
    actor.receive(0, 0)
    assert server.words[IS_FIRST] == 0
    actor.close()


def lose_connection(*_: Any) -> Any:
    raise EOFError


@pytest.mark.parametrize("lost_in", ["act", "save"])
def test_a_worker_that_lost_its_server_leaves_the_mailbox_to_the_next_worker(lost_in: str) -> None:
    server = FakeServer(lose_connection)
    actor = begun(server)
    server.receive = lose_connection
    with pytest.raises(ServerLost):
        actor.act(0) if lost_in == "act" else actor.save()
    server.mailbox.words[HELD] = server.words[CONTINUES] = 1  # as the next worker
    actor.release()
    assert server.mailbox.words[HELD] == server.words[CONTINUES] == 1
    actor.close()


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({}, {1: [1], 2: [1, 1], 5: [3, 2], 16: [8, 8]}),
        ({"device": "cuda"}, {1: [1], 2: [1, 1], 3: [2, 1], 6: [2, 2, 2], 8: [2, 2, 2, 2], 16: [4, 4, 4, 4]}),
        ({"device": "cuda", "where": "head"}, {8: [4, 4]}),
    ],
)
def test_environments_form_groups(options: dict[str, Any], sizes: dict[int, list[int]]) -> None:
    serving = ServedInference(**options)
    assert {num_envs: group_sizes(num_envs, serving) for num_envs in sizes} == sizes
