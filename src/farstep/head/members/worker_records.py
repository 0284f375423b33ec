"""The head's record of a worker: its columns, its current process and its connection."""

from __future__ import annotations

import math
import select
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from farstep.core import Array, Ended, HeadLink, WorkerHandle
from farstep.errors import (
    UNKNOWN_HOST,
    ResourceError,
    Where,
    WorkerDied,
    WorkerError,
    WorkerStuck,
    is_own,
    remote_error,
)
from farstep.rollout.progress import EPISODES, PHASE, ROLLED, SLOT, Phase, private_words
from farstep.rollout.seeds import episode_seed
from farstep.wire.messages import Failure, Reset

_ENV_PHASES = ("step", "reset", "construct")


@dataclass
class WorkerRecord:
    """One worker, through all its processes."""

    worker: int
    first: int
    stop: int
    roots: list[int]
    """For each environment, the root seed of its episodes."""
    resume: Array
    """For each environment, the episode with which a restarted worker begins."""
    words: memoryview
    """Its progress words."""
    clock: int = 0
    """Rows since environments were staggered, modulo the horizon. A restarted worker continues with this value."""
    incarnation: int = 0
    handle: WorkerHandle | None = None
    link: HeadLink | None = None
    host: str = UNKNOWN_HOST
    pid: int = 0
    cores: str = ""
    """The cores that its process may use, e.g. `0-3,8`; empty until it has connected."""
    ready: bool = False
    """Whether its environments are built, so that it may get tickets."""
    has_been_ready: bool = False
    """Whether any of its processes has built its environments."""
    error: WorkerError | None = None
    """Its last failure."""
    shortage: ResourceError | None = None
    """Why its replacement could not be started yet."""
    owes_reply: bool = False
    """Whether it still has to answer a message: an agent, a call or `ReturnTickets`."""
    returning: bool = False
    """Whether it still has to answer `ReturnTickets`. Until then it gets no ticket, so that its chunks stay in
    order."""
    announced: int = 0
    """Number of the last announcement that it got (see `Outbox.announce`)."""
    num_messages: int = 0
    """Messages received from it, without heartbeats."""
    silent_since: float = math.inf
    """Time at which its connection closed while its process was still running; otherwise infinity."""
    is_server: bool = False
    """Whether it is an acting server, which hosts no environments."""
    _suspect: tuple[int, int] | None = None
    """Environment and episode in which it last died or got stuck."""

    @property
    def role(self) -> str:
        """What its process is, for messages to users."""
        return "acting server" if self.is_server else "worker"

    @property
    def num_envs(self) -> int:
        return self.stop - self.first

    @property
    def columns(self) -> slice:
        return slice(self.first, self.stop)

    @property
    def phase(self) -> str:
        """Its current phase, from its progress words."""
        word = int(self.words[PHASE])
        return Phase(word).label if word in Phase.__members__.values() else "?"

    def where(self, phase: str, **more: Any) -> Where:
        return Where(
            worker=self.worker,
            incarnation=self.incarnation,
            host=self.host,
            pid=self.pid,
            phase=phase,
            role=self.role,
            **more,
        )

    def _where_in_env(self, phase: str) -> Where:
        """Like `where`, but also with the environment and the episode seed from its progress words."""
        i, episode = self._current_episode(phase)
        if i is None:
            return self.where(phase)
        slot = self.first + i
        seed = None if episode is None else episode_seed(self.roots[i], slot, episode)
        return self.where(phase, slot=slot, seed=seed)

    def current_slot(self, phase: str) -> int | None:
        """The environment slot in its progress words; None if this phase has no slot."""
        i, _ = self._current_episode(phase)
        return None if i is None else self.first + i

    def _current_episode(self, phase: str) -> tuple[int | None, int | None]:
        """Index and episode of its current environment; each is None if unknown."""
        i = int(self.words[SLOT])
        if phase not in _ENV_PHASES or not 0 <= i < self.num_envs:
            return None, None
        episode = int(self.words[EPISODES + i]) - 1
        return i, None if phase == "construct" or episode < 0 else episode

    def blame(self, phase: str) -> None:
        """Record the episode in which it died or got stuck. If this happens twice in the same episode, skip the
        episode."""
        i, episode = self._current_episode(phase)
        if i is not None and episode is not None:
            if self._suspect == (i, episode):
                self.resume[i] = max(int(self.resume[i]), episode + 1)
            self._suspect = (i, episode)

    def died(self, ended: Ended) -> WorkerError:
        """The error for a process that ended by itself."""
        output = self.handle.output() if self.handle else ""
        return WorkerDied(f"{_a(self.role)} {ended}", self._where_in_env(self.phase), output=output)

    def stuck(self, phase: str, limit_s: float) -> WorkerError:
        """Request stack traces, and return the error for a process that makes no progress."""
        output = ""
        if self.handle is not None:
            if self.handle.pid:  # local; for remote workers, `membership.RequestStacks` did this earlier
                self.handle.read_output()
                self.handle.dump_stacks()
                _wait_for_output(self.handle)
            output = self.handle.output()
        return WorkerStuck(
            f"no progress in phase {phase!r} for {limit_s:g} s (Timeouts.{phase}_s); the {self.role} was killed",
            self._where_in_env(phase),
            output=output,
        )

    def ran_out_of_memory(self, failure: Failure) -> bool:
        """Whether an acting server reported that memory ran out. A restart may help, unlike after other errors of the
        agent."""
        return self.is_server and failure.kind == MemoryError.__name__

    def failed(self, failure: Failure) -> WorkerError:
        """The error for an exception that the worker reported."""
        where = self.where(
            failure.phase,
            slot=failure.slot,
            seed=failure.seed,
            episode_step=failure.episode_step,
            version=failure.version,
        )
        if self.ran_out_of_memory(failure):
            message = f"{_a(self.role)} ran out of memory: {failure.message}"
            return remote_error(failure.kind, message, where, failure.traceback)
        source = "the agent" if failure.phase in ("act", "load") else "the environment"
        message = failure.message.partition(": ")[2] if is_own(failure.kind) else f"{source} raised {failure.message}"
        return remote_error(failure.kind, message, where, failure.traceback)


