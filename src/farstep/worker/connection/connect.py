"""Connects a worker to its head: over shared memory, over ZeroMQ, or through the relay of its node daemon."""

from __future__ import annotations

import math
import os
import signal
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farstep.acting.connections import OWN_ADDRESS, LocalServer, RemoteServer, ServerAddress
from farstep.acting.serving.server import ActingServer
from farstep.core import Link
from farstep.errors import LaunchError
from farstep.rollout.progress import BEAT_S, RATE, private_words
from farstep.wire.channels.local import DETACH, LocalLink
from farstep.wire.channels.memory import SharedMemory
from farstep.wire.messages import Progress, encode
from farstep.worker.connection.death_pipe import die_with_starter, is_starter_dead
from farstep.worker.loop import Worker

if TYPE_CHECKING:
    from farstep.acting.serving.network import NetworkListener

_POLL_S, _ATTACH_POLLS = 0.005, 12_000
"""Pause between two checks whether the daemon accepts a detached worker again, and their number (about a minute)."""


def connect(bootstrap: dict[str, Any]) -> Worker | ActingServer:
    """Make the worker or acting server that the bootstrap describes, connected to its head."""
    identity = (int(bootstrap["worker"]), int(bootstrap["incarnation"]), str(bootstrap["run"]))
    match bootstrap["transport"]:
        case "shm":
            link = LocalLink(socket.socket(fileno=bootstrap["link_fd"]))
            return _process(link, identity, _words(bootstrap), bootstrap)
        case "relay":
            board = _board(bootstrap)
            words = board.map.cast("q")[slice(*bootstrap["words"])]
            link = RelayedLink(socket.socket(fileno=bootstrap["link_fd"]), words, board, bootstrap["death_fd"])
            return _process(link, identity, words, bootstrap)
        case "ipc" | "tcp":
            from farstep.wire.channels.dealer import DealerLink
            from farstep.wire.channels.zmq import MAIN

            words = _words(bootstrap)
            link_to_head = DealerLink(
                *_address(bootstrap),
                MAIN,
                lease_s=bootstrap["lease_s"],
                bulk=bootstrap["bulk_port"],
                encrypted=bootstrap["encrypted"],
            )
            threading.Thread(target=_beat, args=(bootstrap, words), daemon=True, name="farstep-beat").start()
            return _process(link_to_head, identity, words, bootstrap)
        case other:
            raise LaunchError(f"bootstrap with unknown transport {other!r}.")


class RelayedLink(LocalLink):
    """The worker's end of a link to its node daemon, which relays to the head.

    The daemon may request that the worker detaches from it, so that criu can write the process to disk. The worker
    notices nothing but the pause: it reads all messages before it detaches, and the others after it has attached again.

    Args:
        sock: The worker's end of the socket pair.
        words: The progress words of this worker.
        board: The memory of these words, which is shared with the daemon.
        death_fd: The pipe that ends this process with the daemon.
    """

    def __init__(self, sock: socket.socket, words: memoryview, board: SharedMemory, death_fd: int) -> None:
        super().__init__(sock)
        self._words, self._board, self._death_fd = words, board, death_fd
        board.close()  # the mapping stays

    def rate(self) -> float:
        """The throughput between daemon and head in bytes per second; infinite before the first measurement."""
        return float(self._words[RATE]) or math.inf

    def _receive_packet(self) -> tuple[bytes, list[int], int]:
        packet, fds, flags = super()._receive_packet()
        if packet[:1] != DETACH:
            return packet, fds, flags
        self._socket.close()  # tells the daemon that this process may be frozen, at any point of the next line
        self._socket = _accepted(Path(packet[1:].decode()), self._death_fd)
        _, [board], *_ = socket.recv_fds(self._socket, 1, 1)
        self._board.remap(board)  # criu restores a copy of the memory, which the daemon does not see
        os.close(board)
        die_with_starter(self._death_fd)
        raise BlockingIOError  # no message has arrived


def _accepted(path: Path, death_fd: int) -> socket.socket:
    """Connect to the daemon as soon as its socket exists. Until then, open nothing: criu would have to restore it."""
    for _ in range(_ATTACH_POLLS):  # counted, because clocks keep running while this process is on disk
        if is_starter_dead(death_fd, _POLL_S):
            os.killpg(0, signal.SIGKILL)
        if path.exists():
            break
    else:
        raise EOFError("the node daemon did not accept this worker again")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    folder = os.open(path.parent, os.O_PATH)
    try:
        sock.connect(f"/proc/self/fd/{folder}/{path.name}")  # the path itself may be too long
    finally:
        os.close(folder)
    return sock


def _process(
    link: Link, identity: tuple[int, int, str], words: memoryview, bootstrap: dict[str, Any]
) -> Worker | ActingServer:
    has_gpu = bootstrap.get("gpu") is not None
    name, secret = str(bootstrap.get("acting", "")), str(bootstrap.get("acting_secret", ""))
    if bootstrap.get("role") == "acting":
        return ActingServer(link, identity, words, name, secret, has_gpu, _listener(bootstrap))
    server: ServerAddress = LocalServer(name, secret)
    if bootstrap.get("acting_listen"):
        server = RemoteServer(bootstrap["address"], secret, bootstrap["lease_s"], bootstrap["encrypted"])
    return Worker(link, *identity, words, has_gpu, server)


def _listener(bootstrap: dict[str, Any]) -> NetworkListener | None:
    """Where an acting server accepts workers over the network; None if it does not."""
    if not (addresses := bootstrap.get("acting_listen")):
        return None
    from farstep.acting.serving.network import NetworkListener

    is_on_head = addresses != [OWN_ADDRESS]
    if not is_on_head:
        addresses = [f"tcp://{_own_address(bootstrap['address'])}:*"]
    return NetworkListener(addresses, bootstrap["lease_s"], bootstrap["encrypted"], is_on_head)


def _own_address(head_address: str) -> str:
    """The IPv4 address with which this machine reaches the head."""
    host, _, port = head_address.removeprefix("tcp://").rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))  # sends nothing
        return str(probe.getsockname()[0])


def _words(bootstrap: dict[str, Any]) -> memoryview:
    """The worker's progress words: in shared memory if the bootstrap names it, otherwise private."""
    if "board_fd" not in bootstrap:
        return private_words(int(bootstrap["envs"]))
    return _board(bootstrap).map.cast("q")[slice(*bootstrap["words"])]


def _board(bootstrap: dict[str, Any]) -> SharedMemory:
    return SharedMemory(bootstrap["board_fd"], bootstrap["board_bytes"])


def _address(bootstrap: dict[str, Any]) -> tuple[str, bytes, Any]:
    from farstep.wire.keys import KeyPair

    pair = KeyPair(bootstrap["public"].encode(), bootstrap["secret"].encode())
    return bootstrap["address"], bootstrap["server_key"].encode(), pair


def _beat(bootstrap: dict[str, Any], words: memoryview) -> None:
    """Send `Progress` once a second, over a separate connection, because only one thread may use a ZeroMQ socket."""
    from farstep.wire.channels.dealer import DealerLink
    from farstep.wire.channels.zmq import BEAT

    link = DealerLink(*_address(bootstrap), BEAT, lease_s=bootstrap["lease_s"])
    pause = threading.Event()
    while not pause.wait(BEAT_S):
        link.send([encode(Progress(words.tolist()))])
