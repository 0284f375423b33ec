"""What a batch is made of before it is learned from."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tasks import Identity, make_env

from farstep.learners.nets import ActorCritic, NetConfig, make_agent
from farstep.learners.optimizing import Optimizer, Schedule
from farstep.learners.rollout import Minibatch, Rollout, minibatches, prepare
from farstep.learners.statistics import Statistics

CPU = torch.device("cpu")
KINDS = ["discrete", "multi-discrete", "binary", "continuous", "dict"]
NETS = {
    "plain": NetConfig(normalize_obs=True),
    "gru": NetConfig(recurrent="gru", core=8),
    "lstm": NetConfig(recurrent="lstm", core=8),
}


def collected(env: Any, net: NetConfig, steps: int = 25, stale: bool = False) -> tuple[ActorCritic, Any, Rollout]:
    """An agent, a batch of its own, and what is made of that; with `stale`, when the agent has changed since."""
    with make_env(env, 6, launcher="inprocess") as cluster:
        torch.manual_seed(0)
        agent = make_agent(*cluster.launch(), net, 0.99)
        for _ in range(2):  # the second one begins in the middle of episodes, with a state that is not zero
            batch = cluster.collect(agent, steps).copy()
        if stale:
            with torch.no_grad():
                for parameter in agent.parameters():
                    parameter += 0.05 * torch.randn_like(parameter)
            version = cluster.publish(agent)
        else:
            version = cluster.version
    return agent, batch, prepare(agent, batch, version, CPU)


def whole(rollout: Rollout) -> Minibatch:
    """All of it at once, in order."""
    part = Minibatch(rollout.obs, rollout.sample, rollout.initial_state, rollout.episode_start, rollout.columns())
    return part if rollout.initial_state is not None else part.flat()


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_learner_says_what_workers_recorded(kind: str, net: str) -> None:
    """So that the first minibatch's ratios are 1: the same observations, memory, statistics and samples."""
    agent, batch, rollout = collected(partial(Identity, kind, length=7), NETS[net])
    now = whole(rollout).evaluate(agent)
    np.testing.assert_allclose(now.logprob.detach(), batch["logprob"].reshape(-1), atol=1e-5)
    np.testing.assert_allclose(now.value.detach(), batch["value"].reshape(-1), atol=1e-5)
    assert torch.equal(rollout.proximal, rollout.logprob)


@pytest.mark.parametrize("net", NETS)
def test_rows_of_older_weights_are_evaluated_anew(net: str) -> None:
    agent, batch, rollout = collected("CartPole-v1", NETS[net], stale=True)
    now = whole(rollout).evaluate(agent)
    assert not np.allclose(batch["value"], rollout.value, atol=1e-3)
    np.testing.assert_allclose(now.logprob.detach(), rollout.proximal.flatten(), atol=1e-5)
    np.testing.assert_allclose(now.value.detach(), rollout.value.reshape(-1), atol=1e-5)
    np.testing.assert_array_equal(rollout.logprob, batch["logprob"])


@pytest.mark.parametrize("net", NETS)
def test_ends_are_worth_what_the_critic_says_of_them(net: str) -> None:
    """The value of a final observation is that of acting once more: compared with a longer batch of the same rows."""
    agent, batch, rollout = collected(partial(Identity, length=9), NETS[net])
    final = batch.final_obs
    assert len(final) >= 6
    others = np.ones(rollout.shape, bool)
    others[final.row, final.slot] = False
    assert not rollout.final_value[others].any() and rollout.final_value[~others].all()
    obs = torch.from_numpy(np.asarray(final.obs))
    if net == "plain":
        with torch.no_grad():
            np.testing.assert_allclose(agent.value(obs), rollout.final_value[final.row, final.slot], atol=1e-6)


