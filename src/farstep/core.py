"""The protocols of farstep, and the loops that use them. Read this file first.

    worker:   wait for a ticket ─ pull weights if the sync rule decides to ─ roll one chunk ─ send it
    head:     issue tickets ─ receive chunks into the buffer ─ yield a batch ─ publish new weights
    launcher: start workers ─ watch them ─ kill them

A ticket is permission to roll one chunk: T steps of every environment of one worker. `publish` makes a new version.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from numpy.typing import NDArray

BytesLike = bytes | bytearray | memoryview
Array = NDArray[Any]
Nested = Any
"""An array, or mappings and tuples of arrays, nested like the space."""


class Agent(Protocol):
    """The policy. The learner publishes the policy's parameters (arrays or tensors by name); every worker acts with a
    copy.

    `act` may also take `rng`, one random generator per environment slot, and `slots`, the slot of each row. A recurrent
    agent has `initial_state(n)`, takes `act(obs, state, episode_start)`, and returns its new state as `state`.
    Workers call `priorities(rows)`, if the agent has it, after each chunk; the result becomes the array `priority`.
    """

    @property
    def act(self) -> Callable[..., Nested]:
        """A method `act(obs)`: returns the actions for a batch of observations, or a mapping with `action` and other
        arrays to record."""

    def get_parameters(self) -> Nested:
        """Return the parameters to publish.

        Returns:
            Arrays or tensors by name, or mappings and sequences of these; always with the same names and shapes.
        """


@dataclass(frozen=True)
class SyncState:
    """What a worker knows when its sync rule decides whether to pull."""

    held: int
    """The version that the worker acts with; -1 before the first pull."""
    newest: int
    """The newest published version."""
    seconds: float = 0.0
    """Seconds since the last pull."""
    divergences: Sequence[float] = ()
    """KL(held || newest) in nats of each probe since the last pull, newest first; infinite if it could not be
    measured."""


@runtime_checkable
class SyncRule(Protocol):
    """Decides on the worker, before a chunk, whether to pull the newest weights.

    Called only if a newer version exists. A rule that reads `state.divergences` sets two attributes: `probes`, the
    number of divergences that it reads (default 0: none are measured), and `rows`, the number of observations per
    divergence (default 64).
    """

    def should_pull(self, state: SyncState) -> bool:
        """Decide whether to pull.

        Args:
            state: What the worker knows.

        Returns:
            True to pull the newest weights before the next chunk. The first time, the worker pulls in any case.
        """


class Link(Protocol):
    """One end of a connection between head and worker. Messages (lists of frames) arrive whole, in order, exactly
    once."""

    def send(self, frames: Sequence[BytesLike], fds: Sequence[int] = ()) -> None: ...

    def receive(self, timeout_s: float | None = None) -> Received | None:
        """Return the next message, or None after `timeout_s`; raise `EOFError` if the peer is known to be gone."""

    def fileno(self) -> int:
        """Return a file descriptor that is readable when a message arrives; -1 if several links share a connection."""

    def close(self) -> None: ...


class HeadLink(Link, Protocol):
    """The head's end of a link. `send` queues instead of blocking; `flush` returns True once the queue is empty."""

    def flush(self) -> bool: ...


@dataclass(frozen=True)
class Received:
    """A message that has arrived, and the file descriptors sent with it (only within a host)."""

    frames: Sequence[BytesLike]
    fds: Sequence[int] = ()
    heartbeat: bool = False
    """Whether the message arrived over the heartbeat connection, which carries only the progress of remote workers."""


