"""Limits the number of workers that send chunks at the same time; does no I/O.

On a slow connection, some chunks are then complete early, instead of all chunks late.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable


class SendQueue:
    """Queue of workers that want to send. At most `limit` send at the same time (None: all); the others wait in
    order."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._waiting: OrderedDict[int, tuple[int, int]] = OrderedDict()
        """Incarnation and chunk index of each waiting worker, in the order of requests."""
        self._sending: dict[int, int] = {}
        """Incarnation of each sending worker."""

    def request(self, worker: int, incarnation: int, index: int) -> None:
        """Queue a worker that wants to send the chunk with this index."""
        self.forget(worker)  # an earlier chunk of this worker was cancelled
        self._waiting[worker] = incarnation, index

    def forget(self, worker: int) -> None:
        """Remove a worker that is lost, or whose chunk was cancelled."""
        self._sending.pop(worker, None)
        self._waiting.pop(worker, None)

    def done(self, worker: int) -> bool:
        """Record that a worker's chunk has arrived. Return whether another worker may send now."""
        return self._sending.pop(worker, None) is not None

    def next(self, incarnation_of: Callable[[int], int]) -> list[tuple[int, int]]:
        """Choose the next workers to send; return each with the index of its chunk. Skip restarted workers."""
        self._sending = {w: number for w, number in self._sending.items() if incarnation_of(w) == number}
        granted = []
        while self._waiting and (self._limit is None or len(self._sending) < self._limit):
            worker, (incarnation, index) = self._waiting.popitem(last=False)
            if incarnation_of(worker) == incarnation:
                self._sending[worker] = incarnation
                granted.append((worker, index))
        return granted

    def clear(self) -> None:
        """Remove all workers after their tickets were cancelled."""
        self._waiting.clear()
        self._sending.clear()
