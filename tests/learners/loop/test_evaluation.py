"""Evaluations do not favor short episodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import farstep
from farstep.batch import Batch
from farstep.learners.loop.evaluation import run_episodes
from farstep.testing.envs import CountingEnv, TableAgent

SHORT, LONG = 10, 1000
EPISODES, SLOTS = 100, 64
SEED = 27
"""With this seed, 50 of the 100 episodes that count are short, as in the distribution."""


class CoinLength(CountingEnv):
    """Episodes take 10 or 1,000 steps with equal probability."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        found = super().reset(seed=seed)
        self.limit = SHORT if self.np_random.random() < 0.5 else LONG
        return found

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, _, *ended = super().step(action)
        return obs, 1.0, *ended  # the return is the length


@pytest.mark.slow
def test_short_episodes_are_not_favored() -> None:
    """The first 100 episodes that end contain too many short ones; those that count do not."""
    ended: list[float] = []

    def note(batch: Batch) -> None:
        ended.extend(batch.episodes["return"])

    def emit(*warning: Any, **more: Any) -> None:
        pytest.fail(f"unexpected event: {warning}")

    config = {"type": "factory", "env_name": CoinLength, "envs_per_node": SLOTS}
    with farstep.ClusterEnv(config, farstep.InProcessConfig()) as env:
        agent: Any = TableAgent()
        returns, lengths = run_episodes(env, agent, EPISODES, SEED, max_steps=5_000, emit=emit, on_batch=note)
    assert len(returns) == EPISODES and returns.tolist() == lengths.tolist()
    assert abs(np.mean(lengths == SHORT) - 0.5) <= 0.02
    assert returns.mean() == pytest.approx((SHORT + LONG) / 2, rel=0.02)
    assert np.mean(np.array(ended[:EPISODES]) == SHORT) > 0.6
