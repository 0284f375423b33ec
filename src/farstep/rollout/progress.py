"""Where a worker is, in a few shared words: written at almost no cost, read by the head to tell busy from stuck."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import IntEnum

from farstep.errors import WireError
from farstep.wire.channels.memory import SharedMemory

PHASE, COUNT, SLOT, CANCEL, ROLLED = range(5)
EPISODES = 8
"""From here on a word per environment: its episode plus one, or zero where nobody knows."""
BEAT_S = 1.0
"""How often a worker without shared memory says where it is."""


class Phase(IntEnum):
    """What a worker is doing; each but QUEUED has a limit in `Timeouts`."""

    IDLE = 0
    CONNECT = 1
    CONSTRUCT = 2
    RESET = 3
    STEP = 4
    ACT = 5
    LOAD = 6
    CLOSE = 7
    QUEUED = 8
    """There is no node for it yet; how long that may take is the launcher's to say."""

    @property
    def label(self) -> str:
        return self.name.lower()


STEP, ACT, RESET = int(Phase.STEP), int(Phase.ACT), int(Phase.RESET)
"""For the innermost loops: an enum costs a microsecond to store."""


class ProgressBoard:
    """One row of words per worker, in memory that head and local workers share."""

    def __init__(self, workers: int, envs: int) -> None:
        self._width = EPISODES + envs
        self.memory = SharedMemory.create(workers * self._width * 8, "farstep-board")
        self._all = self.memory.map.cast("q")

    def range(self, worker: int) -> tuple[int, int]:
        """Where a worker's words begin and end."""
        return worker * self._width, (worker + 1) * self._width

    def bootstrap(self, worker: int) -> dict[str, object]:
        """What its process finds its words by; it must inherit `memory.fd`."""
        return {"board_fd": self.memory.fd, "board_bytes": self.memory.nbytes, "words": self.range(worker)}

    def words(self, worker: int) -> memoryview:
        """A worker's words, cleared for its next incarnation."""
        first, stop = self.range(worker)
        words = self._all[first:stop]
        copy_words([0] * self._width, words)
        return words

    def read(self, worker: int) -> list[int]:
        return self._all[slice(*self.range(worker))].tolist()

    def close(self) -> None:
        self.memory.close()


def private_words(envs: int) -> memoryview:
    """Words of a worker that shares no memory with the head."""
    return memoryview(array("q", [0] * (EPISODES + envs)))


def check_words(words: Sequence[int], count: int | None = None) -> None:
    """Raise `WireError` unless these can be a worker's words: `count` of them, and a phase that has a time limit."""
    if count is not None and len(words) != count:
        raise WireError(f"{len(words)} progress words; expected {count}.")
    if not 0 <= words[PHASE] < Phase.QUEUED:  # only the head queues a worker
        raise WireError(f"progress words with the phase {words[PHASE]}; expected 0 to {Phase.QUEUED - 1}.")


def copy_words(source: Sequence[int], target: memoryview) -> None:
    """Words of a message into the ones the head looks at; more or fewer than there are is cut."""
    for i, word in enumerate(source[: len(target)]):
        target[i] = word
