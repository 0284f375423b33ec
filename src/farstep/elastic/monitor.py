"""Predicts when workers are needed again, so that they can be started in advance (ARTOS's workload monitor)."""

from __future__ import annotations

from collections import deque
from statistics import fmean

WINDOW = 5
"""Number of latest updates that a prediction is based on."""
STABLE = 0.2
"""Updates are stable if the range of their durations is below this fraction of the mean."""
CHANGE = 0.25
"""If the number of workers changes by more than this fraction, earlier updates say nothing about later ones."""


class WorkloadMonitor:
    """Measures how long starts of workers and updates take, and predicts when to start workers for the next rollout.

    It predicts only while updates are stable. It allows for the slowest start and the fastest update of the window, and
    starts workers earlier by the range of the differences between both:

        start after = min(updates) - max(starts) - (max(updates - starts) - min(updates - starts))

    It does no I/O: durations go in, a duration comes out.
    """

    def __init__(self) -> None:
        self._starts: deque[float] = deque(maxlen=WINDOW)
        self._updates: deque[float] = deque(maxlen=WINDOW)
        self._workers = 0

    def add(self, start_s: float, update_s: float, workers: int) -> None:
        """Add the measurements of one update.

        Args:
            start_s: Seconds from the request for workers until the last of them could act.
            update_s: Seconds from the start of the update until its weights were published.
            workers: Number of workers that rolled for this update.
        """
        if self._workers and abs(workers - self._workers) > CHANGE * self._workers:
            self._starts.clear()
            self._updates.clear()
        self._workers = workers
        self._starts.append(start_s)
        self._updates.append(update_s)

    def longest_update(self) -> float:
        """Return the longest update of the window in seconds; 0 if there is none."""
        return max(self._updates, default=0.0)

    @property
    def is_stable(self) -> bool:
        """Whether the window is full and the durations of its updates are similar."""
        updates = self._updates
        return len(updates) == WINDOW and max(updates) - min(updates) < STABLE * fmean(updates)

    def start_after(self) -> float | None:
        """Return how many seconds after the start of an update to start workers; None: only when they are needed."""
        if not self.is_stable:
            return None
        waits = [update - start for update, start in zip(self._updates, self._starts, strict=True)]
        return max(0.0, min(self._updates) - max(self._starts) - (max(waits) - min(waits)))
