"""Links over ZeroMQ: a ROUTER at the head (here), a DEALER per worker (`dealer.py`), CURVE on all of them.

The head issues a key pair per worker incarnation and admits nobody else; a message is attributed to the key that
its connection was authenticated with, never to what the message says of itself.

A `reliable` hub survives broken connections (see `session.py`) and has a second ROUTER for bulk data: plain TCP, since
CURVE is slow, with every segment sealed under a key that both sides derive from the pair (see `sealing.py`). What is
shown there to be let in can be overheard, so it is good for one connection only.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import cast

import zmq
import zmq.utils.z85

from farstep.core import BytesLike, Received
from farstep.errors import WireError
from farstep.wire.buffer_pool import BufferPool
from farstep.wire.channels.reliable_channel import SEGMENT_BYTES, Packet, ReliableChannel
from farstep.wire.codec import Limits
from farstep.wire.encryption import TAG_BYTES, Cipher, Side
from farstep.wire.keys import KeyPair, Tokens

_ZAP = "inproc://zeromq.zap.01"
_DOMAIN = b"farstep"
MAIN, BEAT, NODE = b"main", b"beat", b"node"
"""What a routing id ends in: of a worker's connections, and of a node's agent."""
_AT_ONCE = 64
_DESCRIPTORS = 16
"""Of a context with its threads and the head's sockets, and some to spare."""
_WORTH_A_REPORT = 1 << 18
UNSENT = 64
"""Segments that wait in a worker, and that wait at the head for being read, before a sender has to."""
CONTROL_BYTES = SEGMENT_BYTES
"""The largest frame on the control connection of a reliable hub: also of those who have not said who they are yet."""
_DRAIN_S = 0.5
"""For reading without a pause: whoever sends faster than that does not keep the head from its other work."""
LEASE_S = 10.0
_PING, _SILENT = 0.1, 0.4
"""Fractions of a lease: the heartbeat interval, and the silence after which a connection is closed. Control
connections use ZeroMQ's heartbeats, the head's bulk connections TCP keepalive; ZeroMQ's threads and the kernel send
them, so a busy interpreter delays neither."""


@dataclass
class Peer:
    """A worker the head issued a key to; `route` is known once it has spoken."""

    worker: int
    """Below zero: not a worker, but the agents on nodes that were asked for together."""
    incarnation: int
    route: bytes = b""
    bulk_route: bytes = b""
    """As the router calls its last bulk connection: nobody else can have that name, or choose it."""
    tokens: Tokens | None = None
    """What it shows, each time another, to be let in to the bulk connection."""
    session: ReliableChannel | None = None


