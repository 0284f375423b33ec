"""Running statistics of observations and rewards. They are torch buffers of the agent, sent and saved with its weights.

Observation statistics change only after an update, so that the learner normalizes a batch as the workers did. Workers
do not use reward statistics. These change before an update, so that even the first batch is scaled.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from farstep.core import Array

_CLIP = 10.0
_EPSILON = 1e-8


class RunningMoments(nn.Module):
    """Running mean and standard deviation, merged batch by batch (parallel variance, Chan et al.).

    Args:
        shape: Shape of a row.
    """

    mean: Tensor
    std: Tensor
    count: Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("std", torch.ones(shape))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, value: Tensor) -> Tensor:
        """Normalize rows, and clip them to [-10, 10]."""
        return ((value - self.mean) / self.std).clamp(-_CLIP, _CLIP)

    @torch.no_grad()
    def update(self, rows: Tensor) -> None:
        """Update the moments with rows `[n, ...]`. They must not contain NaN."""
        if not len(rows):
            return
        rows = rows.double()
        count, added = float(self.count), float(len(rows))
        total = count + added
        shift = rows.mean(0) - self.mean.double()
        before = self.std.double().square() * count
        spread = before + rows.var(0, unbiased=False) * added + shift.square() * (count * added / total)
        self.mean += (shift * (added / total)).float()
        self.std.copy_((spread / total).sqrt().clamp_min(_EPSILON**0.5))
        self.count.fill_(total)


class RewardScale(nn.Module):
    """Divides rewards by the running standard deviation of discounted sums of past rewards.

    This equals Gymnasium's `NormalizeReward`. The sign of a reward does not change.

    Args:
        gamma: Discount factor of the sums.
    """

    def __init__(self, gamma: float) -> None:
        super().__init__()
        self._gamma = gamma
        self.moments = RunningMoments(())

    def forward(self, reward: Array) -> Array:
        """Scale rewards, and clip them to [-10, 10]. Before the first `update`, return them unchanged."""
        if not float(self.moments.count):
            return reward
        return np.clip(reward / np.float32(self.moments.std.item()), -_CLIP, _CLIP)

    def update(self, reward: Array, ended: Array, valid: Array, running: Array) -> None:
        """Update the statistics with the discounted sums of rewards at valid rows.

        Args:
            reward: Rewards `[T, N]`.
            ended: True where an episode ends, `[T, N]`.
            valid: Rows to use, `[T, N]`.
            running: Discounted sum of each environment's rewards so far, `[N]`. It is updated in place.
        """
        returns = np.empty_like(reward)
        for t in range(len(reward)):
            running[:] = np.where(valid[t], running * self._gamma + reward[t], running)
            returns[t] = running
            running[ended[t]] = 0.0
        self.moments.update(torch.from_numpy(returns[valid]))
