"""The head's end of ZeroMQ links: one ROUTER socket for all workers. Each worker has a DEALER (`dealer.py`).

All control connections use CURVE. The head issues one key pair per worker process and admits no other key. It
identifies the sender of a message by the key of the connection, never by the contents of the message.

A `reliable` hub survives broken connections (see `reliable_channel.py`) and has a second ROUTER for bulk data. The
second ROUTER uses plain TCP, because CURVE is slow. Every segment is encrypted with a key that both sides derive from
the pair (see `encryption.py`). An eavesdropper can read the token that opens a bulk connection, so each token is valid
only once.

A worker may also share the connections of its node daemon (see `relay.py`). A tag in front of each packet then names
the worker. The head accepts the packet only from the node on which it started this worker.
"""

from __future__ import annotations

import contextlib
import os
import random
import struct
import time
from collections import Counter
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
"""Endings of routing ids: main connection of a worker, heartbeat connection of a worker, connection of a node
daemon."""
_AT_ONCE = 64
"""Maximum number of messages to read from one socket before the next socket's turn."""
_DESCRIPTORS = 16
"""Number of file descriptors of a ZeroMQ context and the head's sockets, with a margin."""
_ACK_AT_ONCE_BYTES = 1 << 18
"""Larger messages are acknowledged at once, so that the worker can free them."""
_REQUESTS_PER_RELAY = 8
"""Maximum number of workers of a node from which `service` requests an acknowledgement at a time, if the node's daemon
relays for them."""
UNSENT = 64
"""Number of segments that may be queued, in a worker and on the head, before sending blocks."""
CONTROL_BYTES = SEGMENT_BYTES
"""Maximum frame size on the control connection of a reliable hub; limits peers that are not authenticated yet."""
DRAIN_S = 0.5
"""Maximum seconds to read without a pause, so that a flood of messages does not starve the head."""
LEASE_S = 10.0
_PING, _SILENT = 0.1, 0.4
"""Fractions of a lease: the heartbeat interval, and the silence after which a connection is closed. Control connections
use ZeroMQ's heartbeats; the head's bulk connections use TCP keepalive. ZeroMQ's threads and the kernel send these, so a
busy interpreter does not delay them."""


_RELAY_TAG = struct.Struct("<qq")
"""The first frame of a relayed packet: number and incarnation of the worker."""


def relay_tag(worker: int, incarnation: int) -> bytes:
    return _RELAY_TAG.pack(worker, incarnation)


def relayed_worker(tag: BytesLike) -> tuple[int, int] | None:
    """The worker that a relayed packet names; None if it names none."""
    return _RELAY_TAG.unpack(tag) if len(tag) == _RELAY_TAG.size else None


@dataclass(frozen=True)
class _NodeRelay:
    """A node daemon that relays for its workers."""

    route: bytes
    """The routing id of its control connection; a secret of this daemon and the head."""
    tokens: Tokens
    """Checks the one-time tokens with which it opens bulk connections."""


@dataclass
class Peer:
    """A worker to which the head issued a key."""

    worker: int
    """The worker's id; below zero for the node daemons of one group, which share a key."""
    incarnation: int
    route: bytes = b""
    """The routing id of its main connection; empty until its first message."""
    bulk_route: bytes = b""
    """The routing id of its last bulk connection. The router assigns it, so a peer can neither choose nor forge it."""
    tokens: Tokens | None = None
    """Checks the one-time tokens with which it opens bulk connections."""
    channel: ReliableChannel | None = None
    relay: bytes = b""
    """The public key of the node daemon that relays for it; empty if it has connections of its own."""


