"""Where in the horizon each environment belongs, at any time: the schedule of staggered resets, without environments.

Environments are divided into groups by their slot, however many workers there are; group `g` of `G` is `g * (H // G)`
steps ahead of group 0 (Staggered Environment Resets, arXiv 2511.21011). An episode lasts `H` steps, so a slot that was
brought to its place once stays in it.
"""

from __future__ import annotations

import numpy as np

from farstep.config.env import Stagger
from farstep.core import Array
from farstep.rollout.rows import Slots
from farstep.rollout.seeds import offset_generator


class Places:
    """The place of each slot of a worker; rows are counted as the worker counts them."""

    def __init__(self, stagger: Stagger, num_slots: int, clock: int = 0) -> None:
        assert stagger.horizon is not None, "checked when it was configured"
        self.stagger, self.horizon, self._num_slots = stagger, stagger.horizon, num_slots
        self._origin = -clock
        """The row at which places are the offsets; a worker that replaces another was not there."""
        self._offsets: Array | None = None

    def anew(self, row: int) -> None:
        """All slots begin again at this row."""
        self._origin, self._offsets = row, None

    def settle(self, slots: Slots, steps: int) -> None:
        """A rollout of so many steps is the first; until all begin anew, later ones change nothing."""
        if self._offsets is None:
            self._offsets = offsets_of(self.stagger, slots, self._num_slots, steps)

    def phase(self, i: int, row: int) -> int:
        """How many steps of an episode the worker's slot `i` should have done at that row."""
        assert self._offsets is not None
        return (int(self._offsets[i]) + row - self._origin) % self.horizon

    def clock(self, row: int) -> int:
        """Rows since places were the offsets, modulo the horizon."""
        return (row - self._origin) % self.horizon


def num_groups(stagger: Stagger, num_slots: int, steps: int) -> int:
    """Groups that there are: as many as rollouts in a horizon, if it is not said."""
    assert stagger.horizon is not None
    wanted = stagger.horizon // steps if stagger.groups == "auto" else stagger.groups
    return min(max(1, wanted), num_slots)


def offsets_of(stagger: Stagger, slots: Slots, num_slots: int, steps: int) -> Array:
    """How far each of a worker's slots is ahead of slot 0 of all."""
    assert stagger.horizon is not None
    horizon, first = stagger.horizon, slots.first
    if stagger.offsets == "random":
        drawn = [offset_generator(root, first + i).integers(horizon) for i, root in enumerate(slots.roots)]
        return np.array(drawn, np.int64)
    groups = num_groups(stagger, num_slots, steps)
    # Sizes differ by at most one; floor(i / floor(N / G)) would put all that is left over into the last group.
    group = np.arange(first, first + len(slots.roots)) * groups // num_slots
    return group * (horizon // groups)
