"""A worker's progress, stored in a few 64-bit words that are cheap to write.

The head reads the words to distinguish a busy worker from a stuck one. A local worker writes the words into shared
memory; a remote worker sends them once a second (`messages.Progress`).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from farstep.errors import WireError
from farstep.wire.channels.memory import SharedMemory

PHASE, COUNT, SLOT, CANCEL, ROLLED, RATE = range(6)
"""Indices of words: the `Phase`; a counter that increases with progress; the current slot; the id of the last cancelled
ticket (the head writes this word); the id of the last ticket whose chunk is being sent; the throughput of the relay in
bytes per second, or 0 if unknown (the node daemon writes this word)."""
SERVED_ROWS, SERVED_BATCHES = range(6, 8)
"""Indices of the words of an acting server: how many rows and batches it has acted on."""
REQUESTS, WAITED_US = range(6, 8)
"""Indices of the words of a worker with an acting server: how many times it has requested actions, and for how many
microseconds it has waited for them."""
CHUNK_STEP, CHUNK_STEPS, CHUNK_US = range(8, 11)
"""Indices of the words of the chunk that a worker is rolling: how many steps it has taken, of how many (0: it rolls
none), and in how many microseconds. If steps are fast, they are updated at some steps only."""
EPISODES = 11
"""Index of the first of the words for environments, one each: its episode plus one, or 0 if unknown."""
BEAT_S = 1.0
"""Seconds between two `Progress` messages of a worker without shared memory."""


class Phase(IntEnum):
    """What a worker is doing. Each phase except QUEUED has a time limit in `Timeouts`."""

    IDLE = 0
    CONNECT = 1
    CONSTRUCT = 2
    RESET = 3
    STEP = 4
    ACT = 5
    LOAD = 6
    CLOSE = 7
    QUEUED = 8
    """Waiting for a node; the launcher limits the time."""

    @property
    def label(self) -> str:
        return self.name.lower()


STEP, ACT, RESET = int(Phase.STEP), int(Phase.ACT), int(Phase.RESET)
"""Phases as plain integers for the innermost loops, because storing an enum takes a microsecond."""


@dataclass(frozen=True)
class ChunkProgress:
    """How far a worker is with the chunk that it is rolling."""

    worker: int
    num_envs: int
    step: int
    """Steps that it has taken in each of its environments."""
    steps: int
    """Steps of the chunk."""
    seconds: float
    """Seconds that the steps took."""

    @classmethod
    def of(cls, worker: int, num_envs: int, words: Sequence[int]) -> ChunkProgress | None:
        """Read the words of a worker. Return None if it rolls no chunk of several steps."""
        step, steps, seconds = words[CHUNK_STEP], words[CHUNK_STEPS], words[CHUNK_US] / 1e6
        return cls(worker, num_envs, step, steps, seconds) if 0 <= step < steps > 1 and seconds >= 0 else None

    @property
    def seconds_left(self) -> float:
        """Seconds until the chunk is complete; infinity before its first step is complete."""
        return self.seconds / self.step * (self.steps - self.step) if self.step else math.inf

    def __str__(self) -> str:
        envs = f"each of its {self.num_envs} environments" if self.num_envs > 1 else "its environment"
        if not self.step:
            return f"worker {self.worker} has not completed the first of {self.steps:,} steps in {envs}"
        all_envs = f" of all {self.num_envs}" if self.num_envs > 1 else ""
        return (
            f"worker {self.worker} has taken {self.step:,} of {self.steps:,} steps in {envs} "
            f"({self.seconds / self.step:.2g} s per step{all_envs}), and needs about {self.seconds_left:,.0f} s more"
        )


class ProgressBoard:
    """The words of all workers, in memory that the head shares with local workers."""

    def __init__(self, workers: int, envs: int) -> None:
        self._width = EPISODES + envs
        self.memory = SharedMemory.create(workers * self._width * 8, "farstep-board")
        self._all = self.memory.map.cast("q")

    def range(self, worker: int) -> tuple[int, int]:
        """The first index of a worker's words, and the index after the last."""
        return worker * self._width, (worker + 1) * self._width

    def bootstrap(self, worker: int) -> dict[str, object]:
        """The bootstrap entries with the location of a worker's words. The worker's process must inherit
        `memory.fd`."""
        return {"board_fd": self.memory.fd, "board_bytes": self.memory.nbytes, "words": self.range(worker)}

    def words(self, worker: int) -> memoryview:
        """The words of a worker, cleared for its next process."""
        first, stop = self.range(worker)
        words = self._all[first:stop]
        copy_words([0] * self._width, words)
        return words

    def write(self, worker: int, index: int, word: int) -> None:
        """Write one of the words of a worker."""
        self._all[self.range(worker)[0] + index] = word

    def read(self, worker: int) -> list[int]:
        return self._all[slice(*self.range(worker))].tolist()

    def close(self) -> None:
        self.memory.close()


def private_words(envs: int) -> memoryview:
    """New words for a worker that shares no memory with the head."""
    return memoryview(array("q", [0] * (EPISODES + envs)))


def check_words(words: Sequence[int], count: int | None = None) -> None:
    """Raise `WireError` unless there are `count` words and their phase has a time limit."""
    if count is not None and len(words) != count:
        raise WireError(f"{len(words)} progress words; expected {count}.")
    if not 0 <= words[PHASE] < Phase.QUEUED:  # a worker cannot claim to be queued
        raise WireError(f"progress words with the phase {words[PHASE]}; expected 0 to {Phase.QUEUED - 1}.")


def copy_words(source: Sequence[int], target: memoryview) -> None:
    """Copy words into `target`, up to the shorter of both lengths."""
    count = min(len(source), len(target))
    target[:count] = memoryview(array("q", source[:count]))
