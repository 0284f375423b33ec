"""Penalties that a learner adds to the rewards of replayed steps: of invalid and of repeated actions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from farstep.core import Array

INVALID_ACTION = "invalid_action"
"""Entry of an environment's info that marks an invalid action."""


def penalties(
    actions: Sequence[Array], invalid: Array | None, *, invalid_penalty: float, repeat_penalty: float
) -> Array:
    """Return what is added to the rewards of the steps of episodes: 0 or a negative number each.

    Args:
        actions: Arrays `[T, N, ...]` with the actions of N episodes; several if the action space is nested.
        invalid: Not 0 where an action is invalid, `[T, N]`; None: all are valid.
        invalid_penalty: Penalty of an invalid action.
        repeat_penalty: Penalty of the first repetition of an action; the k-th in a row costs k times this.

    Returns:
        Numbers `[T, N]`.
    """
    length, count = actions[0].shape[:2]
    found: Array = np.zeros((length, count))
    for t in range(1, length):
        is_same = np.logical_and.reduce([(a[t] == a[t - 1]).reshape(count, -1).all(-1) for a in actions])
        found[t] = np.where(is_same, found[t - 1] - repeat_penalty, 0.0)
    return found if invalid is None else found - invalid_penalty * (invalid != 0)
