"""Delivers messages whole, in order and exactly once, over connections that lose data when they break. Does no I/O.

Every message has a sequence number. The sender keeps a message until the peer acknowledges it; the receiver delivers
messages in order and drops duplicates. A small message is sent as one packet over the control connection; a large
message is cut into encrypted segments for the bulk connection. Every packet on the control connection also acknowledges
what its sender has received.

After a reconnect, the worker notifies the head, because the worker is the connecting side (`RECONNECTED`, or
`BULK_OPENED` on the bulk connection). Each side then resends the packets of the broken connection that the other side
has not received. In addition, a sender requests an acknowledgement once a second (`REQUEST_ACK`). If the peer
acknowledges nothing new for 15 seconds, the sender resends. It does not resend earlier, so that a slow connection does
not carry everything twice.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from farstep.core import BytesLike
from farstep.errors import WireError
from farstep.wire.buffer_pool import BufferPool
from farstep.wire.encryption import SEGMENTS, TAG_BYTES, Cipher

SEGMENT_BYTES = 1 << 20
SMALL_BYTES = 1 << 13
"""Messages up to this size are sent as one packet, over the control connection."""
ACK_DELAY_S = 0.2
"""Minimum seconds between two `ACK` packets of a worker. In between, its other packets carry the acknowledgement."""
REQUEST_ACK_S, STALL_S = 1.0, 15.0
"""Seconds between requests for an acknowledgement, and seconds without progress after which to resend."""
_MOST_SPARE = 64
"""Maximum number of segment buffers to keep for reuse."""
_RATES = 8
"""Number of latest transfer rates to keep."""
MAX_AHEAD = 4096
"""Maximum number of messages that may arrive before a missing message."""
MAX_FRAMES = 4096
_FRAME_COST = 256
"""Approximate memory of a frame in addition to its bytes, so that a message of many empty frames also has a size."""
ENVELOPE = struct.Struct("<BQQI")
"""The first frame of a packet: kind, sequence number, and two acknowledgements. These are the number of messages that
the sender has received in order, and the number of segments of the next message that it has received."""
POSITION = struct.Struct("<II")
"""The header of a segment: its index, and the number of segments. The frame lengths follow."""
LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8
"""Alignment of frames within a message, so that arrays can be used without a copy."""


class Kind(IntEnum):
    """The kind of a packet."""

    WHOLE = 1
    """A small message."""
    SEGMENT = 2
    """A segment of a large message."""
    ACK = 3
    """An acknowledgement without a message."""
    REQUEST_ACK = 4
    """Requests an `ACK`."""
    RECONNECTED = 5
    """Requests an `ACK` and a resend, after the control connection was restored."""
    BULK_OPENED = 6
    """The first packet of a bulk connection; requests a resend of segments."""


@dataclass(frozen=True)
class Packet:
    """Frames for one of the two connections."""

    bulk: bool
    frames: Sequence[BytesLike]

    @property
    def opens_bulk(self) -> bool:
        """Whether this is the first packet of a bulk connection."""
        return self.bulk and bytes(self.frames[0][:1]) == bytes([Kind.BULK_OPENED])


@dataclass
class _Sent:
    """A message that the peer has not acknowledged."""

    seq: int
    bodies: list[list[BytesLike]]
    """For each packet, the frames after its envelope."""
    bulk: bool
    began: float
    resent: bool = False
    """Whether the message was sent more than once. ZeroMQ may then still be sending a copy after the acknowledgement,
    so its buffers are not reused."""


@dataclass
class _Arriving:
    """A large message that is still arriving, segment by segment."""

    lengths: list[int]
    text: memoryview
    """All decrypted frames, concatenated."""
    indices: set[int] = field(default_factory=set)
    """The segments that have arrived."""
    prefix: int = 0
    """Number of segments that have arrived without a gap, counted from the first."""

    def add(self, index: int) -> None:
        self.indices.add(index)
        while self.prefix in self.indices:
            self.prefix += 1


class ReliableChannel:
    """One end of the channel between the head and a worker.

    Args:
        cipher: Encrypts segments; None: send plain bytes.
        most_bytes: Maximum memory, in bytes, that undelivered messages of the peer may take.
        pool: Buffers for large messages; None: the channel creates a pool.
    """

    def __init__(self, cipher: Cipher | None = None, most_bytes: int = 1 << 33, pool: BufferPool | None = None) -> None:
        self._cipher, self._most_bytes = cipher, most_bytes
        self._take_buffer = (pool or BufferPool()).take
        self._tag_bytes = TAG_BYTES if cipher else 0
        self._next = 1
        self._unacknowledged: deque[_Sent] = deque()
        self._delivered = 0
        self._ready: dict[int, Sequence[BytesLike]] = {}
        self._arriving: dict[int, _Arriving] = {}
        self._held: dict[int, int] = {}
        """The memory in bytes of each undelivered message, even if it is incomplete."""
        self._requested_at = self._last_sent = 0.0
        self._peer_has, self._progressed_at = (0, 0), 0.0
        """What the peer has received, as (messages, segments of the next message), and when this last changed."""
        self._restored: set[bool] = set()
        """Restored connections whose lost packets were not resent yet (True: bulk, False: control). The next `ACK`
        packet triggers the resend."""
        self._spare: list[bytearray] = []
        self._rates: deque[float] = deque(maxlen=_RATES)
        self._acknowledged_at = 0.0
        self.owes_ack = False
        """Whether messages have arrived that were not acknowledged yet."""

    # ---- sending ----

    @property
    def undelivered(self) -> int:
        """Number of messages that have arrived, also in part, and wait for an earlier one or for their rest."""
        return len(self._ready.keys() | self._arriving.keys())

    @property
    def undelivered_bytes(self) -> int:
        """Memory that undelivered messages take, including the announced rest of incomplete ones."""
        return sum(self._held.values())

    def send(self, frames: Sequence[BytesLike], now: float) -> Iterator[Packet]:
        """The packets of a message. After taking all packets, the caller may modify the frames.

        Raises:
            WireError: The message has too many frames or segments.
        """
        views = [memoryview(frame).cast("B") if not isinstance(frame, bytes) else memoryview(frame) for frame in frames]
        if len(views) > MAX_FRAMES:
            raise WireError(f"a message of {len(views)} frames; at most {MAX_FRAMES} are possible.")
        seq, self._next = self._next, self._next + 1
        large = sum(view.nbytes for view in views) > SMALL_BYTES
        sent = _Sent(seq, [], large, now)
        self._unacknowledged.append(sent)
        self._last_sent = now
        if not large:
            sent.bodies.append([bytes(view) for view in views])
            yield self._packet(sent, 0)
            return
        for body in self._segments(seq, views):
            sent.bodies.append(body)
            yield self._packet(sent, len(sent.bodies) - 1)

    def _segments(self, seq: int, views: Sequence[memoryview]) -> Iterator[list[BytesLike]]:
        lengths = b"".join(LENGTH.pack(view.nbytes) for view in views)
        starts, total = _starts([view.nbytes for view in views])
        count = -(-total // SEGMENT_BYTES)
        if count > SEGMENTS:
            raise WireError(f"a message of {count} segments; at most {SEGMENTS} are possible.")
        for index in range(count):
            first, stop = index * SEGMENT_BYTES, min((index + 1) * SEGMENT_BYTES, total)
            text = _cut(views, starts, first, stop)
            # Every segment has the lengths of all frames, because any segment may be the first to arrive.
            header = POSITION.pack(index, count) + lengths
            sealed = self._segment_buffer(stop - first + self._tag_bytes)
            if self._cipher:
                self._cipher.seal(seq, index, header, text, sealed)
            else:
                sealed[:] = text
            yield [header, sealed]

    def _segment_buffer(self, size: int) -> memoryview:
        """A buffer for an encrypted segment. Full-sized buffers are recycled, so that the kernel need not zero
        pages."""
        whole = size == SEGMENT_BYTES + self._tag_bytes
        return memoryview(self._spare.pop() if whole and self._spare else bytearray(size))

    def _packet(self, sent: _Sent, index: int) -> Packet:
        kind = Kind.SEGMENT if sent.bulk else Kind.WHOLE
        return Packet(sent.bulk, [self._envelope(kind, sent.seq), *sent.bodies[index]])

    def _envelope(self, kind: Kind, seq: int = 0) -> bytes:
        self.owes_ack = False
        arriving = self._arriving.get(self._delivered + 1)
        return ENVELOPE.pack(kind, seq, self._delivered, arriving.prefix if arriving else 0)

    def ack(self) -> Packet:
        """A packet that only acknowledges."""
        return Packet(False, [self._envelope(Kind.ACK)])

    def reconnected(self, bulk: bool = False) -> Packet:
        """The packet to send after a connection was restored, because packets in flight may have been lost."""
        self._restored.add(bulk)
        return Packet(False, [self._envelope(Kind.REQUEST_ACK if bulk else Kind.RECONNECTED)])

    def bulk_opened(self) -> Packet:
        """The first packet of a new bulk connection."""
        return Packet(True, [self._envelope(Kind.BULK_OPENED)])

    def due(self, now: float) -> Iterable[Packet]:
        """A `REQUEST_ACK` if messages are unacknowledged, and nothing was sent or requested during the last second."""
        if self._unacknowledged and now - max(self._requested_at, self._last_sent) > REQUEST_ACK_S:
            return [self.request_ack(now)]
        return ()

    def request_ack(self, now: float) -> Packet:
        """A packet that requests an acknowledgement of all earlier messages."""
        self._requested_at = now
        return Packet(False, [self._envelope(Kind.REQUEST_ACK)])

    @property
    def rate(self) -> float:
        """Bytes per second of large messages, from sending to acknowledgement; infinite before the first measurement.

        A measurement is too low if this side reads the acknowledgement late. So the result is the maximum of the last
        `_RATES` measurements.
        """
        return max(self._rates, default=math.inf)

    @property
    def unacknowledged(self) -> int:
        """The number of messages kept for a possible resend."""
        return len(self._unacknowledged)

    # ---- receiving ----

    def receive(self, packet: Packet, now: float) -> list[Packet]:
        """Process a packet. Return the packets to send in response.

        An attacker may be able to write to the bulk connection. Acknowledgements on it are therefore ignored, and with
        a cipher every segment is authenticated.

        Raises:
            WireError: The packet is malformed, or exceeds a limit.
        """
        frames = packet.frames
        if not frames or len(frames[0]) != ENVELOPE.size:
            raise WireError("a packet without an envelope.")
        kind, seq, have, segments = ENVELOPE.unpack(frames[0])
        if packet.bulk != (kind in (Kind.SEGMENT, Kind.BULK_OPENED)):
            raise WireError("a packet on the wrong connection.")
        if kind == Kind.BULK_OPENED:
            return list(self._resend(*self._peer_has, {True}, now))
        if packet.bulk:
            self._take_segment(seq, frames[1:])
            return []
        self._acknowledge(have, segments, now)
        responses: list[Packet] = []
        if now - max(self._progressed_at, self._last_sent) > STALL_S:
            responses += self._resend(have, segments, {False, True}, now)
        elif kind == Kind.RECONNECTED:
            responses += self._resend(have, segments, {False}, now)
        elif kind == Kind.ACK and self._restored:
            responses += self._resend(have, segments, self._restored, now)
            self._restored = set()
        match kind:
            case Kind.WHOLE:
                if self._is_new(seq):
                    self._hold(seq, [len(frame) for frame in frames[1:]])
                    self._ready[seq] = frames[1:]
            case Kind.REQUEST_ACK | Kind.RECONNECTED:
                responses.append(self.ack())
            case Kind.ACK:
                pass
            case _:
                raise WireError(f"a packet of unknown kind {kind}.")
        return responses

    def messages(self) -> Iterator[Sequence[BytesLike]]:
        """Deliver all complete messages that are next in order."""
        while (frames := self._ready.pop(self._delivered + 1, None)) is not None:
            self._delivered += 1
            self._held.pop(self._delivered, None)
            self._arriving.pop(self._delivered, None)  # a peer may have sent the message both whole and in segments
            yield frames

    def _hold(self, seq: int, lengths: Sequence[int]) -> None:
        """Account for the memory of a new message. Raise `WireError` if the peer's messages take too much memory."""
        if len(lengths) > MAX_FRAMES:
            raise WireError(f"a message of {len(lengths)} frames; at most {MAX_FRAMES} are accepted.")
        size, held = sum(lengths) + _FRAME_COST * len(lengths), self.undelivered_bytes
        if sum(lengths) > self._most_bytes or (held and held + size > self._most_bytes):
            raise WireError(
                f"a message of {sum(lengths)} bytes arrived while undelivered messages take {held} bytes; at most "
                f"{self._most_bytes} bytes are accepted in total."
            )
        self._held[seq] = size

    def _is_new(self, seq: int) -> bool:
        if seq > self._delivered + MAX_AHEAD:
            raise WireError(
                f"message {seq} arrived while message {self._delivered + 1} is missing; at most {MAX_AHEAD} messages "
                "may arrive before a missing message."
            )
        self.owes_ack = True
        return seq > self._delivered and seq not in self._ready

    def _take_segment(self, seq: int, frames: Sequence[BytesLike]) -> None:
        table_bytes = len(frames[0]) - POSITION.size if len(frames) == 2 else -1
        if table_bytes < 0 or table_bytes % LENGTH.size:
            raise WireError("a segment without a header.")
        if not self._is_new(seq):
            return
        header, sealed = bytes(frames[0]), frames[1]
        if len(header) > POSITION.size + MAX_FRAMES * LENGTH.size:
            raise WireError(f"a message of more than {MAX_FRAMES} frames.")
        index, count = POSITION.unpack_from(header)
        lengths = [length for (length,) in LENGTH.iter_unpack(header[POSITION.size :])]
        starts, total = _starts(lengths)
        size = min(SEGMENT_BYTES, total - index * SEGMENT_BYTES)
        if count != -(-total // SEGMENT_BYTES) or index >= count or len(sealed) != size + self._tag_bytes:
            raise WireError("a segment whose index or size does not fit its message.")
        arriving = self._arriving.get(seq)
        if arriving is not None and (arriving.lengths != lengths or index in arriving.indices):
            return  # a duplicate
        where = slice(index * SEGMENT_BYTES, index * SEGMENT_BYTES + size)
        if arriving is None:
            # Decrypt before allocating the whole message, so that only the authenticated peer can cause allocations.
            text = self._take_buffer(size)
            self._open(seq, index, header, sealed, text)
            self._hold(seq, lengths)
            arriving = self._arriving[seq] = _Arriving(lengths, self._take_buffer(total) if count > 1 else text)
            if count > 1:
                arriving.text[where] = text
        else:
            self._open(seq, index, header, sealed, arriving.text[where])
        arriving.add(index)
        if len(arriving.indices) == count:
            del self._arriving[seq]
            self._ready[seq] = [arriving.text[s : s + length] for s, length in zip(starts, lengths, strict=True)]

    def _recycle(self, sent: _Sent) -> None:
        if sent.bulk and not sent.resent:
            size = SEGMENT_BYTES + self._tag_bytes
            used = [body[-1] for body in sent.bodies if len(body[-1]) == size][: _MOST_SPARE - len(self._spare)]
            self._spare += [view.obj for view in used if isinstance(view, memoryview)]  # type: ignore[misc]

    def _open(self, seq: int, index: int, header: bytes, sealed: BytesLike, into: memoryview) -> None:
        if self._cipher:
            self._cipher.open(seq, index, header, sealed, into)
        else:
            into[:] = sealed

    def _acknowledge(self, have: int, segments: int, now: float) -> None:
        """Forget the messages that the peer has received, and update the transfer rate."""
        if have >= self._next:
            raise WireError(f"an acknowledgement of message {have}, which was never sent.")
        done = [sent for sent in self._unacknowledged if sent.seq <= have]
        for sent in done:
            self._unacknowledged.popleft()
            self._recycle(sent)
        if large := [sent for sent in done if sent.bulk]:
            began = max(large[0].began, self._acknowledged_at)  # until then, it was queued behind earlier messages
            self._acknowledged_at = now
            if now > began:
                nbytes = sum(len(body[-1]) for sent in large for body in sent.bodies)
                self._rates.append(nbytes / (now - began))
        if (have, segments) != self._peer_has or not self._unacknowledged:
            self._peer_has, self._progressed_at = (have, segments), now

    def _resend(self, have: int, segments: int, lost: set[bool], now: float) -> Iterator[Packet]:
        """The unacknowledged packets of the connections in `lost` (True: bulk, False: control)."""
        self._progressed_at = now
        for sent in [sent for sent in self._unacknowledged if sent.bulk in lost]:
            sent.resent = True
            for index in range(segments if sent.seq == have + 1 else 0, len(sent.bodies)):
                yield self._packet(sent, index)


def _starts(lengths: Sequence[int]) -> tuple[list[int], int]:
    """The offset of each frame in a message, and the total length."""
    starts, total = [], 0
    for length in lengths:
        starts.append(total)
        total += -(-length // _ALIGNMENT) * _ALIGNMENT
    return starts, max(total, 1)


def _cut(views: Sequence[memoryview], starts: Sequence[int], first: int, stop: int) -> BytesLike:
    """The bytes from `first` to `stop` of a message: a view if they are within one frame, otherwise a copy."""
    inside = bisect_right(starts, first) - 1
    if stop <= starts[inside] + views[inside].nbytes:
        return views[inside][first - starts[inside] : stop - starts[inside]]
    text = bytearray(stop - first)
    for view, start in zip(views[inside:], starts[inside:], strict=True):
        if start >= stop:
            break
        low, high = max(first, start), min(stop, start + view.nbytes)
        if low < high:
            text[low - first : high - first] = view[low - start : high - start]
    return text
