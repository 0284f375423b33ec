"""The schedule of staggered resets: computes the episode step of every slot in every row.

Slots are divided into `G` groups, independently of the number of workers. Group `g` is `g * (H // G)` steps ahead of
group 0, where `H` is the horizon (Staggered Environment Resets, arXiv 2511.21011). Every episode lasts `H` steps, so a
slot keeps its offset once it has reached it.
"""

from __future__ import annotations

import numpy as np

from farstep.config.env import Stagger
from farstep.core import Array
from farstep.rollout.rows import Slots
from farstep.rollout.seeds import offset_generator


class StaggerSchedule:
    """The schedule of a worker's slots. Rows are counted from the start of the worker (`Slots.total_rows`)."""

    def __init__(self, stagger: Stagger, num_slots: int, clock: int = 0) -> None:
        assert stagger.horizon is not None, "checked by the configuration"
        self.stagger, self.horizon, self._num_slots = stagger, stagger.horizon, num_slots
        self._origin = -clock
        """The row at which each slot is at its offset; negative if this worker replaces an earlier worker."""
        self._offsets: Array | None = None

    def restart(self, row: int) -> None:
        """Restart all slots at this row; the next rollout computes new offsets."""
        self._origin, self._offsets = row, None

    def catch_up(self, clock: int, row: int) -> bool:
        """Make `clock(row)` return `clock`, because other workers rolled meanwhile. Return whether this is a change."""
        behind = (clock - self.clock(row)) % self.horizon
        self._origin -= behind
        return behind > 0

    @property
    def has_offsets(self) -> bool:
        """Whether a rollout has computed the offsets."""
        return self._offsets is not None

    def fix_offsets(self, slots: Slots, steps: int) -> None:
        """Compute the offsets for rollouts of `steps` rows. Further calls have no effect until `restart`."""
        if self._offsets is None:
            self._offsets = offsets_of(self.stagger, slots, self._num_slots, steps)

    def phase(self, i: int, row: int) -> int:
        """The episode step that the worker's slot `i` should have at `row`."""
        assert self._offsets is not None
        return (int(self._offsets[i]) + row - self._origin) % self.horizon

    def clock(self, row: int) -> int:
        """Rows since the slots were at their offsets, modulo the horizon."""
        return (row - self._origin) % self.horizon


def num_groups(stagger: Stagger, num_slots: int, steps: int) -> int:
    """The number of groups. With "auto": the number of rollouts of `steps` rows in a horizon."""
    assert stagger.horizon is not None
    wanted = stagger.horizon // steps if stagger.groups == "auto" else stagger.groups
    return min(max(1, wanted), num_slots)


def offsets_of(stagger: Stagger, slots: Slots, num_slots: int, steps: int) -> Array:
    """The number of steps by which each slot of a worker is ahead of group 0."""
    assert stagger.horizon is not None
    horizon, first = stagger.horizon, slots.first
    if stagger.offsets == "random":
        drawn = [offset_generator(root, first + i).integers(horizon) for i, root in enumerate(slots.roots)]
        return np.array(drawn, np.int64)
    groups = num_groups(stagger, num_slots, steps)
    # Dealt round-robin: if the last workers are parked, the sizes of the groups still differ by at most one.
    group = np.arange(first, first + len(slots.roots)) % groups
    return group * (horizon // groups)
