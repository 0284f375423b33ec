"""The bulk connection: a token in clear text opens it only once, and it may break at any time."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from farstep.wire.channels.dealer import DealerLink
from farstep.wire.channels.zmq import MAIN, Hub, Peer
from farstep.wire.keys import KeyPair, Tokens
from tests.cluster import attacker

DEADLINE_S = 60.0
LARGE = 3 << 20


@pytest.fixture
def hub() -> Iterator[Hub]:
    with contextlib.closing(Hub("tcp://127.0.0.1:*", reliable=True)) as hub:
        yield hub


@pytest.fixture(autouse=True, scope="module")
def warm() -> None:
    """What is sent without a copy needs a thread of pyzmq's, which stays."""
    with contextlib.closing(Hub("tcp://127.0.0.1:*", reliable=True)) as hub, linked(hub) as (_, link):
        exchange(hub, link, 1)


@contextlib.contextmanager
def linked(hub: Hub, worker: int = 1) -> Iterator[tuple[KeyPair, DealerLink]]:
    pair = hub.admit(worker, 0)
    with contextlib.closing(DealerLink(hub.address, hub.keys.public, pair, MAIN, bulk=hub.bulk_port)) as link:
        greet(hub, link)
        yield pair, link


def exchange(hub: Hub, link: DealerLink, rounds: int, between: Callable[[], object] = lambda: None) -> None:
    """Large messages both ways: each arrives once, and in order."""
    sent: dict[str, list[bytes]] = {"head": [], "worker": []}
    got: dict[str, list[bytes]] = {"head": [], "worker": []}
    deadline = time.monotonic() + DEADLINE_S
    for number in range(rounds + 1):
        if number < rounds:
            text = number.to_bytes(4, "big") + os.urandom(LARGE)
            sent["worker"].append(text)
            link.send([text])
            sent["head"].append(text)
            hub.send(1, [text])
            between()
        while number == rounds or len(got["head"]) < number:  # the last one's fate may be open when it breaks
            got["head"] += [bytes(received.frames[0]) for _, received in hub.drain()]
            hub.service()
            while (received := link.receive(0.01)) is not None:
                got["worker"].append(bytes(received.frames[0]))
            if got == {"head": sent["worker"], "worker": sent["head"]}:
                break
            assert time.monotonic() < deadline, {name: len(texts) for name, texts in got.items()}


def greet(hub: Hub, link: DealerLink) -> Peer:
    """Let the hub learn the way to a worker; return what it knows of the worker."""
    link.send([b"hello"])
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        for peer, _ in hub.drain():
            return peer
        hub.service()
        link.receive(0.01)
    raise AssertionError("the greeting did not arrive")


def is_let_in(hub: Hub, name: bytes, token: bytes, route: bytes = b"") -> bool:
    """Try to open a bulk connection and to send a message over it."""
    with attacker.dial(f"tcp://127.0.0.1:{hub.bulk_port}") as raw:
        raw.sendall(attacker.greeting(b"PLAIN") + attacker.plain_hello(name, token))
        raw.settimeout(0.02)
        deadline, answer = time.monotonic() + DEADLINE_S, b""
        while b"WELCOME" not in answer:
            list(hub.drain())
            with contextlib.suppress(TimeoutError):
                answer += raw.recv(1000)
            if answer.endswith(b"\x03400"):
                return False
            assert time.monotonic() < deadline
        claims = [(b"Socket-Type", b"DEALER"), (b"Identity", route)]
        metadata = b"".join(attacker.property_of(*claim) for claim in claims)
        raw.sendall(attacker.command(b"INITIATE", metadata) + b"\x00\x05hello")
        with contextlib.suppress(TimeoutError):
            raw.recv(1000)
        list(hub.drain())
        return True


def connections(port: str) -> list[socket.socket]:
    """Of this process, those that go to a port; copies, to be closed."""
    found = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(path.readlink()).startswith("socket:"):
                connection = socket.socket(fileno=os.dup(int(path.name)))
                try:
                    address = connection.getpeername()
                except OSError:
                    address = ()
                if address[1:2] == (int(port),):
                    found.append(connection)
                else:
                    connection.close()
    return found


def cut(port: str) -> int:
    made = connections(port)
    for connection in made:
        with connection, contextlib.suppress(OSError):  # gone meanwhile
            connection.shutdown(socket.SHUT_RDWR)
    return len(made)


def test_a_token_is_accepted_once() -> None:
    pair = KeyPair.fresh()
    worker, head = Tokens(pair), Tokens(pair)
    first, second, third = worker.fresh(), worker.fresh(), worker.fresh()
    assert head.accepts(second)
    assert not head.accepts(second) and not head.accepts(first)
    changed = bytes([*third[:-1], third[-1] ^ 1])
    wrong = [changed, b"f" * 16 + third[16:], third[:-1], b"", b"x" * 80, b"\xff" * 80, Tokens(KeyPair.fresh()).fresh()]
    assert not any(head.accepts(token) for token in wrong)
    assert head.accepts(third)


def test_an_intercepted_token_is_rejected(hub: Hub) -> None:
    with linked(hub) as (pair, link):
        exchange(hub, link, 2)
        overheard = Tokens(pair).fresh()  # the one that the worker showed
        for _ in range(5):
            assert not is_let_in(hub, pair.public, overheard)
            exchange(hub, link, 1)
        assert hub.refused == 0


@pytest.mark.parametrize("named", [False, True])
def test_a_worker_cannot_take_the_bulk_connection_of_another(hub: Hub, named: bool) -> None:
    liar = hub.admit(2, 0)
    tokens = Tokens(liar)
    with linked(hub) as (_, link):
        exchange(hub, link, 2)
        route = greet(hub, link).bulk_route
        assert route[:1] == b"\0"  # peers cannot choose such a name
        for _ in range(3):
            assert is_let_in(hub, liar.public, tokens.fresh(), route if named else b"liar")
            exchange(hub, link, 1)


def test_broken_bulk_connection_is_reopened_without_loss(hub: Hub) -> None:
    with linked(hub) as (_, link):
        exchange(hub, link, 2)
        cuts: list[int] = []
        exchange(hub, link, 20, lambda: cuts.append(cut(hub.bulk_port)))
        assert sum(cuts) > 3


def test_both_connections_break(hub: Hub) -> None:
    ports = [hub.bulk_port, hub.address.rpartition(":")[2]]
    with linked(hub) as (_, link):
        exchange(hub, link, 2)
        cuts: list[int] = []
        exchange(hub, link, 20, lambda: cuts.append(cut(ports[len(cuts) % 2])))
        assert sum(cuts) > 3
