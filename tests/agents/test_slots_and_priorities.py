"""An `act` that takes `slots` gets the slots of its rows; `priorities(rows)` becomes a column of initial priorities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import farstep
from farstep.agents.policy import FAST, Policy
from farstep.buffer import NStep, Prioritized
from farstep.errors import AgentError

OBS = np.zeros((3, 4), np.float32)
STARTS = np.ones(3, bool)


class BySlot(torch.nn.Module):
    """Acts by slot: action 1 in odd slots."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def get_parameters(self) -> Any:
        return self.state_dict()

    def act(self, obs: torch.Tensor, slots: torch.Tensor) -> Any:
        return {"action": slots % 2, "scaled": slots * self.weight}


class BySlotNumpy:
    def __init__(self) -> None:
        self.weight = np.ones(())

    def get_parameters(self) -> Any:
        return {"weight": self.weight}

    def act(self, obs: Any, rng: Any, *, slots: Any) -> Any:
        return {"action": slots % 2, "scaled": slots * np.float32(self.weight)}


@pytest.mark.parametrize("inference", ["auto", "eager"])
def test_torch_agent_gets_its_slots_on_both_paths(inference: str) -> None:
    policy = Policy(BySlot(), inference, slots=np.array([5, 6, 7]))
    policy.accelerate(OBS, None, STARTS)
    assert policy.note == (FAST if inference == "auto" else "eager")
    assert policy(OBS, None, STARTS, None)["action"].tolist() == [1, 0, 1]
    assert policy(OBS, None, STARTS, None)["scaled"].tolist() == [5, 6, 7]


@pytest.mark.parametrize("agent", [BySlot, BySlotNumpy])
def test_every_worker_passes_the_slots_that_it_hosts(agent: Any) -> None:
    config = {"env_name": "CartPole-v1", "envs_per_node": 5, "seed": 1}
    with farstep.ClusterEnv(config, farstep.InProcessConfig(workers_per_node=2)) as env:
        batch = env.collect(agent(), steps=3)
    assert batch["scaled"].tolist() == [[0, 1, 2, 3, 4]] * 3
    assert batch["action"].tolist() == [[0, 1, 0, 1, 0]] * 3


class Prioritizes(BySlotNumpy):
    """The priority of a row is its position: 10 * slot + row; checks its arguments."""

    def act(self, obs: Any, slots: Any) -> Any:  # type: ignore[override]
        return {"action": slots % 2, "slot": slots}

    def priorities(self, rows: Any) -> Any:
        steps, count = rows["reward"].shape
        assert rows["obs"].shape == (steps, count, 4)
        assert rows["last_obs"].shape == (count, 4)
        assert rows["slot"].shape == rows["terminated"].shape == (steps, count)
        return 10 * rows["slot"] + np.arange(steps)[:, None] + 1


class NegativePriorities(Prioritizes):
    def priorities(self, rows: Any) -> Any:
        return -rows["reward"]


class WrongShape(Prioritizes):
    def priorities(self, rows: Any) -> Any:
        return rows["reward"][0]


def env_of(**options: Any) -> farstep.ClusterEnv:
    config = {"env_name": "CartPole-v1", "envs_per_node": 3, "seed": 1, **options}
    return farstep.ClusterEnv(config, farstep.InProcessConfig(workers_per_node=1))


def test_priorities_of_the_agent_become_a_column_of_the_batch() -> None:
    with env_of() as env:
        batch = env.collect(Prioritizes(), steps=4)
    assert batch["priority"].dtype == np.float32
    assert batch["priority"].tolist() == [[t + 1, t + 11, t + 21] for t in range(4)]


def test_chunks_with_priorities_are_sent_whole_even_if_rows_could_be_sent_early() -> None:
    config = {"env_name": "CartPole-v1", "envs_per_node": 3, "seed": 1, "transfer": farstep.TransferTrigger(size=1)}
    launch = farstep.LocalConfig(workers_per_node=1, transport="tcp")
    with farstep.ClusterEnv(config, launch) as env:
        batch = env.collect(Prioritizes(), steps=4)
    assert batch["priority"].tolist() == [[t + 1, t + 11, t + 21] for t in range(4)]


@pytest.mark.parametrize(("agent", "text"), [(NegativePriorities, "negative"), (WrongShape, "one number per row")])
def test_invalid_priorities_are_refused(agent: Any, text: str) -> None:
    with env_of() as env, pytest.raises(AgentError, match=text):
        env.collect(agent(), steps=4)


@pytest.mark.parametrize("sampler", [Prioritized(alpha=1.0), NStep(2, by=Prioritized(alpha=1.0))])
def test_rows_are_sampled_in_proportion_to_the_priorities_of_their_worker(sampler: Any) -> None:
    with env_of() as env, farstep.Buffer(30, sampler, seed=1) as buffer:
        batch = env.collect(Prioritizes(), steps=4)
        buffer.insert(batch)
        sampled, info = buffer.sample(8)
    shares = sampled["priority"] / batch["priority"].sum()
    assert info.probabilities.tolist() == pytest.approx(shares.tolist(), rel=1e-5)


def test_rows_inserted_with_priorities_are_sampled_by_them() -> None:
    with farstep.Buffer(10, Prioritized(alpha=1.0), seed=1) as buffer:
        buffer.insert({"obs": np.arange(4), "priority": np.array([0.0, 0.0, 3.0, 1.0], np.float32)})
        sampled, _ = buffer.sample(400)
    assert set(sampled["obs"].tolist()) == {2, 3}
    assert np.mean(sampled["obs"] == 2) == pytest.approx(0.75, abs=0.01)


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf])
def test_invalid_priorities_of_inserted_rows_are_refused(bad: float) -> None:
    with farstep.Buffer(10, Prioritized(), seed=1) as buffer, pytest.raises(farstep.ConfigError, match="finite"):
        buffer.insert({"obs": np.arange(2), "priority": np.array([1.0, bad])})
