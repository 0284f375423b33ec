"""Decides which worker gets the next ticket of a session without rounds.

The worker with the fewest open tickets is first; ties go to the worker that has received the fewest tickets so far. A
feed with a staleness bound counts windows of `FeedPlan.chunks` chunks. A worker may always complete its current window,
but may begin another window only within the bound. Otherwise incomplete windows could use up the bound, and they cannot
be consumed.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Container, Sequence

from farstep.head.tickets.session import CollectionSession

TICKETS_PER_WORKER = 2
"""Maximum number of open tickets per worker: the current ticket and the next, so that the worker need not wait."""

QueueKey = tuple[int, int, int]
"""Sort key of a worker: number of open tickets, number of tickets received so far, and index."""


class WorkerQueue:
    """Workers of one session that may get a ticket. Call `update` after each change to a worker.

    Args:
        session: What is collected.
        open_tickets: For each worker, the ids of its open tickets.
        unread: For each worker, the number of chunks that have arrived but were not taken.
    """

    def __init__(self, session: CollectionSession, open_tickets: Sequence[Sequence[int]], unread: Counter[int]) -> None:
        self._session, self._open, self._unread = session, open_tickets, unread
        self._begun: Counter[int] = Counter()
        """For each worker, the number of windows that it has begun and that were not consumed."""
        self._begun_total = 0
        self._completing: list[QueueKey] = []
        self._beginning: list[QueueKey] = []
        """Heaps of workers: with, and without, an incomplete window. Entries may be outdated."""

    def update(self, worker: int) -> None:
        """Queue a worker again after a change that may allow it another ticket."""
        if (feed := self._session.feed) is not None:
            begun = -(-self._chunks_of(worker) // feed.chunks)
            self._begun_total += begun - self._begun[worker]
            self._begun[worker] = begun
        if not self._may_roll(worker):
            return
        inside = self.is_inside(worker)
        queue = self._completing if inside else self._beginning
        if len(queue) > 4 * len(self._open):
            queue[:] = {key for key in queue if key == self._key(key[2]) and inside == self.is_inside(key[2])}
            heapq.heapify(queue)
        heapq.heappush(queue, self._key(worker))

    def first(self, available: Container[int]) -> int:
        """The worker that gets the next ticket; -1 if none may. Workers that are not available leave the queue."""
        keys = [self._first(self._completing, True, available)]
        if self._may_begin():
            keys.append(self._first(self._beginning, False, available))
        return min((key for key in keys if key is not None), default=(0, 0, -1))[2]

    def _first(self, queue: list[QueueKey], inside: bool, available: Container[int]) -> QueueKey | None:
        """The first up-to-date key of a heap whose worker may get a ticket."""
        while queue:
            worker = queue[0][2]
            current = queue[0] == self._key(worker) and inside == self.is_inside(worker)
            if current and self._may_roll(worker) and worker in available:
                return queue[0]
            heapq.heappop(queue)  # `update` queues the worker again when this changes
        return None

    def _key(self, worker: int) -> QueueKey:
        return len(self._open[worker]), self._session.issued[worker], worker

    def _chunks_of(self, worker: int) -> int:
        """Number of chunks of a worker that are being rolled, unread, or held by the learner."""
        return self._session.held[worker] + len(self._open[worker]) + self._unread[worker]

    def _may_roll(self, worker: int) -> bool:
        """Whether the worker's own limits allow another chunk."""
        session = self._session
        if not session.lanes[worker] or len(self._open[worker]) >= TICKETS_PER_WORKER:
            return False
        if session.invited is not None and not session.invited[worker]:
            return False
        feed = session.feed
        if feed is None or feed.max_staleness is None or self.is_inside(worker):
            return True
        # A batch without a newcomer may be in the learner's hands, and be followed by a publish before the newcomer's
        # first window is consumed. So the newcomer rolls one window less ahead; otherwise its last one would be stale.
        depth = max(1, session.depth - (worker in session.newcomers))
        return self._chunks_of(worker) < depth * feed.per_worker * feed.chunks

    def is_inside(self, worker: int) -> bool:
        """Whether the worker's next chunk continues a window."""
        feed = self._session.feed
        if feed is None or feed.max_staleness is None:
            return False
        return self._chunks_of(worker) % feed.chunks > 0

    def _may_begin(self) -> bool:
        """Whether a worker may begin another window.

        With `windows=None`, `_may_roll` limits each worker instead, so that windows of a departed worker in the buffer
        do not block the others.
        """
        feed = self._session.feed
        if feed is None or feed.max_staleness is None or feed.windows is None:
            return True
        return self._begun_total < self._session.depth * feed.windows
