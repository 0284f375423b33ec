"""Environments with extreme, constant or invalid rewards and observations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from farstep.cli import main
from farstep.errors import RewardError, SpaceError
from farstep.learners.networks.nets import NetConfig, make_agent
from farstep.learners.ppo import PPOConfig
from farstep.learners.returns import gae, lambda_returns
from farstep.testing import CountingEnv
from tests.learning.tasks import make_env, make_training

CONFIG = PPOConfig(num_steps=8)


class BadReward(CountingEnv):
    def __init__(self, reward: float) -> None:
        super().__init__()
        self._reward = reward

    def step(self, action: Any) -> Any:
        obs, _, *rest = super().step(action)
        return obs, self._reward, *rest


class ScalarObs(CountingEnv):
    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Box(-1.0, 1.0, (), np.float32)

    def reset(self, **options: Any) -> Any:
        return np.float32(0.5), super().reset(**options)[1]

    def step(self, action: Any) -> Any:
        return np.float32(0.5), *super().step(action)[1:]


@pytest.mark.parametrize("reward", [np.nan, np.inf, -np.inf])
def test_reward_that_is_not_finite_ends_the_run_and_names_its_slot(reward: float, tmp_path: Path) -> None:
    with (
        make_env(BadReward, 4, launcher="in-process", env_kwargs={"reward": reward}) as env,
        pytest.raises(RewardError, match=r"slot 0 returned the reward -?(nan|inf)"),
    ):
        make_training(env, CONFIG, 100, checkpoints=tmp_path)[0].run()


def test_too_large_rewards_are_warned_about_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    train = [
        "train",
        "ppo",
        "--launcher",
        "in-process",
        "--num-envs",
        "4",
        "--num-steps",
        "8",
        "--folder",
        str(tmp_path),
    ]
    env = ["--env", f"{__name__}:BadReward", "--env-type", "factory", "--env-kwargs", '{"reward": 1e308}']
    assert main([*train, *env]) == 1
    assert "slot 0 returned the reward inf" in capsys.readouterr().err
    assert not [warning for warning in recwarn if issubclass(warning.category, RuntimeWarning)]


def test_update_without_finite_gradients_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    with make_env(BadReward, 4, launcher="in-process", env_kwargs={"reward": 1e38}) as env:
        make_training(env, replace(CONFIG, net=NetConfig(normalize_reward=False)), 64)[0].run()
    assert "changed nothing, because none of its gradients was finite" in caplog.text


def test_a_single_number_is_an_observation() -> None:
    with make_env(ScalarObs, 4, launcher="in-process") as env:
        assert make_training(env, CONFIG, 64)[0].run().steps >= 64


def test_more_numbers_than_a_network_can_have_inputs_are_refused() -> None:
    with pytest.raises(SpaceError, match="1,000,000 inputs"):
        make_agent(spaces.Discrete(1_000_000), spaces.Discrete(2), NetConfig(), 0.99)


def test_nan_does_not_spread_past_the_end_of_an_episode() -> None:
    rewards = np.array([[1.0], [np.nan]])
    ends, never, zeros = np.array([[True], [False]]), np.zeros((2, 1), bool), np.zeros((2, 1))
    advantages, _ = gae(rewards, zeros, np.zeros(1), ends, never, zeros, 0.9, 0.95)
    assert advantages[0, 0] == 1.0 and np.isnan(advantages[1, 0])
    returns = lambda_returns(rewards, zeros, np.zeros(1), ends, never, zeros, 0.9, 0.95)
    assert returns[0, 0] == 1.0
