"""The chunks that were accepted but not delivered to the learner yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from farstep.head.tickets.records import AcceptedChunk


class UnreadChunks:
    """Accepted chunks in the order of arrival, until the learner takes them."""

    def __init__(self) -> None:
        self._chunks: dict[int, AcceptedChunk] = {}
        """By ticket id."""
        self.num_of: Counter[int] = Counter()
        """For each worker, its number of unread chunks."""
        self._oldest = 0
        """Lower bound of the versions of all unread chunks."""

    def __len__(self) -> int:
        return len(self._chunks)

    def __contains__(self, seq: int) -> bool:
        return seq in self._chunks

    def __iter__(self) -> Iterator[AcceptedChunk]:
        return iter(self._chunks.values())

    def before_round(self, stop: int) -> list[AcceptedChunk]:
        """The chunks of all rounds before `stop`."""
        return [accepted for accepted in self._chunks.values() if accepted.ticket.round < stop]

    def add(self, accepted: AcceptedChunk) -> None:
        self._oldest = min(self._oldest, accepted.version) if self._chunks else accepted.version
        self._chunks[accepted.ticket.seq] = accepted
        self.num_of[accepted.ticket.worker] += 1

    def replace(self, accepted: AcceptedChunk) -> None:
        """Replace the chunk of the same ticket, at the same place in the order."""
        self._chunks[accepted.ticket.seq] = accepted

    def remove(self, accepted: AcceptedChunk) -> None:
        del self._chunks[accepted.ticket.seq]
        self.num_of[accepted.ticket.worker] -= 1

    def remove_before(self, version: int) -> list[AcceptedChunk]:
        """Remove and return the chunks of versions older than `version`."""
        if not self._chunks or self._oldest >= version:
            return []
        removed = [accepted for accepted in self._chunks.values() if accepted.version < version]
        for accepted in removed:
            self.remove(accepted)
        self._oldest = min((accepted.version for accepted in self._chunks.values()), default=version)
        return removed

    def clear(self) -> None:
        self._chunks.clear()
        self.num_of.clear()
