"""Who may roll: tickets, admission and exactly-once acceptance, as a state machine without I/O.

A session yields batches. With `num_chunks=None` batch `b` is one chunk of every worker; otherwise it is the first
`num_chunks` chunks to arrive. Admission is one rule: batches outstanding + unread + held by the
learner never exceed `max_staleness + 1`; a learner that publishes once per batch then never meets an older row.
What publishes more often makes rows too old: those are dropped here, counted, and rolled again.

A workflow opens a feed instead: chunks are taken one by one, as they arrive, and count as held until their rows were
consumed, by windows of some chunks of some actors each. Admission counts windows: what a worker has begun it may
complete, and no worker begins so many that others could not begin theirs; so rows never stand still in parts that
nobody can use. Without a bound on staleness only room holds workers back; `invited` ones wait to be asked.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

_QUEUED_PER_WORKER = 2  # one being rolled, one to go on with at once
_FEED_LANES = 3  # the same, and one that is being taken in


@dataclass(frozen=True)
class Order:
    """A ticket that was given: who rolls what into which lane."""

    seq: int
    worker: int
    batch: int
    lane: int
    min_version: int


@dataclass(frozen=True)
class Arrived:
    """A chunk that was accepted."""

    order: Order
    version: int
    """What it counts as, for its age."""
    piece: Any


@dataclass(frozen=True)
class FeedPlan:
    """What a workflow consumes together, and how far its workers may run ahead."""

    max_staleness: int | None = None
    actors: int | None = 1
    """None: all that are present."""
    chunks: int = 1
    """Of each actor."""
    invited: Mapping[int, int] | None = None
    """Per worker, how many chunks it was asked for already; None: it rolls what it may."""


@dataclass
class Session:
    """What the current call asked for, and how far it got."""

    max_staleness: int | None
    """None: synchronous, age is not looked at."""
    num_chunks: int | None
    batches: int | None
    """How many batches in all; None: as many as are asked for."""
    issued: dict[int, int] = field(default_factory=dict)
    """Per worker, the next batch it has no ticket for."""
    redo: dict[int, deque[tuple[int, int]]] = field(default_factory=dict)
    """Per worker, batch and lane of tickets to give again."""
    taken: int = 0
    released: int = 0
    lanes: dict[int, list[int]] = field(default_factory=dict)
    """Per worker, free lanes (first-come sessions only)."""
    feed: FeedPlan | None = None
    since: dict[int, int] = field(default_factory=dict)
    """Per worker, the first batch that it is part of, if it came later than the session."""
    held: Counter[int] = field(default_factory=Counter)
    """Per worker, chunks that the learner has and is not done with (rounds count batches instead)."""
    invited: dict[int, int] | None = None
    """Per worker, how many tickets it was asked to take; None: it takes what it may have."""

    @property
    def depth(self) -> int:
        return (self.max_staleness or 0) + 1


class Tickets:
    """Gives tickets to workers and takes chunks from them."""

    def __init__(self, num_workers: int, fewest: int | None = None) -> None:
        self._workers = num_workers
        self._fewest = num_workers if fewest is None else fewest
        """Batches go on without workers that are absent, as long as so many are there."""
        self.absent: set[int] = set()
        self._draining: set[int] = set()
        self.departed: set[int] = set()
        """Workers that left since somebody emptied this."""
        self.membership = 0
        """Increases whenever a worker joins or leaves."""
        self._seq = 0
        self._outstanding: dict[int, Order] = {}
        self._open: list[list[int]] = [[] for _ in range(num_workers)]
        """Per worker, the numbers of its open tickets, in order."""
        self._arrived: deque[Arrived] = deque()
        self._session: Session | None = None
        self.issued = self.delivered = 0
        self.dropped: Counter[str] = Counter()

    def lanes_needed(self, max_staleness: int | None, num_chunks: int | None, feed: FeedPlan | None = None) -> int:
        """How many lanes a session writes into."""
        if feed is not None:
            return _FEED_LANES
        depth = (max_staleness or 0) + 1
        if num_chunks is None:
            return depth
        # With fewer than a batch's share per worker, a batch of many chunks could never be complete.
        return max(depth, _QUEUED_PER_WORKER, -(-depth * num_chunks // self._fewest))

    def open(
        self,
        max_staleness: int | None,
        num_chunks: int | None = None,
        batches: int | None = None,
        feed: FeedPlan | None = None,
    ) -> None:
        """Begin a session; whatever an earlier one left open is cancelled first. The chunks of a feed are taken one by
        one."""
        assert self._session is None, "cancel the session before opening another"
        session = Session(max_staleness, num_chunks, batches, feed=feed)
        lanes = self.lanes_needed(max_staleness, num_chunks, feed)
        for worker in range(self._workers):
            session.issued[worker] = 0
            session.redo[worker] = deque()
            session.lanes[worker] = list(range(lanes))
        if feed is not None and feed.invited is not None:
            session.invited = {worker: feed.invited.get(worker, 0) for worker in range(self._workers)}
        self._session = session

    @property
    def present(self) -> set[int]:
        """All workers but those that have no node, or whose node is to leave."""
        return set(range(self._workers)) - self.absent - self._draining

    @property
    def quorum(self) -> int:
        """How many workers must be present to go on."""
        return self._fewest

    def invite(self, workers: Iterable[int], chunks: int = 1) -> None:
        """These workers may roll so many more chunks."""
        if self._session is not None and self._session.invited is not None:
            for worker in workers:
                self._session.invited[worker] += chunks

    def withdraw(self, worker: int) -> None:
        """The worker may not roll what it was asked for and has no ticket for."""
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
        return seq in self._outstanding or any(arrived.order.seq == seq for arrived in self._arrived)

    def arrived_of(self) -> list[int]:
        """The workers of chunks that nobody took yet, in order."""
        return [arrived.order.worker for arrived in self._arrived]

    def oldest_of(self, worker: int) -> int | None:
        """The open ticket that a worker got first: it does them in order."""
        return self._open[worker][0] if self._open[worker] else None

    def busy(self, worker: int) -> int:
        """How many tickets a worker holds."""
        return len(self._open[worker])

    # ---- giving ----

    def grant(self, available: Iterable[int], version: int) -> list[Order]:
        """All tickets that the available workers may have now; `version` is the current one."""
        session = self._session
        if session is None:
            return []
        if session.num_chunks is None:
            return [order for worker in available for order in self._rounds(session, worker, version)]
        wanted = session.num_chunks
        if session.feed is not None and session.feed.actors is None:
            wanted = max(1, len(self.present)) * session.feed.chunks
        return self._first_come(session, wanted, list(available), version)

    def _rounds(self, session: Session, worker: int, version: int) -> list[Order]:
        orders = []
        while session.redo[worker]:
            batch, lane = session.redo[worker].popleft()
            orders.append(self._order(session, worker, batch, lane, version + batch - session.released))
        last = session.released + session.depth
        if session.batches is not None:
            last = min(last, session.batches)
        while session.issued[worker] < last:
            batch = session.issued[worker]
            session.issued[worker] += 1
            lane = batch % session.depth
            orders.append(self._order(session, worker, batch, lane, version + batch - session.released))
        return orders

    def _first_come(self, session: Session, wanted: int, available: list[int], version: int) -> list[Order]:
        orders: list[Order] = []
        while True:
            ahead = len(self._outstanding) + len(self._arrived) + session.held.total()
            free = [w for w in available if session.lanes[w] and self.busy(w) < _QUEUED_PER_WORKER]
            if session.invited is not None:
                free = [w for w in free if session.invited[w]]
            if session.feed is not None:
                free = self._admitted(session, session.feed, free)
            elif ahead >= session.depth * wanted:
                return orders
            if not free:
                return orders
            # Whoever has least to do; among equals, whoever got least so far.
            worker = min(free, key=lambda w: (self.busy(w), session.issued[w]))
            session.issued[worker] += 1
            if session.invited is not None:
                session.invited[worker] -= 1
            lane = session.lanes[worker].pop()
            orders.append(self._order(session, worker, -1, lane, version + ahead // wanted))

    def _admitted(self, session: Session, feed: FeedPlan, free: list[int]) -> list[int]:
        """Those who may roll another chunk of a feed: to complete a window, or to begin one."""
        if feed.max_staleness is None:
            return free
        chunks = session.held.copy()
        chunks.update(order.worker for order in self._outstanding.values())
        chunks.update(arrived.order.worker for arrived in self._arrived)
        begun = sum(-(-count // feed.chunks) for count in chunks.values())
        # Where all that are present are waited for, the bound of each is that of all: what one that has left still has
        # in the buffer must not keep another from its own.
        may_begin = feed.actors is None or begun < session.depth * feed.actors
        most = session.depth * feed.chunks
        return [w for w in free if chunks[w] % feed.chunks or (may_begin and chunks[w] < most)]

    def _order(self, session: Session, worker: int, batch: int, lane: int, version_then: int) -> Order:
        """`version_then`: the version when the chunk is consumed, if the learner publishes once per batch."""
        self._seq += 1
        self.issued += 1
        bound = 0 if session.max_staleness is None else max(0, version_then - session.max_staleness)
        order = Order(self._seq, worker, batch, lane, bound)
        self._outstanding[order.seq] = order
        self._open[worker].append(order.seq)
        return order

    # ---- taking ----

    def order(self, seq: int) -> Order | None:
        """The open ticket of that number."""
        return self._outstanding.get(seq)

    def accept(self, worker: int, seq: int, version: int, piece: Any) -> bool:
        """Take a chunk if its ticket is open and this worker owns it; anything else is a leftover or a repetition."""
        order = self._outstanding.get(seq)
        if order is None or order.worker != worker:
            return False
        self._shut(order)
        self._arrived.append(Arrived(order, version, piece))
        return True

    def give_back(self, worker: int, seq: int, cause: str) -> bool:
        """The worker could not do this ticket; somebody is to do it again."""
        order = self._outstanding.get(seq)
        if order is None or order.worker != worker:
            return False
        self._shut(order)
        self._drop(order, cause)
        return True

    def again(self, worker: int, seq: int, cause: str) -> bool:
        """The worker could not do this ticket and does it once more by itself, before its later ones."""
        order = self._outstanding.get(seq)
        if order is None or order.worker != worker:
            return False
        self.dropped[cause] += 1
        self.issued += 1
        return True

    def lost(self, worker: int) -> None:
        """The worker is gone with its open tickets; what it handed over stays."""
        for order in [self._outstanding[seq] for seq in self._open[worker]]:
            self._shut(order)
            self._drop(order, "worker lost")

    def _shut(self, order: Order) -> None:
        """The ticket is not open any more."""
        del self._outstanding[order.seq]
        self._open[order.worker].remove(order.seq)

    def leave(self, worker: int) -> None:
        """The worker has no place to be, and nobody knows for how long: batches go on without it."""
        self.absent.add(worker)
        self.departed.add(worker)
        self.membership += 1
        if self._session is not None:
            self._session.redo[worker].clear()
        self.withdraw(worker)  # it takes part again from the next invitation on

    def drain(self, worker: int) -> None:
        """The worker's node is to leave: it finishes what it has, and gets nothing new."""
        if worker not in self._draining:
            self._draining.add(worker)
            self.membership += 1

    def join(self, worker: int) -> None:
        """The worker is there: it is part of the batches that nobody has begun, or of all that cannot do without it."""
        self._draining.discard(worker)
        if worker in self.absent:
            self.absent.discard(worker)
            self.membership += 1
            if (session := self._session) is not None:
                others = self._present(session) - {worker}
                begun = max((session.issued[other] for other in others), default=0)
                first = session.taken if len(others) < self._fewest else max(begun, session.taken)
                session.since[worker] = session.issued[worker] = first

    def _present(self, session: Session) -> set[int]:
        """Whose chunks the next batch needs."""
        return {
            worker
            for worker in range(self._workers)
            if worker not in self.absent and session.since.get(worker, 0) <= session.taken
        }

    def _drop(self, order: Order, cause: str) -> None:
        self.dropped[cause] += 1
        session = self._session
        if session is None:
            return
        if session.num_chunks is None:
            session.redo[order.worker].append((order.batch, order.lane))
        else:
            session.lanes[order.worker].append(order.lane)
            if session.invited is not None:
                session.invited[order.worker] += 1

    def take_one(self, wanted: Callable[[int], bool], version: int) -> Arrived | None:
        """The first chunk of a feed whose worker is wanted: held until `consumed`, its lane in use until `stored`."""
        session = self._session
        assert session is not None
        self._drop_stale(session, version)
        for arrived in self._arrived:
            if wanted(arrived.order.worker):
                self._arrived.remove(arrived)
                session.held[arrived.order.worker] += 1
                self.delivered += 1
                return arrived
        return None

    def stored(self, arrived: Arrived) -> None:
        """A chunk of a feed was copied to where it stays."""
        if self._session is not None:
            self._session.lanes[arrived.order.worker].append(arrived.order.lane)

    def consumed(self, worker: int, chunks: int, dropped: str | None = None) -> None:
        """The learner is done with some chunks of a feed, or they were dropped for a cause when it was their turn."""
        session = self._session
        if session is not None:
            # What an earlier session took is not held by this one.
            session.held[worker] = max(0, session.held[worker] - chunks)
        if dropped is not None and chunks:
            self.delivered -= chunks
            self.dropped[dropped] += chunks
            if session is not None and session.invited is not None:
                session.invited[worker] += chunks

    def take(self, version: int) -> list[Arrived] | None:
        """The next batch if it is there, its chunks in order of workers; releases the one before."""
        session = self._session
        assert session is not None
        self._drop_stale(session, version)
        if session.num_chunks is None:
            if len(self._arrived) < self._workers - len(self.absent) - len(session.since):
                return None  # as nearly always: not all of them are looked at for every one that arrives
            batch = [arrived for arrived in self._arrived if arrived.order.batch == session.taken]
            missing = self._present(session) - {arrived.order.worker for arrived in batch}
            if missing or len(batch) < self._fewest:
                return None
        else:
            if len(self._arrived) < session.num_chunks:
                return None
            batch = [self._arrived[i] for i in range(session.num_chunks)]
            session.held = Counter(arrived.order.worker for arrived in batch)
            for arrived in batch:  # copied together by the caller before anybody gets the next ticket
                session.lanes[arrived.order.worker].append(arrived.order.lane)
        taken = {arrived.order.seq for arrived in batch}
        self._arrived = deque(arrived for arrived in self._arrived if arrived.order.seq not in taken)
        session.taken += 1
        self.delivered += len(batch)
        return sorted(batch, key=lambda arrived: (arrived.order.worker, arrived.order.seq))

    def _drop_stale(self, session: Session, version: int) -> None:
        if session.max_staleness is None:
            return
        for arrived in [a for a in self._arrived if version - a.version > session.max_staleness]:
            self._arrived.remove(arrived)
            self._drop(arrived.order, "stale")

    def release(self) -> None:
        """The learner is done with the batch it held."""
        session = self._session
        if session is not None:
            session.released = session.taken
            session.held.clear()

    def cancel(self) -> int:
        """End the session; open tickets and unread chunks are dropped. Returns the last ticket's number."""
        self.dropped["cancelled"] += len(self._outstanding) + len(self._arrived)
        if not self.dropped["cancelled"]:
            del self.dropped["cancelled"]
        self._outstanding.clear()
        for numbers in self._open:
            numbers.clear()
        self._arrived.clear()
        self._session = None
        return self._seq
