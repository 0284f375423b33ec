"""The node daemon's end of the links of its workers, which share the daemon's connections to the head.

Each worker has a `ReliableChannel` to the head, as with connections of its own; the daemon runs it for the worker.
Packets of all channels travel over the daemon's control connection and over one bulk connection. A tag in front of each
packet names the worker. `zmq.py` has the head's end.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence

import zmq

from farstep.core import BytesLike
from farstep.errors import WireError
from farstep.wire.buffer_pool import BufferPool
from farstep.wire.channels.dealer import RETRY_S, Connection, DealerLink
from farstep.wire.channels.reliable_channel import ACK_DELAY_S, SEGMENT_BYTES, Packet, ReliableChannel
from farstep.wire.channels.zmq import UNSENT, bulk_address, pending_messages, relay_tag, relayed_worker
from farstep.wire.codec import Limits
from farstep.wire.encryption import TAG_BYTES, Cipher, Side
from farstep.wire.keys import KeyPair, Tokens

Worker = tuple[int, int]
"""Number and incarnation of a worker."""


class Relay:
    """Sends and receives the messages of all workers of a node.

    Args:
        link: The daemon's control connection. The daemon passes packets that arrive on it to `receive`.
        address: The address of the head that `link` is connected to.
        pair: The key pair that the head issued for the bulk connection of this node.
        bulk_port: The head's port for bulk data.
        lease_s: The lease in seconds.
        encrypted: Whether bulk data is encrypted.
    """

    def __init__(
        self, link: DealerLink, address: str, pair: KeyPair, bulk_port: str, lease_s: float, encrypted: bool
    ) -> None:
        self._link, self._lease_s, self._encrypted = link, lease_s, encrypted
        self._bulk_address = bulk_address(address, bulk_port)
        self._public, self._tokens = pair.public, Tokens(pair)
        self._pool = BufferPool()
        self._channels: dict[Worker, ReliableChannel] = {}
        self._unsent: dict[bool, deque[tuple[Worker, Packet]]] = {False: deque(), True: deque()}
        """Packets that wait for their connection (True: bulk, False: control)."""
        self._messages: deque[tuple[Worker, Sequence[BytesLike]]] = deque()
        self._num_connections, self._serviced_at = link.num_connections, 0.0
        self._bulk = self._connect_bulk()

    def _connect_bulk(self) -> Connection:
        bulk = Connection(self._link.context, None, self._lease_s, SEGMENT_BYTES + TAG_BYTES)
        bulk.socket.plain_username, bulk.socket.plain_password = self._public, self._tokens.fresh()
        bulk.socket.sndhwm = UNSENT
        bulk.socket.connect(self._bulk_address)
        self._unsent[True].clear()  # the channels resend what was not acknowledged
        self._unsent[True].extend((worker, channel.bulk_opened()) for worker, channel in self._channels.items())
        return bulk

    # ---- workers ----

    def add(self, worker: Worker, pair: KeyPair) -> None:
        """Open the channel of a worker, with the key pair that the head issued for it."""
        cipher = Cipher(pair.derived(b"bulk"), Side.WORKER) if self._encrypted else None
        channel = self._channels[worker] = ReliableChannel(cipher, Limits.MESSAGE_BYTES, self._pool)
        self._put(worker, channel.bulk_opened())

    def remove(self, worker: Worker) -> None:
        """Close the channel of a worker that has ended."""
        self._channels.pop(worker, None)

    def send(self, worker: Worker, frames: Sequence[BytesLike]) -> None:
        """Send a message of a worker. Does not wait: see `has_backlog`."""
        for packet in self._channels[worker].send(frames, time.monotonic()):
            self._unsent[packet.bulk].append((worker, packet))
        self._flush()

    @property
    def has_backlog(self) -> bool:
        """Whether more than `UNSENT` packets are queued; the daemon then stops reading from its workers
        (backpressure)."""
        return any(len(unsent) > UNSENT for unsent in self._unsent.values())

    def owes(self, worker: Worker) -> bool:
        """Whether a message of this worker may not have reached the head yet: it is queued, or unacknowledged."""
        return self._channels[worker].unacknowledged > 0

    def request_ack(self, worker: Worker) -> None:
        """Request an acknowledgement now if `owes(worker)`, instead of after the usual delay."""
        if self.owes(worker):
            self._put(worker, self._channels[worker].request_ack(time.monotonic()))

    def rate(self, worker: Worker) -> float:
        """The measured throughput in bytes per second; infinite before the first measurement."""
        return self._channels[worker].rate

    # ---- connections ----

    def receive(self, frames: Sequence[BytesLike], bulk: bool = False) -> None:
        """Process a packet of the head."""
        worker = relayed_worker(frames[0])
        channel = None if worker is None else self._channels.get(worker)
        if worker is None or channel is None:
            return  # for a worker that has ended
        with contextlib.suppress(WireError):  # ignore invalid packets: others can write to the bulk connection
            for answer in channel.receive(Packet(bulk, frames[1:]), time.monotonic()):
                self._unsent[answer.bulk].append((worker, answer))
        self._messages.extend((worker, message) for message in channel.messages())

    def messages(self) -> Iterator[tuple[Worker, Sequence[BytesLike]]]:
        """The messages of the head that have arrived whole and in order, each with its worker."""
        while self._messages:
            yield self._messages.popleft()

    def service(self) -> None:
        """Read the bulk connection, handle reconnects, and send acknowledgements and other packets that are due."""
        self._check_connections()
        for message in pending_messages(self._bulk.socket):
            self.receive([frame.buffer for frame in message], bulk=True)
        now = time.monotonic()
        if now - self._serviced_at > ACK_DELAY_S:
            self._serviced_at = now
            for worker, channel in self._channels.items():
                if channel.owes_ack:
                    self._put(worker, channel.ack())
            self._request_ack(now)
        self._flush()

    def _request_ack(self, now: float) -> None:
        """Request an acknowledgement for one worker, in turn: requests of all workers would slow down a busy head."""
        for worker, channel in self._channels.items():
            if requests := channel.due(now):
                self._unsent[False].extend((worker, packet) for packet in requests)
                self._channels[worker] = self._channels.pop(worker)
                return

    def _check_connections(self) -> None:
        """Handle reconnects, and replace a broken bulk connection, whose token is used."""
        self._link.is_connected()  # reads the events of the connection
        restored = [False] if self._link.num_connections != self._num_connections else []
        self._num_connections = self._link.num_connections
        restored += [True] if self._bulk.poll_events() else []
        for bulk in restored:
            for worker, channel in self._channels.items():
                self._put(worker, channel.reconnected(bulk))
        if time.monotonic() - self._bulk.broken_at > RETRY_S:
            self._bulk.close(linger_ms=0)
            self._bulk = self._connect_bulk()

    def _put(self, worker: Worker, packet: Packet) -> None:
        self._unsent[packet.bulk].append((worker, packet))

    def _flush(self) -> None:
        """Send the packets that the connections accept now."""
        for bulk, unsent in self._unsent.items():
            socket = self._bulk.socket if bulk else self._link.sockets[0]
            with contextlib.suppress(zmq.Again):
                while unsent:
                    worker, packet = unsent[0]
                    # The segment buffers belong to the channel, so ZeroMQ need not copy them.
                    frames = [relay_tag(*worker), *packet.frames]
                    socket.send_multipart(frames, zmq.DONTWAIT, copy=not bulk)
                    unsent.popleft()

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """The socket of the bulk connection, for a caller that waits for many relays at once."""
        return self._bulk.socket

    def wait(self, fds: Sequence[int], timeout_s: float) -> set[int]:
        """Wait until a packet arrives or can be sent, one of these descriptors is readable, or `timeout_s` has passed.

        Returns:
            The readable descriptors.
        """
        poller = zmq.Poller()
        for readable in (self._bulk.monitor, *fds):
            poller.register(readable, zmq.POLLIN)
        for bulk, socket in ((True, self._bulk.socket), (False, self._link.sockets[0])):
            poller.register(socket, zmq.POLLIN | (zmq.POLLOUT if self._unsent[bulk] else 0))
        if self._bulk.broken_at < math.inf:
            timeout_s = min(timeout_s, RETRY_S)
        return {found for found, _ in poller.poll(math.ceil(timeout_s * 1000)) if isinstance(found, int)}

    def close(self) -> None:
        self._bulk.close(linger_ms=0)
