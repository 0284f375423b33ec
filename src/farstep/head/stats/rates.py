"""Rates over the last seconds."""

from __future__ import annotations

from collections import deque

WINDOW_S = 10.0
"""Seconds over which rates are measured."""


class Rate:
    """Steps per second over the last 10 s, or between the last two events if they are further apart."""

    def __init__(self) -> None:
        self._events: deque[tuple[float, int]] = deque()

    def add(self, steps: int, now: float) -> None:
        """Count steps that were completed at time `now`, in seconds."""
        self._events.append((now, steps))
        while now - self._events[0][0] > WINDOW_S and len(self._events) > 2:
            self._events.popleft()

    def per_second(self, now: float) -> float:
        """The rate; 0 after a pause that is longer than both the window and the usual interval."""
        if len(self._events) < 2:
            return 0.0
        (first, first_steps), (last, _) = self._events[0], self._events[-1]
        span = last - first
        if span <= 0 or now - last > max(WINDOW_S, span):
            return 0.0
        return (sum(steps for _, steps in self._events) - first_steps) / span
