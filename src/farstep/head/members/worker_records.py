"""A seat is a worker as the head sees it: its columns, its present process and its connection."""

from __future__ import annotations

import math
import select
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from farstep.core import Array, Ended, HeadLink, WorkerHandle
from farstep.errors import ResourceError, Where, WorkerDied, WorkerError, WorkerStuck
from farstep.rollout.progress import EPISODES, PHASE, ROLLED, SLOT, Phase, private_words
from farstep.rollout.seeds import episode_seed
from farstep.wire.messages import Reset

_ENV_PHASES = ("step", "reset", "construct")


@dataclass
class WorkerRecord:
    """One worker, through all its incarnations."""

    worker: int
    first: int
    stop: int
    roots: list[int]
    """Per environment, what its seeds derive from."""
    resume: Array
    """Per environment, the episode to go on with if the worker is replaced."""
    words: memoryview
    clock: int = 0
    """Rows since environments were staggered, modulo the horizon: where a worker that replaces it finds its place."""
    incarnation: int = 0
    handle: WorkerHandle | None = None
    link: HeadLink | None = None
    host: str = "?"
    pid: int = 0
    ready: bool = False
    """Environments are built."""
    error: WorkerError | None = None
    """What it last failed of."""
    shortage: ResourceError | None = None
    """Why its replacement could not be started yet."""
    asked: bool = False
    """It was sent an agent or a call and has not answered yet."""
    heard: int = 0
    """How many messages of it have arrived, heartbeats apart."""
    silent_since: float = math.inf
    """When its connection closed, if its process was still there."""
    _suspect: tuple[int, int] | None = None
    """Environment and episode in which it last died."""

    @property
    def num_envs(self) -> int:
        return self.stop - self.first

    @property
    def columns(self) -> slice:
        return slice(self.first, self.stop)

    @property
    def phase(self) -> str:
        """What its progress words say it is doing."""
        word = int(self.words[PHASE])
        return Phase(word).label if word in Phase.__members__.values() else "?"

    def where(self, phase: str, **more: Any) -> Where:
        return Where(
            worker=self.worker,
            incarnation=self.incarnation,
            host=self.host,
            pid=self.pid,
            phase=phase,
            **more,
        )

    def _where_in_env(self, phase: str) -> Where:
        """With the environment and the episode that its progress words name."""
        i, episode = self._under_way(phase)
        if i is None:
            return self.where(phase)
        slot = self.first + i
        seed = None if episode is None else episode_seed(self.roots[i], slot, episode)
        return self.where(phase, slot=slot, seed=seed)

    def _under_way(self, phase: str) -> tuple[int | None, int | None]:
        """Environment and episode, as far as they are known."""
        i = int(self.words[SLOT])
        if phase not in _ENV_PHASES or not 0 <= i < self.num_envs:
            return None, None
        episode = int(self.words[EPISODES + i]) - 1
        return i, None if phase == "construct" or episode < 0 else episode

    def blame(self, phase: str) -> None:
        """It died, or is stuck: an episode in which that happens twice is not tried again."""
        i, episode = self._under_way(phase)
        if i is not None and episode is not None:
            if self._suspect == (i, episode):
                self.resume[i] = max(int(self.resume[i]), episode + 1)
            self._suspect = (i, episode)

    def died(self, ended: Ended) -> WorkerError:
        """The error for a process that ended by itself."""
        output = self.handle.output() if self.handle else ""
        return WorkerDied(f"a worker {ended}", self._where_in_env(self.phase), output=output)

    def stuck(self, phase: str, limit_s: float) -> WorkerError:
        """The error for a process that makes no progress; asks it for its stacks first."""
        output = ""
        if self.handle is not None:
            if self.handle.pid:  # on this machine; others were asked before (`membership.Ask`)
                self.handle.read_output()
                self.handle.dump_stacks()
                _wait_for_output(self.handle)
            output = self.handle.output()
        return WorkerStuck(
            f"no progress in phase {phase!r} for {limit_s:g} s (Timeouts.{phase}_s); the worker was killed",
            self._where_in_env(phase),
            output=output,
        )


@dataclass(frozen=True)
class ResetRequest:
    """What `reset` asks of all environments."""

    seeds: Sequence[int | None] | None
    mask: Array | None
    options: bytes | None

    def part(self, record: WorkerRecord) -> Reset:
        """A worker's share."""
        seeds = None if self.seeds is None else list(self.seeds[record.columns])
        return Reset(seeds, None if self.mask is None else self.mask[record.columns].tobytes(), self.options)


def expected(record: WorkerRecord, ticket: int | None) -> str:
    """What a worker that does nothing is waited for, `ticket` being its oldest open one: to begin (`idle`), or for the
    rest of what it rolled (`transfer`); empty: for nothing."""
    if ticket is not None and record.words[ROLLED] >= ticket:
        return "transfer"
    return "idle" if record.asked or ticket is not None else ""


def _wait_for_output(handle: WorkerHandle, timeout_s: float = 0.5) -> None:
    """Give a process that is about to be killed a moment to write its stacks (a stopped one never will)."""
    if handle.output_fd < 0:
        return
    poll = select.poll()
    poll.register(handle.output_fd, select.POLLIN)
    deadline = time.monotonic() + 2 * timeout_s
    while poll.poll(timeout_s * 1000) and handle.read_output() and time.monotonic() < deadline:
        timeout_s = 0.05  # it writes piece by piece: done when nothing more comes


def split(nodes: int, envs_per_node: int, workers: int, root: int) -> Sequence[WorkerRecord]:
    """Slots in order, as even as they go: sizes of one node's workers differ by at most one."""
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
