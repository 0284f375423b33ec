"""Parks workers that are not wanted, unparks them, and releases idle workers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from farstep.errors import WireError
from farstep.event import Emit
from farstep.head.client import Client
from farstep.head.members import membership
from farstep.head.members.outbox import Outbox
from farstep.head.members.supervisor import Supervisor
from farstep.head.members.worker_records import WorkerRecord
from farstep.head.tickets.tickets import Tickets
from farstep.wire import messages as m


class Parking:
    """Decides which processes are suspended although their workers are healthy.

    A parked worker takes no part in batches until it is unparked. With `release_idle`, all other workers are suspended
    between two rollouts, too, and during a feed while they have no ticket. Any message that a worker must act on lets
    it continue (see `Outbox.send`).

    A worker is parked in four steps: `want` excludes it, `retire` requests its unstarted tickets, `returned` handles
    its answer, and `parked` continues without it after its process was suspended. Callers must hold the event loop's
    lock.

    Args:
        records: All workers.
        tickets: The tickets of these workers.
        supervisor: Suspends and resumes their processes.
        outbox: Sends them messages.
        client: Notified when a worker is parked.
        emit: Emits the events of the run.
        release_idle: Whether to suspend workers while they have nothing to do (see `Tickets.is_idle`).
    """

    def __init__(
        self,
        records: Sequence[WorkerRecord],
        tickets: Tickets,
        supervisor: Supervisor,
        outbox: Outbox,
        client: Client,
        emit: Emit,
        *,
        release_idle: bool,
    ) -> None:
        self._records, self._tickets, self._supervisor, self._outbox = records, tickets, supervisor, outbox
        self._client, self._emit = client, emit
        self._release_idle = release_idle
        self._num_calls = 0
        """Number of calls for which all workers are unparked."""
        self._reported: set[int] = set()
        """Workers that an event has reported as parked since they last ran."""

    def want(self, workers: Iterable[int], *, quorum: int | None = None, quiet: bool = False) -> None:
        """Unpark these workers, and park the others.

        Args:
            workers: The workers that are to run.
            quorum: Number of them that suffices for a batch. None: as if all workers ran.
            quiet: Whether to emit no events.
        """
        self._tickets.presence.want(workers, quorum)
        for record in self._records:
            if record.worker not in self._tickets.presence.wanted:
                if quiet:
                    self._reported.add(record.worker)
                self._supervisor.act_on(membership.Park(record.worker))
                continue
            self._reported.discard(record.worker)
            ended_while_parked = self._supervisor.membership.members[record.worker].ended is not None
            self._supervisor.act_on(membership.Unpark(record.worker))
            # A worker that is being restarted counts, like any other; one that waits for a node joins when it is ready.
            if record.ready or (ended_while_parked and record.phase != "queued"):
                self._tickets.join(record.worker)

    def admit(self, record: WorkerRecord) -> None:
        """Include a worker that has become ready, unless it is to be parked before its first ticket."""
        retiring = self._supervisor.membership.members[record.worker].retiring
        if retiring and not self._tickets.must_finish(record.worker):
            self._tickets.park(record.worker)
        else:
            self._tickets.join(record.worker)

    def begin_call(self) -> None:
        """Unpark all workers, so that they can answer a call, and suspend no process until `end_call`."""
        self._num_calls += 1
        for record in self._unwanted():
            members = self._supervisor.membership
            if members.is_suspended(record.worker) or members.members[record.worker].retiring:
                self._supervisor.act_on(membership.Unpark(record.worker))

    def end_call(self) -> None:
        """Park again the workers that are not wanted."""
        self._num_calls -= 1
        for record in self._unwanted():
            self._supervisor.act_on(membership.Park(record.worker))
        self.release()

    def _unwanted(self) -> list[WorkerRecord]:
        return [record for record in self._records if record.worker not in self._tickets.presence.wanted]

    def release(self) -> None:
        """With `release_idle`, suspend all idle workers until the next message that they must act on."""
        for record in self._records:
            self.release_if_idle(record)

    def release_if_idle(self, record: WorkerRecord) -> None:
        """With `release_idle`, suspend a worker if it has nothing to do."""
        if not self._release_idle or self._num_calls or not record.ready or record.owes_reply:
            return
        if self._tickets.is_idle(record.worker):
            self._supervisor.act_on(membership.Release(record.worker))

    def retire(self, record: WorkerRecord) -> None:
        """Issue no new tickets to a worker that is to be parked, and request those that it has not started."""
        self._tickets.presence.retire(record.worker)
        if record.ready and not record.returning and not self._tickets.must_finish(record.worker):
            record.returning = True
            self._outbox.send(record, m.ReturnTickets())

    def returned(self, record: WorkerRecord) -> None:
        """Take back the tickets that a worker has not started, and suspend it.

        Raises:
            WireError: The head did not request its tickets.
        """
        if not record.returning:
            raise WireError("a report that it has returned its tickets, which the head did not request.")
        record.returning = False
        self._tickets.returned(record.worker)
        if not self._tickets.must_finish(record.worker) and not self._num_calls:
            self._supervisor.act_on(membership.Idle(record.worker))

    def parked(self, record: WorkerRecord) -> None:
        """Continue without a worker whose process was suspended."""
        self._tickets.park(record.worker)
        self._client.on_parked(record)
        if record.worker not in self._reported:  # otherwise it was unparked for a call
            self._reported.add(record.worker)
            text = f"worker {record.worker} on {record.host} is parked"
            self._emit("parked", text, worker=record.worker, node=record.host)

    def unparked(self, record: WorkerRecord) -> None:
        """Send a worker whose process continues what it missed."""
        clocks = [self._records[worker].clock for worker in sorted(self._tickets.presence.present)]
        self._outbox.send(record, m.Unparked(clocks[0] if clocks else record.clock))
        self._outbox.send_announcements(record)
