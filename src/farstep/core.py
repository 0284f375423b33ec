"""The nouns of farstep, each in the loop it lives in. Read this first.

    worker:   wait for a ticket ─ pull weights if the sync rule says so ─ roll T steps ─ hand over the chunk
    head:     give tickets ─ take chunks into the buffer ─ yield a batch ─ publish new weights
    launcher: start workers ─ watch them ─ end them

Everything here is a protocol or a small value; implementations live in the folder of the same name.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from numpy.typing import NDArray

Array = NDArray[Any]
Nested = Any
"""An array, or nested mappings and tuples of arrays, shaped like a space."""


class Agent(Protocol):
    """What acts: lives on the learner, a copy of it on every worker.

    `act(obs)` returns the actions of a batch of observations, or a mapping with `action` and any further
    per-step arrays. An agent may take `act(obs, rng)` (one generator per environment slot); a recurrent one
    has `initial_state(n)`, takes `act(obs, state, episode_start)` and returns its new state under `state`.
    """

    def act(self, obs: Nested) -> Nested: ...

    def get_parameters(self) -> Nested: ...


@dataclass(frozen=True)
class SyncState:
    """What a worker knows before a chunk, for a rule to decide on. Before the first pull, `held` is -1 and there are no
    `divergences`."""

    held: int
    """The version in use; -1: none yet."""
    newest: int
    """The latest published."""
    seconds: float = 0.0
    """Since the last pull."""
    divergences: Sequence[float] = ()
    """KL(held || learner) by each probe since the last pull, newest first; infinite where it could not be measured."""


@runtime_checkable
class SyncRule(Protocol):
    """Decides on the worker, before each chunk for which there is a newer version, whether to pull the newest weights.

    It is asked before the first pull, too, which happens whatever it answers. A rule may say in `probes` how many
    divergences it looks at (0, or not there: none are measured), and in `rows` on how many observations each is
    measured (64).
    """

    def should_pull(self, state: SyncState) -> bool: ...


class Link(Protocol):
    """One end of the conversation between the head and one worker.

    A message is a list of frames: a header, then raw buffers. Frames arrive whole, in order and once.
    """

    def send(self, frames: Sequence[BytesLike], fds: Sequence[int] = ()) -> None: ...

    def receive(self, timeout_s: float | None = None) -> Received | None:
        """The next message, or None after `timeout_s`; raises `EOFError` if the link can tell that the other side
        is gone (a local one can)."""
        ...

    def fileno(self) -> int:
        """A descriptor to wait on, or -1 if the link has none of its own."""
        ...

    def close(self) -> None: ...


class HeadLink(Link, Protocol):
    """The head's end of a link, which never blocks: what finds no room waits for `flush`."""

    def flush(self) -> bool:
        """Send what waits; True when nothing waits any more."""
        ...


BytesLike = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Received:
    """A message as it arrived: its frames and the file descriptors that came along (same host only)."""

    frames: Sequence[BytesLike]
    fds: Sequence[int] = ()
    heartbeat: bool = False
    """Whether it came over the heartbeat connection, on which a worker without shared memory sends only `Progress`."""


class Launcher(Protocol):
    """Starts workers somewhere, carries what they say and knows when they have ended.

    The head calls `start` for each worker and for its replacements, reads their links, calls `kill` on a handle when
    it gave a worker up, and `close` at the end. A worker has ended only when it certainly writes nothing any more.
    """

    shares_memory: bool
    """Workers see the head's memory: blocks, parameters and progress words."""
    driven: bool
    """Workers live in the head's thread and move only when their link is read."""

    def prepare(self) -> None:
        """Request the nodes that workers run on; called once, before the first `start`. May block; can be interrupted.

        Raises:
            LaunchError: The engine refused the request.
        """
        return

    def start(self, worker: int, incarnation: int, run: str) -> Started: ...

    def filenos(self) -> Sequence[int]:
        """Descriptors to wait on for connections that workers share."""
        ...

    def drain(self, receive: Callable[[int, Received], None]) -> bool:
        """Hand over what has arrived on such connections, for a while; True if anything did."""
        ...

    def tick(self) -> None:
        """Called often: do what time alone brings about. Raises `LaunchError` if the run cannot go on."""
        return

    def stop(self) -> None:
        """The run ends: nothing is asked for any more, and who is queued never comes."""
        return

    def waiting(self) -> str:
        """What workers that are queued wait for, in words; empty if none is."""
        return ""

    def nodes(self) -> list[dict[str, object]]:
        """The nodes that are there: host, process id of the agent, what the engine calls it, numbers of workers."""
        return []

    def spare(self) -> int:
        """Workers that are queued for nodes which nobody asked for: there may be more of these."""
        return 0

    def scale(self, nodes: int) -> None:
        """Have so many nodes from now on; one that cannot is only asked for as many as it has."""
        return

    def close(self) -> None: ...


class WorkerHandle(Protocol):
    """One started worker process."""

    leaving: bool
    """Its node is taken away: it is to end when it has handed over what it is doing."""
    exit_fd: int
    """Readable once it has ended; -1 if there is no such descriptor."""
    output_fd: int
    """Readable when it printed something; -1 if there is no such descriptor."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> Ended | None:
        """How it ended, or None while it may still run."""
        ...

    def kill(self) -> None:
        """End it and all it started, at once."""
        ...

    def dump_stacks(self) -> None:
        """Ask it to write its Python stacks to its output (best effort)."""
        ...

    def read_output(self) -> bytes | None:
        """What it printed since the last call, as far as it is here; None once nothing more can come."""
        ...

    def output(self) -> str:
        """The tail of what it printed."""
        ...

    def close(self) -> None:
        """Forget it; it has ended."""
        ...


@dataclass(frozen=True)
class Started:
    """A worker that was just started."""

    handle: WorkerHandle
    link: HeadLink
    words: memoryview
    """Where it says how far it is (see `rollout/progress.py`)."""
    host: str


@dataclass(frozen=True)
class Ended:
    """How a worker process ended."""

    status: int
    """Exit status, or minus the signal that killed it."""
    note: str = ""
    """What the launcher knows beyond the status, e.g. that memory ran out."""
    blameless: bool = False
    """Its node went, not the worker itself: no restart of the budget is spent."""

    def __str__(self) -> str:
        note = f"; {self.note}" if self.note else ""
        if self.status >= 0:
            return f"exited with status {self.status}{note}"
        try:
            return f"was killed by {signal.Signals(-self.status).name}{note}"
        except ValueError:
            return f"was killed by signal {-self.status}{note}"
