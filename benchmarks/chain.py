"""The chain task of the benchmark of staggered resets: the right action depends on the progress of the episode.

Positions 0 to H - 1 are divided into blocks, each with one action whose reward is 1. An episode is a walk through all
positions, one per step (`gated`: only after the right action), and ends after H steps. Observations are sines and
cosines of the position.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

HORIZON, BLOCKS, ACTIONS = 200, 20, 4
TARGETS = np.random.default_rng(0).integers(ACTIONS, size=BLOCKS)
"""The right action of each block, the same in all runs."""


def features(position: Any) -> np.ndarray:
    angles = np.pi * 2.0 ** np.arange(6) * np.asarray(position, np.float64)[..., None] / HORIZON
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=-1).astype(np.float32)


_FEATURES = features(np.arange(HORIZON + 1))
_TARGET_AT = np.repeat(TARGETS, HORIZON // BLOCKS).tolist()


class Chain(gymnasium.Env[Any, Any]):
    """A deterministic environment: one walk through all positions per episode."""

    observation_space = spaces.Box(-1.0, 1.0, (12,), np.float32)
    action_space = spaces.Discrete(ACTIONS)

    def __init__(self, gated: bool = False) -> None:
        self._gated = gated

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._position = self._steps = 0
        return _FEATURES[0], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        right = int(action) == _TARGET_AT[self._position]
        self._steps += 1
        self._position += right or not self._gated
        over = self._steps == HORIZON
        return _FEATURES[self._position], float(right), over, False, {}