class Hub:
    """The head's side: listens, authenticates, and sorts messages by worker."""

    def __init__(
        self,
        address: str | Sequence[str],
        lease_s: float = LEASE_S,
        *,
        reliable: bool = False,
        encrypted: bool = True,
        most_bytes: int = Limits.MESSAGE_BYTES,
    ) -> None:
        self.keys = KeyPair.fresh()
        self._reliable, self._encrypted, self.lease_s = reliable, encrypted, lease_s
        self._most_bytes = CONTROL_BYTES if reliable else most_bytes
        self.has_more = False
        """Whether the last `drain` stopped before all was read."""
        self.refused = 0
        """Packets on the bulk connection that nobody who was admitted can have sent."""
        self._peers: dict[bytes, Peer] = {}
        self._keys: dict[int, bytes] = {}
        self._rooms = BufferPool()
        check_descriptors(_DESCRIPTORS + (2 if isinstance(address, str) else 2 * len(address)))
        self._context = zmq.Context()
        try:
            self._listen([address] if isinstance(address, str) else address)
        except BaseException:
            self.close()  # a context with open sockets blocks whoever collects it
            raise

    @property
    def address(self) -> str:
        return self.addresses[0]

    def _listen(self, addresses: Sequence[str]) -> None:
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind(_ZAP)
        self._router = self._socket(self._most_bytes)
        # Always read on: libzmq 4.3.5 aborts the process if a heartbeat is due on a connection that the peer closed
        # while its messages are unread.
        self._router.rcvhwm = 0
        keep_asking(self._router, self.lease_s)
        self._router.router_handover = True  # who comes back is let in, though its old connection seems to be there
        self._router.curve_server = True
        self._router.curve_secretkey = self.keys.secret
        self._router.curve_publickey = self.keys.public
        self.addresses, self.bulk_port = _bound(self._router, addresses), ""
        self._bulk: zmq.Socket[bytes] | None = None
        if self._reliable:
            self._bulk = self._socket(SEGMENT_BYTES + TAG_BYTES)
            self._bulk.plain_server = True
            self._bulk.rcvhwm = UNSENT  # bounded, so TCP keepalive takes the place of heartbeats
            self._bulk.tcp_keepalive = 1
            ping_s = min(max(1, round(_PING * self.lease_s)), 32_767)  # what Linux accepts
            self._bulk.tcp_keepalive_idle = self._bulk.tcp_keepalive_intvl = ping_s
            self._bulk.tcp_keepalive_cnt = round(_SILENT / _PING)
            self._bulk.tcp_maxrt = min(int(_SILENT * self.lease_s * 1000), 2**31 - 1)  # for unacknowledged data
            bound = _bound(self._bulk, [bulk_address(address, "*") for address in addresses])
            self.bulk_port = bound[0].rpartition(":")[2]

    def _socket(self, most_bytes: int) -> zmq.Socket[bytes]:
        router = self._context.socket(zmq.ROUTER)
        router.zap_domain = _DOMAIN
        router.maxmsgsize = most_bytes
        router.linger = 0
        router.backlog = 4096  # as many as systems allow: a thousand workers may knock at once
        router.handshake_ivl = 10_000
        router.sndhwm = 0
        router.router_mandatory = True
        return router

    @property
    def _routers(self) -> list[zmq.Socket[bytes]]:
        return [self._router] if self._bulk is None else [self._router, self._bulk]

    def filenos(self) -> list[int]:
        return [int(socket.fd) for socket in (self._zap, *self._routers)]

    def admit(self, worker: int, incarnation: int) -> KeyPair:
        """A fresh pair for a worker; its earlier ones stop being accepted."""
        self.expel(worker)
        pair = KeyPair.fresh()
        peer = self._peers[pair.public] = Peer(worker, incarnation)
        self._keys[worker] = pair.public
        if self._reliable and worker >= 0:
            peer.tokens = Tokens(pair)
            seal = Cipher(pair.derived(b"bulk"), Side.HEAD) if self._encrypted else None
            peer.session = ReliableChannel(seal, Limits.MESSAGE_BYTES, rooms=self._rooms)
        return pair

    def expel(self, worker: int) -> None:
        self._peers.pop(self._keys.pop(worker, b""), None)

    def drain(self) -> Iterator[tuple[Peer, Received]]:
        """Answer handshakes and yield every message that has arrived, but not for ever (see `has_more`)."""
        until, self.has_more = time.monotonic() + _DRAIN_S, False
        arrived = True
        while arrived:
            arrived = False
            for request in islice(waiting(self._zap), _AT_ONCE):
                arrived = True
                self._answer([frame.bytes for frame in request])
            for router, frames in self._next():
                arrived = True
                peer = self._peers.get(str(frames[-1].get("User-Id")).encode())
                if peer is None or len(frames) < 2:
                    continue  # a key that was taken back meanwhile
                route, packet = frames[0].bytes, Packet(router is self._bulk, [frame.buffer for frame in frames[1:]])
                if packet.is_here and route == peer.bulk_route:
                    continue  # said already: nobody is sent everything again and again
                if packet.is_here:
                    peer.bulk_route = route
                elif not packet.bulk and route.endswith(MAIN):
                    peer.route = route
                elif not packet.bulk:  # a worker's heartbeat has a connection of its own; answers go to the main one
                    yield peer, Received(packet.frames, heartbeat=True)
                    continue
                yield from self._taken(peer, packet)
            if time.monotonic() > until:
                self.has_more = True
                return

    def _next(self) -> Iterator[tuple[zmq.Socket[bytes], list[zmq.Frame]]]:
        """Some of what waits, in turn."""
        for router in self._routers:
            for frames in islice(waiting(router), _AT_ONCE):
                yield router, frames

    def _taken(self, peer: Peer, packet: Packet) -> Iterator[tuple[Peer, Received]]:
        if peer.session is None:
            yield peer, Received(packet.frames)
            return
        try:
            answers = peer.session.receive(packet, time.monotonic())
        except WireError:
            if packet.bulk:  # not necessarily the worker's own: it is not made to pay for it
                self.refused += 1
            else:
                yield peer, Received(())
            return
        for answer in answers:
            self._put(peer, answer)
        for frames in peer.session.messages():
            yield peer, Received(frames)
            if sum(map(len, frames)) > _WORTH_A_REPORT:  # what waits for one is kept by the worker
                self._put(peer, peer.session.report())

    def service(self) -> None:
        """Say what has arrived, and ask about what has not been confirmed; to be called about once a second."""
        now = time.monotonic()
        for peer in self._peers.values():
            if peer.session is not None:
                if peer.session.owes_report:
                    self._put(peer, peer.session.report())
                for packet in peer.session.due(now):
                    self._put(peer, packet)

    def _put(self, peer: Peer, packet: Packet) -> None:
        """Send, if somebody is there; what is lost is sent again when the worker is back."""
        self.send_to(peer.bulk_route if packet.bulk else peer.route, packet.frames, bulk=packet.bulk)

    def send(self, worker: int, frames: Sequence[BytesLike]) -> bool:
        """Send, unless nobody is connected there: False. A worker's launcher or lease says that it has gone."""
        peer = self._peers.get(self._keys.get(worker, b""))
        if peer is None:
            return False
        if peer.session is None:
            return self.send_to(peer.route, frames)
        for packet in peer.session.send(frames, time.monotonic()):
            self._put(peer, packet)
        return True

    def send_to(self, route: bytes, frames: Sequence[BytesLike], *, bulk: bool = False) -> bool:
        """The same by routing id."""
        router = self._bulk if bulk else self._router
        if not route or router is None:
            return False
        try:
            router.send_multipart([route, *frames], flags=zmq.DONTWAIT)
        except zmq.ZMQError:
            return False
        return True

    def _answer(self, request: list[bytes]) -> None:
        """RFC 27: admit exactly the keys that were issued."""
        version, request_id, _domain, _address, _identity, mechanism, *credentials = request
        key, known = b"", False
        if mechanism == b"CURVE" and credentials:
            key = zmq.utils.z85.encode(credentials[0])
            known = key in self._peers
        elif mechanism == b"PLAIN" and len(credentials) == 2:
            key, token = credentials
            peer = self._peers.get(key)
            known = peer is not None and peer.tokens is not None and peer.tokens.accepts(token)
        status = [b"200", b"OK", key, b""] if known else [b"400", b"unknown key", b"", b""]
        self._zap.send_multipart([version, request_id, *status])

    @property
    def is_closed(self) -> bool:
        return bool(self._context.closed)

    def close(self, linger_ms: int = 0) -> None:
        self._context.destroy(linger=linger_ms)


