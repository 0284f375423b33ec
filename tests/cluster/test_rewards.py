"""Rewards that are NaN or infinite, in a loop of the user's own."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest

from farstep.testing import CountingEnv, TableAgent
from tests.cluster.checks import cluster, in_process


class BadRewardEnv(CountingEnv):
    """The third reward of each episode is `reward`."""

    def __init__(self, reward: float) -> None:
        super().__init__(length=5)
        self._reward = reward

    def step(self, action: Any) -> Any:
        obs, reward, *rest = super().step(action)
        return obs, self._reward if self.count == 3 else reward, *rest


@pytest.mark.parametrize("reward", [math.nan, -math.inf])
@pytest.mark.parametrize("call", ["collect", "step"])
def test_a_reward_that_is_not_finite_is_warned_about_once(
    call: str, reward: float, caplog: pytest.LogCaptureFixture
) -> None:
    agent = TableAgent()
    with cluster(BadRewardEnv, env_kwargs={"reward": reward}, envs=4, workers=2) as env:
        if call == "step":
            env.reset(seed=1)
        for _ in range(3):
            rewards = env.collect(agent, steps=8)["reward"] if call == "collect" else stepped(env, agent)
        assert not np.isfinite(rewards).all()  # as they are
        (text,) = warned(env)
    assert re.match(rf"BadRewardEnv returned the reward {reward} in environment slot [0-3]\. ", text)
    assert "Correct the environment, or clip its rewards" in text
    assert text in caplog.messages


def stepped(env: Any, agent: Any) -> Any:
    return np.stack([env.step(agent)[1] for _ in range(5)])


def warned(env: Any) -> list[str]:
    return [event.text for event in env.events("warned") if "reward" in event.text]


def test_finite_rewards_cause_no_warning() -> None:
    with cluster(BadRewardEnv, env_kwargs={"reward": 1e30}, envs=4, config=in_process()) as env:
        env.collect(TableAgent(), steps=8)
        assert warned(env) == []
