"""Agents for tests of served inference."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

from farstep.testing import TableAgent
from tests.cluster.toys import RememberingAgent


class RandomAgent(TableAgent):
    """Draws its actions from `rng`."""

    def act(self, obs: Any, rng: Any) -> dict[str, Any]:  # type: ignore[override]
        draws = np.array([each.random() for each in rng])
        return {"action": (draws * 3).astype(np.int64), "draw": draws}


class RandomRecurrentAgent(RememberingAgent):
    """Recurrent, and draws from `rng`."""

    def act(self, obs: Any, state: Any, episode_start: Any, rng: Any) -> dict[str, Any]:  # type: ignore[override]
        return {**super().act(obs, state, episode_start), "draw": np.array([each.random() for each in rng])}


class WhoAgent(TableAgent):
    """Records the slots of its rows, the process that acts, and the number of rows in a call."""

    def act(self, obs: Any, slots: Any) -> dict[str, Any]:  # type: ignore[override]
        n = len(obs)
        return {**super().act(obs), "slot": slots, "pid": np.full(n, os.getpid()), "rows": np.full(n, n)}


class ThreadsAgent(TableAgent):
    """Returns how many threads its process may use."""

    def act(self, obs: Any) -> dict[str, Any]:
        return {**super().act(obs), "threads": np.full(len(obs), int(os.environ["OMP_NUM_THREADS"]))}


class PriorAgent(TableAgent):
    """Computes initial priorities from the rows."""

    def priorities(self, rows: Any) -> Any:
        return rows["reward"] + rows["obs"][..., 1]


class VersionAgent(TableAgent):
    """Returns its parameter with every row."""

    def __init__(self) -> None:
        super().__init__()
        self.number = np.zeros(1)

    def act(self, obs: Any) -> dict[str, Any]:
        return {**super().act(obs), "number": np.full(len(obs), self.number[0])}

    def get_parameters(self) -> dict[str, Any]:
        return {"number": self.number}


class HoldingAgent(VersionAgent):
    """Acts slowly, so that versions are published while chunks are rolled."""

    def act(self, obs: Any) -> dict[str, Any]:
        time.sleep(0.002)
        return super().act(obs)


class UnloadableAgent(VersionAgent):
    """Cannot load the parameters of later versions."""

    def set_parameters(self, parameters: Any) -> None:
        if parameters["number"][0] > 0:
            raise ValueError("cannot load this version")
        self.number = parameters["number"]
