"""New weights reach the workers: `collect` and `step` notice changed parameters of any framework by themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import farstep
from farstep.testing import TableAgent
from tests.cluster.checks import cluster


@pytest.fixture(scope="module")
def torch() -> Any:
    """Imported here and not above: workers import torch as soon as the head has, which slows every other test."""
    return pytest.importorskip("torch")


@pytest.fixture(scope="module")
def jax() -> Any:
    module = pytest.importorskip("jax")
    module.numpy.zeros(1)  # starts its threads
    return module


def acts_with(env: farstep.ClusterEnv, agent: Any, value: float, version: int) -> None:
    """The next batch was rolled with the parameter `value` as `version`."""
    batch = env.collect(agent, steps=2)
    np.testing.assert_array_equal(batch["value"], np.full(batch.shape, value, np.float32))
    assert (batch["version"] == version).all()


class ArrayAgent(TableAgent):
    """A NumPy agent without a setter: new weights are written into its arrays."""

    def __init__(self) -> None:
        super().__init__()
        self.value = np.zeros(1, np.float32)

    def act(self, obs: Any) -> Any:
        return {"action": np.zeros(len(obs), np.int64), "value": np.repeat(self.value, len(obs))}

    def get_parameters(self) -> Any:
        return {"nested": [self.value]}


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_numpy_agents(transport: str) -> None:
    with cluster(transport=transport, workers=2) as env:
        agent = ArrayAgent()
        acts_with(env, agent, 0, version=0)
        acts_with(env, agent, 0, version=0)
        agent.value[:] = 1
        acts_with(env, agent, 1, version=1)
        agent.value = np.full(1, 2, np.float32)
        env.step(agent)
        acts_with(env, agent, 2, version=2)
        agent.value[:] = 3
        assert env.publish(agent) == 3
        acts_with(env, agent, 3, version=3)
        acts_with(env, ArrayAgent(), 0, version=4)  # another agent gets the next version: a version names one policy


def torch_agent(torch: Any) -> Any:
    class Module(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.value = torch.nn.Parameter(torch.zeros(1))

        def act(self, obs: Any) -> Any:
            n = obs.shape[0]
            return {"action": torch.zeros(n, dtype=torch.int64), "value": self.value.expand(n)}

        def get_parameters(self) -> Any:
            return self.state_dict()

    return Module()


@pytest.mark.usefixtures("torch_in_workers")
def test_torch_agents(torch: Any) -> None:
    with cluster() as env:
        agent = torch_agent(torch)
        acts_with(env, agent, 0, version=0)
        acts_with(env, agent, 0, version=0)
        optimizer = torch.optim.SGD(agent.parameters(), lr=1.0)
        (-agent.value).sum().backward()
        optimizer.step()
        acts_with(env, agent, 1, version=1)
        agent.value.data.fill_(2)
        acts_with(env, agent, 2, version=2)
        with torch.no_grad():
            agent.value += 1
        env.step(agent)
        acts_with(env, agent, 3, version=3)


class JaxAgent:
    """Immutable arrays: replaced, never written."""

    def __init__(self, jnp: Any) -> None:
        self.value = jnp.zeros(1)

    def act(self, obs: Any) -> Any:
        return {"action": np.zeros(len(obs), np.int64), "value": self.value.repeat(len(obs))}

    def get_parameters(self) -> Any:
        return {"value": self.value}

    def set_parameters(self, parameters: Any) -> None:
        self.value = parameters["value"]


def test_jax_agents(jax: Any) -> None:
    with cluster() as env:
        agent = JaxAgent(jax.numpy)
        acts_with(env, agent, 0, version=0)
        acts_with(env, agent, 0, version=0)
        agent.value = agent.value + 1
        acts_with(env, agent, 1, version=1)
        agent.value = agent.value * 1  # another array, the same contents
        acts_with(env, agent, 1, version=1)
        agent.value = agent.value * 2
        env.step(agent)
        acts_with(env, agent, 2, version=2)


class ScriptedAgent(ArrayAgent):
    """A baseline: there is nothing to learn."""

    def get_parameters(self) -> Any:
        return {}


class CopyingAgent(ArrayAgent):
    def get_parameters(self) -> Any:
        return {"z": np.zeros(1)}


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_an_agent_without_parameters_acts_with_version_zero(transport: str) -> None:
    with cluster(transport=transport, workers=2) as env:
        agent = ScriptedAgent()
        for _ in range(2):
            acts_with(env, agent, 0, version=0)
        assert env.publish(agent) == 1
        acts_with(env, agent, 0, version=1)
        with pytest.raises(farstep.AgentError, match="returns a copy"):
            env.collect(CopyingAgent(), steps=2)


def test_parameters_that_cannot_be_used_are_refused_and_the_old_ones_stay() -> None:
    with cluster() as env:
        agent = ArrayAgent()
        acts_with(env, agent, 0, version=0)
        agent.value[:] = np.nan
        with pytest.raises(farstep.FarstepError, match="NaN"):
            env.collect(agent, steps=2)
        agent.value = np.zeros(2, np.float32)
        with pytest.raises(farstep.FarstepError, match="shape"):
            env.collect(agent, steps=2)
        agent.value = np.ones(1, np.float32)
        acts_with(env, agent, 1, version=1)
