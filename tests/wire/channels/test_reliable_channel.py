"""Messages arrive in order and exactly once over connections that lose, repeat or reorder packets."""

from __future__ import annotations

import os
import random
import struct
from collections import deque
from typing import Any

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given, settings
from hypothesis import strategies as st

from farstep.errors import WireError
from farstep.wire.channels import reliable_channel as module
from farstep.wire.channels.reliable_channel import (
    REQUEST_ACK_S,
    SEGMENT_BYTES,
    SMALL_BYTES,
    STALL_S,
    Kind,
    Packet,
    ReliableChannel,
)
from farstep.wire.encryption import Cipher, Side


class Pair:
    """A head and a worker with two connections between them, each in order, until one breaks."""

    def __init__(self, sealed: bool = True) -> None:
        key = os.urandom(32)
        self.ends = {side: ReliableChannel(Cipher(key, side) if sealed else None) for side in (Side.HEAD, Side.WORKER)}
        self.lines: dict[tuple[Side, bool], deque[Packet]] = {
            (side, bulk): deque() for side in self.ends for bulk in (False, True)
        }
        self.got: dict[Side, list[list[bytes]]] = {side: [] for side in self.ends}
        self.now = 0.0
        self.sent_bytes = 0

    def send(self, side: Side, frames: list[bytes]) -> None:
        for packet in self.ends[side].send(frames, self.now):
            self.put(side, packet)

    def put(self, side: Side, packet: Packet) -> None:
        self.sent_bytes += sum(len(frame) for frame in packet.frames)
        self.lines[side, packet.bulk].append(packet)

    def deliver(self, side: Side, bulk: bool) -> None:
        """One packet that `side` sent arrives."""
        line, other = self.lines[side, bulk], Side.HEAD if side is Side.WORKER else Side.WORKER
        if not line:
            return
        packet = line.popleft()
        for answer in self.ends[other].receive(packet, self.now):
            self.put(other, answer)
        self.got[other] += [[bytes(frame) for frame in frames] for frames in self.ends[other].messages()]

    def break_line(self, bulk: bool) -> None:
        """A connection breaks with all that is under way; the worker notices when it is there again."""
        for side in self.ends:
            self.lines[side, bulk].clear()
        worker = self.ends[Side.WORKER]
        if bulk:
            self.put(Side.WORKER, worker.bulk_opened())
        self.put(Side.WORKER, worker.reconnected(bulk))

    def settle(self) -> None:
        for _ in range(10_000):
            for side, bulk in list(self.lines):
                self.deliver(side, bulk)
            if not any(self.lines.values()):
                if not any(end.unacknowledged for end in self.ends.values()):
                    return
                self.now += REQUEST_ACK_S + 0.1
                for side, end in self.ends.items():
                    for packet in end.due(self.now):
                        self.put(side, packet)
        raise AssertionError("it does not settle")


LARGE = [SMALL_BYTES + 1, SEGMENT_BYTES, SEGMENT_BYTES + 1, 2 * SEGMENT_BYTES + 17]


@pytest.mark.parametrize("sealed", [True, False])
def test_messages_of_all_sizes_arrive_in_order(sealed: bool) -> None:
    pair = Pair(sealed)
    messages = [
        [b"small", b""],
        [os.urandom(size) for size in LARGE],
        [b"after"],
        [b"", os.urandom(SMALL_BYTES + 1), b""],
    ]
    for message in messages:
        pair.send(Side.WORKER, message)
    pair.settle()
    assert pair.got[Side.HEAD] == messages


def test_a_small_message_waits_for_the_large_one_before_it() -> None:
    pair = Pair()
    pair.send(Side.WORKER, [os.urandom(3 * SEGMENT_BYTES)])
    pair.send(Side.WORKER, [b"second"])
    pair.deliver(Side.WORKER, bulk=False)
    pair.deliver(Side.WORKER, bulk=True)
    assert pair.got[Side.HEAD] == []
    pair.settle()
    assert pair.got[Side.HEAD][1] == [b"second"]


