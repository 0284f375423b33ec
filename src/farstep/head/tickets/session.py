"""The progress of one call: which rounds or chunks were issued, delivered and released."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from farstep.head.tickets.records import FeedPlan


@dataclass
class CollectionSession:
    """What the current call collects, and its progress.

    A session has rounds if `num_chunks` is None: every worker rolls one chunk per round. Otherwise it takes chunks in
    order of arrival.
    """

    max_staleness: int | None
    """Versions that a row may be behind; None: a synchronous session, where age does not matter."""
    num_chunks: int | None
    """Chunks per batch, in order of arrival; None: the chunks of whole rounds."""
    batches: int | None
    """Number of batches in the session; None: unlimited."""
    rollouts: int = 1
    """Rounds per batch."""
    feed: FeedPlan | None = None
    """Set if a workflow takes chunks one by one."""
    issued: dict[int, int] = field(default_factory=dict)
    """Per worker, the first round for which it has no ticket yet; without rounds, its number of tickets so far."""
    redo: dict[int, deque[tuple[int, int]]] = field(default_factory=dict)
    """Per worker, round and lane of tickets to reissue."""
    due: set[int] = field(default_factory=set)
    """Workers whose state changed since tickets were last granted (rounds only)."""
    missing: dict[int, int] | None = None
    """Per worker, how many of its chunks the next batch still needs (rounds only); None: must be recomputed."""
    taken: int = 0
    """Rounds delivered to the learner; like `released`, a multiple of `rollouts`."""
    released: int = 0
    """Rounds that the learner has finished with."""
    since: dict[int, int] = field(default_factory=dict)
    """Per worker that joined during the session, the first round that includes it."""
    lanes: dict[int, list[int]] = field(default_factory=dict)
    """Per worker, free lanes (without rounds only)."""
    held: Counter[int] = field(default_factory=Counter)
    """Per worker, chunks that the learner has and is not done with (without rounds only)."""
    held_total: int = 0
    invited: dict[int, int] | None = None
    """Per worker, tickets that it may still get by invitation; None: workers roll without invitation."""
    voided: list[tuple[int, int]] = field(default_factory=list)
    """Worker and ticket id of each dropped chunk of a feed, until `Tickets.voided` returns them."""

    @cached_property
    def depth(self) -> int:
        """Most batches that may be outstanding, unread or held at the same time."""
        return (self.max_staleness or 0) + 1

    @cached_property
    def rounds_ahead(self) -> int:
        """Most rounds that may be outstanding, unread or held at the same time; each has its own lane."""
        return self.depth * self.rollouts

    def next_rounds(self, worker: int) -> list[tuple[int, int]]:
        """Take the rounds that a worker may roll now, each with its lane: repeated ones first, then new ones."""
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
        """Include a worker from round `first` on, except for the rounds that it `delivered` before it left."""
        first = -(-first // self.rollouts) * self.rollouts  # the start of a batch
        self.since[worker] = self.issued[worker] = first
        if self.num_chunks is None:
            self._skip_delivered(worker, set(delivered))
        self.missing = None

    def _skip_delivered(self, worker: int, delivered: set[int]) -> None:
        """Do not reissue tickets for rounds whose chunks the worker delivered and that are still unread."""
        first = self.issued[worker]
        self.redo[worker].clear()  # filled by chunks that became stale while it was absent
        self.issued[worker] = max([first, *(number + 1 for number in delivered)])
        gaps = set(range(first, self.issued[worker])) - delivered
        self.redo[worker].extend((number, number % self.rounds_ahead) for number in sorted(gaps))

    def consume(self, worker: int, chunks: int) -> None:
        """Record that the learner is done with chunks of a worker; those of an earlier session do not count."""
        left = max(0, self.held[worker] - chunks)
        self.held_total -= self.held[worker] - left
        self.held[worker] = left

    def release(self) -> None:
        """Record that the learner is done with everything that was delivered."""
        if self.num_chunks is None and self.released < self.taken:
            self.due.update(self.issued)
        self.released = self.taken
        self.held.clear()
        self.held_total = 0
