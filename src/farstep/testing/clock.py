"""A clock that moves only when told."""

from __future__ import annotations


class FakeClock:
    """Monotonic seconds for state machines under test."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> float:
        if seconds < 0:
            raise ValueError(f"a clock does not go back; got {seconds}.")
        self.now += seconds
        return self.now
