"""Connects a worker to its head: over shared memory, over ZeroMQ, or through the relay of its node daemon."""

from __future__ import annotations

import math
import socket
import threading
from typing import TYPE_CHECKING, Any

from farstep.acting.connections import LocalServer, RemoteServer, ServerAddress
from farstep.acting.server import ActingServer
from farstep.core import Link
from farstep.errors import LaunchError
from farstep.rollout.progress import BEAT_S, RATE, private_words
from farstep.wire.channels.local import LocalLink
from farstep.wire.channels.memory import SharedMemory
from farstep.wire.messages import Progress, encode
from farstep.worker.loop import Worker

if TYPE_CHECKING:
    from farstep.acting.network import NetworkListener


def connect(bootstrap: dict[str, Any]) -> Worker | ActingServer:
    """Make the worker or acting server that the bootstrap describes, connected to its head."""
    identity = (int(bootstrap["worker"]), int(bootstrap["incarnation"]), str(bootstrap["run"]))
    match bootstrap["transport"]:
        case "shm":
            link = LocalLink(socket.socket(fileno=bootstrap["link_fd"]))
            return _process(link, identity, _words(bootstrap), bootstrap)
        case "relay":
            words = _words(bootstrap)
            link = RelayedLink(socket.socket(fileno=bootstrap["link_fd"]), words)
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
    """The worker's end of a link to its node daemon, which relays to the head."""

    def __init__(self, sock: socket.socket, words: memoryview) -> None:
        super().__init__(sock)
        self._words = words

    def rate(self) -> float:
        """The throughput between daemon and head in bytes per second; infinite before the first measurement."""
        return float(self._words[RATE]) or math.inf


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
    from farstep.acting.network import NetworkListener

    return NetworkListener(addresses, bootstrap["lease_s"], bootstrap["encrypted"])


def _words(bootstrap: dict[str, Any]) -> memoryview:
    """The worker's progress words: in shared memory if the bootstrap names it, otherwise private."""
    if "board_fd" not in bootstrap:
        return private_words(int(bootstrap["envs"]))
    board = SharedMemory(bootstrap["board_fd"], bootstrap["board_bytes"])
    return board.map.cast("q")[slice(*bootstrap["words"])]


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
