"""Starts workers as processes on this machine, connected by socket pairs and shared memory."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

from farstep.core import Launcher, Received, Started
from farstep.launch.acting_plan import ActingPlan
from farstep.launch.daemon.process import ProcessStarter, import_path
from farstep.rollout.progress import PHASE, Phase, ProgressBoard
from farstep.wire.channels.local import local_pair


class LocalLauncher(Launcher):
    """Starts one process per worker. The process inherits its end of the link and the progress board."""

    shares_memory = True
    driven = False

    def __init__(self, plan: ActingPlan, envs: int, starter: ProcessStarter, gpus: Sequence[int | None]) -> None:
        self._plan, self._starter, self._gpus = plan, starter, gpus
        self._board = ProgressBoard(plan.num_workers + plan.num_servers, envs)

    def preload(self, modules: Sequence[str]) -> None:
        self._starter.preload(modules, import_path())

    def start(self, worker: int, incarnation: int, run: str) -> Started:
        words = self._board.words(worker)
        words[PHASE] = Phase.CONNECT
        link, theirs = local_pair()
        memory = self._board.memory
        bootstrap = {
            "transport": "shm",
            "worker": worker,
            "incarnation": incarnation,
            "run": run,
            "link_fd": theirs.fileno(),
            **self._board.bootstrap(worker),
            "gpu": self._gpus[worker],
            **self._plan.bootstrap(worker, self._plan.nodes),
        }
        try:
            with theirs:
                handle = self._starter.start(bootstrap, [theirs.fileno(), memory.fd], worker)
        except BaseException:
            link.close()
            raise
        return Started(handle, link, words, socket.gethostname())

    def filenos(self) -> Sequence[int]:
        return ()

    def drain(self, receive: Callable[[int, Received], None]) -> bool:
        return False

    def close(self) -> None:
        self._starter.close()
        self._board.close()
