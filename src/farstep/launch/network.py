"""Starts workers on this machine that communicate like remote workers: by encrypted ZeroMQ, without shared memory."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence

from farstep.core import Launcher, Received, Started
from farstep.launch.acting_plan import ActingPlan
from farstep.launch.daemon.process import ProcessStarter, import_path
from farstep.launch.hub import HubLink, admit_worker, drain
from farstep.rollout.progress import PHASE, Phase, private_words
from farstep.wire.channels.zmq import Hub

_LOOPBACK = "tcp://127.0.0.1"


class NetworkLauncher(Launcher):
    """Starts one process per worker, connected by ZeroMQ over loopback (tcp) or a local socket (ipc)."""

    shares_memory = False
    driven = False

    def __init__(
        self, plan: ActingPlan, envs: int, starter: ProcessStarter, transport: str, gpus: Sequence[int | None]
    ) -> None:
        # An abstract socket leaves no file behind. tcp listens only on loopback, on any free port.
        address = f"ipc://@farstep-{os.getpid()}-{os.urandom(8).hex()}" if transport == "ipc" else f"{_LOOPBACK}:*"
        self._transport, self._envs, self._gpus = transport, envs, gpus
        self._plan, self._starter = plan, starter
        self.hub = Hub(address, reliable=True)

    def preload(self, modules: Sequence[str]) -> None:
        self._starter.preload(modules, import_path())

    def start(self, worker: int, incarnation: int, run: str) -> Started:
        bootstrap = admit_worker(self.hub, worker, incarnation, run, self._envs) | {
            "transport": self._transport,
            "address": self.hub.address,
            "encrypted": True,
            "gpu": self._gpus[worker],
            **self._plan.bootstrap(worker, self._plan.nodes, [self._acting_address(worker)]),
        }
        words = private_words(self._envs)
        words[PHASE] = Phase.CONNECT
        handle = self._starter.start(bootstrap, rank=worker)
        return Started(handle, HubLink(self.hub, worker), words, socket.gethostname())

    def _acting_address(self, worker: int) -> str:
        """Where an acting server on this machine listens, if workers do not share memory with it."""
        return f"{_LOOPBACK}:*" if self._transport == "tcp" else f"ipc://@farstep-{os.urandom(16).hex()}"

    def filenos(self) -> Sequence[int]:
        return self.hub.filenos()

    def drain(self, receive: Callable[[int, Received], None]) -> bool:
        return drain(self.hub, receive)

    def tick(self) -> None:
        self.hub.service()

    def close(self) -> None:
        self._starter.close()
        self.hub.close()
