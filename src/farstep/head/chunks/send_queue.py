"""Whose turn it is to send a chunk, without I/O: on a slow connection some chunks early beat all of them late."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable


class SendQueue:
    """Workers ask, `limit` at a time are told to go (None: all of them), the others wait in order."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._waiting: OrderedDict[int, tuple[int, int]] = OrderedDict()
        """Per waiting worker, its incarnation and the ticket of its chunk, in order of asking."""
        self._sending: dict[int, int] = {}
        """Per sending worker, its incarnation."""

    def ask(self, worker: int, incarnation: int, index: int) -> None:
        self.forget(worker)  # what it was sending, or asked for, was lost
        self._waiting[worker] = incarnation, index

    def forget(self, worker: int) -> None:
        """It is gone, or its chunk is."""
        self._sending.pop(worker, None)
        self._waiting.pop(worker, None)

    def done(self, worker: int) -> bool:
        """A worker's chunk is here; whether that makes room."""
        return self._sending.pop(worker, None) is not None

    def next(self, incarnation_of: Callable[[int], int]) -> list[tuple[int, int]]:
        """Workers that may send now, each with the ticket of its chunk; workers that were replaced are forgotten."""
        self._sending = {w: number for w, number in self._sending.items() if incarnation_of(w) == number}
        going = []
        while self._waiting and (self._limit is None or len(self._sending) < self._limit):
            worker, (incarnation, index) = self._waiting.popitem(last=False)
            if incarnation_of(worker) == incarnation:
                self._sending[worker] = incarnation
                going.append((worker, index))
        return going

    def clear(self) -> None:
        """Nothing is wanted any more."""
        self._waiting.clear()
        self._sending.clear()
