"""Which workers are present, and which can get a ticket now."""

from __future__ import annotations

from collections.abc import Sequence

from farstep.head.members.membership import Membership, State
from farstep.head.members.worker_records import WorkerRecord
from farstep.head.tickets.tickets import Tickets


class Availability:
    """Contains the number of each worker that can get a ticket. Callers must hold the event loop's lock.

    Args:
        records: All workers.
        servers: All acting servers.
        tickets: Know which workers are present, and which must finish a window.
        membership: The states of the workers.
    """

    def __init__(
        self,
        records: Sequence[WorkerRecord],
        servers: Sequence[WorkerRecord],
        tickets: Tickets,
        membership: Membership,
    ) -> None:
        self._servers = servers
        self._records, self._tickets, self._membership = records, tickets, membership

    def present(self) -> list[WorkerRecord]:
        """All workers that have a node and are not parked."""
        return [record for record in self._records if not self._tickets.presence.is_away(record.worker)]

    def all_ready(self) -> bool:
        """Whether a quorum of workers is present, and all present workers and their acting servers are ready."""
        present = self.present()
        servers = [record for record in self._servers if record.phase != "queued"]
        return len(present) >= self._tickets.presence.quorum and all(record.ready for record in [*present, *servers])

    def unsettled(self) -> bool:
        """Whether the set of workers to wait for will change, because workers are missing or about to leave.

        Parked workers do not count, because only `scale` changes them.
        """
        members = self._membership.members
        return any(
            not self._can_roll(record) for record in self._records if members[record.worker].state is not State.PARKED
        )

    def _can_roll(self, record: WorkerRecord) -> bool:
        if not record.ready or record.returning or record.handle is None or record.handle.leaving:
            return False
        presence = self._tickets.presence
        if record.worker in presence.retiring:
            return self._tickets.must_finish(record.worker)
        return record.worker not in presence.parked

    def __contains__(self, worker: object) -> bool:
        """Whether a worker can get a ticket.

        A worker that was released during a feed must wait until all its chunks have been taken, unless it is inside a
        window. Otherwise it would be resumed for each of them.
        """
        if not isinstance(worker, int) or not self._can_roll(self._records[worker]):
            return False
        is_released = self._membership.members[worker].state is State.RELEASED
        return not (is_released and self._tickets.unread.num_of[worker]) or self._tickets.must_finish(worker)
