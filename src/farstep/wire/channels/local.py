"""The link between processes of one host: a socket pair, with shared memory for what is large.

A worker inherits its end, so holding it is the authentication, and its end of file is the other side's death,
noticed by the kernel at once. Messages keep their borders (SOCK_SEQPACKET); a large one travels as a sealed memfd,
which the receiver maps: of a message that it refuses, only the header was ever read.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Sequence

from farstep.core import BytesLike, Received
from farstep.errors import WireError
from farstep.wire.channels.memory import map_immutable, write_immutable
from farstep.wire.codec import Limits, frame_lengths

_INLINE_BYTES = 32 * 1024
_MAX_FDS = 8
_MAX_FRAMES = 4096


def local_pair() -> tuple[LocalLink, socket.socket]:
    """The head's link, which never blocks, and the socket for the worker to inherit."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    return LocalLink(ours), theirs


class LocalLink:
    """One end of the pair."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._outbox: deque[tuple[bytes, list[int]]] = deque()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, frames: Sequence[BytesLike], fds: Sequence[int] = ()) -> None:
        """Send at once; what a busy peer has no room for waits and goes out with `flush`."""
        table = frame_lengths([len(frame) for frame in frames])
        total = sum(len(frame) for frame in frames)
        # Descriptors are duplicated, so that the caller may close its own while a message still waits.
        held: list[int] = []
        try:
            for fd in fds:
                held.append(os.dup(fd))
            if total <= _INLINE_BYTES:
                packet = b"".join((b"I", table, *frames))
            else:
                held.append(write_immutable(frames))
                packet = b"M" + table
        except BaseException:
            for fd in held:
                os.close(fd)
            raise
        self._outbox.append((packet, held))
        self.flush()

    def flush(self) -> bool:
        """Send what waits; True when nothing waits any more."""
        while self._outbox:
            packet, fds = self._outbox[0]
            try:
                if fds:
                    socket.send_fds(self._socket, [packet], fds)
                else:
                    self._socket.send(packet)
            except (BlockingIOError, InterruptedError):
                return False
            except (BrokenPipeError, ConnectionError):
                pass  # the peer is gone: its end of file says so to whoever reads
            except OSError as error:
                if error.errno not in (errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM):
                    raise
                return False  # the socket is full: retry later
            self._outbox.popleft()
            for fd in fds:
                os.close(fd)
        return True

    def receive(self, timeout_s: float | None = None) -> Received | None:
        if timeout_s is not None or self._socket.getblocking():
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            if not poll.poll(None if timeout_s is None else timeout_s * 1000):
                return None
        try:
            packet, fds, flags = self._receive_packet()
        except BlockingIOError:
            return None
        except ConnectionError as error:
            raise EOFError("the other side is gone") from error
        try:
            if not packet:
                raise EOFError("the other side is gone")
            if flags & socket.MSG_CTRUNC and len(fds) < _MAX_FDS:
                raise WireError("a descriptor beyond this process's limit of open files: raise it (ulimit -n).")
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise WireError("a packet larger than a link carries.")
            return _parse(packet, fds)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise

    def _receive_packet(self) -> tuple[bytes, list[int], int]:
        for _ in range(2):
            try:
                packet, fds, flags, _ = socket.recv_fds(self._socket, _INLINE_BYTES + 65536, _MAX_FDS)
                for fd in fds:
                    os.set_inheritable(fd, False)
                return packet, fds, flags
            except ConnectionResetError as error:
                # A peer that ends with something unread: the kernel says so once, before what it had sent.
                reset = error
        raise reset

    def close(self) -> None:
        for _, fds in self._outbox:
            for fd in fds:
                os.close(fd)
        self._outbox.clear()
        self._socket.close()


def _parse(packet: bytes, fds: list[int]) -> Received:
    try:
        (count,) = struct.unpack_from("<I", packet, 1)
        if count > _MAX_FRAMES:
            raise WireError(f"a message of {count} frames; at most {_MAX_FRAMES} are accepted.")
        lengths = struct.unpack_from(f"<{count}Q", packet, 5)
    except struct.error as error:
        raise WireError("a packet without a frame table.") from error
    if sum(lengths) > Limits.MESSAGE_BYTES:
        raise WireError(f"a message of {sum(lengths)} bytes; at most {Limits.MESSAGE_BYTES} are accepted.")
    if packet[:1] not in (b"I", b"M"):
        raise WireError(f"a packet of the unknown kind {packet[:1]!r}.")
    if packet[:1] == b"M":
        if not fds:
            raise WireError("a large message without its memory.")
        payload: BytesLike = map_immutable(fds[-1], sum(lengths))
        os.close(fds.pop())
    else:
        payload = memoryview(packet)[5 + 8 * count :]
    if len(payload) != sum(lengths):
        raise WireError("frame lengths and payload disagree.")
    frames, start, view = [], 0, memoryview(payload)
    for length in lengths:
        frames.append(view[start : start + length])
        start += length
    return Received(frames, fds)
