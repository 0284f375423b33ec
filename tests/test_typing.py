"""Programs as the documentation shows them; `make lint` checks with `mypy --strict` that their types are accepted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, assert_type

import numpy as np

import farstep
from farstep.core import Array


class RandomAgent:
    """An agent whose `act` takes random generators."""

    def act(self, obs: Array, rng: Sequence[np.random.Generator]) -> Array:
        return np.array([generator.integers(2) for generator in rng])

    def get_parameters(self) -> dict[str, Array]:
        return {}


class RecurrentAgent:
    """An agent whose `act` takes a recurrent state."""

    def initial_state(self, n: int) -> Array:
        return np.zeros((n, 1))

    def act(self, obs: Array, state: Array, episode_start: Array) -> dict[str, Any]:
        return {"action": np.zeros(len(obs), int), "state": state}

    def get_parameters(self) -> dict[str, Array]:
        return {}


def test_launch_configurations_have_a_common_type() -> None:
    configs: list[farstep.LaunchConfig] = [farstep.LocalConfig(), farstep.InProcessConfig()]
    for config in configs:
        assert_type(config.timeouts, farstep.Timeouts)
        assert config.timeouts == farstep.Timeouts()


def test_environment_configurations_take_mappings() -> None:
    config = farstep.EnvConfig(
        env_name="CartPole-v1", stagger={"horizon": 500}, transfer={"size": 64}, weights={"only": "actor.*"}
    )
    assert_type(config.stagger, farstep.Stagger | None)
    assert_type(config.transfer, farstep.TransferTrigger)
    assert_type(config.weights, farstep.WeightsConfig)
    assert config.stagger == farstep.Stagger(horizon=500)
    assert config.transfer == farstep.TransferTrigger(size=64)
    assert config.weights == farstep.WeightsConfig(only="actor.*")
    assert farstep.EnvConfig(env_name="CartPole-v1", stagger=None).stagger is None


def test_every_form_of_act_is_an_agent() -> None:
    agents: list[farstep.Agent] = [RandomAgent(), RecurrentAgent()]
    for agent in agents:
        with farstep.ClusterEnv({"env_name": "CartPole-v1"}, farstep.InProcessConfig()) as env:
            assert env.collect(agent, steps=2).shape == (2, 1)
