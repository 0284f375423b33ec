"""Links over ZeroMQ: a ROUTER at the head, a DEALER per worker, CURVE on all of them.

The head issues a key pair per worker incarnation and admits nobody else; a message is attributed to the key that
its connection was authenticated with, never to what the message says of itself.

A `reliable` hub survives broken connections (see `session.py`) and has a second ROUTER for bulk data: plain TCP, since
CURVE is slow, with every segment sealed under a key that both sides derive from the pair (see `sealing.py`).
"""

from __future__ import annotations

import contextlib
import hmac
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import cast

import zmq
import zmq.utils.z85
from zmq.utils.monitor import parse_monitor_message

from farstep.core import Buffer, Received
from farstep.errors import WireError
from farstep.wire.codec import Limits
from farstep.wire.keys import KeyPair
from farstep.wire.sealing import TAG_BYTES, Seal, Side
from farstep.wire.session import REPORT_S, SEGMENT_BYTES, Packet, Session

_ZAP = "inproc://zeromq.zap.01"
_DOMAIN = b"farstep"
MAIN, BULK, BEAT, NODE = b"main", b"bulk", b"beat", b"node"
"""What a routing id ends in: of a worker's connections, and of a node's agent."""
_AT_ONCE = 64
_WORTH_A_REPORT = 1 << 18
_UNSENT = 64
"""Segments that wait in a worker, and that wait at the head for being read, before a sender has to."""
_LEASE_S = 10.0
_PING, _SILENT = 0.1, 0.4
"""Of a lease: how often a side is asked whether it is there, and how long it may take to answer. ZeroMQ's own threads
ask and answer, so that a busy interpreter delays neither."""


@dataclass
class Peer:
    """A worker the head issued a key to; `route` is known once it has spoken."""

    worker: int
    """Below zero: not a worker, but the agents on nodes that were asked for together."""
    incarnation: int
    route: bytes = b""
    bulk_route: bytes = b""
    token: bytes = b""
    """What it shows to be let in to the bulk connection; whoever overhears it can send nothing that can be opened."""
    session: Session | None = None


