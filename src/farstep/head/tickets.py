"""Who may roll: tickets, admission and exactly-once acceptance, as a state machine without I/O.

A session yields batches. With `num_chunks=None` every worker rolls one chunk per round, and a batch is the chunks of
the next `rollouts` rounds; otherwise it is the first `num_chunks` chunks to arrive. Admission is one rule: batches
outstanding + unread + held by the learner never exceed `max_staleness + 1`; a learner that publishes once per batch
then never gets an older row. If it publishes more often, rows become too old: those are dropped here, counted, and
collected again.

A workflow opens a feed instead: chunks are taken one by one, as they arrive, and count as held until their rows were
consumed, by windows of some chunks of some actors each. Admission counts windows: what a worker has begun it may
complete, and no worker begins so many that others could not begin theirs; so rows never stand still in parts that
nobody can use. Without a bound on staleness only room holds workers back; `invited` ones wait to be asked.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

_QUEUED_PER_WORKER = 2  # one being rolled, one to go on with at once
_FEED_LANES = 3  # the same, and one that is being taken in


@dataclass(frozen=True)
class IssuedTicket:
    """A ticket that was given: who rolls what into which lane."""

    seq: int
    worker: int
    batch: int
    """Index of its round; -1 in a session without rounds (first come)."""
    lane: int
    min_version: int


@dataclass(frozen=True)
class AcceptedChunk:
    """A chunk that was accepted."""

    ticket: IssuedTicket
    version: int
    """What it counts as, for its age."""
    piece: Any


@dataclass(frozen=True)
class FeedPlan:
    """What a workflow consumes together, and how far its workers may run ahead."""

    max_staleness: int | None = None
    actors: int | None = 1
    """Workers whose windows make a batch; None: all that are present."""
    chunks: int = 1
    """Of each actor."""
    invited: Mapping[int, int] | None = None
    """Per worker, how many chunks it was asked for already; None: it rolls what it may."""


QueueKey = tuple[int, int, int]
"""A worker's key in the queue for tickets: tickets that it holds, tickets that it was given so far, its number."""


@dataclass
class CollectionSession:
    """What the current call asked for, and how far it got."""

    max_staleness: int | None
    """None: synchronous, age is not looked at."""
    num_chunks: int | None
    batches: int | None
    """How many batches in all; None: as many as are asked for."""
    rollouts: int = 1
    """Rounds per batch."""
    issued: dict[int, int] = field(default_factory=dict)
    """Per worker, the first round for which it has no ticket yet."""
    redo: dict[int, deque[tuple[int, int]]] = field(default_factory=dict)
    """Per worker, round and lane of tickets to reissue."""
    due: set[int] = field(default_factory=set)
    """Workers whose state changed since tickets were last granted (rounds only)."""
    missing: dict[int, int] | None = None
    """Per worker, how many of its chunks the next batch still needs (rounds only); None: must be recomputed."""
    taken: int = 0
    """Rounds handed to the learner; like `released`, a multiple of `rollouts`."""
    released: int = 0
    """Rounds that the learner has finished with."""
    lanes: dict[int, list[int]] = field(default_factory=dict)
    """Per worker, free lanes (first-come sessions only)."""
    feed: FeedPlan | None = None
    voided: list[tuple[int, int]] = field(default_factory=list)
    """Worker and ticket id of each dropped chunk of a feed, until `Tickets.voided` returns them."""
    since: dict[int, int] = field(default_factory=dict)
    """Per worker that joined after the session began, the first round that includes it."""
    held: Counter[int] = field(default_factory=Counter)
    """Per worker, chunks that the learner has and is not done with (rounds count batches instead)."""
    invited: dict[int, int] | None = None
    """Per worker, how many tickets it was asked to take; None: it takes what it may have."""
    held_total: int = 0
    begun: Counter[int] = field(default_factory=Counter)
    """Per worker, windows of a feed that it has begun and that were not consumed."""
    begun_total: int = 0
    completing: list[QueueKey] = field(default_factory=list)
    beginning: list[QueueKey] = field(default_factory=list)
    """Heaps of workers that may get a ticket: those with an incomplete window, and the others. Entries may be stale."""

    @property
    def depth(self) -> int:
        return (self.max_staleness or 0) + 1

    @property
    def rounds_ahead(self) -> int:
        """Most rounds that may be outstanding, unread or held at the same time; each has its own lane."""
        return self.depth * self.rollouts


