"""Accounts for the time in which a run waits for slots."""

from __future__ import annotations

_REPORT_S = 60.0
"""Seconds between two reports."""


class WaitLedger:
    """Sums the seconds in which a run waits for slots, and decides when to report a wait.

    The first wait is reported after a second, every wait after a minute.
    """

    def __init__(self) -> None:
        self._since: float | None = None
        self._past_s = 0.0
        self._report_at = 0.0
        self._was_reported = False

    def begin(self, now: float) -> None:
        """Record that the run waits from now on, unless it waits already."""
        if self._since is None:
            self._since = now
            self._report_at = now + (_REPORT_S if self._was_reported else 1.0)

    def end(self, now: float) -> None:
        """Record that the run does not wait any more; otherwise do nothing."""
        self._past_s, self._since = self.seconds(now), None

    def seconds(self, now: float) -> float:
        """Return the sum up to now."""
        return self._past_s + (0.0 if self._since is None else now - self._since)

    def report_is_due(self, now: float) -> bool:
        """Return whether to report the wait now; once per report."""
        if self._since is None or now < self._report_at:
            return False
        self._report_at, self._was_reported = now + _REPORT_S, True
        return True
