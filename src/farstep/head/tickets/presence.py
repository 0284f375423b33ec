"""Tracks which workers have a node and therefore take part in batches."""

from __future__ import annotations


class Presence:
    """The present, draining and absent workers. A draining worker finishes its tickets before its node leaves.

    Args:
        num_workers: Number of all workers of the run.
        quorum: Number of workers that must be present to continue.
    """

    def __init__(self, num_workers: int, quorum: int) -> None:
        self._num_workers, self.quorum = num_workers, quorum
        self.absent: set[int] = set()
        self._draining: set[int] = set()
        self.departed: set[int] = set()
        """Workers that left since `Feed.members` last cleared this set."""
        self.changes = 0
        """Increases whenever a worker joins, drains or leaves."""

    @property
    def present(self) -> set[int]:
        """All workers except absent and draining ones."""
        return set(range(self._num_workers)) - self.absent - self._draining

    @property
    def num_present(self) -> int:
        return self._num_workers - len(self.absent) - len(self._draining)

    def leave(self, worker: int) -> None:
        self.absent.add(worker)
        self._draining.discard(worker)
        self.departed.add(worker)
        self.changes += 1

    def drain(self, worker: int) -> None:
        if worker not in self._draining and worker not in self.absent:
            self._draining.add(worker)
            self.changes += 1

    def join(self, worker: int) -> bool:
        """Mark a worker as present. Return whether it was absent."""
        was_absent = worker in self.absent
        self.changes += was_absent or worker in self._draining
        self._draining.discard(worker)
        self.absent.discard(worker)
        return was_absent
