"""Accounts for the time in which slots are held."""

from __future__ import annotations


class SlotLedger:
    """Sums the seconds in which slots are held: for each slot, from each acquisition to the next release.

    It does no I/O: the caller passes the time, in seconds of any clock that does not run backwards.
    """

    def __init__(self) -> None:
        self._since: dict[int, float] = {}
        self._past_s = 0.0

    def acquire(self, slot: int, now: float) -> None:
        """Record that a slot is held from now on, unless it is held already."""
        self._since.setdefault(slot, now)

    def release(self, slot: int, now: float) -> None:
        """Record that a slot is not held any more; otherwise do nothing."""
        self._past_s += now - self._since.pop(slot, now)

    @property
    def held(self) -> int:
        """Number of slots that are held."""
        return len(self._since)

    def held_seconds(self, now: float) -> float:
        """Return the sum of the seconds in which slots were held, up to now."""
        return self._past_s + sum(now - since for since in self._since.values())
