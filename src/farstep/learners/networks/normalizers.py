"""Running statistics of observations and rewards, as buffers of the agent: they travel and are saved with its weights.

Those of observations change only after an update, so that a batch is learned from with those it was acted under; those
of rewards before it, since no worker uses them and even the first batch is to be learned from in their units.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from farstep.core import Array

_CLIP = 10.0
_EPSILON = 1e-8


class RunningMoments(nn.Module):
    """Mean and standard deviation of rows, merged batch by batch (Chan et al., parallel variance)."""

    mean: Tensor
    std: Tensor
    count: Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("std", torch.ones(shape))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, value: Tensor) -> Tensor:
        return ((value - self.mean) / self.std).clamp(-_CLIP, _CLIP)

    @torch.no_grad()
    def update(self, rows: Tensor) -> None:
        """Take rows `[n, ...]` into account; none of them may be NaN."""
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
    """Rewards in units of the standard deviation of discounted returns: their sign and zero stay."""

    def __init__(self, gamma: float) -> None:
        super().__init__()
        self._gamma = gamma
        self.moments = RunningMoments(())

    def forward(self, reward: Array) -> Array:
        """Rewards as they are learned from."""
        if not float(self.moments.count):
            return reward
        return np.clip(reward / np.float32(self.moments.std.item()), -_CLIP, _CLIP)

    def update(self, reward: Array, ended: Array, valid: Array, running: Array) -> None:
        """Take valid rows `[T, N]` into account; `running` `[N]` are the discounted sums so far, and are moved on."""
        seen = np.empty_like(reward)
        for t in range(len(reward)):
            running[:] = np.where(valid[t], running * self._gamma + reward[t], running)
            seen[t] = running
            running[ended[t]] = 0.0
        self.moments.update(torch.from_numpy(seen[valid]))