class Hub:
    """The head's side: listens, authenticates, and sorts messages by worker."""

    def __init__(
        self,
        address: str | Sequence[str],
        lease_s: float = _LEASE_S,
        *,
        reliable: bool = False,
        encrypted: bool = True,
    ) -> None:
        self.keys = KeyPair.fresh()
        self._reliable, self._encrypted = reliable, encrypted
        self.refused = 0
        """Packets on the bulk connection that nobody who was admitted can have sent."""
        self._peers: dict[bytes, Peer] = {}
        self._keys: dict[int, bytes] = {}
        self._context = zmq.Context()
        try:
            self._listen([address] if isinstance(address, str) else address, lease_s)
        except BaseException:
            self.close()  # a context with open sockets blocks whoever collects it
            raise

    @property
    def address(self) -> str:
        return self.addresses[0]

    def _listen(self, addresses: Sequence[str], lease_s: float) -> None:
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind(_ZAP)
        self._router = self._socket(Limits.MESSAGE_BYTES, lease_s)
        self._router.curve_server = True
        self._router.curve_secretkey = self.keys.secret
        self._router.curve_publickey = self.keys.public
        self.addresses, self.bulk_port = _bound(self._router, addresses), ""
        self._bulk: zmq.Socket[bytes] | None = None
        if self._reliable:
            self._bulk = self._socket(SEGMENT_BYTES + TAG_BYTES, lease_s)
            self._bulk.plain_server = True
            self._bulk.rcvhwm = _UNSENT
            bound = _bound(self._bulk, [bulk_address(address, "*") for address in addresses])
            self.bulk_port = bound[0].rpartition(":")[2]

    def _socket(self, most_bytes: int, lease_s: float) -> zmq.Socket[bytes]:
        router = self._context.socket(zmq.ROUTER)
        router.zap_domain = _DOMAIN
        router.maxmsgsize = most_bytes
        router.linger = 0
        router.handshake_ivl = 10_000
        router.sndhwm = 0
        router.router_mandatory = True
        router.router_handover = True  # who comes back is let in, though its old connection seems to be there
        _keep_asking(router, lease_s)
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
            peer.token, peer.bulk_route = pair.token, pair.public[:16] + BULK
            seal = Seal(pair.derived(b"bulk"), Side.HEAD) if self._encrypted else None
            peer.session = Session(seal, Limits.MESSAGE_BYTES)
        return pair

    def expel(self, worker: int) -> None:
        self._peers.pop(self._keys.pop(worker, b""), None)

    def drain(self) -> Iterator[tuple[Peer, Received]]:
        """Answer handshakes and yield every message that has arrived."""
        arrived = True
        while arrived:
            for request in _waiting(self._zap):
                self._answer([frame.bytes for frame in request])
            arrived = False
            for router, frames in self._next():
                arrived = True
                peer = self._peers.get(str(frames[-1].get("User-Id")).encode())
                if peer is None or len(frames) < 2:
                    continue  # a key that was taken back meanwhile
                rest = [frame.buffer for frame in frames[1:]]
                # A worker's heartbeat has a connection of its own; answers go to the main one.
                if router is self._router and frames[0].bytes.endswith(MAIN):
                    peer.route = frames[0].bytes
                elif router is self._router:
                    yield peer, Received(rest)
                    continue
                yield from self._taken(peer, Packet(router is self._bulk, rest))

    def _next(self) -> Iterator[tuple[zmq.Socket[bytes], list[zmq.Frame]]]:
        """Some of what waits, in turn."""
        for router in self._routers:
            for frames in islice(_waiting(router), _AT_ONCE):
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

    def send(self, worker: int, frames: Sequence[Buffer]) -> bool:
        """Send, unless nobody is connected there: False. A worker's launcher or lease says that it has gone."""
        peer = self._peers.get(self._keys.get(worker, b""))
        if peer is None:
            return False
        if peer.session is None:
            return self.send_to(peer.route, frames)
        for packet in peer.session.send(frames, time.monotonic()):
            self._put(peer, packet)
        return True

    def send_to(self, route: bytes, frames: Sequence[Buffer], *, bulk: bool = False) -> bool:
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
            known = peer is not None and bool(peer.token) and hmac.compare_digest(peer.token, token)
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


def _keep_asking(socket: zmq.Socket[bytes], lease_s: float) -> None:
    socket.heartbeat_ivl, socket.heartbeat_timeout = int(_PING * lease_s * 1000), int(_SILENT * lease_s * 1000)


def _waiting(socket: zmq.Socket[bytes]) -> Iterator[list[zmq.Frame]]:
    """What has arrived; to try is cheaper than to ask."""
    with contextlib.suppress(zmq.Again):
        while True:
            yield socket.recv_multipart(zmq.DONTWAIT, copy=False)


def bulk_address(address: str, port: str) -> str:
    """Where bulk data goes of those who are at `address` for the rest."""
    return f"{address}-bulk" if address.startswith("ipc:") else f"{address.rpartition(':')[0]}:{port}"