def test_only_missing_segments_are_retransmitted() -> None:
    pair = Pair()
    text = os.urandom(10 * SEGMENT_BYTES)
    pair.send(Side.WORKER, [text])
    for _ in range(8):
        pair.deliver(Side.WORKER, bulk=True)
    pair.break_line(bulk=True)
    pair.settle()
    assert pair.got[Side.HEAD] == [[text]]
    assert pair.sent_bytes < 12.1 * SEGMENT_BYTES


def test_slow_connection_causes_no_needless_retransmission() -> None:
    pair = Pair()
    pair.send(Side.WORKER, [os.urandom(4 * SEGMENT_BYTES)])
    for _ in range(4):  # a segment every ten seconds; meanwhile the worker asks, and hears how far it is
        for _ in range(10):
            pair.now += REQUEST_ACK_S
            for packet in pair.ends[Side.WORKER].due(pair.now):
                pair.put(Side.WORKER, packet)
            pair.deliver(Side.WORKER, bulk=False)
            pair.deliver(Side.HEAD, bulk=False)
        pair.deliver(Side.WORKER, bulk=True)
    pair.settle()
    assert len(pair.got[Side.HEAD]) == 1
    assert pair.sent_bytes < 4.1 * SEGMENT_BYTES


def test_silently_lost_segments_are_retransmitted() -> None:
    pair = Pair()
    pair.send(Side.HEAD, [b"lost"])
    pair.lines[Side.HEAD, False].clear()
    pair.settle()
    assert pair.got[Side.WORKER] == [[b"lost"]]
    assert pair.now > STALL_S


@settings(deadline=None, max_examples=150)
@given(st.integers(0, 2**32 - 1))
@pytest.mark.slow
def test_random_failures_neither_lose_nor_repeat_messages(seed: int) -> None:
    chance = random.Random(seed)
    small, segment = module.SMALL_BYTES, module.SEGMENT_BYTES
    module.SMALL_BYTES, module.SEGMENT_BYTES = 8, 16
    try:
        pair = Pair()
        sent: dict[Side, list[list[bytes]]] = {side: [] for side in pair.ends}
        for _ in range(300):
            side = chance.choice(list(pair.ends))
            match chance.randrange(8):
                case 0 | 1:
                    message = [
                        chance.randbytes(chance.choice([0, 1, 9, 16, 17, 70])) for _ in range(chance.randint(1, 3))
                    ]
                    sent[side].append(message)
                    pair.send(side, message)
                case 2 if chance.random() < 0.3:
                    pair.break_line(chance.random() < 0.5)
                case 3:
                    pair.now += chance.random() * 5
                    for packet in pair.ends[side].due(pair.now):
                        pair.put(side, packet)
                case _:
                    pair.deliver(side, chance.random() < 0.5)
        pair.settle()
        assert pair.got == {Side.HEAD: sent[Side.WORKER], Side.WORKER: sent[Side.HEAD]}
    finally:
        module.SMALL_BYTES, module.SEGMENT_BYTES = small, segment


def packets_of(session: ReliableChannel, size: int) -> list[Packet]:
    return list(session.send([os.urandom(size)], 0.0))