class Hub:
    """The head's end of all ZeroMQ links: listens, authenticates, and attributes messages to workers.

    Args:
        address: The address or addresses to listen on; with port `*`, the system chooses a port.
        lease_s: The lease in seconds; it determines the heartbeat interval.
        reliable: Whether to resend what broken connections lose, and to listen for bulk data on a second port.
        encrypted: Whether bulk data is encrypted.
        most_bytes: Maximum frame size in bytes for a hub that is not reliable.
    """

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
        """Whether the last `drain` stopped before it had read all messages."""
        self.refused = 0
        """Number of invalid packets on bulk connections. An unauthenticated peer may have sent them."""
        self.peers: dict[bytes, Peer] = {}
        """Workers, and groups of node daemons, to which the head issued keys, by public key."""
        self._keys: dict[int, bytes] = {}
        self._relays: dict[bytes, _NodeRelay] = {}
        self._pool = BufferPool()
        check_descriptors(_DESCRIPTORS + (2 if isinstance(address, str) else 2 * len(address)))
        self._context = zmq.Context()
        try:
            self._listen([address] if isinstance(address, str) else address)
        except BaseException:
            self.close()  # otherwise the garbage collector would block on a context with open sockets
            raise

    @property
    def address(self) -> str:
        return self.addresses[0]

    def _listen(self, addresses: Sequence[str]) -> None:
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind(_ZAP)
        self._router = self._socket(self._most_bytes)
        # Never stop reading: libzmq 4.3.5 aborts the process if a heartbeat is due on a connection that the peer has
        # closed and whose messages are unread.
        self._router.rcvhwm = 0
        enable_heartbeats(self._router, self.lease_s)
        self._router.router_handover = True  # a reconnect replaces the old connection, even if the old one seems alive
        self._router.curve_server = True
        self._router.curve_secretkey = self.keys.secret
        self._router.curve_publickey = self.keys.public
        self.addresses, self.bulk_port = _bound(self._router, addresses), ""
        self._bulk: zmq.Socket[bytes] | None = None
        if self._reliable:
            self._bulk = self._socket(SEGMENT_BYTES + TAG_BYTES)
            self._bulk.plain_server = True
            self._bulk.rcvhwm = UNSENT  # a bounded queue, so use TCP keepalive instead of heartbeats
            self._bulk.tcp_keepalive = 1
            ping_s = min(max(1, round(_PING * self.lease_s)), 32_767)  # Linux allows no more
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
        router.backlog = 4096  # a thousand workers may connect at once
        router.handshake_ivl = 10_000
        router.sndhwm = 0
        router.router_mandatory = True
        return router

    @property
    def _routers(self) -> list[zmq.Socket[bytes]]:
        return [self._router] if self._bulk is None else [self._router, self._bulk]

    def filenos(self) -> list[int]:
        return [int(socket.fd) for socket in (self._zap, *self._routers)]

    def admit(self, worker: int, incarnation: int, pair: KeyPair | None = None) -> KeyPair:
        """Issue a key pair to a worker: a new one, or one that was never used. Its earlier ones are no longer
        accepted."""
        self.expel(worker)
        pair = pair or KeyPair.fresh()
        peer = self.peers[pair.public] = Peer(worker, incarnation)
        self._keys[worker] = pair.public
        if self._reliable and worker >= 0:
            peer.tokens = Tokens(pair)
            cipher = Cipher(pair.derived(b"bulk"), Side.HEAD) if self._encrypted else None
            peer.channel = ReliableChannel(cipher, Limits.MESSAGE_BYTES, pool=self._pool)
        return pair

    def expel(self, worker: int) -> None:
        """Revoke a worker's key."""
        self.peers.pop(self._keys.pop(worker, b""), None)

    def admit_relay(self, route: bytes) -> KeyPair:
        """Issue a key pair to a node daemon that relays for its workers.

        Args:
            route: The routing id of its control connection, which only this daemon and the head may know.
        """
        pair = KeyPair.fresh()
        self._relays[pair.public] = _NodeRelay(route, Tokens(pair))
        return pair

    def expel_relay(self, public: bytes) -> None:
        """Revoke the key of a node daemon that relays. Packets of its workers are no longer accepted."""
        self._relays.pop(public, None)

    def relay_for(self, worker: int, public: bytes) -> None:
        """Accept packets of an admitted worker from the node daemon with this key only, and send it those for the
        worker."""
        peer, relay = self.peers[self._keys[worker]], self._relays[public]
        peer.relay, peer.route = public, relay.route

    def drain(self) -> Iterator[tuple[Peer, Received]]:
        """Answer handshakes, and yield the messages that have arrived, for at most `DRAIN_S` seconds (see
        `has_more`)."""
        until, self.has_more = time.monotonic() + DRAIN_S, False
        arrived = True
        while arrived:
            arrived = False
            for request in islice(pending_messages(self._zap), _AT_ONCE):
                arrived = True
                self._authenticate([frame.bytes for frame in request])
            for router, frames in self._next():
                arrived = True
                key, route, bulk = str(frames[-1].get("User-Id")).encode(), frames[0].bytes, router is self._bulk
                body = [frame.buffer for frame in frames[1:]]
                is_relayed = key in self._relays or (len(body) > 1 and route.endswith(NODE))
                peer = self._relayed(key, route, bulk, body) if is_relayed else self.peers.get(key)
                if peer is None or not body or bool(peer.relay) is not is_relayed:
                    continue  # its key was revoked, or it uses the wrong connection
                packet = Packet(bulk, body[1:] if is_relayed else body)
                if packet.opens_bulk and route == peer.bulk_route:
                    continue  # a duplicate must not cause another resend
                if packet.opens_bulk:
                    peer.bulk_route = route
                elif is_relayed:
                    pass
                elif not packet.bulk and route.endswith(MAIN):
                    peer.route = route
                elif not packet.bulk:  # from a heartbeat or node daemon: not a route for replies to a worker
                    yield peer, Received(packet.frames, heartbeat=True)
                    continue
                yield from self._process(peer, packet)
            if time.monotonic() > until:
                self.has_more = True
                return

    def _relayed(self, key: bytes, route: bytes, bulk: bool, body: Sequence[BytesLike]) -> Peer | None:
        """The worker of a relayed packet; None if this node daemon does not relay for it."""
        named = relayed_worker(body[0]) if len(body) > 1 else None
        if named is None:
            return None
        peer = self.peers.get(self._keys.get(named[0], b""))
        if peer is None or peer.incarnation != named[1]:
            return None
        relay = self._relays.get(peer.relay)
        if relay is None or (peer.relay != key if bulk else relay.route != route):
            return None
        return peer

    def _next(self) -> Iterator[tuple[zmq.Socket[bytes], list[zmq.Frame]]]:
        """A limited number of messages from each socket."""
        for router in self._routers:
            for frames in islice(pending_messages(router), _AT_ONCE):
                yield router, frames

    def _process(self, peer: Peer, packet: Packet) -> Iterator[tuple[Peer, Received]]:
        if peer.channel is None:
            yield peer, Received(packet.frames)
            return
        try:
            answers = peer.channel.receive(packet, time.monotonic())
        except WireError:
            if packet.bulk:  # do not replace the worker: an unauthenticated peer may have sent it
                self.refused += 1
            else:
                yield peer, Received(())
            return
        for answer in answers:
            self._put(peer, answer)
        for frames in peer.channel.messages():
            yield peer, Received(frames)
            if sum(map(len, frames)) > _ACK_AT_ONCE_BYTES:
                self._put(peer, peer.channel.ack())

    def service(self) -> None:
        """Send acknowledgements and requests for acknowledgements. Call this about once a second."""
        now = time.monotonic()
        relayed: list[Peer] = []
        for peer in self.peers.values():
            if peer.channel is None:
                continue
            if peer.channel.owes_ack:
                self._put(peer, peer.channel.ack())
            if not peer.relay:
                self._request_ack(peer, peer.channel, now)
            elif peer.channel.unacknowledged:
                relayed.append(peer)
        # Workers of a node share a connection: requests to some of them suffice, and those to all would slow it down.
        random.shuffle(relayed)
        requested: Counter[bytes] = Counter()
        for peer in relayed:
            requested[peer.relay] += 1
            if peer.channel is not None and requested[peer.relay] <= _REQUESTS_PER_RELAY:
                self._request_ack(peer, peer.channel, now)

    def _request_ack(self, peer: Peer, channel: ReliableChannel, now: float) -> None:
        for packet in channel.due(now):
            self._put(peer, packet)

    def _put(self, peer: Peer, packet: Packet) -> None:
        """Send a packet if the worker is connected. The channel resends lost packets."""
        tag = [relay_tag(peer.worker, peer.incarnation)] if peer.relay else []
        self.send_to(peer.bulk_route if packet.bulk else peer.route, [*tag, *packet.frames], bulk=packet.bulk)

    def send(self, worker: int, frames: Sequence[BytesLike]) -> bool:
        """Send a message to a worker. Return False if this is impossible.

        True does not mean that the worker is alive. Its launcher or an expired lease reports its loss.
        """
        peer = self.peers.get(self._keys.get(worker, b""))
        if peer is None:
            return False
        if peer.channel is None:
            return self.send_to(peer.route, frames)
        for packet in peer.channel.send(frames, time.monotonic()):
            self._put(peer, packet)
        return True

    def send_to(self, route: bytes, frames: Sequence[BytesLike], *, bulk: bool = False) -> bool:
        """Send frames to a routing id. Return False if it is not connected."""
        router = self._bulk if bulk else self._router
        if not route or router is None:
            return False
        try:
            router.send_multipart([route, *frames], flags=zmq.DONTWAIT)
        except zmq.ZMQError:
            return False
        return True

    def _authenticate(self, request: list[bytes]) -> None:
        """Answer a handshake (ZeroMQ RFC 27). Admit only keys that were issued, and tokens that were not used."""
        version, request_id, _domain, _address, _identity, mechanism, *credentials = request
        key, known = b"", False
        if mechanism == b"CURVE" and credentials:
            key = zmq.utils.z85.encode(credentials[0])
            known = key in self.peers
        elif mechanism == b"PLAIN" and len(credentials) == 2:
            key, token = credentials
            peer, relay = self.peers.get(key), self._relays.get(key)
            tokens = relay.tokens if relay is not None else peer.tokens if peer is not None else None
            known = tokens is not None and tokens.accepts(token)
        status = [b"200", b"OK", key, b""] if known else [b"400", b"unknown key", b"", b""]
        self._zap.send_multipart([version, request_id, *status])

    @property
    def is_closed(self) -> bool:
        return bool(self._context.closed)

    def close(self, linger_ms: int = 0) -> None:
        self._context.destroy(linger=linger_ms)


