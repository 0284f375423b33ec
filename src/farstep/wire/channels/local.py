"""Links between processes of one host: a Unix socket pair, with shared memory for large messages.

A worker inherits its end, so possession of the descriptor authenticates it. When a process dies, the kernel closes its
end, and the peer reads end-of-file at once. The socket keeps message boundaries (SOCK_SEQPACKET). A large message is
sent as a sealed memfd, which the receiver maps. If the receiver rejects the message, it has read only the header.
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

DETACH = b"D"
"""First byte of a packet that is not a message: the node daemon requests that its worker detaches (`send_detach`)."""
_INLINE_BYTES = 32 * 1024
_MAX_FDS = 8
_MAX_FRAMES = 4096


def local_pair() -> tuple[LocalLink, socket.socket]:
    """Return the head's end, which never blocks, and the socket that the worker inherits."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    return LocalLink(ours), theirs


def is_own_process(sock: socket.socket) -> bool:
    """Whether the process at the other end of a Unix socket belongs to the same user."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return bool(uid == os.getuid())


class LocalLink:
    """One end of a socket pair."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._outbox: deque[tuple[bytes, list[int]]] = deque()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, frames: Sequence[BytesLike], fds: Sequence[int] = ()) -> None:
        """Send a message now. If the peer's queue is full, keep the message for the next `flush`."""
        table = frame_lengths([len(frame) for frame in frames])
        total = sum(len(frame) for frame in frames)
        # Duplicate the descriptors, so that the caller may close its own while the message waits in the outbox.
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

    def send_detach(self, path: str) -> None:
        """Request that the worker closes its end, and connects again as soon as the socket `path` exists."""
        self._outbox.append((DETACH + path.encode(), []))
        self.flush()

    def flush(self) -> bool:
        """Send the messages in the outbox. Return whether it is empty now."""
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
                pass  # the peer closed its end; `receive` raises `EOFError`
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
            raise EOFError("the peer closed the connection") from error
        try:
            if not packet:
                raise EOFError("the peer closed the connection")
            if flags & socket.MSG_CTRUNC and len(fds) < _MAX_FDS:
                raise WireError(
                    "a file descriptor beyond this process's limit of open files: raise the limit (ulimit -n)."
                )
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise WireError("a packet with too many bytes or file descriptors for a link.")
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
                # The peer died with unread messages. The kernel reports this once, then delivers the peer's messages.
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
            raise WireError("a large message without its memfd.")
        payload: BytesLike = map_immutable(fds[-1], sum(lengths))
        os.close(fds.pop())
    else:
        payload = memoryview(packet)[5 + 8 * count :]
    if len(payload) != sum(lengths):
        raise WireError(f"a payload of {len(payload)} bytes; its frame table says {sum(lengths)}.")
    frames, start, view = [], 0, memoryview(payload)
    for length in lengths:
        frames.append(view[start : start + length])
        start += length
    return Received(frames, fds)
