"""Environments and agents with known numbers for `test_collect`; workers import this module by its name."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from farstep.testing import CountingEnv, TableAgent


class NestedEnv(gymnasium.Env[Any, Any]):
    """Dict and Tuple spaces; every number is the step's count, or echoes the last action. Ends after 3 steps."""

    def __init__(self) -> None:
        self.observation_space = spaces.Dict(
            {
                "camera": spaces.Box(0, 255, (2, 2), np.uint8),
                "pair": spaces.Tuple((spaces.Discrete(4), spaces.MultiBinary(2))),
                "echo": spaces.Dict(
                    {"move": spaces.Box(-9, 9, (2,), np.float64), "gear": spaces.Discrete(5, start=-2)}
                ),
            }
        )
        self.action_space = spaces.Tuple((spaces.Box(-9, 9, (2,), np.float32), spaces.Discrete(5, start=-2)))

    def _obs(self, action: Any) -> dict[str, Any]:
        return {
            "camera": np.full((2, 2), 10 * self.count, np.uint8),
            "pair": (self.count, np.array([1, self.count % 2], np.int8)),
            "echo": {"move": np.float64(action[0]), "gear": action[1]},
        }

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.count = 0
        return self._obs((np.zeros(2), -2)), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        self.count += 1
        return self._obs(action), 1.0, self.count == 3, False, {}


class NestedAgent:
    """Moves by the camera's brightness, in a gear of the count, with nested extras."""

    def act(self, obs: Any) -> dict[str, Any]:
        count = obs["pair"][0]
        move = np.stack([obs["camera"][:, 0, 0] / 10, count], axis=1).astype(np.float32)
        return {"action": (move, count - 1), "extra": {"double": count * 2.0}}

    def get_parameters(self) -> list[Any]:
        return [np.zeros(1)]

    def set_parameters(self, parameters: list[Any]) -> None:
        """Nothing depends on it."""


class RememberingAgent(TableAgent):
    """Recurrent: its state counts the steps of the episode."""

    def initial_state(self, n: int) -> dict[str, Any]:
        return {"age": np.zeros((n, 1), np.float32)}

    def act(self, obs: Any, state: Any, episode_start: Any) -> dict[str, Any]:  # type: ignore[override]
        age = np.where(episode_start[:, None], 0, state["age"]) + 1
        return {**super().act(obs), "age": age[:, 0], "state": {"age": age.astype(np.float32)}}


def counting_vector(num_envs: int, mode: str) -> SyncVectorEnv:
    return SyncVectorEnv([CountingEnv] * num_envs, autoreset_mode=AutoresetMode[mode])


class TellingEnv(CountingEnv):
    """Infos of every kind; some of them appear and vanish."""

    def step(self, action: Any) -> Any:
        *rest, info = super().step(action)
        some = {"odd": self.count} if self.count % 2 else {"nested": {"half": self.count / 2, "text": f"{self.count}"}}
        return *rest, {**info, "flag": self.count > 2, "array": np.full(2, self.count, np.float32), **some}


def telling_vector(num_envs: int, mode: str) -> SyncVectorEnv:
    return SyncVectorEnv([TellingEnv] * num_envs, autoreset_mode=AutoresetMode[mode])


class DoubledReward(gymnasium.RewardWrapper[Any, Any]):
    def reward(self, reward: Any) -> Any:
        return 2 * reward