class Tickets:
    """Gives tickets to workers and takes chunks from them."""

    def __init__(self, num_workers: int, fewest: int | None = None) -> None:
        self._workers = num_workers
        self._fewest = num_workers if fewest is None else fewest
        """Batches go on without workers that are absent, as long as so many are there."""
        self.absent: set[int] = set()
        self._draining: set[int] = set()
        self.departed: set[int] = set()
        """Workers that left since `Feed.members` last cleared this."""
        self.membership = 0
        """Increases whenever a worker joins or leaves."""
        self._seq = 0
        self._outstanding: dict[int, IssuedTicket] = {}
        self._open: list[list[int]] = [[] for _ in range(num_workers)]
        """Per worker, the numbers of its open tickets, in order."""
        self._arrived: dict[int, AcceptedChunk] = {}
        """By ticket id, in order of arrival."""
        self._arrived_of: Counter[int] = Counter()
        self._oldest = 0
        """No chunk that has arrived is of an older version."""
        self._session: CollectionSession | None = None
        self.issued = self.delivered = 0
        self.dropped: Counter[str] = Counter()

    def lanes_needed(
        self, max_staleness: int | None, num_chunks: int | None, feed: FeedPlan | None = None, rollouts: int = 1
    ) -> int:
        """How many lanes a session writes into."""
        if feed is not None:
            return _FEED_LANES
        depth = (max_staleness or 0) + 1
        if num_chunks is None:
            return depth * rollouts
        # With fewer than a batch's share per worker, a batch of many chunks could never be complete.
        return max(depth, _QUEUED_PER_WORKER, -(-depth * num_chunks // self._fewest))

    def open(
        self,
        max_staleness: int | None,
        num_chunks: int | None = None,
        batches: int | None = None,
        feed: FeedPlan | None = None,
        rollouts: int = 1,
    ) -> None:
        """Begin a session; the previous one must be cancelled.

        Args:
            max_staleness: Versions that a row may be behind; None: a synchronous session, where age does not matter.
            num_chunks: Chunks per batch, in order of arrival; None: the chunks of whole rounds.
            batches: Number of batches in the session; None: unlimited.
            feed: For a workflow, whose chunks are taken one by one.
            rollouts: Rounds per batch, if `num_chunks` is None.
        """
        assert self._session is None, "cancel the session before opening another"
        session = CollectionSession(max_staleness, num_chunks, batches, rollouts, feed=feed)
        lanes = self.lanes_needed(max_staleness, num_chunks, feed, rollouts)
        for worker in range(self._workers):
            session.issued[worker] = 0
            session.redo[worker] = deque()
            session.lanes[worker] = list(range(lanes))
        if feed is not None and feed.invited is not None:
            session.invited = {worker: feed.invited.get(worker, 0) for worker in range(self._workers)}
        self._session = session
        for worker in range(self._workers):
            self._touch(worker)

    @property
    def present(self) -> set[int]:
        """All workers except those that have no node, or whose node is about to leave."""
        return set(range(self._workers)) - self.absent - self._draining

    @property
    def quorum(self) -> int:
        """Workers that must be present to continue."""
        return self._fewest

    def invite(self, workers: Iterable[int], chunks: int = 1) -> None:
        """Let each of these workers roll `chunks` more chunks."""
        if self._session is not None and self._session.invited is not None:
            for worker in workers:
                self._session.invited[worker] += chunks
                self._touch(worker)

    def withdraw(self, worker: int) -> None:
        """Cancel the chunks that a worker was asked for and has no ticket for."""
        if self._session is not None and self._session.invited is not None:
            self._session.invited[worker] = 0

    @property
    def is_open(self) -> bool:
        return self._session is not None

    @property
    def in_flight(self) -> int:
        return len(self._outstanding)

    @property
    def buffered(self) -> int:
        return len(self._arrived)

    def is_live(self, seq: int) -> bool:
        """Whether the chunk of that ticket is still to come, or to be taken."""
        return seq in self._outstanding or seq in self._arrived

    def voided(self) -> list[tuple[int, int]]:
        """Worker and ticket id of each chunk of a feed that was dropped since the last call."""
        if self._session is None:
            return []
        found, self._session.voided = self._session.voided, []
        return found

    def arrived_of(self) -> list[int]:
        """The workers of chunks that nobody took yet, in order."""
        return [accepted.ticket.worker for accepted in self._arrived.values()]

    def oldest_of(self, worker: int) -> int | None:
        """The open ticket that a worker got first: it does them in order."""
        return self._open[worker][0] if self._open[worker] else None

    def busy(self, worker: int) -> int:
        """How many tickets a worker holds."""
        return len(self._open[worker])

    def pending(self, worker: int) -> int:
        """Chunks of a worker that are being rolled or wait to be taken."""
        return self.busy(worker) + self._arrived_of[worker]

    # ---- giving ----

    def grant(self, available: Container[int], version: int) -> list[IssuedTicket]:
        """All tickets that the available workers may get now; `version` is the current one. Call `join` first when
        another worker has become available."""
        session = self._session
        if session is None:
            return []
        if session.num_chunks is None:
            there = sorted(worker for worker in session.due if worker in available)
            orders = [issued for worker in there for issued in self._rounds(session, worker, version)]
            # Workers that are being restarted stay queued; `join` queues absent ones when they return.
            session.due = {worker for worker in session.due.difference(there) if worker not in self.absent}
            return orders
        wanted = session.num_chunks
        if session.feed is not None and session.feed.actors is None:
            wanted = max(1, self._workers - len(self.absent) - len(self._draining)) * session.feed.chunks
        return self._first_come(session, wanted, available, version)

    def _rounds(self, session: CollectionSession, worker: int, version: int) -> list[IssuedTicket]:
        places = []
        while session.redo[worker]:
            places.append(session.redo[worker].popleft())
        last = session.released + session.rounds_ahead
        if session.batches is not None:
            last = min(last, session.batches * session.rollouts)
        while session.issued[worker] < last:
            number = session.issued[worker]
            session.issued[worker] += 1
            places.append((number, number % session.rounds_ahead))
        return [
            self._order(session, worker, number, lane, version + (number - session.released) // session.rollouts)
            for number, lane in places
        ]

    def _first_come(
        self, session: CollectionSession, wanted: int, available: Container[int], version: int
    ) -> list[IssuedTicket]:
        orders: list[IssuedTicket] = []
        while True:
            ahead = len(self._outstanding) + len(self._arrived) + session.held_total
            if session.feed is None and ahead >= session.depth * wanted:
                return orders
            # The worker with the fewest open tickets; among equals, the one that was given the fewest so far.
            places = [self._first(session, session.completing, True, available)]
            if self._may_begin(session):
                places.append(self._first(session, session.beginning, False, available))
            worker = min((place for place in places if place is not None), default=(0, 0, -1))[2]
            if worker < 0:
                return orders
            session.issued[worker] += 1
            if session.invited is not None:
                session.invited[worker] -= 1
            lane = session.lanes[worker].pop()
            orders.append(self._order(session, worker, -1, lane, version + ahead // wanted))

    def _first(
        self, session: CollectionSession, queue: list[QueueKey], inside: bool, available: Container[int]
    ) -> QueueKey | None:
        """The first place of a queue that is up to date and whose worker may have a ticket."""
        while queue:
            worker = queue[0][2]
            same = queue[0] == self._place(session, worker) and inside == self._is_inside(session, worker)
            if same and self._may_roll(session, worker) and worker in available:
                return queue[0]
            heapq.heappop(queue)  # `_touch` queues the worker again when this changes
        return None

    def _place(self, session: CollectionSession, worker: int) -> QueueKey:
        return self.busy(worker), session.issued[worker], worker

    def _touch(self, worker: int) -> None:
        """Queue a worker again after a change that may let it get a ticket."""
        session = self._session
        if session is None:
            return
        if session.num_chunks is None:
            session.due.add(worker)
            return
        if session.feed is not None:
            begun = -(-self._chunks_of(session, worker) // session.feed.chunks)
            session.begun_total += begun - session.begun[worker]
            session.begun[worker] = begun
        if not self._may_roll(session, worker):
            return
        inside = self._is_inside(session, worker)
        queue = session.completing if inside else session.beginning
        if len(queue) > 4 * self._workers:
            queue[:] = {
                place
                for place in queue
                if place == self._place(session, place[2]) and inside == self._is_inside(session, place[2])
            }
            heapq.heapify(queue)
        heapq.heappush(queue, self._place(session, worker))

    def _chunks_of(self, session: CollectionSession, worker: int) -> int:
        """Chunks of a worker that are being rolled, wait to be taken, or are held by the learner."""
        return session.held[worker] + self.pending(worker)

    def _may_roll(self, session: CollectionSession, worker: int) -> bool:
        """Whether a worker's own limits allow it another chunk."""
        if not session.lanes[worker] or self.busy(worker) >= _QUEUED_PER_WORKER:
            return False
        if session.invited is not None and not session.invited[worker]:
            return False
        feed = session.feed
        if feed is None or feed.max_staleness is None or self._is_inside(session, worker):
            return True
        return self._chunks_of(session, worker) < session.depth * feed.chunks

    def _is_inside(self, session: CollectionSession, worker: int) -> bool:
        """Whether the worker's next chunk continues a window of a feed."""
        feed = session.feed
        if feed is None or feed.max_staleness is None:
            return False
        return self._chunks_of(session, worker) % feed.chunks > 0

    def _may_begin(self, session: CollectionSession) -> bool:
        """Whether another window may be begun. With `n="all"` each worker has a bound of its own instead: windows that
        a departed worker left in the buffer must not block the others."""
        feed = session.feed
        if feed is None or feed.max_staleness is None or feed.actors is None:
            return True
        return session.begun_total < session.depth * feed.actors

    def _order(self, session: CollectionSession, worker: int, batch: int, lane: int, version_then: int) -> IssuedTicket:
        """`version_then`: the version when the chunk is consumed, if the learner publishes once per batch."""
        self._seq += 1
        self.issued += 1
        bound = 0 if session.max_staleness is None else max(0, version_then - session.max_staleness)
        issued = IssuedTicket(self._seq, worker, batch, lane, bound)
        self._outstanding[issued.seq] = issued
        self._open[worker].append(issued.seq)
        self._touch(worker)
        return issued

    # ---- taking ----

    def outstanding(self, seq: int) -> IssuedTicket | None:
        """The open ticket of that number."""
        return self._outstanding.get(seq)

    def accept(self, worker: int, seq: int, version: int, piece: Any) -> bool:
        """Take a chunk if its ticket is open and this worker owns it; anything else is a leftover or a repetition."""
        issued = self._outstanding.get(seq)
        if issued is None or issued.worker != worker:
            return False
        self._oldest = min(self._oldest, version) if self._arrived else version
        self._arrived[seq] = AcceptedChunk(issued, version, piece)
        self._arrived_of[worker] += 1
        self._shut(issued)
        session = self._session
        if session is not None and session.missing and issued.batch < session.taken + session.rollouts:
            left = session.missing.pop(worker, 1) - 1  # an absent worker has no entry: its chunk is optional
            if left:
                session.missing[worker] = left
        return True

    def give_back(self, worker: int, seq: int, cause: str) -> bool:
        """The worker could not do this ticket; somebody is to do it again."""
        issued = self._outstanding.get(seq)
        if issued is None or issued.worker != worker:
            return False
        self._shut(issued)
        self._drop(issued, cause)
        return True

    def again(self, worker: int, seq: int, cause: str) -> bool:
        """The worker could not do this ticket and does it once more by itself, before its later ones."""
        issued = self._outstanding.get(seq)
        if issued is None or issued.worker != worker:
            return False
        self.dropped[cause] += 1
        self.issued += 1
        return True

    def lost(self, worker: int) -> None:
        """The worker is gone with its open tickets; what it handed over stays."""
        for issued in [self._outstanding[seq] for seq in self._open[worker]]:
            self._shut(issued)
            self._drop(issued, "worker lost")

    def _shut(self, issued: IssuedTicket) -> None:
        """The ticket is not open any more."""
        del self._outstanding[issued.seq]
        self._open[issued.worker].remove(issued.seq)
        self._touch(issued.worker)

    def leave(self, worker: int) -> None:
        """The worker has no place to be, and nobody knows for how long: batches go on without it."""
        self.absent.add(worker)
        self._draining.discard(worker)
        self.departed.add(worker)
        self.membership += 1
        if (session := self._session) is not None:
            session.missing = None
            session.redo[worker].clear()
            if session.feed is not None and session.feed.actors is None:
                self.withdraw(worker)  # others go on without it; it takes part again from the next `invite` on

    def drain(self, worker: int) -> None:
        """The worker's node is about to leave: the worker finishes its tickets and gets no new ones."""
        if worker not in self._draining and worker not in self.absent:
            self._draining.add(worker)
            self.membership += 1

    def join(self, worker: int) -> None:
        """The worker is there: it is part of the batches that nobody has begun, or of all that cannot do without it."""
        self.membership += worker in self.absent or worker in self._draining
        self._draining.discard(worker)
        if worker in self.absent:
            self.absent.discard(worker)
            if (session := self._session) is not None:
                others = self._present(session) - {worker}
                begun = max((session.issued[other] for other in others), default=0)
                first = session.taken if len(others) < self._fewest else max(begun, session.taken)
                first = -(-first // session.rollouts) * session.rollouts  # from the start of a batch on
                session.since[worker] = session.issued[worker] = first
                if session.num_chunks is None:
                    self._skip_delivered(session, worker)
                session.missing = None
        self._touch(worker)

    def _skip_delivered(self, session: CollectionSession, worker: int) -> None:
        """Do not reissue tickets for rounds that the worker delivered before it left and that are still unread."""
        first = session.issued[worker]
        session.redo[worker].clear()  # filled by chunks that became stale while it was absent
        delivered = {a.ticket.batch for a in self._arrived.values() if a.ticket.worker == worker}
        session.issued[worker] = max([first, *(number + 1 for number in delivered)])
        gaps = set(range(first, session.issued[worker])) - delivered
        session.redo[worker].extend((number, number % session.rounds_ahead) for number in sorted(gaps))

    def _present(self, session: CollectionSession) -> set[int]:
        """Whose chunks the next batch needs."""
        return {
            worker
            for worker in range(self._workers)
            if worker not in self.absent and session.since.get(worker, 0) <= session.taken
        }

    def _drop(self, issued: IssuedTicket, cause: str) -> None:
        self.dropped[cause] += 1
        session = self._session
        if session is None:
            return
        if session.num_chunks is None:
            if issued.batch >= session.since.get(issued.worker, 0):  # else no batch waits for it
                session.redo[issued.worker].append((issued.batch, issued.lane))
            session.missing = None
            self._touch(issued.worker)
        else:
            session.lanes[issued.worker].append(issued.lane)
            if session.feed is not None:
                session.voided.append((issued.worker, issued.seq))
            if session.invited is not None:
                session.invited[issued.worker] += 1
            self._touch(issued.worker)

    def take_one(self, wanted: Callable[[int], bool], version: int) -> AcceptedChunk | None:
        """The first chunk of a feed whose worker is wanted: held until `consumed`, its lane in use until `stored`."""
        session = self._session
        assert session is not None
        self._drop_stale(session, version)
        for accepted in self._arrived.values():
            worker = accepted.ticket.worker
            if wanted(worker):
                self._forget(accepted)
                session.held[worker] += 1
                session.held_total += 1
                self.delivered += 1
                return accepted
        return None

    def _forget(self, accepted: AcceptedChunk) -> None:
        del self._arrived[accepted.ticket.seq]
        self._arrived_of[accepted.ticket.worker] -= 1

    def stored(self, accepted: AcceptedChunk) -> None:
        """A chunk of a feed was copied to where it stays."""
        if self._session is not None:
            self._session.lanes[accepted.ticket.worker].append(accepted.ticket.lane)
            self._touch(accepted.ticket.worker)

    def consumed(self, worker: int, chunks: int, dropped: str | None = None) -> None:
        """The learner is done with some chunks of a feed, or they were dropped for a cause when it was their turn."""
        session = self._session
        if session is not None:
            # What an earlier session took is not held by this one.
            left = max(0, session.held[worker] - chunks)
            session.held_total -= session.held[worker] - left
            session.held[worker] = left
        if dropped is not None and chunks:
            self.delivered -= chunks
            self.dropped[dropped] += chunks
            if session is not None and session.invited is not None:
                session.invited[worker] += chunks
        self._touch(worker)

    def take(self, version: int) -> list[AcceptedChunk] | None:
        """The next batch if it is there, its chunks in order of workers; releases the one before."""
        session = self._session
        assert session is not None
        self._drop_stale(session, version)
        if session.num_chunks is None:
            if not self.round_is_complete():
                return None
            batch = self._of_next_batch(session)
            session.missing = None
        else:
            if len(self._arrived) < session.num_chunks:
                return None
            batch = list(islice(self._arrived.values(), session.num_chunks))
            session.held = Counter(accepted.ticket.worker for accepted in batch)
            session.held_total = len(batch)
            for accepted in batch:  # copied together by the caller before anybody gets the next ticket
                session.lanes[accepted.ticket.worker].append(accepted.ticket.lane)
        for accepted in batch:
            self._forget(accepted)
            self._touch(accepted.ticket.worker)
        session.taken += session.rollouts
        self.delivered += len(batch)
        return sorted(batch, key=lambda accepted: (accepted.ticket.worker, accepted.ticket.seq))

    def round_is_complete(self) -> bool:
        """Whether the next batch has every chunk of the present workers, and chunks of at least `fewest` workers."""
        session = self._session
        assert session is not None
        if session.missing is None:
            here = Counter(accepted.ticket.worker for accepted in self._of_next_batch(session))
            needed = {worker: session.rollouts - here[worker] for worker in self._present(session)}
            session.missing = {worker: count for worker, count in needed.items() if count}
        if session.missing or len(self._arrived) < self._fewest:
            return False
        return len({accepted.ticket.worker for accepted in self._of_next_batch(session)}) >= self._fewest

    def _of_next_batch(self, session: CollectionSession) -> list[AcceptedChunk]:
        stop = session.taken + session.rollouts
        return [accepted for accepted in self._arrived.values() if accepted.ticket.batch < stop]

    def _drop_stale(self, session: CollectionSession, version: int) -> None:
        if session.max_staleness is None or not self._arrived or version - self._oldest <= session.max_staleness:
            return
        for accepted in [a for a in self._arrived.values() if version - a.version > session.max_staleness]:
            self._forget(accepted)
            self._drop(accepted.ticket, "stale")
        self._oldest = min((accepted.version for accepted in self._arrived.values()), default=version)

    def release(self) -> None:
        """The learner is done with the batch it held."""
        session = self._session
        if session is not None:
            if session.num_chunks is None and session.released < session.taken:
                session.due.update(range(self._workers))
            session.released = session.taken
            session.held.clear()
            session.held_total = 0

    def cancel(self) -> int:
        """End the session; open tickets and unread chunks are dropped. Returns the last ticket's number."""
        self.dropped["cancelled"] += len(self._outstanding) + len(self._arrived)
        if not self.dropped["cancelled"]:
            del self.dropped["cancelled"]
        self._outstanding.clear()
        for numbers in self._open:
            numbers.clear()
        self._arrived.clear()
        self._arrived_of.clear()
        self._session = None
        return self._seq
