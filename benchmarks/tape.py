"""Environments that play a recording of Pong: real observations at almost no cost."""

from __future__ import annotations

from functools import cache
from typing import Any

import gymnasium
import numpy as np

FRAMES = 512


@cache
def recording(seed: int = 0) -> Any:
    """Stacks of four frames of a random policy, `[FRAMES, 4, 84, 84]`."""
    import ale_py

    gymnasium.register_envs(ale_py)
    env = gymnasium.make("ALE/Pong-v5", frameskip=1)
    env = gymnasium.wrappers.AtariPreprocessing(env)
    env = gymnasium.wrappers.FrameStackObservation(env, 4)
    frames = np.zeros((FRAMES, 4, 84, 84), np.uint8)
    obs, _ = env.reset(seed=seed)
    env.action_space.seed(seed)
    for t in range(FRAMES):
        frames[t] = obs
        obs, _, terminated, truncated, _ = env.step(env.action_space.sample())
        if terminated or truncated:
            obs, _ = env.reset()
    env.close()
    return frames


class PongTape(gymnasium.Env[Any, Any]):
    """Plays the recording from a position that the seed determines."""

    observation_space = gymnasium.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    action_space = gymnasium.spaces.Discrete(6)

    def __init__(self) -> None:
        self._frames, self._t = recording(), 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._t = int(self.np_random.integers(FRAMES))
        return self._frames[self._t], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._t = (self._t + 1) % FRAMES
        return self._frames[self._t], 0.0, False, False, {}
