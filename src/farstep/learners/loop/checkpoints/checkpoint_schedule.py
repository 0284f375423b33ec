"""Decides after which updates a run writes a checkpoint."""

from __future__ import annotations

import math

DEFAULT_EVERY = 10
"""Updates between checkpoints if writing them takes little time."""
_MAX_SHARE = 0.02
"""Maximum share of the training time that may be spent on writing checkpoints."""


class CheckpointSchedule:
    """Checkpoints at fixed intervals, or as often as the time for writing them allows.

    Args:
        every: Updates between checkpoints; None: 10, or more if writing would otherwise take over 2 % of the time.
    """

    def __init__(self, every: int | None) -> None:
        self._every = every
        self._earliest = -math.inf
        self._checked: int | None = None
        """Updates at the last call of `due`."""

    def due(self, updates: int, now: float) -> bool:
        """Whether to write a checkpoint: a multiple of the interval was reached since the last call.

        Args:
            updates: Updates so far.
            now: The time in seconds.
        """
        before = updates - 1 if self._checked is None else self._checked
        self._checked = updates
        every = self._every or DEFAULT_EVERY
        return updates // every > before // every and (self._every is not None or now >= self._earliest)

    def wrote(self, began: float, ended: float) -> None:
        """Record when writing a checkpoint began and ended, in seconds."""
        self._earliest = ended + (ended - began) * (1 / _MAX_SHARE - 1)
