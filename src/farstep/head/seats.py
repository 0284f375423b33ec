"""A seat is a worker as the head sees it: its columns, its present process and its connection."""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from farstep.core import Buffer, Ended, Received
from farstep.errors import Where, WorkerDied, WorkerError, WorkerStuck
from farstep.launch.inprocess import InprocessWorker
from farstep.launch.local import LocalLauncher, describe
from farstep.wire.inproc import inproc_pair
from farstep.wire.local import local_pair
from farstep.wire.zmq import Hub
from farstep.worker.progress import PHASE, SLOT, Board, Phase, private_words

log = logging.getLogger("farstep")


class HeadLink(Protocol):
    """The head's end of a link, which never blocks."""

    def send(self, frames: Sequence[Buffer], fds: Sequence[int] = ()) -> None: ...

    def flush(self) -> bool: ...

    def close(self) -> None: ...


class Handle(Protocol):
    """A started worker process (see `core.WorkerHandle`), with descriptors to wait on."""

    output_fd: int
    exit_fd: int

    @property
    def pid(self) -> int: ...

    def poll(self) -> Ended | None: ...

    def kill(self) -> None: ...

    def dump_stacks(self) -> None: ...

    def read_output(self) -> bytes: ...

    def output(self) -> str: ...

    def close(self) -> None: ...


@dataclass
class Seat:
    """One worker, through all its incarnations."""

    worker: int
    first: int
    stop: int
    incarnation: int = 0
    handle: Handle | None = None
    link: Any = None
    host: str = "?"
    pid: int = 0
    ready: bool = False
    """Environments are built."""
    agent: int = -1
    """The agent it has, or was sent."""
    generation: int = -1
    words: memoryview = field(default_factory=private_words)
    error: WorkerError | None = None
    """What it last failed of."""
    asked: bool = False
    """It was sent an agent or a call and has not answered yet."""

    @property
    def num_envs(self) -> int:
        return self.stop - self.first

    def where(self, phase: str, **more: Any) -> Where:
        return Where(
            worker=self.worker,
            incarnation=self.incarnation,
            host=self.host,
            pid=self.pid,
            phase=phase,
            **more,
        )

    def died(self, ended: Ended, phase: str) -> WorkerError:
        """The error for a process that ended by itself."""
        note = f"; {ended.note}" if ended.note else ""
        output = self.handle.output() if self.handle else ""
        slot = self.first + int(self.words[SLOT]) if phase in ("step", "reset", "construct") else None
        return WorkerDied(f"a worker {describe(ended.status)}{note}", self.where(phase, slot=slot), output=output)

    def stuck(self, phase: str, limit_s: float) -> WorkerError:
        """The error for a process that makes no progress; asks it for its stacks first."""
        output = ""
        if self.handle is not None:
            self.handle.read_output()
            self.handle.dump_stacks()
            _wait_for_output(self.handle)
            output = self.handle.output()
        slot = self.first + int(self.words[SLOT]) if phase in ("step", "reset", "construct") else None
        return WorkerStuck(
            f"no progress in phase {phase!r} for {limit_s:g} s (Timeouts.{phase}_s); the worker was killed",
            self.where(phase, slot=slot),
            output=output,
        )


def _wait_for_output(handle: Handle, timeout_s: float = 0.5) -> None:
    """Give a process that is about to be killed a moment to write its stacks (a stopped one never will)."""
    import select

    if handle.output_fd < 0:
        return
    poll = select.poll()
    poll.register(handle.output_fd, select.POLLIN)
    deadline = time.monotonic() + 2 * timeout_s
    while poll.poll(timeout_s * 1000) and handle.read_output() and time.monotonic() < deadline:
        timeout_s = 0.05  # it writes piece by piece: done when nothing more comes


class Engine(Protocol):
    """Starts seats' processes on one kind of engine and carries their messages."""

    shares_memory: bool
    threaded: bool

    def start(self, seat: Seat, run: str) -> None:
        """Start the seat's next incarnation and connect its link."""
        ...

    def filenos(self) -> list[int]: ...

    def drain(self, receive: Callable[[int, Received], None]) -> bool:
        """Hand over what has arrived on connections that seats share; True if anything did."""
        ...

    def close(self) -> None: ...


