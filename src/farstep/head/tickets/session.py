"""The progress of one call: the rounds or chunks that were issued, delivered and released."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from farstep.head.tickets.records import FeedPlan, IssuedTicket


@dataclass
class CollectionSession:
    """What the current call collects, and its progress.

    If `num_chunks` is None, a session has rounds: every worker rolls one chunk per round. Otherwise the session takes
    chunks in the order of arrival.
    """

    max_staleness: int | None
    """Maximum number of versions that a row may be behind; None: a synchronous session, in which age does not
    matter."""
    num_chunks: int | None
    """Number of chunks per batch, in the order of arrival; None: a batch has the chunks of whole rounds."""
    batches: int | None
    """Number of batches in the session; None: unlimited."""
    rollouts: int = 1
    """Rounds per batch."""
    feed: FeedPlan | None = None
    """Set if a workflow takes chunks one by one."""
    issued: dict[int, int] = field(default_factory=dict)
    """For each worker, the first round for which it has no ticket yet; without rounds, its number of tickets so far."""
    redo: dict[int, deque[tuple[int, int]]] = field(default_factory=dict)
    """For each worker, round and lane of the tickets to reissue."""
    due: set[int] = field(default_factory=set)
    """Workers whose state changed since tickets were last granted (rounds only)."""
    missing: dict[int, int] | None = None
    """For each worker, how many of its chunks the next batch still needs (rounds only); None: recompute."""
    taken: int = 0
    """Number of rounds delivered to the learner; a multiple of `rollouts`."""
    released: int = 0
    """Number of rounds that the learner is done with; a multiple of `rollouts`."""
    since: dict[int, int] = field(default_factory=dict)
    """For each worker that joined during the session, the first round that includes it."""
    unparked: set[int] = field(default_factory=set)
    """Workers that joined after they were parked."""
    newcomers: set[int] = field(default_factory=set)
    """Workers that joined during the session, and of which the learner has consumed nothing since."""
    lanes: dict[int, list[int]] = field(default_factory=dict)
    """For each worker, its free lanes (only without rounds)."""
    lanes_per_worker: int = 0
    held: Counter[int] = field(default_factory=Counter)
    """For each worker, the number of chunks that the learner holds (only without rounds)."""
    held_total: int = 0
    invited: dict[int, int] | None = None
    """For each worker, the number of tickets that its invitations still allow; None: workers need no invitation."""
    voided: list[tuple[int, int]] = field(default_factory=list)
    """Worker and ticket id of each dropped chunk of a feed, since the last `Tickets.voided`."""

    @cached_property
    def depth(self) -> int:
        """Maximum number of batches that may be outstanding, unread or held at the same time."""
        return (self.max_staleness or 0) + 1

    @cached_property
    def rounds_ahead(self) -> int:
        """Maximum number of rounds that may be outstanding, unread or held at the same time; each has its own lane."""
        return self.depth * self.rollouts

    def next_rounds(self, worker: int) -> list[tuple[int, int]]:
        """Take the rounds that a worker may roll now, each with its lane: first rounds to repeat, then new rounds."""
        rounds, ahead = list(self.redo[worker]), self.rounds_ahead
        self.redo[worker].clear()
        last = self.released + ahead
        if self.batches is not None:
            last = min(last, self.batches * self.rollouts)
        first = self.issued[worker]
        if first < last:
            rounds += [(number, number % ahead) for number in range(first, last)]
            self.issued[worker] = last
        return rounds

    def join(self, worker: int, first: int, delivered: Iterable[int]) -> None:
        """Include a worker from round `first` on. Skip the rounds that it `delivered` before it left."""
        first = -(-first // self.rollouts) * self.rollouts  # the start of a batch
        self.since[worker] = self.issued[worker] = first
        if self.num_chunks is None:
            self._skip_delivered(worker, set(delivered))
        self.missing = None

    def _skip_delivered(self, worker: int, delivered: set[int]) -> None:
        """Do not reissue tickets for rounds whose chunks the worker has already delivered."""
        first = self.issued[worker]
        self.redo[worker].clear()  # has rounds whose chunks became stale while the worker was absent
        self.issued[worker] = max([first, *(number + 1 for number in delivered)])
        gaps = set(range(first, self.issued[worker])) - delivered
        self.redo[worker].extend((number, number % self.rounds_ahead) for number in sorted(gaps))

    def free_lane(self, ticket: IssuedTicket) -> None:
        """Free the lane of a ticket, unless its chunk was copied."""
        if ticket.lane >= 0:
            self.lanes[ticket.worker].append(ticket.lane)

    def consume(self, worker: int, chunks: int) -> None:
        """Record that the learner is done with chunks of a worker. Chunks of earlier sessions do not count."""
        left = max(0, self.held[worker] - chunks)
        if left < self.held[worker]:
            self.newcomers.discard(worker)
        self.held_total -= self.held[worker] - left
        self.held[worker] = left

    def release(self) -> None:
        """Record that the learner is done with all delivered rounds."""
        if self.num_chunks is None and self.released < self.taken:
            self.due.update(self.issued)
        self.released = self.taken
        self.held.clear()
        self.held_total = 0
