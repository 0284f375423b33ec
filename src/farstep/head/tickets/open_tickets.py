"""The tickets whose chunks have not arrived yet, by id and by worker."""

from __future__ import annotations

from collections.abc import Iterator

from farstep.head.tickets.records import IssuedTicket


class OpenTickets:
    """Issued tickets that are neither answered nor taken back, oldest first.

    Args:
        num_workers: Number of all workers of the run.
    """

    def __init__(self, num_workers: int) -> None:
        self._tickets: dict[int, IssuedTicket] = {}
        self.ids: list[list[int]] = [[] for _ in range(num_workers)]
        """For each worker, the ids of its open tickets, oldest first. The worker rolls the oldest first."""

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, seq: int) -> bool:
        return seq in self._tickets

    def __iter__(self) -> Iterator[IssuedTicket]:
        return iter(self._tickets.values())

    def get(self, seq: int) -> IssuedTicket | None:
        """The open ticket with this id, or None."""
        return self._tickets.get(seq)

    def held_by(self, worker: int, seq: int) -> IssuedTicket | None:
        """The open ticket with this id if this worker holds it; otherwise None."""
        issued = self._tickets.get(seq)
        return issued if issued is not None and issued.worker == worker else None

    def of_worker(self, worker: int) -> list[IssuedTicket]:
        """The open tickets of a worker, oldest first."""
        return [self._tickets[seq] for seq in self.ids[worker]]

    def num_of(self, worker: int) -> int:
        """Number of open tickets of a worker."""
        return len(self.ids[worker])

    def oldest_of(self, worker: int) -> int | None:
        """Id of the worker's oldest open ticket; None if it has no open ticket."""
        return self.ids[worker][0] if self.ids[worker] else None

    def add(self, issued: IssuedTicket) -> None:
        self._tickets[issued.seq] = issued
        self.ids[issued.worker].append(issued.seq)

    def remove(self, issued: IssuedTicket) -> None:
        del self._tickets[issued.seq]
        self.ids[issued.worker].remove(issued.seq)

    def clear(self) -> None:
        self._tickets.clear()
        for ids in self.ids:
            ids.clear()