def _bound(router: zmq.Socket[bytes], addresses: Sequence[str]) -> list[str]:
    """Listen on all of them, on one port: what a firewall lets through is easily said then."""
    bound: list[str] = []
    for address in addresses:
        port = bound[0].rpartition(":")[2] if bound else "*"
        router.bind(address.replace(":*", f":{port}"))
        bound.append(bytes(cast(bytes, router.last_endpoint)).rstrip(b"\0").decode())
    return bound


def check_descriptors(count: int) -> None:
    """Raise `OSError` unless this process may open `count` more files: ZeroMQ aborts the process if it cannot."""
    with contextlib.ExitStack() as opened:
        for _ in range(count):
            opened.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


def keep_asking(socket: zmq.Socket[bytes], lease_s: float) -> None:
    """Make ZeroMQ send heartbeats, and close a connection whose other side does not answer them."""
    socket.heartbeat_ivl, socket.heartbeat_timeout = int(_PING * lease_s * 1000), int(_SILENT * lease_s * 1000)


def waiting(socket: zmq.Socket[bytes]) -> Iterator[list[zmq.Frame]]:
    """What has arrived; to try is cheaper than to ask."""
    with contextlib.suppress(zmq.Again):
        while True:
            yield socket.recv_multipart(zmq.DONTWAIT, copy=False)


def bulk_address(address: str, port: str) -> str:
    """Where bulk data goes of those who are at `address` for the rest."""
    return f"{address}-bulk" if address.startswith("ipc:") else f"{address.rpartition(':')[0]}:{port}"