class Launcher(Protocol):
    """Starts workers, provides their links and detects when they have ended.

    The head calls `start` for each worker and each replacement. After a worker is reported as ended, it cannot write
    any more.
    """

    shares_memory: bool
    """Whether workers map the head's memory: rollout blocks, parameters and progress words."""
    driven: bool
    """Whether workers run in the head's thread, only while the head reads their link."""

    def prepare(self) -> None:
        """Request the nodes for the workers, once, before the first `start`; raise `LaunchError` if refused."""
        return

    def preload(self, modules: Sequence[str]) -> None:
        """Let zygotes import these modules, too, before they fork further workers. The default does nothing."""
        return

    def start(self, worker: int, incarnation: int, run: str) -> Started:
        """Start a worker or its replacement. `incarnation` is the number of earlier processes of this worker."""

    def filenos(self) -> Sequence[int]:
        """Return the file descriptors of connections that several workers share."""

    def drain(self, receive: Callable[[int, Received], None]) -> bool:
        """Call `receive(worker, message)` for messages of shared connections; return True if there were any."""

    def changed(self) -> Sequence[int]:
        """Return the workers without descriptors that have printed or ended since the last call. If there are any, one
        of `filenos` is readable. The default returns none."""
        return ()

    def tick(self) -> None:
        """Check deadlines; raise `LaunchError` if the run cannot continue. The head calls it periodically."""
        return

    def stop(self) -> None:
        """Stop requesting nodes because the run is ending. Workers that wait for a node are not started any more."""
        return

    def waiting(self) -> str:
        """Describe what queued workers wait for; empty if no worker is queued."""
        return ""

    def nodes(self) -> list[dict[str, object]]:
        """Describe the present nodes: host, process id of the node daemon, the engine's id, workers."""
        return []

    def on_disk(self) -> Mapping[int, int]:
        """Return the parked workers that are on disk instead of in memory, and their sizes in bytes."""
        return {}

    def spare(self) -> int:
        """Return the number of queued workers whose nodes exceed the requested number of nodes."""
        return 0

    def scale(self, nodes: int) -> None:
        """Change the number of nodes. The default does nothing, for launchers with a fixed number."""
        return

    def make_room(self, workers: int) -> int:
        """Request more nodes if the present ones cannot host this number of workers. Return the number of nodes that
        the run now wants. The default does nothing and returns 1."""
        return 1

    def close(self) -> None: ...


class WorkerHandle(Protocol):
    """A started worker. `exit_fd` is readable once the worker has ended, `output_fd` when it has printed; -1: none (see
    `Launcher.changed`)."""

    leaving: bool
    """Whether the worker must end after its current chunk, because its node is being released or preempted."""
    exit_fd: int
    output_fd: int

    @property
    def pid(self) -> int: ...

    def poll(self) -> Ended | None:
        """Return how the process ended, or None while it may still run."""

    def kill(self) -> None:
        """Kill the process and its children at once, even if they are suspended."""

    def suspend(self, parked: bool = False) -> None:
        """Suspend the process and its children: they use no CPU time.

        Args:
            parked: Whether they may be suspended for long. Otherwise, they keep their memory.
        """

    def resume(self) -> None:
        """Let a suspended process and its children continue; otherwise do nothing."""

    def dump_stacks(self) -> None:
        """Make the process write its Python stacks to its output, if it can still react."""

    def read_output(self) -> bytes | None:
        """Return what was printed since the last call; None after the end of the output."""

    def output(self) -> str:
        """Return the tail of the output."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Started:
    """A worker that was just started."""

    handle: WorkerHandle
    link: HeadLink
    words: memoryview
    """Shared words in which the worker reports its progress (`rollout/progress.py`)."""
    host: str


UNKNOWN_STATUS = 256
"""Status of a process whose exit status cannot be known; an exit status is at most 255."""


@dataclass(frozen=True)
class Ended:
    """How a worker process ended."""

    status: int
    """Exit status, or minus the number of the signal that killed it; or `UNKNOWN_STATUS`."""
    note: str = ""
    """Additional cause known to the launcher, e.g. that memory ran out."""
    blameless: bool = False
    """Whether its node was lost, or could not fork or restore it. Its replacement then does not use the restart
    budget."""

    def __str__(self) -> str:
        note = f"; {self.note}" if self.note else ""
        if self.status == UNKNOWN_STATUS:
            return f"ended{note}"
        if self.status >= 0:
            return f"exited with status {self.status}{note}"
        names = {each.value: each.name for each in signal.Signals}
        return f"was killed by {names.get(-self.status, f'signal {-self.status}')}{note}"
