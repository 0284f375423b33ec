"""The worker's end of ZeroMQ links: one DEALER socket for control, one for bulk data. `zmq.py` has the head's end."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections import deque
from collections.abc import Sequence

import zmq

from farstep.core import BytesLike, Received
from farstep.errors import WireError
from farstep.wire.channels.reliable_channel import ACK_DELAY_S, SEGMENT_BYTES, Packet, ReliableChannel
from farstep.wire.channels.zmq import (
    BEAT,
    CONTROL_BYTES,
    LEASE_S,
    NODE,
    UNSENT,
    bulk_address,
    enable_heartbeats,
    pending_messages,
)
from farstep.wire.codec import Limits
from farstep.wire.encryption import TAG_BYTES, Cipher, Side
from farstep.wire.keys import KeyPair, Tokens

_BROKEN = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
RETRY_S = 0.1
"""Seconds after which a broken bulk connection is replaced."""
CHECK_S = 1.0
"""Seconds after which a link that waits for a message checks its connections, unless one is known to be broken."""


class Connection:
    """A DEALER socket that tracks whether it is connected to the authenticated head.

    It reads ZeroMQ's monitor events. ZeroMQ's own threads record them, so no event is lost while the interpreter is
    busy.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], route: bytes | None, lease_s: float, most_bytes: int
    ) -> None:
        self.socket = context.socket(zmq.DEALER)
        if route is not None:
            self.socket.routing_id = route
        self.socket.maxmsgsize = most_bytes
        self.socket.linger = 2000
        # The receive queue is unlimited, so that libzmq never stops reading. Otherwise libzmq 4.3.5 would abort the
        # process if a heartbeat is due on a connection that broke while reading was paused. The head sends only what
        # the worker requested, mostly weights, so the queue stays small.
        self.socket.rcvhwm = 0
        enable_heartbeats(self.socket, lease_s)
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | _BROKEN)
        self.connected, self.disconnected_at = False, time.monotonic()
        """When the connection broke, or when the socket was made; infinite while the socket is connected."""
        self.broken_at = math.inf
        """Like `disconnected_at`, but infinite until the first connection breaks or is rejected."""
        self.num_established = 0
        """How often a connection was established."""
        self._is_open, self._open_until = False, self.disconnected_at
        """Whether there is a TCP connection, and when the last one broke; at first, when the socket was made."""

    def unreached_s(self) -> float:
        """Seconds without a TCP connection. A peer that is too busy for a handshake counts as reached."""
        return 0.0 if self._is_open else time.monotonic() - self._open_until

    def poll_events(self) -> bool:
        """Read new events. Return whether a connection was established since the last call."""
        established = False
        while self.monitor.poll(0):
            event = int.from_bytes(self.monitor.recv_multipart()[0][:2], sys.byteorder)
            now, self._is_open = time.monotonic(), not event & _BROKEN
            if event == zmq.EVENT_CONNECTED:
                continue
            self._open_until = now
            self.connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self.disconnected_at = math.inf if self.connected else min(self.disconnected_at, now)
            self.broken_at = math.inf if self.connected else min(self.broken_at, now)
            established = established or self.connected
            self.num_established += self.connected
        return established

    def close(self, linger_ms: int | None = None) -> None:
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger_ms)


