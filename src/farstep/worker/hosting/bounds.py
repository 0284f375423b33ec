"""Compares observations with the bounds of their space, which neither Gymnasium nor farstep enforces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np

from farstep.core import Array
from farstep.rollout.rows import Rows
from farstep.schema import leaves, space_schema
from farstep.worker.hosting.base import Host
from farstep.worker.hosting.hosts import AnyHost

_CHECKED_ROWS = 128
"""Rows after which a worker no longer checks, so that the check costs nothing later."""
_ROUNDING = 1e-5
"""Relative difference from a bound that counts as a rounding error."""


class BoundsCheck:
    """Checks the first chunks of a worker."""

    def __init__(self) -> None:
        self._rows = 0

    def check(self, host: AnyHost | None, rows: Rows, steps: int) -> str:
        """Return what `outside_bounds` says of a chunk; empty if enough rows were checked, or if the head acts."""
        if self._rows >= _CHECKED_ROWS or not steps or not isinstance(host, Host):
            return ""
        self._rows += steps
        observed = {name: rows.row[name][: steps + 1] for name in host.current}
        return outside_bounds(host.observation_space, observed, host.slots.first)


def outside_bounds(space: gymnasium.spaces.Space[Any], observed: Mapping[str, Array], first_slot: int) -> str:
    """Find an observation outside its Box.

    Args:
        space: The observation space of one environment.
        observed: Observations by name, `[rows, envs, ...]`.
        first_slot: Slot of the first environment.

    Returns:
        Its name, value, slot and bounds; empty if all observations are inside.
    """
    structure, _ = space_schema(space, "obs")
    for name, box in leaves(structure, space):
        if isinstance(box, gymnasium.spaces.Box) and (found := _outside_box(box, observed[name])):
            entry, value, env, low, high = found
            return (
                f"{name}{list(entry) or ''} was {value:.6g} in environment slot {first_slot + env}, but its Box allows "
                f"{low:g} to {high:g}"
            )
    return ""


def _outside_box(box: gymnasium.spaces.Box, values: Array) -> tuple[tuple[int, ...], float, int, float, float] | None:
    """Return index, value, environment and bounds of the value that is furthest outside, or NaN; None if all are
    inside."""
    low, high = box.low.astype(np.float64), box.high.astype(np.float64)
    least, most = values.min(axis=(0, 1)), values.max(axis=(0, 1))  # first, because a chunk may be large
    inside = (least >= low - _ROUNDING * (1 + abs(low))) & (most <= high + _ROUNDING * (1 + abs(high)))
    if inside.all():
        return None
    entry = tuple(np.argwhere(~inside)[0].tolist())
    column = values[(..., *entry)].astype(np.float64)
    with np.errstate(invalid="ignore"):
        excess = np.maximum(low[entry] - column, column - high[entry])
    row, env = np.unravel_index(int(excess.argmax()), excess.shape)  # NaN counts as the maximum
    return entry, float(column[row, env]), int(env), float(low[entry]), float(high[entry])