class _Connection:
    """A DEALER that knows whether the head, and nobody else, is at the other end: ZeroMQ's threads know, however busy
    the interpreter is."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], route: bytes, lease_s: float) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.routing_id = route
        self.socket.maxmsgsize = Limits.MESSAGE_BYTES
        self.socket.linger = 2000
        _keep_asking(self.socket, lease_s)
        self._monitor = self.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self.connected, self.changed = False, time.monotonic()

    def look(self) -> bool:
        """Whether it was made, perhaps once more, since the last look."""
        made = False
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())["event"]
            self.connected, self.changed = event == zmq.EVENT_HANDSHAKE_SUCCEEDED, time.monotonic()
            made = made or self.connected
        return made

    def close(self) -> None:
        self.socket.disable_monitor()
        self._monitor.close(linger=0)
        self.socket.close()


class DealerLink:
    """The worker's side of a `Hub`. Without room `send` waits, at most `send_s` if given (then `zmq.Again`).

    With `bulk`, the port where a reliable hub takes bulk data, what is lost with a broken connection is sent again.
    """

    def __init__(
        self,
        address: str,
        server_key: bytes,
        pair: KeyPair,
        role: bytes,
        send_s: float | None = None,
        *,
        route: bytes | None = None,
        lease_s: float = _LEASE_S,
        bulk: str | None = None,
        encrypted: bool = True,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        self._shares_context = context is not None
        self._context = context or zmq.Context()
        self._main = _Connection(self._context, route or pair.public[:16] + role, lease_s)
        socket = self._socket = self._main.socket
        socket.curve_serverkey = server_key
        socket.curve_publickey, socket.curve_secretkey = pair.public, pair.secret
        socket.sndtimeo = -1 if send_s is None else int(send_s * 1000)
        socket.connect(address)
        self._bulk: _Connection | None = None
        self._session: Session | None = None
        self._messages: deque[Received] = deque()
        self._reported_at = 0.0
        if bulk is not None:
            self._bulk = _Connection(self._context, pair.public[:16] + BULK, lease_s)
            self._bulk.socket.plain_username = pair.public
            self._bulk.socket.plain_password = pair.token
            self._bulk.socket.sndhwm = self._bulk.socket.rcvhwm = _UNSENT
            self._bulk.socket.connect(bulk_address(address, bulk))
            seal = Seal(pair.derived(b"bulk"), Side.WORKER) if encrypted else None
            self._session = Session(seal, Limits.MESSAGE_BYTES)

    def fileno(self) -> int:
        return int(self._socket.fd)

    def rate(self) -> float:
        """Bytes per second that the connection has carried, as far as that was seen; infinite before."""
        return self._session.rate if self._session is not None else math.inf

    def send(self, frames: Sequence[Buffer], fds: Sequence[int] = ()) -> None:
        if fds:
            raise WireError("descriptors do not travel over ZeroMQ.")
        if self._session is None:
            self._socket.send_multipart(list(frames))
            return
        self._service(self._session)  # what was confirmed need not be kept any longer
        for packet in self._session.send(frames, time.monotonic()):
            self._put(packet)

    def _put(self, packet: Packet) -> None:
        connection = self._bulk if packet.bulk else self._main
        assert connection is not None
        # Sealed segments are ours alone, so they need not be copied; small frames are not worth it.
        connection.socket.send_multipart(list(packet.frames), copy=not packet.bulk)

    def receive(self, timeout_s: float | None = None) -> Received | None:
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            if self._session is not None:
                self._service(self._session)
                if self._messages:
                    return self._messages.popleft()
            else:
                for frames in _waiting(self._socket):
                    return Received([frame.buffer for frame in frames])
            if (left := deadline - time.monotonic()) <= 0:
                return None
            self.wait((), min(left, 1.0))

    def _service(self, session: Session) -> None:
        """Take what arrived, and do what a session owes the other side."""
        assert self._bulk is not None
        now = time.monotonic()
        if any([self._main.look(), self._bulk.look()]):
            self._put(session.back())
        for connection in (self._main, self._bulk):
            for message in _waiting(connection.socket):
                frames = [frame.buffer for frame in message]
                with contextlib.suppress(WireError):  # on the bulk connection anybody may try
                    for answer in session.receive(Packet(connection is self._bulk, frames), now):
                        self._put(answer)
                self._messages.extend(map(Received, session.messages()))
        if session.owes_report and now - self._reported_at > REPORT_S:
            self._reported_at = now
            self._put(session.report())
        for packet in session.due(now):
            self._put(packet)

    def wait(self, fds: Sequence[int], timeout_s: float) -> None:
        """Until something arrived here or on one of these descriptors."""
        poller = zmq.Poller()
        for readable in (*self.sockets, *fds):
            poller.register(readable, zmq.POLLIN)
        poller.poll(math.ceil(timeout_s * 1000))

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """For whoever waits for many links at once."""
        return [self._socket] if self._bulk is None else [self._socket, self._bulk.socket]

    def is_connected(self) -> bool:
        """Whether the head, and nobody else, is at the other end."""
        self._main.look()
        return self._main.connected

    def silent_s(self) -> float:
        """How long the head has not been there."""
        return 0.0 if self.is_connected() else time.monotonic() - self._main.changed

    def close(self) -> None:
        self._main.close()
        if self._bulk is not None:
            self._bulk.close()
        if not self._shares_context:
            self._context.term()