def test_sequences_stay_whole_and_all_rows_come_once() -> None:
    _, _, rollout = collected("CartPole-v1", NETS["lstm"], steps=10)
    numbers = torch.arange(60).reshape(10, 6)
    parts = list(minibatches(rollout, {"number": numbers}, 20, torch.Generator().manual_seed(0)))
    assert [len(part) for part in parts] == [20, 20, 20]
    assert sorted(torch.cat([part["number"] for part in parts]).tolist()) == list(range(60))
    for part in parts:
        rows = part["number"].reshape(10, 2)
        assert (rows.diff(dim=0) == 6).all()


def test_the_last_minibatch_may_be_smaller() -> None:
    _, _, rollout = collected("CartPole-v1", NETS["plain"], steps=10)
    numbers = torch.arange(60).reshape(10, 6)
    generator = torch.Generator().manual_seed(0)
    first, second = (
        [p["number"].tolist() for p in minibatches(rollout, {"number": numbers}, 25, generator)] for _ in "ab"
    )
    assert [len(part) for part in first] == [25, 25, 10]
    assert (
        sorted(number for part in first for number in part) == list(range(60)) and first != second
    )  # reshuffled every epoch


@pytest.mark.parametrize("net", ["plain", "lstm"])
def test_micro_batches_give_the_gradient_of_the_whole(net: str) -> None:
    found = []
    for micro in (None, 20):
        agent, _, rollout = collected("CartPole-v1", NETS[net], steps=10)
        optimizer = Optimizer(agent, 1e-3, 1e9, seed=0)
        valid = torch.ones(rollout.shape, dtype=torch.bool)
        valid[3:6, 2:] = False
        columns = rollout.columns() | {"valid": valid}

        def loss(part: Minibatch, agent: ActorCritic = agent) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            now = part.evaluate(agent)
            assert part.valid is not None
            mean = (now.logprob + now.value.square())[part.valid].sum() / part.valid.sum().clamp_min(1)
            return mean, {}

        optimizer.learn(rollout, columns, loss, Schedule(epochs=1, batch_size=60, micro_batch_size=micro))
        found.append(torch.cat([parameter.detach().flatten() for parameter in agent.parameters()]))
    torch.testing.assert_close(found[0], found[1], atol=1e-6, rtol=1e-5)


def test_a_step_without_numbers_is_left_out() -> None:
    agent, _, rollout = collected("CartPole-v1", NETS["plain"], steps=10)
    optimizer = Optimizer(agent, 1e-3, 0.5, seed=0)
    before = {name: tensor.clone() for name, tensor in agent.state_dict().items()}

    def loss(part: Minibatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return part.evaluate(agent).value.sum() * torch.nan, {}

    metrics = optimizer.learn(rollout, rollout.columns(), loss, Schedule(epochs=1, batch_size=30))
    assert metrics["actor/skipped_steps"] == 1
    assert all(torch.equal(before[name], tensor) for name, tensor in agent.state_dict().items())


def test_statistics_are_those_of_all_rows_seen() -> None:
    seen, rewards = [], []
    with make_env("Pendulum-v1", 4, launcher="inprocess") as env:
        agent = make_agent(*env.launch(), NetConfig(normalize_obs=True, normalize_reward=True), 0.9)
        statistics = Statistics(agent)
        for _ in range(5):
            batch = env.collect(agent, 90).copy()
            statistics.observe_rewards(batch)
            statistics.observe(batch)
            seen.append(batch["obs"].reshape(-1, 3))
            rewards.append(batch)
    moments = agent.encoders["obs"].moments
    np.testing.assert_allclose(moments.mean, np.concatenate(seen).mean(0), atol=1e-4)
    np.testing.assert_allclose(moments.std, np.concatenate(seen).std(0), rtol=1e-3)
    running, found = np.zeros(4), []
    for batch in rewards:  # by hand: discounted sums that end with their episodes
        for reward, ended in zip(batch["reward"], batch["terminated"] | batch["truncated"], strict=True):
            running = running * 0.9 + reward
            found.append(running.copy())
            running[ended] = 0
    assert agent.reward_scale is not None
    np.testing.assert_allclose(agent.reward_scale.moments.std, np.concatenate(found).std(), rtol=1e-3)
    assert (np.abs(agent.reward_scale(np.full(3, -1e9))) == 10).all()