@dataclass(frozen=True)
class ResetRequest:
    """How environments are to be reset."""

    seeds: Sequence[int | None] | None
    """One seed per slot; None: the slot keeps its current seed."""
    mask: Array | None
    """For each slot, whether to reset it; None: reset all."""
    options: bytes | None
    """Pickled options for `Env.reset`."""
    rest: Any = None
    """The same options, not pickled, for workers that are reset by a call."""

    def part(self, record: WorkerRecord) -> Reset:
        """The part that concerns one worker."""
        seeds = None if self.seeds is None else list(self.seeds[record.columns])
        return Reset(seeds, None if self.mask is None else self.mask[record.columns].tobytes(), self.options)


def _a(role: str) -> str:
    return f"an {role}" if role[0] in "aeiou" else f"a {role}"


def acting_servers(count: int, first: int, stop: int) -> list[WorkerRecord]:
    """Records of acting servers, numbered after the workers from `first` on; `stop` is the number of slots."""
    empty = np.zeros(0, np.int64)
    return [WorkerRecord(first + k, stop, stop, [], empty, private_words(0), is_server=True) for k in range(count)]


def expected(record: WorkerRecord, ticket: int | None) -> str:
    """What the head still expects of an idle worker: to start (`idle`), to finish sending (`transfer`), or nothing
    (empty).

    Args:
        record: The worker.
        ticket: Id of its oldest open ticket, if it has one.
    """
    if ticket is not None and record.words[ROLLED] >= ticket:
        return "transfer"
    return "idle" if record.owes_reply or ticket is not None else ""


def _wait_for_output(handle: WorkerHandle, timeout_s: float = 0.5) -> None:
    """Wait about a second for a process to write its stack traces. A suspended process never does."""
    if handle.output_fd < 0:
        return
    poll = select.poll()
    poll.register(handle.output_fd, select.POLLIN)
    deadline = time.monotonic() + 2 * timeout_s
    while poll.poll(timeout_s * 1000) and handle.read_output() and time.monotonic() < deadline:
        timeout_s = 0.05  # the output comes in several pieces; a pause of 50 ms means that it is complete


def split(nodes: int, envs_per_node: int, workers: int, root: int) -> Sequence[WorkerRecord]:
    """Divide the slots among workers in order. Within a node, workers differ by at most one slot."""
    per_node = workers // nodes
    records: list[WorkerRecord] = []
    first = 0
    for _ in range(nodes):
        for k in range(per_node):
            count = envs_per_node // per_node + (k < envs_per_node % per_node)
            resume = np.zeros(count, np.int64)
            records.append(
                WorkerRecord(len(records), first, first + count, [root] * count, resume, private_words(count))
            )
            first += count
    return records