@pytest.mark.parametrize("frame", range(3))
def test_a_changed_segment_is_refused_and_takes_no_memory(frame: int) -> None:
    key = os.urandom(32)
    head, worker = ReliableChannel(Cipher(key, Side.HEAD)), ReliableChannel(Cipher(key, Side.WORKER))
    packet = packets_of(worker, 2 * SEGMENT_BYTES)[0]
    text = bytes(packet.frames[frame])
    last = 8 if frame == 0 else len(text) - 1  # what the envelope says beyond the number is not looked at
    for place in {0, last // 2, last}:
        changed = [bytes(other) for other in packet.frames]
        changed[frame] = text[:place] + bytes([text[place] ^ 1]) + text[place + 1 :]
        with pytest.raises(WireError):
            head.receive(Packet(True, changed), 0.0)
    assert not head.undelivered


def test_a_segment_of_another_worker_or_of_the_other_side_is_refused() -> None:
    key = os.urandom(32)
    head = ReliableChannel(Cipher(key, Side.HEAD))
    stranger = ReliableChannel(Cipher(os.urandom(32), Side.WORKER))
    mirror = ReliableChannel(Cipher(key, Side.HEAD))
    for liar in (stranger, mirror):
        with pytest.raises(WireError, match="did not encrypt, or that was modified"):
            head.receive(packets_of(liar, SMALL_BYTES + 1)[0], 0.0)


def test_a_replayed_segment_changes_nothing() -> None:
    key = os.urandom(32)
    head, worker = ReliableChannel(Cipher(key, Side.HEAD)), ReliableChannel(Cipher(key, Side.WORKER))
    packets = packets_of(worker, 2 * SEGMENT_BYTES)
    for packet in packets + packets:
        head.receive(packet, 0.0)
    assert len(list(head.messages())) == 1
    for packet in packets:
        head.receive(packet, 0.0)
    assert not list(head.messages()) and not head.undelivered


def test_no_nonce_is_used_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[bytes] = []

    class Recording:
        """AES-GCM that records the nonces with which it encrypts."""

        def __init__(self, key: bytes) -> None:
            self._cipher = AESGCM(key)

        def encrypt_into(self, nonce: bytes, *rest: Any) -> int:
            used.append(nonce)
            return self._cipher.encrypt_into(nonce, *rest)

    monkeypatch.setattr("farstep.wire.encryption.AESGCM", Recording)
    pair = Pair()
    for _ in range(20):
        pair.send(Side.WORKER, [os.urandom(3 * SEGMENT_BYTES // 2)])
        pair.send(Side.HEAD, [os.urandom(SMALL_BYTES + 1)])
    assert len(used) == len(set(used)) == 20 * 2 + 20


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind not in (Kind.SEGMENT, Kind.BULK_OPENED)])
def test_the_bulk_connection_takes_only_segments(kind: Kind) -> None:
    """Otherwise an attacker who can write to it could forge messages or acknowledgments."""
    head = ReliableChannel(Cipher(os.urandom(32), Side.HEAD))
    list(head.send([b"to be confirmed"], 0.0))
    with pytest.raises(WireError, match="wrong connection"):
        head.receive(Packet(True, [bytes([kind]) + b"\1" + b"\0" * 7 + b"\1" + b"\0" * 11, b"forged"]), 0.0)
    assert head.unacknowledged == 1
    assert not list(head.messages())


@pytest.mark.parametrize("bulk", [True, False])
@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"x" * 20],
        [b"\x02" + b"\0" * 20],
        [b"\x02" + b"\0" * 20, b"a", b"b", b"c"],
        [b"\x09" + b"\0" * 20],
        [b"\x01" + b"\xff" * 20, b"far ahead"],
    ],
)
def test_invalid_packets_are_refused(frames: list[bytes], bulk: bool) -> None:
    with pytest.raises(WireError):
        ReliableChannel(Cipher(os.urandom(32), Side.HEAD)).receive(Packet(bulk, frames), 0.0)


def test_a_forged_segment_does_not_overwrite_received_data() -> None:
    """A segment that cannot be opened is noticed only after it was written: it has no place but its own."""
    key = os.urandom(32)
    head, worker = ReliableChannel(Cipher(key, Side.HEAD)), ReliableChannel(Cipher(key, Side.WORKER))
    text = os.urandom(2 * SEGMENT_BYTES)
    first, second = worker.send([text], 0.0)
    head.receive(first, 0.0)
    about = struct.pack("<II", 1, 2) + bytes(first.frames[1])[8:]  # says that it is the second of two segments
    with pytest.raises(WireError):
        head.receive(Packet(True, [first.frames[0], about, first.frames[2]]), 0.0)
    head.receive(second, 0.0)
    assert [[bytes(frame) for frame in frames] for frames in head.messages()] == [[text]]
