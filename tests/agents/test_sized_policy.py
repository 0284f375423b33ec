"""Policies that replay one recording for each batch size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from farstep.agents.policy import FAST, Policy
from farstep.agents.sized_policy import SizedPolicy


class CountingPolicy(torch.nn.Module):
    """Counts how often Python code of `act` runs, in a list of the class, which is no state of the agent."""

    calls: list[int] = []  # noqa: RUF012

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Tanh(), torch.nn.Linear(width, 4))

    def act(self, obs: Any) -> dict[str, Any]:
        type(self).calls.append(len(obs))
        logits = self.net(obs)
        noise = -torch.log(-torch.log(torch.rand_like(logits)))
        return {"action": torch.argmax(logits + noise, -1), "logits": logits}


class SlotPolicy(CountingPolicy):
    def act(self, obs: Any, slots: Any) -> dict[str, Any]:  # type: ignore[override]
        return {**super().act(obs), "slot": slots}


class RememberingPolicy(CountingPolicy):
    """Its state is the sum of the observations of an episode."""

    def initial_state(self, n: int) -> Any:
        return torch.zeros(n, 3)

    def act(self, obs: Any, state: Any, episode_start: Any) -> dict[str, Any]:  # type: ignore[override]
        state = torch.where(episode_start[:, None], obs, state + obs)
        return {**super().act(state), "state": state}


@pytest.fixture(autouse=True)
def no_calls() -> None:
    CountingPolicy.calls.clear()
    torch.manual_seed(0)


def rows(count: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=(count, 3)).astype(np.float32)


def accelerated(agent: Any, count: int = 4) -> SizedPolicy:
    policy = SizedPolicy(agent)
    policy.accelerate(rows(count), policy.initial_state(count), np.ones(count, bool))
    return policy


def acts(policy: Policy, count: int, seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    out = policy(rows(count, seed), None, np.zeros(count, bool), None)
    return {name: np.array(array) for name, array in out.items()}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    np.testing.assert_array_equal(found["action"], expected["action"])
    np.testing.assert_allclose(found["logits"], expected["logits"], rtol=1e-5, atol=1e-5)


def test_frequent_sizes_are_replayed_with_the_same_results() -> None:
    agent = CountingPolicy()
    policy, eager = accelerated(agent), Policy(agent)
    assert policy.note == FAST
    for seed in range(20):
        for count in (4, 8, 12):
            assert_same(acts(policy, count, seed), acts(eager, count, seed))
    agent.calls.clear()
    for count in (4, 8, 12):
        acts(policy, count)
    assert agent.calls == []


def test_a_rare_size_is_not_recorded() -> None:
    agent = CountingPolicy()
    policy = accelerated(agent)
    agent.calls.clear()
    acts(policy, 8)
    assert agent.calls == [8]


def test_a_large_batch_is_not_recorded() -> None:
    agent = CountingPolicy(width=1000)  # 8,004 parameters
    policy = accelerated(agent)
    for _ in range(20):
        acts(policy, 600)
    agent.calls.clear()
    acts(policy, 600)
    assert agent.calls == [600]
    assert accelerated(agent, 600).note == "eager"


def test_recordings_use_new_weights() -> None:
    agent = CountingPolicy()
    policy, eager = accelerated(agent), Policy(agent)
    for seed in range(3):
        with torch.no_grad():
            for parameter in agent.parameters():
                parameter.add_(torch.randn_like(parameter))
        policy.check_after_load()
        assert_same(acts(policy, 4, seed), acts(eager, 4, seed))


@pytest.mark.parametrize("size", [4, 8])
def test_a_recording_that_no_longer_agrees_is_replaced(size: int) -> None:
    agent = CountingPolicy()
    policy, eager = accelerated(agent), Policy(agent)
    for _ in range(10):
        acts(policy, size)
    agent.net[1] = torch.nn.ReLU()
    policy.check_after_load()
    assert_same(acts(policy, size), acts(eager, size))
    agent.calls.clear()
    acts(policy, size)
    assert agent.calls == []


def test_recording_and_checks_draw_no_random_numbers() -> None:
    agent = CountingPolicy()
    policy, eager = accelerated(agent), Policy(agent)
    found: list[Any] = []
    expected: list[Any] = []
    for each, results in ((policy, found), (eager, expected)):
        torch.manual_seed(7)
        for k in range(20):
            if k % 5 == 0:
                each.check_after_load()
            results.append(each(rows(8, k), None, np.zeros(8, bool), None)["action"].tolist())
    assert found == expected


def test_a_recurrent_policy_keeps_its_state() -> None:
    agent = RememberingPolicy()
    policy, eager = accelerated(agent), Policy(agent)
    states = [each.initial_state(8) for each in (policy, eager)]
    for k in range(20):
        starts = np.arange(8) == k % 8
        outs = []
        for i, each in enumerate((policy, eager)):
            torch.manual_seed(k)
            outs.append(each(rows(8, k), states[i], starts, None))
            states[i] = np.array(outs[i].pop("state"))
        assert_same(*outs)
        np.testing.assert_allclose(states[0], states[1], rtol=1e-5, atol=1e-5)


def test_a_policy_that_takes_slots_is_not_recorded() -> None:
    policy = accelerated(SlotPolicy())
    assert policy.note == "eager: act takes slots, which change from batch to batch"
    for first in range(20):
        policy.slots = first + np.arange(4)
        assert acts(policy, 4)["slot"].tolist() == policy.slots.tolist()
