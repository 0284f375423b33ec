"""Where a worker is, in a few shared words: written at almost no cost, read by the head to tell busy from stuck."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import IntEnum

from farstep.wire.memory import SharedMemory

WORDS = 8
PHASE, COUNT, SLOT, CANCEL = range(4)
BEAT_S = 1.0
"""How often a worker without shared memory says where it is."""


class Phase(IntEnum):
    """What a worker is doing; each but IDLE has a limit in `Timeouts`."""

    IDLE = 0
    CONNECT = 1
    CONSTRUCT = 2
    RESET = 3
    STEP = 4
    ACT = 5
    LOAD = 6
    CLOSE = 7

    @property
    def label(self) -> str:
        return self.name.lower()


STEP, ACT, RESET = int(Phase.STEP), int(Phase.ACT), int(Phase.RESET)
"""For the innermost loops: an enum costs a microsecond to store."""


class Board:
    """One row of words per worker, in memory that head and local workers share."""

    def __init__(self, workers: int) -> None:
        self.memory = SharedMemory.create(workers * WORDS * 8, "farstep-board")
        self._all = memoryview(self.memory.map).cast("q")

    def words(self, worker: int, *, clear: bool = False) -> memoryview:
        words = self._all[worker * WORDS : (worker + 1) * WORDS]
        if clear:
            copy_words([0] * WORDS, words)
        return words

    def close(self) -> None:
        self.memory.close()


def private_words() -> memoryview:
    """Words of a worker that shares no memory with the head."""
    return memoryview(array("q", [0] * WORDS))


def copy_words(source: Sequence[int], target: memoryview) -> None:
    """Words of a message into the ones the head looks at; more or fewer than there are is cut."""
    for i, word in enumerate(source[: len(target)]):
        target[i] = word
