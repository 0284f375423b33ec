"""Decides which workers may roll chunks, and accepts each chunk once. It uses neither I/O nor a clock.

A session yields batches. With `num_chunks=None`, every worker rolls one chunk per round, and a batch consists of the
chunks of the next `rollouts` rounds. Otherwise a batch consists of the first `num_chunks` chunks to arrive. In both
cases, at most `max_staleness + 1` batches are outstanding, unread or held by the learner. Therefore a learner that
publishes once per batch never receives a row that is too old. If the learner publishes more often, rows that became too
old are dropped, counted and collected again.

A workflow opens a feed instead. It takes chunks one by one as they arrive, and each chunk counts as held until its rows
are consumed. Windows limit a feed (see `worker_queue.py`); without a staleness bound, only free lanes do. With
invitations, a worker rolls only the chunks that `invite` allows.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Container, Iterable
from dataclasses import replace
from itertools import islice
from typing import Any

from farstep.head.tickets.open_tickets import OpenTickets
from farstep.head.tickets.presence import Presence
from farstep.head.tickets.records import AcceptedChunk, DropCause, FeedPlan, IssuedTicket
from farstep.head.tickets.session import CollectionSession
from farstep.head.tickets.unread_chunks import UnreadChunks
from farstep.head.tickets.worker_queue import TICKETS_PER_WORKER, WorkerQueue

FEED_LANES = TICKETS_PER_WORKER + 1
"""Lanes per worker in a feed: one per open ticket, and one for the chunk that is being stored."""


class Tickets:
    """Issues tickets to workers and accepts their chunks.

    At any moment, `issued` = `delivered` + all `dropped` + `buffered` + `in_flight`.

    Args:
        num_workers: Number of all workers of the run.
        quorum: Number of workers that must be present for a batch; None: all.
    """

    def __init__(self, num_workers: int, quorum: int | None = None) -> None:
        self._workers = num_workers
        self.presence = Presence(num_workers, num_workers if quorum is None else quorum)
        self._seq = 0
        self.outstanding = OpenTickets(num_workers)
        self.unread = UnreadChunks()
        self._session: CollectionSession | None = None
        self._queue: WorkerQueue | None = None
        """The order in which workers get tickets in a session without rounds."""
        self.issued = self.delivered = 0
        self.dropped: Counter[DropCause] = Counter()
        """Tickets and chunks dropped so far, by cause."""

    def lanes_needed(
        self, max_staleness: int | None, num_chunks: int | None, feed: FeedPlan | None = None, rollouts: int = 1
    ) -> int:
        """Number of lanes per worker that a session needs. Takes the arguments of `open`."""
        if feed is not None:
            return FEED_LANES
        depth = (max_staleness or 0) + 1
        if num_chunks is None:
            return depth * rollouts
        # Even if only the quorum is present, there must be a lane for every chunk of `depth` batches. If workers are
        # parked later, see `chunks_to_copy`.
        return max(depth, TICKETS_PER_WORKER, -(-depth * num_chunks // self.presence.quorum))

    def open(
        self,
        max_staleness: int | None,
        num_chunks: int | None = None,
        batches: int | None = None,
        feed: FeedPlan | None = None,
        rollouts: int = 1,
    ) -> None:
        """Start a session; the previous one must be cancelled.

        Args:
            max_staleness: Maximum number of versions that a row may be behind; None: a synchronous session, in which
                age does not matter.
            num_chunks: Number of chunks per batch, in the order of arrival; None: a batch has the chunks of whole
                rounds.
            batches: Number of batches in the session; None: unlimited.
            feed: For a workflow that takes chunks one by one; None otherwise.
            rollouts: Rounds per batch, if `num_chunks` is None.
        """
        assert self._session is None, "cancel the session before opening another"
        session = CollectionSession(max_staleness, num_chunks, batches, rollouts, feed=feed)
        lanes = session.lanes_per_worker = self.lanes_needed(max_staleness, num_chunks, feed, rollouts)
        for worker in range(self._workers):
            session.issued[worker] = 0
            session.redo[worker] = deque()
            session.lanes[worker] = list(range(lanes))
        if feed is not None and feed.invited is not None:
            session.invited = {worker: feed.invited.get(worker, 0) for worker in range(self._workers)}
        self._session = session
        if num_chunks is not None:
            self._queue = WorkerQueue(session, self.outstanding.ids, self.unread.num_of)
        for worker in range(self._workers):
            self._touch(worker)

    def invite(self, workers: Iterable[int], chunks: int = 1) -> None:
        """Let each of these workers roll `chunks` more chunks."""
        if self._session is not None and self._session.invited is not None:
            for worker in workers:
                self._session.invited[worker] += chunks
                self._touch(worker)

    def withdraw(self, worker: int) -> None:
        """Cancel the invitations of a worker for which no ticket has been issued yet."""
        if self._session is not None and self._session.invited is not None:
            self._session.invited[worker] = 0

    @property
    def is_open(self) -> bool:
        return self._session is not None

    @property
    def one_version(self) -> bool:
        """Whether one version must act in all rows of a chunk: in synchronous sessions, and without staleness."""
        session = self._session
        return session is not None and session.feed is None and not session.max_staleness

    @property
    def in_flight(self) -> int:
        """Open tickets."""
        return len(self.outstanding)

    @property
    def buffered(self) -> int:
        """Number of unread chunks: accepted, but not delivered."""
        return len(self.unread)

    def is_idle(self, worker: int) -> bool:
        """Whether a worker has nothing to do: no session is open, or it has no ticket of a feed."""
        return not self.is_open or (self.has_feed and not self.outstanding.num_of(worker))

    @property
    def has_feed(self) -> bool:
        """Whether the open session is a feed."""
        return self._session is not None and self._session.feed is not None

    def is_live(self, seq: int) -> bool:
        """Whether the ticket is open, or its chunk is unread."""
        return seq in self.outstanding or seq in self.unread

    def voided(self) -> list[tuple[int, int]]:
        """Worker and ticket id of each chunk of a feed that was dropped since the last call."""
        if self._session is None:
            return []
        found, self._session.voided = self._session.voided, []
        return found

    def pending(self, worker: int) -> int:
        """Number of chunks of a worker that are being rolled or are unread."""
        return self.outstanding.num_of(worker) + self.unread.num_of[worker]

    # ---- issuing ----

    def grant(self, available: Container[int], version: int) -> list[IssuedTicket]:
        """Issue all tickets that workers may get now.

        Args:
            available: Workers that can receive a ticket. Call `join` before a worker becomes available.
            version: The current version.
        """
        session = self._session
        if session is None:
            return []
        if session.num_chunks is None:
            ready = sorted(worker for worker in session.due if worker in available)
            granted = [issued for worker in ready for issued in self._rounds(session, worker, version)]
            # Workers that are being restarted stay due. `join` adds absent and parked workers when they return.
            session.due = {worker for worker in session.due.difference(ready) if not self.presence.is_away(worker)}
            return granted
        wanted = session.num_chunks
        if session.feed is not None and session.feed.windows is None:
            wanted = max(1, self.presence.num_present) * session.feed.chunks
        return self._first_come(session, wanted, available, version)

    def can_issue(self, available: Container[int]) -> bool:
        """Whether `grant` would issue a ticket of a feed."""
        return self._queue is not None and self._queue.first(available) >= 0

    def _rounds(self, session: CollectionSession, worker: int, version: int) -> list[IssuedTicket]:
        return [
            self._issue(session, worker, number, lane, version + (number - session.released) // session.rollouts)
            for number, lane in session.next_rounds(worker)
        ]

    def _first_come(
        self, session: CollectionSession, wanted: int, available: Container[int], version: int
    ) -> list[IssuedTicket]:
        assert self._queue is not None
        granted: list[IssuedTicket] = []
        while True:
            ahead = len(self.outstanding) + len(self.unread) + session.held_total
            if session.feed is None and ahead >= session.depth * wanted:
                return granted
            worker = self._queue.first(available)
            if worker < 0:
                return granted
            session.issued[worker] += 1
            if session.invited is not None:
                session.invited[worker] -= 1
            lane = session.lanes[worker].pop()
            granted.append(self._issue(session, worker, -1, lane, version + ahead // wanted))

    def _touch(self, worker: int) -> None:
        """Reconsider a worker after a change that may allow it another ticket."""
        if self._queue is not None:
            self._queue.update(worker)
        elif self._session is not None:
            self._session.due.add(worker)

    def _issue(
        self, session: CollectionSession, worker: int, round_index: int, lane: int, expected_version: int
    ) -> IssuedTicket:
        """Issue one ticket. A learner that publishes once per batch consumes the chunk at `expected_version`."""
        self._seq += 1
        self.issued += 1
        min_version = 0 if session.max_staleness is None else max(0, expected_version - session.max_staleness)
        issued = IssuedTicket(self._seq, worker, round_index, lane, min_version)
        self.outstanding.add(issued)
        self._touch(worker)
        return issued

    # ---- accepting ----

    def accept(self, worker: int, seq: int, version: int, info: Any) -> bool:
        """Accept a chunk if this worker holds its ticket. Return False for a cancelled ticket or a duplicate.

        Args:
            worker: The sender.
            seq: Id of the ticket.
            version: Version from which the staleness of the chunk is counted.
            info: Data to store with the chunk (see `AcceptedChunk`).
        """
        if (issued := self.outstanding.held_by(worker, seq)) is None:
            return False
        self.unread.add(AcceptedChunk(issued, version, info))
        self._close(issued)
        session = self._session
        if session is not None and session.missing and issued.round < session.taken + session.rollouts:
            left = session.missing.pop(worker, 1) - 1  # an absent worker has no entry, because its chunk is optional
            if left:
                session.missing[worker] = left
        return True

    # ---- workers that fail, leave and join ----

    def give_back(self, worker: int, seq: int, cause: DropCause) -> bool:
        """Reclaim a ticket that the worker could not complete, and reissue it later."""
        if (issued := self.outstanding.held_by(worker, seq)) is None:
            return False
        self._close(issued)
        self._drop(issued, cause)
        return True

    def retry(self, worker: int, seq: int, cause: DropCause) -> bool:
        """Count an attempt that failed: the worker itself retries the ticket, before its later ones."""
        if self.outstanding.held_by(worker, seq) is None:
            return False
        self.dropped[cause] += 1
        self.issued += 1
        return True

    def lost(self, worker: int) -> None:
        """Reclaim the open tickets of a lost worker. Its accepted chunks stay."""
        for issued in self.outstanding.of_worker(worker):
            self._close(issued)
            self._drop(issued, "worker_lost")

    def _close(self, issued: IssuedTicket) -> None:
        self.outstanding.remove(issued)
        self._touch(issued.worker)

    def leave(self, worker: int) -> None:
        """Continue without a worker that has no node, until it joins again."""
        self.presence.leave(worker)
        if (session := self._session) is not None:
            session.missing = None
            session.redo[worker].clear()
            if session.feed is not None and session.feed.windows is None:
                self.withdraw(worker)  # the next `invite` includes it again

    def drain(self, worker: int) -> None:
        """Count a worker as not present, because its node is about to leave. The worker finishes its open tickets."""
        self.presence.drain(worker)

    def must_finish(self, worker: int) -> bool:
        """Whether a retiring worker still gets tickets, to complete a window of a feed that it has begun.

        Otherwise the rows of the window would become stale, or triggers would get them together with newer ones.
        """
        session = self._session
        if session is None or session.feed is None or self._queue is None:
            return False
        requested = session.invited is not None and session.feed.windows is None and session.invited[worker] > 0
        return requested or self._queue.is_inside(worker)

    def returned(self, worker: int) -> None:
        """Take back the open tickets of a worker, which has not started them. They count as never issued."""
        for issued in self.outstanding.of_worker(worker):
            self._close(issued)
            self._drop(issued, None)
            self.issued -= 1
        self._touch(worker)

    def park(self, worker: int) -> None:
        """Continue without a worker that is parked, until it joins again. Its accepted chunks stay."""
        self.presence.park(worker)
        if (session := self._session) is not None:
            session.unparked.discard(worker)
            session.newcomers.discard(worker)
            session.missing = None
            session.redo[worker].clear()

    def join(self, worker: int) -> None:
        """Include a ready worker that was absent or parked, from the first batch for which no other has a ticket.

        If the other workers do not reach the quorum, include the worker already in the next batch, which needs it. A
        worker that was parked does not count for the quorum of batches that others have begun.
        """
        was_parked = worker in self.presence.parked
        if self.presence.join(worker) and (session := self._session) is not None:
            session.newcomers.add(worker)
            if was_parked:
                session.unparked.add(worker)
            others = self._present(session) - {worker}
            begun = max((session.issued[other] for other in others), default=0)
            needed = not was_parked and len(others) < self.presence.quorum
            first = session.taken if needed else max(begun, session.taken)
            delivered = (a.ticket.round for a in self.unread if a.ticket.worker == worker)
            session.join(worker, first, delivered)
        self._touch(worker)

    def _present(self, session: CollectionSession) -> set[int]:
        """Workers whose chunks the next batch needs."""
        return {
            worker
            for worker in range(self._workers)
            if not self.presence.is_away(worker) and session.since.get(worker, 0) <= session.taken
        }

    def _drop(self, issued: IssuedTicket, cause: DropCause | None) -> None:
        if cause is not None:
            self.dropped[cause] += 1
        session = self._session
        if session is None:
            return
        if session.num_chunks is None:
            if issued.round >= session.since.get(issued.worker, 0):  # otherwise no batch needs it
                session.redo[issued.worker].append((issued.round, issued.lane))
            session.missing = None
            self._touch(issued.worker)
        else:
            session.free_lane(issued)
            if session.feed is not None:
                session.voided.append((issued.worker, issued.seq))
            if session.invited is not None:
                session.invited[issued.worker] += 1
            self._touch(issued.worker)

    # ---- delivering ----

    def take_one(self, wanted: Callable[[int], bool], version: int) -> AcceptedChunk | None:
        """Deliver the first unread chunk of a feed whose worker is `wanted`, or return None.

        The chunk counts as held until `consumed`, and its lane stays in use until `stored`.
        """
        session = self._session
        assert session is not None
        self._drop_stale(session, version)
        for accepted in self.unread:
            worker = accepted.ticket.worker
            if wanted(worker):
                self.unread.remove(accepted)
                session.held[worker] += 1
                session.held_total += 1
                self.delivered += 1
                return accepted
        return None

    def stored(self, accepted: AcceptedChunk) -> None:
        """Free the lane of a feed's chunk after its rows were copied."""
        if self._session is not None:
            self._session.lanes[accepted.ticket.worker].append(accepted.ticket.lane)
            self._touch(accepted.ticket.worker)

    def consumed(self, worker: int, chunks: int, dropped: DropCause | None = None) -> None:
        """Record that the learner is done with some chunks of a feed, or that they were dropped for a cause."""
        session = self._session
        if session is not None:
            session.consume(worker, chunks)
        if dropped is not None and chunks:
            self.delivered -= chunks
            self.dropped[dropped] += chunks
            if session is not None and session.invited is not None:
                session.invited[worker] += chunks
        self._touch(worker)

    def take(self, version: int) -> list[AcceptedChunk] | None:
        """Deliver the next batch, with its chunks in the order of workers; None if the batch is incomplete."""
        session = self._session
        assert session is not None
        self._drop_stale(session, version)
        if session.num_chunks is None:
            if not self.round_is_complete():
                return None
            batch = self._of_next_batch(session)
            session.missing = None
        else:
            if len(self.unread) < session.num_chunks:
                return None
            batch = list(islice(self.unread, session.num_chunks))
            session.held = Counter(accepted.ticket.worker for accepted in batch)
            session.held_total = len(batch)
            for accepted in batch:  # the caller copies the chunks before it grants tickets
                session.free_lane(accepted.ticket)
        for accepted in batch:
            self.unread.remove(accepted)
            self._touch(accepted.ticket.worker)
        session.taken += session.rollouts
        self.delivered += len(batch)
        return sorted(batch, key=lambda accepted: (accepted.ticket.worker, accepted.ticket.seq))

    def chunks_to_copy(self) -> list[AcceptedChunk]:
        """Return the unread chunks of workers that have no free lane, if a batch cannot become complete otherwise.

        This happens if workers were parked: the lanes of the others then hold fewer chunks than a batch. The caller
        copies the chunks and calls `copied`.
        """
        session = self._session
        if session is None or session.num_chunks is None or session.feed is not None:
            return []
        if self.presence.num_present * session.lanes_per_worker >= session.depth * session.num_chunks:
            return []
        return [a for a in self.unread if a.ticket.lane >= 0 and not session.lanes[a.ticket.worker]]

    def copied(self, accepted: AcceptedChunk, info: Any) -> None:
        """Free the lane of an unread chunk, whose copy is in `info`."""
        assert self._session is not None
        self._session.lanes[accepted.ticket.worker].append(accepted.ticket.lane)
        self.unread.replace(replace(accepted, ticket=replace(accepted.ticket, lane=-1), info=info))
        self._touch(accepted.ticket.worker)

    def round_is_complete(self) -> bool:
        """Whether the next batch is complete: it has all chunks of the present workers, which must be a quorum."""
        session = self._session
        assert session is not None
        if session.missing is None:
            arrived = Counter(accepted.ticket.worker for accepted in self._of_next_batch(session))
            needed = {worker: session.rollouts - arrived[worker] for worker in self._present(session)}
            session.missing = {worker: count for worker, count in needed.items() if count}
        if session.missing:
            return False
        late = sum(session.since.get(worker, 0) > session.taken for worker in session.unparked)
        quorum = max(1, self.presence.quorum - late)
        if len(self.unread) < quorum:
            return False
        return len({accepted.ticket.worker for accepted in self._of_next_batch(session)}) >= quorum

    def _of_next_batch(self, session: CollectionSession) -> list[AcceptedChunk]:
        return self.unread.before_round(session.taken + session.rollouts)

    def _drop_stale(self, session: CollectionSession, version: int) -> None:
        if session.max_staleness is not None:
            for accepted in self.unread.remove_before(version - session.max_staleness):
                self._drop(accepted.ticket, "stale")

    def release(self) -> None:
        """Record that the learner is done with its batch."""
        if self._session is not None:
            self._session.release()

    def cancel(self) -> int:
        """End the session, and drop open tickets and unread chunks. Return the id of the last ticket."""
        self.dropped["cancelled"] += len(self.outstanding) + len(self.unread)
        if not self.dropped["cancelled"]:
            del self.dropped["cancelled"]
        self.outstanding.clear()
        self.unread.clear()
        self._session = self._queue = None
        return self._seq
