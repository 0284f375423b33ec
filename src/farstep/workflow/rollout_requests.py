"""Tracks which workers of a workflow are present, and from which of them a rollout was requested.

By default, workers roll whenever the buffer has room. If `Workflow.next_rollout` is a consumer, workers roll on demand:
a request lets every present worker roll one window, and triggers with `n="all"` wait for exactly these workers.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence

from farstep.event import Emit
from farstep.head.feed import Feed
from farstep.head.tickets.records import FeedPlan
from farstep.workflow.run_state import RunState
from farstep.workflow.triggers import DataKeyTrigger

ABSENT_S = 5.0
"""A trigger that has lacked workers for this many seconds causes a warning."""


class RolloutRequests:
    """Tracks membership and requested chunks over the runs of a workflow.

    Args:
        state: The state of the workflow.
        triggers: All `DataKeyTrigger`s; more may be added to this list.
        consuming: The triggers among them that consume rows; more may be added to this list.
        num_workers: Largest number of workers.
        emit: Receives warnings about triggers that wait for absent workers.
    """

    def __init__(
        self,
        state: RunState,
        triggers: Sequence[DataKeyTrigger],
        consuming: Sequence[DataKeyTrigger],
        num_workers: int,
        emit: Emit,
    ) -> None:
        self._state, self._triggers, self._consuming, self._num_workers = state, triggers, consuming, num_workers
        self._emit = emit
        self.on_demand = False
        """Whether workers roll only when `next_rollout` is called."""
        self.warn_at = math.inf
        """When to call `warn_if_absent` (`time.monotonic`)."""
        self._owed: Counter[int] = Counter()
        """For each worker, the number of requested chunks that have not arrived; kept between runs."""
        self._present: frozenset[int] = frozenset()
        self._parked: frozenset[int] = frozenset()
        self._finishing: frozenset[int] = frozenset()
        """Workers that are about to be parked and still have to deliver chunks, for which triggers wait."""
        self._requested: frozenset[int] | None = None
        """With `_waits_for_all`, the workers of the last request; None before the first request."""
        self._requested_quorum = 1
        """The quorum at the time of the last request; `ClusterEnv.scale` may have raised it since."""
        self._waits_for_all = False
        """Whether a trigger consumes the rows of all present workers, not of a fixed number of workers."""
        self._quorum = self._chunk_steps = 1

    def plan(self, chunk_steps: int, max_staleness: int | None) -> FeedPlan:
        """Start a run with chunks of `chunk_steps` steps, and return the plan for its feed."""
        self._chunk_steps = chunk_steps
        counts = [leaf.n for leaf in self._consuming if leaf.n is not None]
        self._waits_for_all = len(counts) < len(self._consuming)
        return FeedPlan(
            max_staleness,
            None if self._waits_for_all else max(counts, default=1),
            max((_most_chunks(leaf.size, chunk_steps) for leaf in self._consuming), default=1),
            self._owed if self.on_demand else None,
            max((leaf.windows_per_actor for leaf in self._consuming), default=1),
        )

    # ---- requests ----

    def request(self, feed: Feed) -> None:
        """Let every present worker roll one window."""
        with feed.locked():  # otherwise a worker could be parked before it is invited
            self._requested = None  # this request replaces the last one
            self.update(feed)
            if self._waits_for_all:
                self._requested, self._requested_quorum = self._present, self._quorum
            self._request_window(self._present if self._waits_for_all else range(self._num_workers), feed)
            self._update_ledger()

    def _request_window(self, workers: Iterable[int], feed: Feed, unread: int = 0) -> None:
        """Let these workers roll a window. `unread` chunks of the window already exist."""
        chunks = max((-(-leaf.size // self._chunk_steps) for leaf in self._consuming), default=1) - unread
        if chunks > 0:
            self._owed.update(dict.fromkeys(workers, chunks))
            feed.invite(workers, chunks)

    def _unread(self, worker: int, feed: Feed) -> int:
        """Return the number of stored or pending chunks of a rejoined worker that are not yet consumed."""
        ledger = self._state.ledger
        rows = min((ledger.written(worker) - leaf.start_of(worker) for leaf in self._consuming), default=0)
        return rows // self._chunk_steps + feed.pending(worker)

    def arrived(self, worker: int) -> None:
        """Count a chunk that has arrived."""
        self._owed[worker] = max(0, self._owed[worker] - 1)

    def dropped(self, worker: int, chunks: int) -> None:
        """Request chunks again because they were dropped before they were consumed."""
        if self.on_demand:
            self._owed[worker] += chunks

    # ---- membership ----

    def update(self, feed: Feed) -> None:
        """Process the workers that have joined or left since the last call."""
        if (members := feed.members()) is None:
            if self._finishing and (finishing := feed.finishing(self._finishing)) != self._finishing:
                self._finishing = finishing
                self._update_ledger()
            return
        self._present, self._parked, self._quorum = members.present, members.parked, members.quorum
        self._finishing = feed.finishing(members.parked)
        self.warn_at = time.monotonic() + ABSENT_S
        self._state.void_lost()
        for worker in members.departed:
            if self._requested is not None:
                self._requested -= {worker}
            self._drop_window(worker, feed)
        self._request_from_joined(feed)
        self._update_ledger()

    def drop_if_absent(self, worker: int, feed: Feed) -> None:
        """Drop the incomplete window of a worker if the worker left before its last chunk arrived."""
        if worker not in self._present and worker not in self._parked:
            self._drop_window(worker, feed)

    def _drop_window(self, worker: int, feed: Feed) -> None:
        """Drop the incomplete window and the requests of a departed worker, if triggers do not wait for it."""
        if self._waits_for_all:
            self._state.retention.left(worker)
            self._owed[worker] = 0
            feed.withdraw(worker)

    def _request_from_joined(self, feed: Feed) -> None:
        """Request a rollout from joined workers if too few requested workers remain for a trigger to fire."""
        if self._requested is None:
            return
        needed = max([self._awaited_quorum, *(leaf.min_actors or 0 for leaf in self._consuming)])
        if len(self._requested & self._present) < needed <= len(self._present):
            joined = self._present - self._requested
            self._requested |= joined
            for worker in joined:
                self._request_window([worker], feed, self._unread(worker, feed))

    def _update_ledger(self) -> None:
        """Record in the ledger for which workers triggers wait: on demand, only for workers with a request."""
        awaited = self._present | self._finishing
        requested = awaited if self._requested is None else self._requested & awaited
        self._state.ledger.members(requested, self._awaited_quorum)

    @property
    def _awaited_quorum(self) -> int:
        """Number of workers without which triggers do not fire: on demand, no more than when they were requested."""
        return self._quorum if self._requested is None else min(self._quorum, self._requested_quorum)

    def warn_if_absent(self, now: float) -> None:
        """Warn, if `warn_at` has passed, about triggers that cannot fire until workers join."""
        if now < self.warn_at:
            return
        self.warn_at = math.inf
        for trigger in self._triggers:
            needed = self._quorum if trigger.min_actors is None else trigger.min_actors
            if needed > len(self._present) and not trigger.is_warm:
                advice = (
                    "min_nodes requires them."
                    if trigger.n is None
                    else 'DataKeyTrigger(n="all", ...) waits only for present workers.'
                )
                self._emit(
                    "warned",
                    f"{trigger!r} waits for {needed} workers, but {len(self._present)} of at most {self._num_workers} "
                    f"are present, so it cannot fire until others join. {advice}",
                )


def _most_chunks(size: int, steps: int) -> int:
    """Return the maximum number of chunks of `steps` rows that one window of `size` rows can overlap."""
    return 1 + -(-(size - math.gcd(size, steps)) // steps)
