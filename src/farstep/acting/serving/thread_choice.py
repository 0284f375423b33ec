"""Decides with how many threads torch computes a batch, by measured durations, without I/O or clock."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

_TRIALS = 5
"""Calls of `act` per candidate in a measurement."""
_CLEAR_TRIALS, _CLEAR_FACTOR = 2, 4
"""This many calls are enough if one candidate takes longer by this factor."""
_MAX_OVERHEAD = 0.02
"""Largest share of time for measuring the candidate that was not chosen."""


class ThreadChoice:
    """Chooses between one thread and several, for batches of each size.

    Several threads wait for each other in every layer. That takes longer than a small batch, and much longer if other
    processes use the cores. Since both batches and load change, the choice is measured again from time to time.

    Args:
        max_threads: The larger number of threads, above 1.
    """

    def __init__(self, max_threads: int) -> None:
        self._max_threads = max_threads
        self._sizes: dict[int, _Measurement] = {}

    def threads_for(self, num_rows: int) -> int:
        """The number of threads for the next batch."""
        return self._measured(num_rows).next_threads()

    def note(self, num_rows: int, threads: int, seconds: float) -> None:
        """Take the duration of a batch into account."""
        self._measured(num_rows).note(threads, seconds)

    def _measured(self, num_rows: int) -> _Measurement:
        """The measurement for batches of about this size: within a factor of two."""
        return self._sizes.setdefault(num_rows.bit_length(), _Measurement({1: [], self._max_threads: []}))


@dataclass
class _Measurement:
    """Durations of batches of one size."""

    durations: dict[int, list[float]]
    """Durations in the current measurement, for each number of threads."""
    best: int = 0
    """The choice; 0 while it is measured."""
    pause_s: float = 0.0
    """Seconds of computing before the next measurement."""

    def next_threads(self) -> int:
        return self.best or min(self.durations, key=lambda threads: len(self.durations[threads]))

    def note(self, threads: int, seconds: float) -> None:
        if self.best:
            self.pause_s -= seconds
            if self.pause_s <= 0:
                self.best, self.durations = 0, {each: [] for each in self.durations}
            return
        self.durations[threads].append(seconds)
        fewest = min(map(len, self.durations.values()))
        if fewest >= _TRIALS or (fewest >= _CLEAR_TRIALS and self._is_clear()):
            self.best = min(self.durations, key=lambda each: statistics.median(self.durations[each]))
            lost_s = sum(sum(found) for each, found in self.durations.items() if each != self.best)
            self.pause_s = lost_s / _MAX_OVERHEAD

    def _is_clear(self) -> bool:
        """Whether every call of one candidate took much longer than all calls of the other."""
        one, other = self.durations.values()
        return min(one) > _CLEAR_FACTOR * max(other) or min(other) > _CLEAR_FACTOR * max(one)
