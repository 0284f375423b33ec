"""Links over ZeroMQ: one ROUTER at the head, a DEALER per worker, CURVE on all of them.

The head issues a key pair per worker incarnation and admits nobody else; a message is attributed to the key that
its connection was authenticated with, never to what the message says of itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import zmq
import zmq.utils.z85
from zmq.utils.monitor import parse_monitor_message

from farstep.core import Buffer, Received
from farstep.errors import WireError
from farstep.wire.codec import Limits
from farstep.wire.keys import KeyPair

_ZAP = "inproc://zeromq.zap.01"
_DOMAIN = b"farstep"
MAIN, BEAT, NODE = b"main", b"beat", b"node"
"""What a routing id ends in: of a worker's two connections, and of a node's agent."""
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


class Hub:
    """The head's side: listens, authenticates, and sorts messages by worker."""

    def __init__(self, address: str | Sequence[str], lease_s: float = _LEASE_S) -> None:
        self.keys = KeyPair.fresh()
        self._peers: dict[bytes, Peer] = {}
        self._context = zmq.Context()
        try:
            self.addresses = self._listen([address] if isinstance(address, str) else address, lease_s)
        except BaseException:
            self.close()  # a context with open sockets blocks whoever collects it
            raise

    @property
    def address(self) -> str:
        return self.addresses[0]

    def _listen(self, addresses: Sequence[str], lease_s: float) -> list[str]:
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind(_ZAP)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.curve_server = True
        self._router.curve_secretkey = self.keys.secret
        self._router.curve_publickey = self.keys.public
        self._router.zap_domain = _DOMAIN
        self._router.maxmsgsize = Limits.MESSAGE_BYTES
        self._router.linger = 0
        self._router.handshake_ivl = 10_000
        self._router.sndhwm = 0
        self._router.router_mandatory = True
        self._router.router_handover = True  # who comes back is let in, though its old connection seems to be there
        _keep_asking(self._router, lease_s)
        bound: list[str] = []
        for address in addresses:  # all on one port: what a firewall lets through is easily said then
            port = bound[0].rpartition(":")[2] if bound else "*"
            self._router.bind(address.replace(":*", f":{port}"))
            bound.append(bytes(cast(bytes, self._router.last_endpoint)).rstrip(b"\0").decode())
        return bound

    def filenos(self) -> list[int]:
        return [int(self._router.fd), int(self._zap.fd)]

    def admit(self, worker: int, incarnation: int) -> KeyPair:
        """A fresh pair for a worker; its earlier ones stop being accepted."""
        self.expel(worker)
        pair = KeyPair.fresh()
        self._peers[pair.public] = Peer(worker, incarnation)
        return pair

    def expel(self, worker: int) -> None:
        self._peers = {key: peer for key, peer in self._peers.items() if peer.worker != worker}

    def drain(self) -> Iterator[tuple[Peer, Received]]:
        """Answer handshakes and yield every message that has arrived."""
        while True:
            while int(self._zap.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                self._answer(self._zap.recv_multipart())
            if not int(self._router.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                return
            frames = self._router.recv_multipart(copy=False)
            peer = self._peers.get(str(frames[-1].get("User-Id")).encode())
            if peer is None or len(frames) < 2:
                continue  # a key that was taken back meanwhile
            # A worker's heartbeat has a connection of its own; answers go to the main one.
            if frames[0].bytes.endswith(MAIN):
                peer.route = frames[0].bytes
            yield peer, Received([frame.buffer for frame in frames[1:]])

    def send(self, worker: int, frames: Sequence[Buffer]) -> bool:
        """Send, unless nobody is connected there: False. A worker's launcher or lease says that it has gone."""
        peer = next((p for p in self._peers.values() if p.worker == worker), None)
        return peer is not None and self.send_to(peer.route, frames)

    def send_to(self, route: bytes, frames: Sequence[Buffer]) -> bool:
        """The same by routing id."""
        if not route:
            return False
        try:
            self._router.send_multipart([route, *frames], flags=zmq.DONTWAIT)
        except zmq.ZMQError:
            return False
        return True

    def _answer(self, request: list[bytes]) -> None:
        """RFC 27: admit exactly the keys that were issued."""
        version, request_id, _domain, _address, _identity, mechanism, *credentials = request
        key = zmq.utils.z85.encode(credentials[0]) if mechanism == b"CURVE" and credentials else b""
        known = key in self._peers
        status = [b"200", b"OK", key, b""] if known else [b"400", b"unknown key", b"", b""]
        self._zap.send_multipart([version, request_id, *status])

    @property
    def is_closed(self) -> bool:
        return bool(self._context.closed)

    def close(self, linger_ms: int = 0) -> None:
        self._context.destroy(linger=linger_ms)


def _keep_asking(socket: zmq.Socket[bytes], lease_s: float) -> None:
    socket.heartbeat_ivl, socket.heartbeat_timeout = int(_PING * lease_s * 1000), int(_SILENT * lease_s * 1000)


class DealerLink:
    """The worker's side of a `Hub`. Without room `send` waits, at most `send_s` if given (then `zmq.Again`)."""

    def __init__(
        self,
        address: str,
        server_key: bytes,
        pair: KeyPair,
        role: bytes,
        send_s: float | None = None,
        route: bytes | None = None,
        lease_s: float = _LEASE_S,
    ) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.routing_id = route or pair.public[:16] + role
        self._socket.curve_serverkey = server_key
        self._socket.curve_publickey, self._socket.curve_secretkey = pair.public, pair.secret
        self._socket.maxmsgsize = Limits.MESSAGE_BYTES
        self._socket.linger = 2000
        self._socket.sndtimeo = -1 if send_s is None else int(send_s * 1000)
        _keep_asking(self._socket, lease_s)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._connected, self._changed = False, time.monotonic()
        self._socket.connect(address)

    def fileno(self) -> int:
        return int(self._socket.fd)

    def send(self, frames: Sequence[Buffer], fds: Sequence[int] = ()) -> None:
        if fds:
            raise WireError("descriptors do not travel over ZeroMQ.")
        self._socket.send_multipart(list(frames))

    def receive(self, timeout_s: float | None = None) -> Received | None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = None if deadline is None else int(max(0.0, deadline - time.monotonic()) * 1000)
            if self._socket.poll(left):
                return Received([frame.buffer for frame in self._socket.recv_multipart(copy=False)])
            if deadline is not None and time.monotonic() >= deadline:
                return None

    def wait(self, fds: Sequence[int], timeout_s: float) -> None:
        """Until something arrived here or on one of these descriptors."""
        poller = zmq.Poller()
        for readable in (self._socket, *fds):
            poller.register(readable, zmq.POLLIN)
        poller.poll(int(timeout_s * 1000))

    def is_connected(self) -> bool:
        """Whether the head, and nobody else, is at the other end; known to ZeroMQ's threads, however busy we are."""
        while self._monitor.poll(0):
            self._connected = parse_monitor_message(self._monitor.recv_multipart())["event"] != zmq.EVENT_DISCONNECTED
            self._changed = time.monotonic()
        return self._connected

    def silent_s(self) -> float:
        """How long the head has not been there."""
        return 0.0 if self.is_connected() else time.monotonic() - self._changed

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()
        self._context.term()
