"""CartPole that sleeps for a random time in every step, like a simulator that runs elsewhere."""

from __future__ import annotations

import math
import time
from typing import Any

import gymnasium as gym
import numpy as np

SIGMA = 1.5
"""Standard deviation of the logarithm: the mean is 3.1 times the median, the 99th percentile 33 times."""


class Sleepy(gym.Wrapper[Any, Any, Any, Any]):
    """Sleeps before each step for a time drawn from a log-normal distribution."""

    def __init__(self, env: gym.Env[Any, Any], mean_ms: float, sigma: float) -> None:
        super().__init__(env)
        self._mu, self._sigma = math.log(mean_ms / 1e3) - sigma**2 / 2, sigma
        self._rng = np.random.default_rng()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        time.sleep(self._rng.lognormal(self._mu, self._sigma))
        return self.env.step(action)


def cartpole(mean_ms: float, sigma: float = SIGMA) -> gym.Env[Any, Any]:
    """Make an environment on a worker; `mean_ms` is the mean time of a step."""
    return Sleepy(gym.make("CartPole-v1"), mean_ms, sigma)
