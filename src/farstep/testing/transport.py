"""Contract check of links between head and worker."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from farstep.core import BytesLike, Received
from farstep.wire.channels.memory import SharedMemory

_DEADLINE_S = 30.0


class LinkEnd(Protocol):
    """The methods of `core.Link` that the check uses."""

    def send(self, frames: Sequence[BytesLike], fds: Sequence[int] = ()) -> None: ...

    def receive(self, timeout_s: float | None = None) -> Received | None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Ends:
    """The two ends of a link.

    Attributes:
        head: The head's end, which never blocks in `send`.
        worker: The worker's end.
        carries_descriptors: Whether file descriptors can be sent; default False.
        reports_end: Whether `receive` raises `EOFError` after the other end was closed; default False.
    """

    head: LinkEnd
    worker: LinkEnd
    carries_descriptors: bool = False
    reports_end: bool = False


def check_transport(factory: Callable[[], AbstractContextManager[Ends]]) -> None:
    """Check that links deliver every message whole, in order and exactly once.

    Args:
        factory: Makes a context manager that returns a connected pair of ends.

    Raises:
        AssertionError: A message was lost, changed, reordered or duplicated.
    """
    for check in (_frames, _sizes, _many, _sender_may_reuse, _nothing_waits, _descriptors, _end):
        with factory() as ends:
            check(ends)


def take(receiver: LinkEnd, sender: LinkEnd | None = None) -> Received:
    """Return the next message. While waiting, flush the queue of `sender`."""
    deadline = time.monotonic() + _DEADLINE_S
    flush = getattr(sender, "flush", lambda: True)
    while time.monotonic() < deadline:
        flush()
        received = receiver.receive(0.01)
        if received is not None:
            return received
    raise AssertionError(f"nothing arrived within {_DEADLINE_S:g} s")


def _check(receiver: LinkEnd, sender: LinkEnd | None, expected: Sequence[BytesLike]) -> None:
    received = take(receiver, sender)
    got = [bytes(frame) for frame in received.frames]
    sizes = [len(frame) for frame in got], [len(frame) for frame in expected]
    assert got == [bytes(frame) for frame in expected], f"sent frames of {sizes[1]} bytes, got {sizes[0]}"
    assert not received.fds


def _both_ways(ends: Ends) -> list[tuple[LinkEnd, LinkEnd]]:
    return [(ends.head, ends.worker), (ends.worker, ends.head)]


def _frames(ends: Ends) -> None:
    """Check that the boundaries of frames and of messages are preserved."""
    messages: list[list[BytesLike]] = [
        [b"one"],
        [b""],
        [b"", b"x", b"", b""],
        [b"header", bytearray(b"array"), memoryview(b"view")],
        [bytes([i]) for i in range(200)],
    ]
    for sender, receiver in _both_ways(ends):
        for message in messages:
            sender.send(message)
        for message in messages:
            _check(receiver, sender, message)


def _sizes(ends: Ends) -> None:
    """Check message sizes around the thresholds at which links change their way of sending, and far above."""
    for size in (1, 32 * 1024 - 1, 32 * 1024, 32 * 1024 + 1, 2**18, 10 * 2**20):
        content = os.urandom(size)
        for sender, receiver in _both_ways(ends):
            sender.send([b"header", content[: size // 2], content[size // 2 :]])
            _check(receiver, sender, [b"header", content[: size // 2], content[size // 2 :]])


def _many(ends: Ends) -> None:
    """Check that a thousand messages can be sent before the other side reads the first."""
    for i in range(1000):
        ends.head.send([b"%d" % i, b"x" * (i % 300)])
    for i in range(1000):
        _check(ends.worker, ends.head, [b"%d" % i, b"x" * (i % 300)])

    def talk() -> None:
        for i in range(1000):
            ends.worker.send([b"%d" % i])

    worker = threading.Thread(target=talk)
    worker.start()  # in a thread, because the worker's end blocks while the queue is full
    try:
        for i in range(1000):
            _check(ends.head, None, [b"%d" % i])
    finally:
        worker.join(_DEADLINE_S)


def _sender_may_reuse(ends: Ends) -> None:
    for sender, receiver in _both_ways(ends):
        for size in (10, 2**17):
            frame = bytearray(b"a" * size)
            sender.send([frame])
            frame[:] = b"b" * size
            _check(receiver, sender, [b"a" * size])


def _nothing_waits(ends: Ends) -> None:
    assert ends.head.receive(0.0) is None
    assert ends.worker.receive(0.0) is None


def _descriptors(ends: Ends) -> None:
    """Check that a received descriptor refers to the same memory, after the sender has closed its own."""
    if not ends.carries_descriptors:
        return
    for frame in (b"small", b"large" * 20_000):
        memory = SharedMemory.create(64, "farstep-check")
        memory.map[:4] = b"data"
        ends.head.send([frame], [memory.fd])
        memory.close()
        received = take(ends.worker, ends.head)
        assert [bytes(f) for f in received.frames] == [frame] and len(received.fds) == 1
        try:
            assert os.pread(received.fds[0], 4, 0) == b"data"
        finally:
            os.close(received.fds[0])


def _end(ends: Ends) -> None:
    """Check that messages sent before the end still arrive, and that the end is reported after them."""
    if not ends.reports_end:
        return
    ends.head.send([b"never read"])
    ends.worker.send([b"last words"])
    ends.worker.close()
    _check(ends.head, ends.worker, [b"last words"])
    for _ in range(2):
        try:
            got = ends.head.receive(_DEADLINE_S)
        except EOFError:
            continue
        raise AssertionError(f"expected EOFError after the other side closed, got {got}")
    ends.head.send([b"after the end"])  # must not raise
