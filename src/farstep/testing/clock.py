"""A clock for tests that moves only when it is advanced."""

from __future__ import annotations


class FakeClock:
    """A replacement for `time.monotonic` in tests.

    Args:
        now: Start time in seconds; default 0.

    Attributes:
        now: Current time in seconds.
    """

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> float:
        """Move the clock forward.

        Args:
            seconds: At least 0.

        Returns:
            The new time in seconds.

        Raises:
            ValueError: `seconds` is negative.
        """
        if seconds < 0:
            raise ValueError(f"seconds is {seconds}; a clock does not move back.")
        self.now += seconds
        return self.now
