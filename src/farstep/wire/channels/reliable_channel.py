"""Messages whole, in order and once, over connections that lose what was under way when they break. Without I/O.

Every message has a number. The sender keeps it until the other side says that it has it; the receiver hands messages
out in order and knows again what it has had. Small messages go whole over the control connection; large ones are cut
into segments, sealed, for the bulk connection.

Whoever connected, and sees that it had to again, says so (`BACK`; `HERE` on the bulk connection): both sides then send
again what the other does not have and what that connection carried. Beyond that a sender whose message is not confirmed
asks now and then, and sends again only if nothing has moved for long: a slow connection must not be given everything
twice.
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
"""Messages up to this size travel whole, over the control connection."""
REPORT_S = 0.2
"""How long a confirmation may wait for a message to go with."""
ASK_S, STILL_S = 1.0, 15.0
"""How often to ask about a message that is not confirmed, and after how long without any progress to send it again."""
_MOST_SPARE = 64
_RATES = 8
MAX_AHEAD = 4096
"""Messages that may wait for one before them."""
MAX_FRAMES = 4096
_FRAME_COST = 256
"""What a frame takes besides its bytes, about: many empty ones are not free."""
_ENVELOPE = struct.Struct("<BQQI")
_PLACE = struct.Struct("<II")
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8
"""Of frames in a message, so that arrays in it can be used as they are."""


class Kind(IntEnum):
    WHOLE = 1
    SEGMENT = 2
    HAVE = 3
    """Only says what has arrived."""
    ASK = 4
    """The same, and asks the other side to say it."""
    BACK = 5
    """The same, after the control connection broke and was made again."""
    HERE = 6
    """The first packet of a bulk connection."""


@dataclass(frozen=True)
class Packet:
    """Frames for one of the two connections."""

    bulk: bool
    frames: Sequence[BytesLike]

    @property
    def is_here(self) -> bool:
        """Whether it is the first of a bulk connection."""
        return self.bulk and bytes(self.frames[0][:1]) == bytes([Kind.HERE])


@dataclass
class _Sent:
    """A message that the other side has not confirmed."""

    seq: int
    bodies: list[list[BytesLike]]
    """Per packet, the frames after its envelope."""
    bulk: bool
    began: float
    again: bool = False
    """It was sent more than once: a copy may still be on its way when it is confirmed."""


@dataclass
class _Arriving:
    """A large message, as far as it is here."""

    lengths: list[int]
    text: memoryview
    """All frames, one after the other."""
    indices: set[int] = field(default_factory=set)
    prefix: int = 0
    """Segments from the first on without a gap."""

    def add(self, index: int) -> None:
        self.indices.add(index)
        while self.prefix in self.indices:
            self.prefix += 1


class ReliableChannel:
    """One side of a conversation."""

    def __init__(self, seal: Cipher | None = None, most_bytes: int = 1 << 33, rooms: BufferPool | None = None) -> None:
        self._seal, self._most_bytes = seal, most_bytes
        self._room_for = (rooms or BufferPool()).room
        self._tag_bytes = TAG_BYTES if seal else 0
        self._next = 1
        self._unconfirmed: deque[_Sent] = deque()
        self._delivered = 0
        self._ready: dict[int, Sequence[BytesLike]] = {}
        self._arriving: dict[int, _Arriving] = {}
        self._held: dict[int, int] = {}
        """Per message that is here, whole or not, and was not handed out: the memory that it takes."""
        self._asked_at = self._last_sent = 0.0
        self._others, self._moved_at = (0, 0), 0.0
        """What the other side has: messages, and segments of the next; and since when."""
        self._broken: set[bool] = set()
        """Which connections were made again, by whether they are for bulk, since the other side said what it has."""
        self._spare: list[bytearray] = []
        self._rates: deque[float] = deque(maxlen=_RATES)
        self._confirmed_at = 0.0
        self.owes_report = False
        """The other side should hear what has arrived, soon."""

    # ---- sending ----

    def send(self, frames: Sequence[BytesLike], now: float) -> Iterator[Packet]:
        """What to put on the wire for a message; the frames may be changed once all of it was taken."""
        views = [memoryview(frame).cast("B") if not isinstance(frame, bytes) else memoryview(frame) for frame in frames]
        if len(views) > MAX_FRAMES:
            raise WireError(f"a message of {len(views)} frames; at most {MAX_FRAMES} are possible.")
        seq, self._next = self._next, self._next + 1
        large = sum(view.nbytes for view in views) > SMALL_BYTES
        sent = _Sent(seq, [], large, now)
        self._unconfirmed.append(sent)
        self._last_sent = now
        if not large:
            sent.bodies.append([bytes(view) for view in views])
            yield self._packet(sent, 0)
            return
        for body in self._segments(seq, views):
            sent.bodies.append(body)
            yield self._packet(sent, len(sent.bodies) - 1)

    def _segments(self, seq: int, views: Sequence[memoryview]) -> Iterator[list[BytesLike]]:
        lengths = b"".join(_LENGTH.pack(view.nbytes) for view in views)
        starts, total = _starts([view.nbytes for view in views])
        count = -(-total // SEGMENT_BYTES)
        if count > SEGMENTS:
            raise WireError(f"a message of {count} segments; at most {SEGMENTS} are possible.")
        for index in range(count):
            first, stop = index * SEGMENT_BYTES, min((index + 1) * SEGMENT_BYTES, total)
            text = _cut(views, starts, first, stop)
            # The lengths of all frames come with every segment: any of them may be the first to arrive.
            about = _PLACE.pack(index, count) + lengths
            sealed = self._room(stop - first + self._tag_bytes)
            if self._seal:
                self._seal.seal(seq, index, about, text, sealed)
            else:
                sealed[:] = text
            yield [about, sealed]

    def _room(self, size: int) -> memoryview:
        """For a sealed segment; for a whole one, memory that was used before, which costs the kernel nothing."""
        whole = size == SEGMENT_BYTES + self._tag_bytes
        return memoryview(self._spare.pop() if whole and self._spare else bytearray(size))

    def _packet(self, sent: _Sent, index: int) -> Packet:
        kind = Kind.SEGMENT if sent.bulk else Kind.WHOLE
        return Packet(sent.bulk, [self._envelope(kind, sent.seq), *sent.bodies[index]])

    def _envelope(self, kind: Kind, seq: int = 0) -> bytes:
        self.owes_report = False
        arriving = self._arriving.get(self._delivered + 1)
        return _ENVELOPE.pack(kind, seq, self._delivered, arriving.prefix if arriving else 0)

    def report(self) -> Packet:
        """Says what has arrived."""
        return Packet(False, [self._envelope(Kind.HAVE)])

    def back(self, bulk: bool = False) -> Packet:
        """A connection broke and is there again: whatever was under way may be lost."""
        self._broken.add(bulk)
        return Packet(False, [self._envelope(Kind.ASK if bulk else Kind.BACK)])

    def here(self) -> Packet:
        """What a bulk connection begins with."""
        return Packet(True, [self._envelope(Kind.HERE)])

    def due(self, now: float) -> Iterable[Packet]:
        """What time alone brings about: a question about messages that were not confirmed for a while."""
        if self._unconfirmed and now - max(self._asked_at, self._last_sent) > ASK_S:
            self._asked_at = now
            return [Packet(False, [self._envelope(Kind.ASK)])]
        return ()

    @property
    def rate(self) -> float:
        """Bytes per second of large messages, one after the other, until confirmed; the best of the last few, since a
        confirmation may wait to be read. Infinite before there was one."""
        return max(self._rates, default=math.inf)

    @property
    def unconfirmed(self) -> int:
        """Messages that are kept, since they may have to be sent again."""
        return len(self._unconfirmed)

    # ---- receiving ----

    def receive(self, packet: Packet, now: float) -> list[Packet]:
        """Take a packet; what must be answered, or sent again, because of it.

        Others may be able to write to the bulk connection: of what comes there, only sealed segments count.
        """
        frames = packet.frames
        if not frames or len(frames[0]) != _ENVELOPE.size:
            raise WireError("a packet without an envelope.")
        kind, seq, have, segments = _ENVELOPE.unpack(frames[0])
        if packet.bulk != (kind in (Kind.SEGMENT, Kind.HERE)):
            raise WireError("a packet on the wrong connection.")
        if kind == Kind.HERE:
            return list(self._again(*self._others, {True}, now))
        if packet.bulk:
            self._take_segment(seq, frames[1:])
            return []
        self._confirm(have, segments, now)
        again: list[Packet] = []
        if now - max(self._moved_at, self._last_sent) > STILL_S:
            again += self._again(have, segments, {False, True}, now)
        elif kind == Kind.BACK:
            again += self._again(have, segments, {False}, now)
        elif kind == Kind.HAVE and self._broken:
            again += self._again(have, segments, self._broken, now)
            self._broken = set()
        match kind:
            case Kind.WHOLE:
                if self._is_new(seq):
                    self._hold(seq, [len(frame) for frame in frames[1:]])
                    self._ready[seq] = frames[1:]
            case Kind.ASK | Kind.BACK:
                again.append(self.report())
            case Kind.HAVE:
                pass
            case _:
                raise WireError(f"a packet of unknown kind {kind}.")
        return again

    def messages(self) -> Iterator[Sequence[BytesLike]]:
        """Those whose turn it is."""
        while (frames := self._ready.pop(self._delivered + 1, None)) is not None:
            self._delivered += 1
            self._held.pop(self._delivered, None)
            self._arriving.pop(self._delivered, None)  # who sends it in two ways has us keep neither
            yield frames

    def _hold(self, seq: int, lengths: Sequence[int]) -> None:
        """Take in a message of that size, unless the other side has us keep too much already."""
        if len(lengths) > MAX_FRAMES:
            raise WireError(f"a message of {len(lengths)} frames; at most {MAX_FRAMES} are accepted.")
        size = sum(lengths) + _FRAME_COST * len(lengths)
        if sum(lengths) > self._most_bytes or (self._held and sum(self._held.values()) + size > self._most_bytes):
            raise WireError(f"a message of {sum(lengths)} bytes; at most {self._most_bytes} are accepted.")
        self._held[seq] = size

    def _is_new(self, seq: int) -> bool:
        if seq > self._delivered + MAX_AHEAD:
            raise WireError(f"message {seq}, when {self._delivered + 1} is the next.")
        self.owes_report = True
        return seq > self._delivered and seq not in self._ready

    def _take_segment(self, seq: int, frames: Sequence[BytesLike]) -> None:
        table_bytes = len(frames[0]) - _PLACE.size if len(frames) == 2 else -1
        if table_bytes < 0 or table_bytes % _LENGTH.size:
            raise WireError("a segment that does not say what it is.")
        if not self._is_new(seq):
            return
        about, sealed = bytes(frames[0]), frames[1]
        if len(about) > _PLACE.size + MAX_FRAMES * _LENGTH.size:
            raise WireError(f"a message of more than {MAX_FRAMES} frames.")
        index, count = _PLACE.unpack_from(about)
        lengths = [length for (length,) in _LENGTH.iter_unpack(about[_PLACE.size :])]
        starts, total = _starts(lengths)
        size = min(SEGMENT_BYTES, total - index * SEGMENT_BYTES)
        if count != -(-total // SEGMENT_BYTES) or index >= count or len(sealed) != size + self._tag_bytes:
            raise WireError("a segment that has no place in its message.")
        arriving = self._arriving.get(seq)
        if arriving is not None and (arriving.lengths != lengths or index in arriving.indices):
            return  # had it already
        here = slice(index * SEGMENT_BYTES, index * SEGMENT_BYTES + size)
        if arriving is None:
            # Nobody but the other side may ask for room: the first segment is opened before any is made.
            text = self._room_for(size)
            self._open(seq, index, about, sealed, text)
            self._hold(seq, lengths)
            arriving = self._arriving[seq] = _Arriving(lengths, self._room_for(total) if count > 1 else text)
            if count > 1:
                arriving.text[here] = text
        else:
            self._open(seq, index, about, sealed, arriving.text[here])
        arriving.add(index)
        if len(arriving.indices) == count:
            del self._arriving[seq]
            self._ready[seq] = [arriving.text[s : s + length] for s, length in zip(starts, lengths, strict=True)]

    def _recycle(self, sent: _Sent) -> None:
        if sent.bulk and not sent.again:
            size = SEGMENT_BYTES + self._tag_bytes
            used = [body[-1] for body in sent.bodies if len(body[-1]) == size][: _MOST_SPARE - len(self._spare)]
            self._spare += [view.obj for view in used if isinstance(view, memoryview)]  # type: ignore[misc]

    def _open(self, seq: int, index: int, about: bytes, sealed: BytesLike, into: memoryview) -> None:
        if self._seal:
            self._seal.open(seq, index, about, sealed, into)
        else:
            into[:] = sealed

    def _confirm(self, have: int, segments: int, now: float) -> None:
        """The other side says what it has: forget that."""
        if have >= self._next:
            raise WireError(f"message {have} was confirmed, and never sent.")
        done = [sent for sent in self._unconfirmed if sent.seq <= have]
        for sent in done:
            self._unconfirmed.popleft()
            self._recycle(sent)
        if large := [sent for sent in done if sent.bulk]:
            began = max(large[0].began, self._confirmed_at)  # before that, it waited for those before it
            self._confirmed_at = now
            if now > began:
                nbytes = sum(len(body[-1]) for sent in large for body in sent.bodies)
                self._rates.append(nbytes / (now - began))
        if (have, segments) != self._others or not self._unconfirmed:
            self._others, self._moved_at = (have, segments), now

    def _again(self, have: int, segments: int, lost: set[bool], now: float) -> Iterator[Packet]:
        """What the other side does not have, of the connections that may have lost it."""
        self._moved_at = now
        for sent in [sent for sent in self._unconfirmed if sent.bulk in lost]:
            sent.again = True
            for index in range(segments if sent.seq == have + 1 else 0, len(sent.bodies)):
                yield self._packet(sent, index)


def _starts(lengths: Sequence[int]) -> tuple[list[int], int]:
    """Where frames begin in a message, and how long it is."""
    starts, total = [], 0
    for length in lengths:
        starts.append(total)
        total += -(-length // _ALIGNMENT) * _ALIGNMENT
    return starts, max(total, 1)


def _cut(views: Sequence[memoryview], starts: Sequence[int], first: int, stop: int) -> BytesLike:
    """A stretch of a message: of one frame where it is as it is, else copied together."""
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