class InprocessEngine:
    """Everything in the caller's thread."""

    shares_memory = True
    threaded = False

    def __init__(self, board: Board) -> None:
        self._board = board

    def start(self, seat: Seat, run: str) -> None:
        seat.words = self._board.words(seat.worker)
        seat.host = socket.gethostname()
        links = inproc_pair()
        seat.link = links[0]
        seat.handle = InprocessWorker(seat.worker, seat.incarnation, run, links, seat.words)

    def filenos(self) -> list[int]:
        return []

    def drain(self, receive: Callable[[int, Received], None]) -> bool:
        return False

    def close(self) -> None:
        """Nothing outside the process."""


class LocalEngine:
    """Processes of this machine, over socket pairs and shared memory."""

    shares_memory = True
    threaded = True

    def __init__(self, board: Board, threads: int) -> None:
        self._board, self._launcher = board, LocalLauncher(threads)

    def start(self, seat: Seat, run: str) -> None:
        self._board.clear(seat.worker)
        seat.words = self._board.words(seat.worker)
        seat.words[PHASE] = Phase.CONNECT
        seat.host = socket.gethostname()
        seat.link, theirs = local_pair()
        memory = self._board.memory
        bootstrap = {
            "transport": "shm",
            "worker": seat.worker,
            "incarnation": seat.incarnation,
            "run": run,
            "link_fd": theirs.fileno(),
            "board_fd": memory.fd,
            "board_bytes": memory.nbytes,
        }
        with theirs:
            fds = [theirs.fileno(), memory.fd]
            seat.handle = self._launcher.start(seat.worker, seat.incarnation, bootstrap, fds)

    def filenos(self) -> list[int]:
        return []

    def drain(self, receive: Callable[[int, Received], None]) -> bool:
        return False

    def close(self) -> None:
        self._launcher.close()


class ZmqEngine:
    """Processes of this machine that talk as remote ones would: ZeroMQ with CURVE, no shared memory."""

    shares_memory = False
    threaded = True

    def __init__(self, threads: int, transport: str) -> None:
        # An abstract socket leaves no file behind; loopback only, and any free port.
        address = f"ipc://@farstep-{os.getpid()}-{os.urandom(8).hex()}" if transport == "ipc" else "tcp://127.0.0.1:*"
        self._transport = transport
        self._hub = Hub(address)
        self._launcher = LocalLauncher(threads)

    def start(self, seat: Seat, run: str) -> None:
        pair = self._hub.admit(seat.worker, seat.incarnation)
        seat.words = private_words()
        seat.words[PHASE] = Phase.CONNECT
        seat.host = socket.gethostname()
        seat.link = _HubLink(self._hub, seat.worker)
        bootstrap = {
            "transport": self._transport,
            "worker": seat.worker,
            "incarnation": seat.incarnation,
            "run": run,
            "address": self._hub.address,
            "server_key": self._hub.keys.public.decode(),
            "public": pair.public.decode(),
            "secret": pair.secret.decode(),
        }
        seat.handle = self._launcher.start(seat.worker, seat.incarnation, bootstrap, [])

    def filenos(self) -> list[int]:
        return self._hub.filenos()

    def drain(self, receive: Callable[[int, Received], None]) -> bool:
        any_arrived = False
        for peer, received in self._hub.drain():
            any_arrived = True
            receive(peer.worker, received)
        return any_arrived

    def close(self) -> None:
        self._launcher.close()
        self._hub.close()


class _HubLink:
    """A seat's share of the hub."""

    def __init__(self, hub: Hub, worker: int) -> None:
        self._hub, self._worker = hub, worker

    def send(self, frames: Sequence[Buffer], fds: Sequence[int] = ()) -> None:
        self._hub.send(self._worker, frames)

    def flush(self) -> bool:
        return True

    def close(self) -> None:
        self._hub.expel(self._worker)


def preloads() -> list[str]:
    """Heavy modules that the head's agents use: workers import them while the head is busy."""
    return [name for name in ("torch",) if name in sys.modules]
