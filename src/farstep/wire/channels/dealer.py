"""The worker's side of a `Hub` (see `zmq.py`): a DEALER for control, and one for bulk data if the hub takes any."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Sequence

import zmq
from zmq.utils.monitor import parse_monitor_message

from farstep.core import BytesLike, Received
from farstep.errors import WireError
from farstep.wire.channels.reliable_channel import REPORT_S, SEGMENT_BYTES, Packet, ReliableChannel
from farstep.wire.channels.zmq import BEAT, CONTROL_BYTES, LEASE_S, NODE, UNSENT, bulk_address, keep_asking, waiting
from farstep.wire.codec import Limits
from farstep.wire.encryption import TAG_BYTES, Cipher, Side
from farstep.wire.keys import KeyPair, Tokens

_BROKEN = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_AGAIN_MS = 100
"""After how long a bulk connection that broke is replaced by another."""


class _Connection:
    """A DEALER that knows whether the head, and nobody else, is at the other end: ZeroMQ's threads know, however busy
    the interpreter is."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], route: bytes | None, lease_s: float, most_bytes: int
    ) -> None:
        self.socket = context.socket(zmq.DEALER)
        if route is not None:
            self.socket.routing_id = route
        self.socket.maxmsgsize = most_bytes
        self.socket.linger = 2000
        # No limit on received messages, so that libzmq never stops reading: libzmq 4.3.5 aborts the process if a
        # heartbeat is due on a connection that broke while reading was paused. The head sends only what the worker
        # requested, mostly weights, so the queue stays bounded.
        self.socket.rcvhwm = 0
        keep_asking(self.socket, lease_s)
        self._monitor = self.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | _BROKEN)
        self.connected, self.changed = False, time.monotonic()
        self.broken_at = math.inf
        """Since when it is not there any more, or not let in."""

    def look(self) -> bool:
        """Whether it was made, perhaps once more, since the last look."""
        made = False
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())["event"]
            self.connected, self.changed = event == zmq.EVENT_HANDSHAKE_SUCCEEDED, time.monotonic()
            self.broken_at = math.inf if self.connected else min(self.broken_at, self.changed)
            made = made or self.connected
        return made

    def close(self, linger_ms: int | None = None) -> None:
        self.socket.disable_monitor()
        self._monitor.close(linger=0)
        self.socket.close(linger_ms)


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
        lease_s: float = LEASE_S,
        bulk: str | None = None,
        encrypted: bool = True,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        self._shares_context = context is not None
        self._context = context or zmq.Context()
        small = bulk is not None or role in (BEAT, NODE)
        most_bytes = CONTROL_BYTES if small else Limits.MESSAGE_BYTES
        self._main = _Connection(self._context, route or pair.route + role, lease_s, most_bytes)
        socket = self._socket = self._main.socket
        socket.curve_serverkey = server_key
        socket.curve_publickey, socket.curve_secretkey = pair.public, pair.secret
        socket.sndtimeo = -1 if send_s is None else int(send_s * 1000)
        socket.connect(address)
        self._bulk: _Connection | None = None
        self._session: ReliableChannel | None = None
        self._messages: deque[Received] = deque()
        self._reported_at = 0.0
        if bulk is not None:
            self._bulk_address, self._lease_s = bulk_address(address, bulk), lease_s
            self._public, self._tokens = pair.public, Tokens(pair)
            seal = Cipher(pair.derived(b"bulk"), Side.WORKER) if encrypted else None
            self._session = ReliableChannel(seal, Limits.MESSAGE_BYTES)
            self._bulk = self._dial(self._session)

    def _dial(self, session: ReliableChannel) -> _Connection:
        bulk = _Connection(self._context, None, self._lease_s, SEGMENT_BYTES + TAG_BYTES)
        bulk.socket.plain_username, bulk.socket.plain_password = self._public, self._tokens.fresh()
        bulk.socket.sndhwm = UNSENT
        bulk.socket.connect(self._bulk_address)
        bulk.socket.send_multipart(list(session.here().frames))
        return bulk

    def _look(self, bulk: _Connection, session: ReliableChannel) -> None:
        """A token opens one bulk connection: when that breaks, ZeroMQ connects again in vain, and another takes its
        place; what is lost with it the session sends again."""
        if self._main.look():
            self._put(session.back())
        if bulk.look():
            self._put(session.back(bulk=True))
        if time.monotonic() - bulk.broken_at > _AGAIN_MS / 1000:
            bulk.close(linger_ms=0)
            self._bulk = self._dial(session)

    def fileno(self) -> int:
        return int(self._socket.fd)

    @property
    def unconfirmed(self) -> int:
        """Messages that the head has not said it has."""
        return self._session.unconfirmed if self._session is not None else 0

    def rate(self) -> float:
        """Bytes per second that the connection has carried, as far as that was seen; infinite before."""
        return self._session.rate if self._session is not None else math.inf

    def send(self, frames: Sequence[BytesLike], fds: Sequence[int] = ()) -> None:
        if fds:
            raise WireError("descriptors do not travel over ZeroMQ.")
        if self._session is None:
            self._socket.send_multipart(list(frames))
            return
        self._service(self._session)  # what was confirmed need not be kept any longer
        for packet in self._session.send(frames, time.monotonic()):
            self._put(packet)

    def _put(self, packet: Packet) -> None:
        frames = list(packet.frames)
        if not packet.bulk:
            self._socket.send_multipart(frames)
            return
        while self._bulk is not None and self._session is not None:
            # Sealed segments are ours alone, so they need not be copied; small frames are not worth it.
            try:
                self._bulk.socket.send_multipart(frames, zmq.DONTWAIT, copy=False)
            except zmq.Again:
                self._bulk.socket.poll(_AGAIN_MS, zmq.POLLOUT)
                self._look(self._bulk, self._session)
            else:
                return

    def receive(self, timeout_s: float | None = None) -> Received | None:
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            if self._session is not None:
                self._service(self._session)
                if self._messages:
                    return self._messages.popleft()
            else:
                for frames in waiting(self._socket):
                    return Received([frame.buffer for frame in frames])
            if (left := deadline - time.monotonic()) <= 0:
                return None
            self.wait((), min(left, 1.0))

    def _service(self, session: ReliableChannel) -> None:
        """Take what arrived, and do what a session owes the other side."""
        assert self._bulk is not None
        now = time.monotonic()
        self._look(self._bulk, session)
        for connection in (self._main, self._bulk):
            for message in waiting(connection.socket):
                frames = [frame.buffer for frame in message]
                with contextlib.suppress(WireError):  # on the bulk connection anybody may try
                    for answer in session.receive(Packet(connection is self._bulk, frames), now):
                        self._put(answer)
                self._messages.extend(map(Received, session.messages()))
                if connection.socket.closed:  # it broke while answers had to wait
                    break
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
