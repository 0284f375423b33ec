"""Tracks which workers are present: those that have a node and are neither draining, retiring nor parked."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet


class Presence:
    """The present, retiring, parked, draining and absent workers.

    A draining worker finishes its tickets before its node leaves. A retiring worker finishes its chunk before it is
    parked.

    Args:
        num_workers: Number of all workers of the run.
        quorum: Number of workers that must be present to continue; at most the number of workers that are not parked.
    """

    def __init__(self, num_workers: int, quorum: int) -> None:
        self._num_workers, self._quorum = num_workers, quorum
        self.wanted: AbstractSet[int] = frozenset(range(num_workers))
        """Workers that are to run; the others are parked, or are about to be."""
        self.wanted_quorum = num_workers
        """Maximum of `quorum`, because only the workers in `wanted` run."""
        self.absent: set[int] = set()
        """Workers that have no node."""
        self.parked: set[int] = set()
        self.retiring: set[int] = set()
        self._draining: set[int] = set()
        self.departed: set[int] = set()
        """Workers that left since `Feed.members` last cleared this set."""
        self.changes = 0
        """Increases whenever a worker joins, drains, retires, is parked or leaves, or `wanted_quorum` changes."""

    @property
    def quorum(self) -> int:
        """Number of workers that must be present to continue."""
        return min(self._quorum, self.wanted_quorum, self._num_workers - len(self.parked))

    @property
    def parked_or_retiring(self) -> frozenset[int]:
        """All workers that are parked, or are about to be."""
        return frozenset(self.parked | self.retiring)

    @property
    def present(self) -> set[int]:
        """All workers that take part: those with a node that are neither draining, retiring nor parked."""
        return set(range(self._num_workers)) - self._out()

    @property
    def num_present(self) -> int:
        return self._num_workers - len(self._out())

    def _out(self) -> set[int]:
        return self.absent | self.parked | self.retiring | self._draining

    def is_away(self, worker: int) -> bool:
        """Whether a worker gets no tickets until it joins: it is absent or parked."""
        return worker in self.absent or worker in self.parked

    def want(self, workers: Iterable[int], quorum: int | None) -> None:
        """Set which workers are to run, and how many of them suffice. None: as if all workers ran."""
        before, self.wanted = self.wanted_quorum, frozenset(workers)
        self.wanted_quorum = self._num_workers if quorum is None else quorum
        self.changes += self.wanted_quorum != before

    def leave(self, worker: int) -> None:
        self.absent.add(worker)
        self._draining.discard(worker)
        self.departed.add(worker)
        self.changes += 1

    def drain(self, worker: int) -> None:
        if worker not in self._draining and worker not in self.absent:
            self._draining.add(worker)
            self.changes += 1

    def retire(self, worker: int) -> None:
        """Count a worker as not present, because it is to be parked."""
        if worker not in self.retiring and worker not in self.parked:
            self.retiring.add(worker)
            self.changes += 1

    def park(self, worker: int) -> None:
        self.retiring.discard(worker)
        self.absent.discard(worker)
        self.parked.add(worker)
        self.changes += 1

    def join(self, worker: int) -> bool:
        """Mark a worker as present. Return whether it was absent or parked."""
        was_away = self.is_away(worker)
        self.changes += was_away or worker in self._draining or worker in self.retiring
        for workers in (self.absent, self.parked, self.retiring, self._draining):
            workers.discard(worker)
        return was_away
