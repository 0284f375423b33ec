"""Workers that talk over ZeroMQ with CURVE and share no memory with the head, wherever they are started."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence

from farstep.core import Buffer, Launcher, Received, Started
from farstep.launch.process import ProcessStarter
from farstep.wire.zmq import Hub
from farstep.worker.progress import PHASE, Phase, private_words


class NetworkLauncher(Launcher):
    """Processes of this machine that talk as remote ones would."""

    shares_memory = False
    driven = False

    def __init__(self, envs: int, threads: int, transport: str, gpus: Sequence[int | None]) -> None:
        # An abstract socket leaves no file behind; loopback only, and any free port.
        address = f"ipc://@farstep-{os.getpid()}-{os.urandom(8).hex()}" if transport == "ipc" else "tcp://127.0.0.1:*"
        self._transport, self._envs, self._gpus = transport, envs, gpus
        self._starter = ProcessStarter(threads)
        try:
            self._hub = Hub(address, reliable=True)
        except BaseException:
            self._starter.close()
            raise

    def start(self, worker: int, incarnation: int, run: str) -> Started:
        pair = self._hub.admit(worker, incarnation)
        words = private_words(self._envs)
        words[PHASE] = Phase.CONNECT
        bootstrap = {
            "transport": self._transport,
            "worker": worker,
            "incarnation": incarnation,
            "run": run,
            "envs": self._envs,
            "address": self._hub.address,
            "bulk_port": self._hub.bulk_port,
            "encrypted": True,
            "gpu": self._gpus[worker],
            "server_key": self._hub.keys.public.decode(),
            "public": pair.public.decode(),
            "secret": pair.secret.decode(),
        }
        handle = self._starter.start(bootstrap)
        return Started(handle, HubLink(self._hub, worker), words, socket.gethostname())

    def filenos(self) -> Sequence[int]:
        return self._hub.filenos()

    def drain(self, receive: Callable[[int, Received], None]) -> bool:
        arrived = False
        for peer, received in self._hub.drain():
            arrived = True
            receive(peer.worker, received)
        return arrived

    def tick(self) -> None:
        self._hub.service()

    def close(self) -> None:
        self._starter.close()
        self._hub.close()


class HubLink:
    """A worker's share of the hub, which is read for all of them together."""

    def __init__(self, hub: Hub, worker: int) -> None:
        self._hub, self._worker = hub, worker

    def fileno(self) -> int:
        return -1

    def send(self, frames: Sequence[Buffer], fds: Sequence[int] = ()) -> None:
        self._hub.send(self._worker, frames)

    def receive(self, timeout_s: float | None = None) -> Received | None:
        return None

    def flush(self) -> bool:
        return True

    def close(self) -> None:
        self._hub.expel(self._worker)