class DealerLink:
    """The worker's end of a link to a `Hub`.

    Args:
        address: The hub's address.
        server_key: The hub's public key.
        pair: The key pair that the hub issued to this worker.
        role: `MAIN`, `BEAT` or `NODE` (see `zmq.py`).
        send_s: If the queue is full, `send` waits this many seconds, then raises `zmq.Again`; None: wait forever.
        route: The routing id; default: derived from `pair` and `role`.
        lease_s: The lease in seconds; it determines the heartbeat interval.
        bulk: The hub's port for bulk data if the hub is reliable (it resends what a broken connection lost), otherwise
            None.
        encrypted: Whether bulk data is encrypted.
        context: A ZeroMQ context to share; None: the link creates its own context and terminates it on `close`.
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
        lease_s: float = LEASE_S,
        bulk: str | None = None,
        encrypted: bool = True,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        self._shares_context = context is not None
        self.context = context or zmq.Context()
        small = bulk is not None or role in (BEAT, NODE)
        most_bytes = CONTROL_BYTES if small else Limits.MESSAGE_BYTES
        self._main = Connection(self.context, route or pair.route + role, lease_s, most_bytes)
        socket = self._socket = self._main.socket
        socket.curve_serverkey = server_key
        socket.curve_publickey, socket.curve_secretkey = pair.public, pair.secret
        socket.sndtimeo = -1 if send_s is None else int(send_s * 1000)
        socket.connect(address)
        self._address = address
        self._bulk: Connection | None = None
        self._channel: ReliableChannel | None = None
        self._messages: deque[Received] = deque()
        self._acked_at = 0.0
        if bulk is not None:
            self._bulk_address, self._lease_s = bulk_address(address, bulk), lease_s
            self._public, self._tokens = pair.public, Tokens(pair)
            cipher = Cipher(pair.derived(b"bulk"), Side.WORKER) if encrypted else None
            self._channel = ReliableChannel(cipher, Limits.MESSAGE_BYTES)
            self._bulk = self._connect_bulk(self._channel)

    def _connect_bulk(self, channel: ReliableChannel) -> Connection:
        bulk = Connection(self.context, None, self._lease_s, SEGMENT_BYTES + TAG_BYTES)
        bulk.socket.plain_username, bulk.socket.plain_password = self._public, self._tokens.fresh()
        bulk.socket.sndhwm = UNSENT
        bulk.socket.connect(self._bulk_address)
        bulk.socket.send_multipart(list(channel.bulk_opened().frames))
        return bulk

    def _check_connections(self, bulk: Connection, channel: ReliableChannel) -> None:
        """Handle reconnects, and replace a broken bulk connection.

        A token is valid for only one bulk connection, so the head rejects ZeroMQ's own reconnects. The worker therefore
        opens a new socket with a new token. The channel resends lost data.
        """
        if self._main.poll_events():
            self._put(channel.reconnected())
        if bulk.poll_events():
            self._put(channel.reconnected(bulk=True))
        if time.monotonic() - bulk.broken_at > RETRY_S:
            bulk.close(linger_ms=0)
            self._bulk = self._connect_bulk(channel)

    def fileno(self) -> int:
        return int(self._socket.fd)

    @property
    def unacknowledged(self) -> int:
        """The number of messages that the head has not acknowledged."""
        return self._channel.unacknowledged if self._channel is not None else 0

    def rate(self) -> float:
        """The measured throughput in bytes per second; infinite before the first measurement."""
        return self._channel.rate if self._channel is not None else math.inf

    def send(self, frames: Sequence[BytesLike], fds: Sequence[int] = ()) -> None:
        if fds:
            raise WireError("file descriptors cannot be sent over ZeroMQ.")
        if self._channel is None:
            self._socket.send_multipart(list(frames))
            return
        self._service(self._channel)  # frees messages that the head has acknowledged
        for packet in self._channel.send(frames, time.monotonic()):
            self._put(packet)

    def _put(self, packet: Packet) -> None:
        frames = list(packet.frames)
        if not packet.bulk:
            self._socket.send_multipart(frames)
            return
        while self._bulk is not None and self._channel is not None:
            # The segment buffers belong to the channel, so ZeroMQ need not copy them.
            try:
                self._bulk.socket.send_multipart(frames, zmq.DONTWAIT, copy=False)
            except zmq.Again:
                self._bulk.socket.poll(int(RETRY_S * 1000), zmq.POLLOUT)
                self._check_connections(self._bulk, self._channel)
            else:
                return

    def receive(self, timeout_s: float | None = None) -> Received | None:
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            if self._channel is not None:
                self._service(self._channel)
                if self._messages:
                    return self._messages.popleft()
            else:
                for frames in pending_messages(self._socket):
                    return Received([frame.buffer for frame in frames])
            if (left := deadline - time.monotonic()) <= 0:
                return None
            self.wait((), min(left, self._check_s()))

    def _check_s(self) -> float:
        """Seconds until connections must be checked again, although no message has arrived."""
        broken = self._bulk is not None and self._bulk.broken_at < math.inf
        return RETRY_S if broken else CHECK_S

    def _service(self, channel: ReliableChannel) -> None:
        """Receive the packets that have arrived, and send acknowledgements and other packets that are due."""
        assert self._bulk is not None
        now = time.monotonic()
        self._check_connections(self._bulk, channel)
        for connection in (self._main, self._bulk):
            for message in pending_messages(connection.socket):
                frames = [frame.buffer for frame in message]
                with contextlib.suppress(WireError):  # ignore invalid packets: others can write to the bulk connection
                    for answer in channel.receive(Packet(connection is self._bulk, frames), now):
                        self._put(answer)
                self._messages.extend(map(Received, channel.messages()))
                if connection.socket.closed:  # replaced while responses were being sent
                    break
        if channel.owes_ack and now - self._acked_at > ACK_DELAY_S:
            self._acked_at = now
            self._put(channel.ack())
        for packet in channel.due(now):
            self._put(packet)

    def wait(self, fds: Sequence[int], timeout_s: float) -> set[int]:
        """Block until a message arrives, one of these descriptors is readable, or `timeout_s` has passed.

        Returns:
            The readable descriptors.
        """
        poller = zmq.Poller()
        for readable in (*self.sockets, *self._monitors, *fds):
            poller.register(readable, zmq.POLLIN)
        return {found for found, _ in poller.poll(math.ceil(timeout_s * 1000)) if isinstance(found, int)}

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """The sockets to poll, for a caller that waits for many links at once."""
        return [self._socket] if self._bulk is None else [self._socket, self._bulk.socket]

    @property
    def _monitors(self) -> list[zmq.Socket[bytes]]:
        """Sockets that report restored connections, which `_service` must handle at once: lost data is resent then."""
        return [self._main.monitor, self._bulk.monitor] if self._bulk is not None else []

    def is_connected(self) -> bool:
        """Whether the link is connected to the authenticated head."""
        self._main.poll_events()
        return self._main.connected

    @property
    def num_connections(self) -> int:
        """How often the link was connected, as of the last call of `is_connected`."""
        return self._main.num_established

    def silent_s(self) -> float:
        """Seconds since the connection to the head broke; 0 while connected. Failed reconnects do not reset it."""
        return 0.0 if self.is_connected() else time.monotonic() - self._main.disconnected_at

    def unreached_address(self, seconds: float) -> str:
        """Return the first address without a TCP connection for more than this many seconds; empty if there is none."""
        if self._main.unreached_s() > seconds:
            return self._address
        return self._bulk_address if self._bulk is not None and self._bulk.unreached_s() > seconds else ""

    def close(self, linger_ms: int | None = None) -> None:
        """Disconnect. Unsent messages are sent for up to `linger_ms` milliseconds more (None: two seconds)."""
        self._main.close(linger_ms)
        if self._bulk is not None:
            self._bulk.close(linger_ms)
        if not self._shares_context:
            self.context.term()
