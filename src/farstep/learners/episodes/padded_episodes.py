"""Replayed episodes of a batch, padded to the same length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from farstep.batch import info_array
from farstep.core import Array, Nested
from farstep.learners.episodes.penalties import INVALID_ACTION, penalties
from farstep.learners.returns import retrace_delta
from farstep.schema import map_leaves


@dataclass(frozen=True)
class Episodes:
    """N episodes of up to T steps; arrays and tensors are time-major `[T, N, ...]`, padded where `valid` is False."""

    obs: Nested
    sample: Nested
    """What the policy sampled; actions may be clipped."""
    final_obs: Nested
    """Observations after the last step, `[N, ...]`."""
    logprob: Array
    """Log-probabilities of the samples under the policy that acted."""
    reward: Array
    """Rewards of the environment."""
    penalty: Array
    """Penalties, 0 or negative."""
    terminated: Array
    truncated: Array
    valid: Array

    @property
    def steps(self) -> Tensor:
        """Indices of the valid steps among all `T * N`."""
        return torch.from_numpy(np.flatnonzero(self.valid))

    @property
    def length(self) -> Array:
        """Length of each episode, `[N]`."""
        return np.asarray(self.valid.sum(0))

    @property
    def ended(self) -> Array:
        """Whether the episode ends with the step."""
        return np.asarray((self.terminated | self.truncated) & self.valid)

    def valid_rows(self, rows: Nested) -> Nested:
        """Return the valid steps `[n, ...]` of nested tensors `[T, N, ...]`."""
        steps = self.steps
        return map_leaves(lambda leaf: leaf.flatten(0, 1)[steps.to(leaf.device)], rows)

    def success(self, gamma: float) -> Array:
        """Return for each step 1 if the discounted sum of the environment's rewards from there on is above 0."""
        zeros = np.zeros(self.valid.shape)
        returns = retrace_delta(zeros, self.reward, zeros, zeros[0], gamma * ~self.ended, valid=self.valid)
        return (returns > 0).astype(np.float32)


def episodes_of(rows: Mapping[str, Nested], sample: str, *, invalid_penalty: float, repeat_penalty: float) -> Episodes:
    """Convert a sampled batch `[N, T, ...]` to time-major episodes.

    Args:
        rows: Tensors by name, as `ReplayBatch` has them.
        sample: Name of the array with what the policy sampled.
        invalid_penalty: Penalty of an invalid action; if it is not 0, `rows` has the info `invalid_action`.
        repeat_penalty: Penalty of the first repetition of an action.
    """
    by_time = {name: map_leaves(lambda leaf: leaf.transpose(0, 1), value) for name, value in rows.items()}
    actions: list[Array] = []
    map_leaves(lambda leaf: actions.append(leaf.numpy(force=True)), by_time["action"])
    invalid = by_time[info_array(INVALID_ACTION)].numpy(force=True) if invalid_penalty else None
    penalty = penalties(actions, invalid, invalid_penalty=invalid_penalty, repeat_penalty=repeat_penalty)
    flags = {name: by_time[name].numpy(force=True) for name in ("terminated", "truncated", "valid")}
    return Episodes(
        by_time["obs"],
        by_time[sample],
        map_leaves(lambda leaf: leaf[-1], by_time["next_obs"]),  # padding repeats the last step
        by_time["logprob"].numpy(force=True),
        by_time["reward"].numpy(force=True),
        penalty.astype(np.float32),
        **flags,
    )