def _bound(router: zmq.Socket[bytes], addresses: Sequence[str]) -> list[str]:
    """Listen on all addresses with the same port, so that a firewall needs only one rule."""
    bound: list[str] = []
    for address in addresses:
        port = bound[0].rpartition(":")[2] if bound else "*"
        router.bind(address.replace(":*", f":{port}"))
        bound.append(bytes(cast(bytes, router.last_endpoint)).rstrip(b"\0").decode())
    return bound


def check_descriptors(count: int) -> None:
    """Raise `OSError` unless this process may open `count` more files. Otherwise ZeroMQ would abort the process."""
    with contextlib.ExitStack() as opened:
        for _ in range(count):
            opened.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


def enable_heartbeats(socket: zmq.Socket[bytes], lease_s: float) -> None:
    """Make ZeroMQ send heartbeats, and close a connection whose peer does not answer them."""
    socket.heartbeat_ivl, socket.heartbeat_timeout = int(_PING * lease_s * 1000), int(_SILENT * lease_s * 1000)


def pending_messages(socket: zmq.Socket[bytes]) -> Iterator[list[zmq.Frame]]:
    """The messages that have arrived, without waiting. Trying to read is cheaper than polling."""
    with contextlib.suppress(zmq.Again):
        while True:
            yield socket.recv_multipart(zmq.DONTWAIT, copy=False)


def bulk_address(address: str, port: str) -> str:
    """The address for bulk data of a control address."""
    return f"{address}-bulk" if address.startswith("ipc:") else f"{address.rpartition(':')[0]}:{port}"
