"""Simulated workers: a node daemon that acts for all the workers that the head requests, in one process.

Each simulated worker has the connections of a real one and sends the same messages; instead of rolling, it sends the
same rows repeatedly: at once, or with the arguments LOW HIGH after a log-uniform time between these numbers of seconds,
which is also the sum of the chunk's rewards. `scale.py` and `uneven.py` start this script in place of ssh.

With the arguments `relay FOLDER`, the process acts for many nodes that relay for their workers: one for each bootstrap
that appears in the folder.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from gymnasium import spaces

from farstep.launch.daemon.node_daemon import NodeDaemon
from farstep.rollout.blocks import Layout
from farstep.rollout.progress import BEAT_S, ROLLED, private_words
from farstep.rollout.rows import Rows
from farstep.schema import ArraySpec
from farstep.wire import messages as m
from farstep.wire import node_messages as n
from farstep.wire.channels.dealer import DealerLink
from farstep.wire.channels.relay import Relay
from farstep.wire.channels.zmq import BEAT, MAIN, NODE
from farstep.wire.codec import pack
from farstep.wire.keys import KeyPair
from farstep.wire.versions import versions
from farstep.worker.connection.bootstrap import read_bootstrap


class Figure:
    """One simulated worker.

    `send` sends a message to the head. `range_s` has the shortest and the longest time of a chunk, both 0 to answer at
    once. The figure adds the times at which its chunks are done, and itself, to the heap `due`.
    """

    def __init__(
        self,
        bootstrap: dict[str, Any],
        send: Callable[[list[Any]], None],
        range_s: tuple[float, float],
        due: list[tuple[float, int, Figure]],
    ) -> None:
        self._send = send
        self._rng, self._range_s, self._due = np.random.default_rng(int(bootstrap["worker"])), range_s, due
        self._tickets: deque[tuple[float, m.Ticket]] = deque()
        """Tickets in progress, each with the time that it takes."""
        self._done_at = 0.0
        """When the last ticket is done."""
        self.words = private_words(int(bootstrap["envs"])).tolist()
        identity = (int(bootstrap["worker"]), int(bootstrap["incarnation"]), str(bootstrap["run"]))
        self._say(m.Hello(*identity, socket.gethostname(), os.getpid(), versions()))
        self._order = 0

    def _say(self, message: m.FromWorker, *frames: Any) -> None:
        self._send([m.encode(message), *frames])

    def handle(self, frames: Sequence[Any]) -> None:
        """Answer a message of the head."""
        match m.decode_from_head(frames):
            case m.Welcome(seeds=seeds):
                self._envs = len(seeds)
                obs = spaces.Box(-1.0, 1.0, (8,), np.float32)
                self._say(m.Ready(pack(obs), pack(spaces.Discrete(2))))
            case m.SendAgent(agent=agent):
                schema = {"action": ArraySpec((), "<i8")}
                self._say(m.AgentReady(agent, schema, pack({"action": "action"}), {}, pack(None)))
            case m.SetLayout() as lay:
                layout = Layout.of(lay)
                self._layout = Layout(1, layout.steps, self._envs, layout.rows, layout.chunks)
                self._blocks = self._layout.views(memoryview(bytearray(self._layout.nbytes)))
            case m.Ticket() as ticket:
                self._accept(ticket)

    def _accept(self, ticket: m.Ticket) -> None:
        """Answer a ticket, at once or some time after the previous one is done."""
        low, high = self._range_s
        if not low:
            self._answer(ticket, 0.0)
            return
        took = low * (high / low) ** self._rng.random()
        self._done_at = max(time.monotonic(), self._done_at) + took
        self._tickets.append((took, ticket))
        heapq.heappush(self._due, (self._done_at, id(self), self))

    def answer_next(self) -> None:
        """Answer the oldest ticket in progress."""
        took, ticket = self._tickets.popleft()
        self._answer(ticket, took)

    def _answer(self, ticket: m.Ticket, took: float) -> None:
        rows = Rows(self._layout, self._blocks, 0, 0, self._envs)
        rows.row["valid"][:] = True
        rows.row["reward"][:] = took / max(1, ticket.steps)
        tables = rows.tables(ticket.steps)
        frames = [b"" if name.startswith("final_") else table.tobytes() for name, table in tables.items()]
        self._order += ticket.steps > 0
        resume = np.ones(self._envs, np.int64).tobytes()
        self.words[ROLLED] = ticket.seq
        self._say(m.Chunk(ticket.seq, 0, resume, self._order, passed=0, keys=list(tables), infos=False), b"", *frames)


class Connected:
    """A figure with connections of its own."""

    def __init__(
        self,
        bootstrap: dict[str, Any],
        context: Any,
        range_s: tuple[float, float],
        due: list[tuple[float, int, Figure]],
    ) -> None:
        where = (bootstrap["address"], bootstrap["server_key"].encode(), _pair(bootstrap))
        self.link = DealerLink(*where, MAIN, bulk=bootstrap["bulk_port"], context=context)
        self._beat = DealerLink(*where, BEAT, context=context)
        self._figure = Figure(bootstrap, self.link.send, range_s, due)

    def beat(self) -> None:
        self._beat.send([m.encode(m.Progress(self._figure.words))])

    def hear(self) -> None:
        """Answer all messages that have arrived."""
        while (received := self.link.receive(0.0)) is not None:
            self._figure.handle(received.frames)


def _pair(bootstrap: dict[str, Any]) -> KeyPair:
    return KeyPair(bootstrap["public"].encode(), bootstrap["secret"].encode())


class RelayNode:
    """A simulated node whose daemon relays for its figures."""

    def __init__(self, bootstrap: dict[str, Any], number: int, context: Any) -> None:
        self._bootstrap, self._name = bootstrap, os.urandom(8).hex()
        self._address, self._number = bootstrap["addresses"][0], number
        route = self._name.encode() + NODE
        key, pair = bootstrap["server_key"].encode(), _pair(bootstrap)
        self.link = DealerLink(
            self._address, key, pair, NODE, 0.0, route=route, lease_s=bootstrap["lease_s"], context=context
        )
        self._relay: Relay | None = None
        self._figures: dict[tuple[int, int], Figure] = {}
        self.left = False

    def sockets(self) -> list[Any]:
        return self.link.sockets if self._relay is None else [*self.link.sockets, self._relay.socket]

    def beat(self) -> None:
        if not self._figures:
            cpus, place = 50, f"crowd {self._number}"
            hello = n.NodeHello(self._name, self._bootstrap["run"], place, os.getpid(), cpus, versions(), place)
            self.link.send([n.encode(hello)])
            return
        words = [figure.words for figure in self._figures.values()]
        self.link.send([n.encode(n.NodeBeat(self._name, list(self._figures), [], words))])

    def hear(self) -> None:
        while (received := self.link.receive(0.0)) is not None:
            if len(received.frames) > 1 and self._relay is not None:
                self._relay.receive(received.frames)
                continue
            match n.decode_to_node(received.frames):
                case n.StartWorker() as order:
                    self._start(order)
                case n.Leave():
                    self.left = True
        if self._relay is not None:
            self._relay.service()
            for worker, frames in self._relay.messages():
                self._figures[worker].handle(frames)
            self._relay.service()

    def _start(self, order: n.StartWorker) -> None:
        key, keys = (order.worker, order.incarnation), order.relay
        if key in self._figures or keys is None:
            return
        bootstrap = json.loads(order.bootstrap)
        if self._relay is None:
            pair = KeyPair(keys.public, keys.secret)
            self._relay = Relay(self.link, self._address, pair, keys.bulk_port, self._bootstrap["lease_s"], True)
        relay = self._relay
        relay.add(key, _pair(bootstrap))
        self._figures[key] = Figure(bootstrap, lambda frames: relay.send(key, frames), (0.0, 0.0), [])


def serve_nodes(folder: Path) -> None:
    """Act for one node per bootstrap in the folder, until the head has released all of them."""
    context = zmq.Context()
    context.max_sockets = 20_000
    nodes: list[RelayNode] = []
    poller, next_beat = zmq.Poller(), 0.0
    owners: dict[Any, RelayNode] = {}
    while not nodes or not all(node.left for node in nodes):
        if time.monotonic() > next_beat:
            next_beat = time.monotonic() + BEAT_S
            for path in folder.glob("*.json"):
                with contextlib.suppress(FileNotFoundError):  # the other process has it
                    taken = path.rename(path.with_suffix(f".{os.getpid()}"))
                    nodes.append(RelayNode(json.loads(taken.read_bytes()), len(nodes), context))
            for node in nodes:
                node.beat()
                node.hear()
            poller, owners = zmq.Poller(), {sock: node for node in nodes for sock in node.sockets()}
            for sock in owners:
                poller.register(sock, zmq.POLLIN)
        for node in {id(owners[sock]): owners[sock] for sock, _ in poller.poll(200)}.values():
            node.hear()


class Crowd(NodeDaemon):
    """A node daemon with simulated workers."""

    def __init__(self, bootstrap: dict[str, Any], range_s: tuple[float, float]) -> None:
        super().__init__(bootstrap, "crowd")
        self._range_s = range_s
        self._context = zmq.Context()
        self._context.max_sockets = 20_000
        self._orders: list[dict[str, Any]] = []
        threading.Thread(target=self._act, daemon=True).start()

    def _start(self, link: DealerLink, order: n.StartWorker) -> None:
        key = (order.worker, order.incarnation)
        if key not in self._started:
            self._started[key] = None
            self._orders.append({**json.loads(order.bootstrap), "address": self._address})

    def running(self) -> list[tuple[int, int]]:
        return list(self._started)

    def _act(self) -> None:
        poller, next_beat = zmq.Poller(), 0.0
        figures: dict[Any, Connected] = {}
        due: list[tuple[float, int, Figure]] = []
        while True:
            while self._orders:
                figure = Connected(self._orders.pop(0), self._context, self._range_s, due)
                for sock in figure.link.sockets:
                    poller.register(sock, zmq.POLLIN)
                    figures[sock] = figure
            wait_ms = 20 if not due else max(0.0, min(20.0, (due[0][0] - time.monotonic()) * 1e3))
            for sock, _ in poller.poll(int(wait_ms)):
                figures[sock].hear()
            while due and due[0][0] <= time.monotonic():
                heapq.heappop(due)[-1].answer_next()
            if time.monotonic() > next_beat:
                next_beat = time.monotonic() + BEAT_S
                for figure in dict.fromkeys(figures.values()):
                    figure.beat()
                    figure.hear()


if __name__ == "__main__":
    if sys.argv[1:2] == ["relay"]:
        serve_nodes(Path(sys.argv[2]))
        os._exit(0)
    low_s, high_s = (float(word) for word in sys.argv[1:3]) if len(sys.argv) > 2 else (0.0, 0.0)
    crowd = Crowd(read_bootstrap(sys.stdin.fileno(), None), (low_s, high_s))
    signal.signal(signal.SIGTERM, crowd.on_signal)
    crowd.run()
    os._exit(0)
