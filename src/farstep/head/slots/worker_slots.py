"""A run's use of its worker slots: how many workers run, and when the run requests and returns slots."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING

from farstep.elastic.coordinator.worker_pool import SessionSlots
from farstep.errors import counted
from farstep.head.client import Client
from farstep.head.members import membership
from farstep.head.members.worker_records import WorkerRecord
from farstep.head.slots.parking import Parking
from farstep.head.slots.placement import workers_left, workers_on
from farstep.head.slots.prewarming import Prewarming

if TYPE_CHECKING:
    from farstep.head.server import Server


class WorkerSlots:
    """Scales, pauses, parks and releases the workers of a server (a `WorkerPool`).

    A run without a coordinator has a slot for each of its workers.

    Args:
        server: The server of the workers. It is complete except for this object.
        client: Notified when a worker is parked.
        release_idle: Whether to suspend workers while no session of tickets is open, and in a feed while they have no
            ticket.
        prewarm: Whether to resume them shortly before the next session is expected.
    """

    def __init__(self, server: Server, client: Client, *, release_idle: bool, prewarm: bool) -> None:
        self._server, self._tickets, self._supervisor = server, server.tickets, server.supervisor
        self.locked, self.fail = server.locked, server.fail
        self.parking = Parking(
            server.records,
            server.tickets,
            server.supervisor,
            server.outbox,
            client,
            server.events.emit,
            release_idle=release_idle,
        )
        self._prewarming = Prewarming(self._resume_early, self._suspend_again) if prewarm else None
        self.is_paused = False
        """Whether no tickets are issued, because this run has no slots."""
        self._session_slots: SessionSlots | None = None
        self._keeps_slots = False
        """Whether to keep the slots at the end of a session."""
        self._returned_slots = False
        """Whether the slots were returned during a feed, because no worker could get a ticket."""

    @property
    def state(self) -> str:
        """The state of the run in one word."""
        return self._server.state

    @property
    def is_waiting(self) -> bool:
        """Whether no tickets are issued before slots arrive that the run has requested."""
        return self.is_paused and not self._returned_slots

    def num_running(self) -> int:
        """Return the number of workers that may be using a core: all that are not parked, and those that will run as
        soon as they have a node; 0 if `pause` or the end of the run has made all of them idle."""
        with self.locked():
            is_idle = (self.is_paused or self.state != "running") and not self._tickets.in_flight
            present = {record.worker for record in self._server.available.present()}
            return 0 if is_idle else len(present | self._tickets.presence.wanted)

    # ---- the number of workers ----

    def scale_nodes(self, nodes: int) -> None:
        """Change the number of nodes. All their workers run: none is parked any more."""
        with self.locked():
            self._server.raise_failure()
            self._supervisor.launcher.scale(nodes)
            self._want(range(len(self._server.records)))

    def scale_workers(self, workers: int) -> None:
        """Change the number of workers that run. The last workers are parked."""
        with self.locked():
            self._server.raise_failure()
            self._supervisor.launcher.make_room(workers)
            self._change(range(workers))

    def use_slots(self, slots: Collection[int], *, quiet: bool = False) -> None:
        """Run a worker for each of these slots of the coordinator (see `placement.py`). `quiet`: emit no events."""
        with self.locked():
            self._server.raise_failure()
            self.is_paused = False
            nodes, per_node = self._supervisor.launcher.make_room(len(slots)), self._server.workers_per_node
            workers = workers_on(slots, nodes, per_node)
            self._change(workers, workers_left(workers, nodes, per_node, self._server.min_nodes), quiet=quiet)

    def _change(self, workers: Collection[int], quorum: int | None = None, *, quiet: bool = False) -> None:
        before = len(self._tickets.presence.wanted)
        self._want(workers, quorum, quiet=quiet)
        if len(workers) != before and not quiet:
            self._server.events.emit("scaled", f"scaled from {before} to {counted(len(workers), 'worker')}")

    def pause(self) -> None:
        """Issue no tickets until `use_slots` is called. Workers finish their open tickets and are idle then."""
        with self.locked():
            self.is_paused = True

    def _want(self, workers: Iterable[int], quorum: int | None = None, *, quiet: bool = False) -> None:
        self.parking.want(workers, quorum=quorum, quiet=quiet)
        self._server.grant()
        if self._prewarming is None or not self._prewarming.is_early:
            self.parking.release()

    @contextlib.contextmanager
    def all_unparked(self) -> Iterator[None]:
        """Context manager: inside, parked workers run, so that they can answer a call, and no process is suspended."""
        begun = False
        try:
            with self.locked():  # may deliver Ctrl-C at its end
                self.parking.begin_call()
                begun = True
            yield
        finally:
            if begun:
                with self.locked():
                    self.parking.end_call()

    # ---- the slots of a session ----

    def use_slots_per_session(self, slots: SessionSlots) -> None:
        """From now on, return the slots at the end of each session, and request them for the next one. A session issues
        no tickets until `use_slots` is called."""
        with self.locked():
            self._session_slots = slots
            self._give_back()

    def begin_session(self, *, one_batch: bool) -> None:
        """Request slots for the session of tickets that was opened."""
        was_early = self._prewarming is not None and self._prewarming.rollout_begins(time.monotonic())
        if self._session_slots is not None and not (was_early and one_batch):
            self._session_slots.begin(for_rollout=one_batch)

    def end_session(self) -> None:
        """Return the slots of the session of tickets that was closed."""
        if not self._keeps_slots:
            self._give_back()
        if self._prewarming is not None:
            self._prewarming.rollout_ended(time.monotonic(), self._tickets.presence.num_present)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Context manager: inside, all sessions use the slots of the first one, and no worker is suspended between
        them."""
        try:
            with self.locked():  # may deliver Ctrl-C at its end
                self._keeps_slots = True
            yield
        finally:
            with self.locked():
                self._keeps_slots = False
                if self.state == "running" and not self._tickets.is_open:
                    self._give_back()

    def _give_back(self) -> None:
        self.parking.release()
        if self._session_slots is not None:
            self.is_paused = True
            if not self._returned_slots:
                self._session_slots.end()
        self._returned_slots = False

    def release_without_ticket(self, record: WorkerRecord) -> None:
        """During a feed, suspend a worker without a ticket, and return the slots if no worker has one."""
        if record.is_server or not self._tickets.has_feed:
            return
        self.parking.release_if_idle(record)
        if self._session_slots is None or self.is_paused or self._tickets.in_flight:
            return
        if not self._tickets.can_issue(self._server.available):
            self._give_back()
            self._returned_slots = True

    def request_again(self) -> None:
        """Request slots that were returned during a feed if a worker can get a ticket. The slots arrive with
        `use_slots`."""
        if self._returned_slots and self._session_slots is not None and self._tickets.can_issue(self._server.available):
            self._returned_slots = False
            self._session_slots.begin(for_rollout=False)

    # ---- prewarming ----

    def note_ticket(self) -> None:
        """A ticket was issued."""
        if self._prewarming is not None:
            self._prewarming.issued(time.monotonic())

    def note_first_chunk(self, busy_s: float) -> None:
        """A worker has delivered its first chunk of a session, with which it was busy for `busy_s` seconds."""
        if self._prewarming is not None:
            self._prewarming.chunk_arrived(time.monotonic(), busy_s)

    def close(self) -> None:
        """Stop resuming workers early."""
        if self._prewarming is not None:
            self._prewarming.close()

    def _resume_early(self) -> None:
        """Resume all workers, and request slots, because the next session is expected soon."""
        with self.locked():
            if self.state != "running" or self._tickets.is_open or self._prewarming is None:
                return
            self._prewarming.resumed()
            for record in self._server.records:
                self._supervisor.act_on(membership.Acquire(record.worker))
            if self._session_slots is not None:
                self._session_slots.begin(for_rollout=True)

    def _suspend_again(self) -> None:
        """Suspend workers that were resumed early, because no session was opened."""
        with self.locked():
            # A failed run, too, returns the slots that it got early.
            if self._server.is_closed or self._tickets.is_open or self._prewarming is None:
                return
            self._prewarming.is_early = False
            self._give_back()
