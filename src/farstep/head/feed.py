"""A feed: delivers chunks to a workflow one by one as they arrive, and wakes the workflow for other events."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from farstep.batch import Batch
from farstep.head.chunks.incoming_chunks import EarlyPart
from farstep.head.collector import Collector
from farstep.head.members.worker_records import WorkerRecord
from farstep.head.tickets.records import AcceptedChunk, DropCause, FeedPlan
from farstep.head.tickets.tickets import FEED_LANES


@dataclass(frozen=True)
class Members:
    """The workers of a run at one point in time."""

    present: frozenset[int]
    departed: frozenset[int]
    """Workers that have left since the last call of `Feed.members`; some may have returned."""
    parked: frozenset[int]
    """Workers that are parked or about to be parked. Their rows in the buffer stay."""
    quorum: int
    """Number of workers that must be present to continue."""


class Feed:
    """Chunks for a workflow. Workers get tickets while a feed is open; `take` waits for a chunk, a deadline, or `wake`.

    Args:
        collector: Issues the tickets and receives the chunks.
        steps: Rows per chunk.
        plan: How many chunks of how many workers the workflow consumes at a time, and its staleness bound.
        early: Whether to also deliver parts of chunks that are not complete yet.
    """

    def __init__(self, collector: Collector, steps: int, plan: FeedPlan, early: bool = False) -> None:
        self._collector, self._server = collector, collector.server
        self._woken = False
        self._seen_changes = -1
        """`Presence.changes` at the last call of `members`."""
        self._early: deque[EarlyPart] = deque()
        self._waking = threading.Lock()
        """Held while writing to the descriptor, so that no other thread closes the descriptor in between."""
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            self._server.watch(self._wake_fd, self._on_wake)
            self._request = collector.open_feed(steps, plan, self._on_part if early else None)
            collector.publisher.on_published = self.wake  # called by the publishing thread
        except BaseException:
            self._stop_watching()
            raise

    def _on_wake(self) -> None:
        with contextlib.suppress(OSError):  # already read, or about to be closed
            os.eventfd_read(self._wake_fd)
        self._woken = True

    def _on_part(self, early: EarlyPart) -> None:
        if not early.part.complete:
            # Copy now: if the worker dies, another chunk overwrites the lane.
            self._early.append(replace(early, part=replace(early.part, so_far=early.part.so_far.copy())))
            self._woken = True

    def take(
        self,
        wanted: Callable[[int], bool],
        deadline: float,
        check: Callable[[], None],
        store: Callable[[AcceptedChunk, Batch], None],
        store_early: Callable[[EarlyPart], None],
        room: AbstractContextManager[object],
    ) -> None:
        """Wait for the next chunk of a `wanted` worker and store it.

        Returns without a chunk after `wake`, a part, the deadline, or a change of the present workers.

        Args:
            wanted: Whether a worker's chunk can be stored now.
            deadline: In `time.monotonic()` seconds.
            check: Called while there is no chunk; raises if no chunk can arrive.
            store: Stores a chunk.
            store_early: Stores a part.
            room: Context manager, entered while a chunk is taken and stored, so that no other thread uses the free
                space.
        """
        times = self._collector.counters.learner

        def poll() -> bool | None:
            if self._woken or self._server.tickets.presence.changes != self._seen_changes:
                return False
            with room:
                found = self._collector.take_chunk(self._request, wanted)
                if found is not None:
                    with times.measure("prepare"):
                        store(*found)
                    self._server.tickets.stored(found[0])
                    self._server.grant()
                    return True
            check()
            return None

        with self._server.locked():  # defer Ctrl-C: the chunk counts as delivered before it is stored
            with times.measure("wait"):
                self._server.wait_until(poll, deadline)
            self._woken = False
            while self._early:
                store_early(self._early.popleft())

    def is_live(self, ticket: int) -> bool:
        """Whether a ticket is open, or its chunk has not been taken yet."""
        return self._server.tickets.is_live(ticket)

    def voided(self) -> list[tuple[int, int]]:
        """Worker and ticket id of each chunk that was dropped since the last call."""
        with self._server.locked():
            return self._server.tickets.voided()

    def record(self, worker: int) -> WorkerRecord:
        return self._server.records[worker]

    @property
    def under_way(self) -> bool:
        """Whether a chunk waits to be taken, or another may still arrive."""
        with self._server.locked():
            return bool(self._server.tickets.buffered) or self._may_roll()

    def _may_roll(self) -> bool:
        """Return whether any worker is rolling a chunk, is about to join or leave, or waits for a coordinator's slots.
        The caller holds the lock."""
        server = self._server
        return bool(server.tickets.in_flight) or server.slots.is_waiting or server.available.unsettled()

    @property
    def num_parked(self) -> int:
        """Number of parked workers."""
        return len(self._server.tickets.presence.parked)

    @property
    def max_unread_chunks(self) -> int:
        """Number of chunks after which all workers that are not parked wait until one is taken."""
        tickets = self._server.tickets
        return FEED_LANES * (len(self._server.records) - len(tickets.presence.parked))

    @property
    def num_unread_chunks(self) -> int:
        """Number of chunks that have not been taken yet."""
        return self._server.tickets.buffered

    @property
    def workers_with_unread_chunks(self) -> list[int]:
        """The workers whose chunks have not been taken yet; empty while another chunk may still arrive."""
        with self._server.locked():
            return [] if self._may_roll() else [each.ticket.worker for each in self._server.tickets.unread]

    def pending(self, worker: int) -> int:
        """Number of chunks of a worker that are being rolled or have not been taken yet."""
        with self._server.locked():
            return self._server.tickets.pending(worker)

    def consumed(self, worker: int, chunks: int, dropped: DropCause | None = None) -> None:
        """Record that the learner is done with some chunks of a worker, or that they were dropped for a cause."""
        with self._server.locked():
            self._server.tickets.consumed(worker, chunks, dropped)

    def invite(self, workers: Iterable[int], chunks: int) -> None:
        """Let each of these workers roll `chunks` more chunks."""
        with self._server.locked():
            self._server.tickets.invite(workers, chunks)
            self._server.grant()

    def withdraw(self, worker: int) -> None:
        """Cancel the invitations of a worker for which no ticket has been issued yet."""
        with self._server.locked():
            self._server.tickets.withdraw(worker)

    def members(self) -> Members | None:
        """Which workers are present and which have left; None if this has not changed since the last call."""
        presence = self._server.tickets.presence
        if presence.changes == self._seen_changes:
            return None
        with self._server.locked():
            self._seen_changes = presence.changes
            departed = frozenset(presence.departed)
            presence.departed.clear()
            parked = frozenset(presence.parked | presence.retiring)
            return Members(frozenset(presence.present), departed, parked, presence.quorum)

    def locked(self) -> AbstractContextManager[None]:
        """Prevent workers from joining and leaving."""
        return self._server.locked()

    def finishing(self, workers: Iterable[int]) -> frozenset[int]:
        """Return which of these workers, all about to be parked, still have to deliver chunks."""
        with self._server.locked():
            tickets = self._server.tickets
            return frozenset(w for w in workers if tickets.pending(w) or tickets.must_finish(w))

    def wake(self) -> None:
        """Make `take` return; may be called from any thread."""
        with self._waking:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Cancel open tickets and free the descriptor."""
        self._collector.publisher.on_published = None
        self._collector.counters.learner.end()
        try:
            self._collector.end_feed(self._request)
        finally:
            self._stop_watching()

    def _stop_watching(self) -> None:
        try:
            self._server.unwatch(self._wake_fd)
        finally:
            with self._waking:
                fd, self._wake_fd = self._wake_fd, -1
            os.close(fd)
