"""A feed: chunks for a workflow, one by one as they arrive, and everything else that it may be waiting for."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from farstep.batch import Batch
from farstep.head.collector import Collector
from farstep.head.seats import Seat
from farstep.head.tickets import Arrived


class Feed:
    """Tickets are given while it is open; `take` sleeps until there is a chunk, a deadline, or somebody wakes it."""

    def __init__(
        self, collector: Collector, steps: int, max_staleness: int | None, num_chunks: int, invited: bool
    ) -> None:
        self._collector, self._server = collector, collector.server
        self._woken = False
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._server.watch(self._wake_fd, self._note)
        try:
            self._request = collector.open_feed(steps, max_staleness, num_chunks, invited)
        except BaseException:
            self._stop_watching()
            raise

    def _note(self) -> None:
        os.eventfd_read(self._wake_fd)
        self._woken = True

    def take(self, wanted: Callable[[int], bool], deadline: float) -> tuple[Arrived, Batch] | None:
        """The next chunk of a worker that is wanted: views, until it is `stored`. None when woken, or too late."""

        def look() -> tuple[Arrived, Batch] | bool | None:
            if self._woken:
                return False
            return self._collector.take_chunk(self._request, wanted)

        with self._server.locked():
            began = time.monotonic()
            found = self._server.wait_until(look, deadline)
            self._collector.counters.wait["learner"] += time.monotonic() - began
            self._woken = False
        return found if isinstance(found, tuple) else None

    def seat(self, worker: int) -> Seat:
        return self._server.seats[worker]

    @property
    def under_way(self) -> int:
        """Chunks that are being rolled, or wait to be taken."""
        with self._server.locked():
            self._server.grant()
            return self._server.tickets.in_flight + self._server.tickets.buffered

    @property
    def waiting(self) -> list[int]:
        """The workers whose chunks wait to be taken, if nobody rolls another one."""
        with self._server.locked():
            tickets = self._server.tickets
            return [] if tickets.in_flight else tickets.arrived_of()

    def stored(self, arrived: Arrived) -> None:
        """A chunk was copied; its lane can be written again."""
        with self._server.locked():
            self._server.tickets.stored(arrived)
            self._server.grant()

    def consumed(self, chunks: int, stale: bool = False) -> None:
        """The learner is done with so many chunks."""
        with self._server.locked():
            self._server.tickets.consumed(chunks, stale)

    def invite(self) -> None:
        """Every worker rolls one more chunk."""
        with self._server.locked():
            self._server.tickets.invite()
            self._server.grant()

    def wake(self) -> None:
        """Let `take` return; from any thread."""
        os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Cancel what is under way."""
        try:
            self._collector.end_feed(self._request)
        finally:
            self._stop_watching()

    def _stop_watching(self) -> None:
        self._server.unwatch(self._wake_fd)
        os.close(self._wake_fd)
