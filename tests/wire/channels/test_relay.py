"""Workers that share the connections of their node daemon: nothing is lost, repeated or accepted from another node."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator

import pytest
import zmq
from zmq.utils.garbage import gc as zmq_garbage

from farstep.wire.channels.dealer import DealerLink
from farstep.wire.channels.relay import Relay
from farstep.wire.channels.zmq import NODE, Hub, relay_tag
from farstep.wire.keys import KeyPair
from tests.wire.channels.test_zmq import Relay as TcpProxy

GROUP = -1
ROUTE = b"0123456789abcdef" + NODE
WORKERS = [(0, 0), (1, 3), (2, 0)]


@pytest.fixture(scope="module", autouse=True)
def zero_copy_thread() -> Iterator[None]:
    """pyzmq starts this thread with the first large send that does not copy, and keeps it."""
    context = zmq.Context()
    sender, receiver = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    receiver.bind("inproc://warm-up")
    sender.connect("inproc://warm-up")
    sender.send(bytes(1 << 18), copy=False)
    receiver.recv()
    context.destroy()
    yield
    zmq_garbage.stop()


class Node:
    """A node daemon that relays for its workers, connected through proxies that can break its connections."""

    def __init__(self, hub: Hub, group: KeyPair, route: bytes = ROUTE) -> None:
        self.control = TcpProxy(int(hub.address.rpartition(":")[2]))
        self.bulk = TcpProxy(int(hub.bulk_port))
        self.keys = hub.admit_relay(route)
        self.link = DealerLink(self.control.address, hub.keys.public, group, NODE, 0.0, route=route)
        bulk_port = self.bulk.address.rpartition(":")[2]
        self.relay = Relay(self.link, self.control.address, self.keys, bulk_port, 10.0, True)
        self.received: dict[tuple[int, int], list[bytes]] = {}

    def start(self, hub: Hub, worker: tuple[int, int]) -> None:
        pair = hub.admit(*worker)
        hub.relay_for(worker[0], self.keys.public)
        self.relay.add(worker, pair)
        self.received[worker] = []

    def pump(self) -> None:
        self.relay.wait((), 0.002)
        while (received := self.link.receive(0.0)) is not None:
            self.relay.receive(received.frames)
        self.relay.service()
        for worker, frames in self.relay.messages():
            self.received[worker].append(bytes(frames[0]))

    def close(self) -> None:
        self.relay.close()
        self.link.close()
        self.control.close()
        self.bulk.close()


@contextlib.contextmanager
def hub_and_nodes(*routes: bytes) -> Iterator[tuple[Hub, list[Node]]]:
    hub = Hub("tcp://127.0.0.1:*", reliable=True)
    group = hub.admit(GROUP, 0)
    nodes: list[Node] = []
    try:
        nodes += [Node(hub, group, route) for route in routes]
        yield hub, nodes
    finally:
        for node in nodes:
            node.close()
        hub.close()


def pumped(hub: Hub, nodes: list[Node], arrived: dict[int, list[bytes]], until: Callable[[], bool]) -> None:
    """Run both ends until the condition holds."""
    deadline, next_service = time.monotonic() + 60, 0.0
    while not until():
        assert time.monotonic() < deadline, {worker: len(messages) for worker, messages in arrived.items()}
        for peer, received in hub.drain():
            if peer.worker >= 0:
                arrived.setdefault(peer.worker, []).append(bytes(received.frames[0]))
        if time.monotonic() > next_service:
            next_service = time.monotonic() + 0.2
            hub.service()
        for node in nodes:
            node.pump()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", range(3))
def test_messages_arrive_once_and_in_order_while_connections_break_at_random(seed: int) -> None:
    """Small and large ones, in both directions, of several workers."""
    rng = random.Random(seed)
    with hub_and_nodes(ROUTE) as (hub, [node]):
        for worker in WORKERS:
            node.start(hub, worker)
        arrived: dict[int, list[bytes]] = {number: [] for number, _ in WORKERS}
        up: dict[int, list[bytes]] = {number: [] for number, _ in WORKERS}
        down: dict[tuple[int, int], list[bytes]] = {worker: [] for worker in WORKERS}

        def message() -> bytes:
            return rng.randbytes(8) * rng.choice([1, 1, 500, 3000, 200_000])

        for turn in range(60):
            worker = rng.choice(WORKERS)
            up[worker[0]].append(message())
            node.relay.send(worker, [up[worker[0]][-1]])
            down[worker].append(message())
            hub.send(worker[0], [down[worker][-1]])
            pumped(hub, [node], arrived, iter([False] * rng.randrange(3) + [True]).__next__)
            if turn % 6 == 5:
                rng.choice([node.control, node.bulk]).break_connections()
        pumped(hub, [node], arrived, lambda: arrived == up and node.received == down)


def test_an_ended_worker_does_not_disturb_the_others() -> None:
    with hub_and_nodes(ROUTE) as (hub, [node]):
        for worker in WORKERS:
            node.start(hub, worker)
        arrived: dict[int, list[bytes]] = {}
        node.relay.remove((0, 0))
        hub.send(0, [b"too late"])
        hub.expel(2)
        node.relay.send((2, 0), [b"revoked"])
        node.relay.send((1, 3), [b"accepted"])
        pumped(hub, [node], arrived, lambda: bool(arrived))
        assert arrived == {1: [b"accepted"]}


def test_a_node_cannot_send_messages_of_a_worker_of_another_node() -> None:
    """Neither on its control connection nor on its bulk connection."""
    with hub_and_nodes(ROUTE, b"fedcba9876543210" + NODE) as (hub, [node, other]):
        pair = hub.admit(0, 0)
        hub.relay_for(0, node.keys.public)
        node.relay.add((0, 0), pair)
        other.relay.add((0, 0), pair)  # suppose that it even got the keys of the worker
        arrived: dict[int, list[bytes]] = {}
        other.relay.send((0, 0), [b"forged"])
        other.relay.send((0, 0), [b"forged" * 10_000])
        other.start(hub, (1, 0))
        other.relay.send((1, 0), [b"own"])
        other.relay.send((1, 0), [b"own" * 10_000])
        pumped(hub, [node, other], arrived, lambda: len(arrived.get(1, [])) == 2)
        assert 0 not in arrived
        node.relay.send((0, 0), [b"genuine"])
        pumped(hub, [node, other], arrived, lambda: 0 in arrived)
        assert arrived[0] == [b"genuine"]


def test_packets_of_a_node_that_was_declared_lost_are_not_accepted() -> None:
    with hub_and_nodes(ROUTE, b"fedcba9876543210" + NODE) as (hub, [lost, node]):
        lost.start(hub, (0, 0))
        node.start(hub, (1, 0))
        arrived: dict[int, list[bytes]] = {}
        hub.expel_relay(lost.keys.public)
        lost.relay.send((0, 0), [b"late"])
        lost.link.send([relay_tag(7, 0), b"unknown worker"])
        lost.link.send([b"?", b"not a tag"])
        node.relay.send((1, 0), [b"own"])
        pumped(hub, [lost, node], arrived, lambda: 1 in arrived)
        assert 0 not in arrived


def test_backlog_of_an_unreachable_head_stops_reading_from_workers() -> None:
    with hub_and_nodes(ROUTE) as (hub, [node]):
        node.start(hub, (0, 0))
        node.control.close()
        node.bulk.close()
        for _ in range(200):
            if node.relay.has_backlog:
                break
            node.relay.send((0, 0), [bytes(1 << 20)])
        assert node.relay.has_backlog


@pytest.mark.parametrize("breaks", [False, True])
def test_a_relay_owes_a_message_until_the_head_has_received_it(breaks: bool) -> None:
    """Also a small one, so that the report of a worker's end does not overtake it."""
    with hub_and_nodes(ROUTE) as (hub, [node]):
        node.start(hub, (0, 0))
        arrived: dict[int, list[bytes]] = {}
        node.relay.send((0, 0), [b"first"])
        pumped(hub, [node], arrived, lambda: bool(arrived))
        if breaks:
            node.control.break_connections()
        node.relay.send((0, 0), [b"last"])
        assert node.relay.owes((0, 0))
        node.relay.request_ack((0, 0))
        pumped(hub, [node], arrived, lambda: not node.relay.owes((0, 0)))
        assert arrived == {0: [b"first", b"last"]}
