"""Preparation of a batch before the update."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
import pytest
import torch
from gymnasium import spaces

import farstep
from farstep.batch import Batch
from farstep.elastic import GradientNoise
from farstep.learners.loop.statistics import Statistics
from farstep.learners.networks.encoders import encoder_for
from farstep.learners.networks.nets import ActorCritic, NetConfig, make_agent
from farstep.learners.on_policy.optimizer import Optimizer, Schedule
from farstep.learners.on_policy.rollout import Minibatch, Rollout, minibatches, prepare
from farstep.learners.ppo import PPO, PPOConfig
from tests.learning.tasks import Identity, make_env, make_training

pytestmark = pytest.mark.slow  # learning
CPU = torch.device("cpu")
KINDS = ["discrete", "multi-discrete", "binary", "continuous", "dict"]
NETS = {
    "plain": NetConfig(normalize_obs=True),
    "gru": NetConfig(recurrent="gru", core=8),
    "lstm": NetConfig(recurrent="lstm", core=8),
}


def collected(env: Any, net: NetConfig, steps: int = 25, stale: bool = False) -> tuple[ActorCritic, Any, Rollout]:
    """An agent, a batch of it, and the prepared rollout; with `stale`, the agent has changed in between."""
    with make_env(env, 6, launcher="in-process") as cluster:
        torch.manual_seed(0)
        agent = make_agent(*cluster.launch(), net, 0.99)
        for _ in range(2):  # the second one begins in the middle of episodes, with a state that is not zero
            batch = cluster.collect(agent, steps).copy()
        if stale:
            with torch.no_grad():
                for parameter in agent.parameters():
                    parameter += 0.05 * torch.randn_like(parameter)  # type: ignore[misc]
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
def test_learner_computes_the_values_that_workers_recorded(kind: str, net: str) -> None:
    """So that the first minibatch's ratios are 1: the same observations, memory, statistics and samples."""
    agent, batch, rollout = collected(partial(Identity, kind, length=7), NETS[net])
    now = whole(rollout).evaluate(agent)
    np.testing.assert_allclose(now.logprob.detach(), batch["logprob"].reshape(-1), atol=1e-5)
    np.testing.assert_allclose(now.value.detach(), batch["value"].reshape(-1), atol=1e-5)
    assert torch.equal(rollout.proximal, rollout.logprob)


@pytest.mark.parametrize("net", NETS)
def test_rows_of_older_weights_are_evaluated_again(net: str) -> None:
    agent, batch, rollout = collected("CartPole-v1", NETS[net], stale=True)
    now = whole(rollout).evaluate(agent)
    assert not np.allclose(batch["value"], rollout.value, atol=1e-3)
    np.testing.assert_allclose(now.logprob.detach(), rollout.proximal.flatten(), atol=1e-5)
    np.testing.assert_allclose(now.value.detach(), rollout.value.reshape(-1), atol=1e-5)
    np.testing.assert_array_equal(rollout.logprob, batch["logprob"])


@pytest.mark.parametrize("net", NETS)
def test_final_observations_have_the_value_of_the_critic(net: str) -> None:
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


@pytest.mark.parametrize("net", NETS)
def test_final_observation_has_the_value_that_it_has_in_a_longer_episode(net: str) -> None:
    """Observations do not depend on actions, so memory is the same, too."""
    found = []
    for length in (9, 10):
        with make_env(partial(Identity, length=length), 6, launcher="in-process") as env:
            torch.manual_seed(0)
            agent = make_agent(*env.launch(), NETS[net], 0.99)
            batch = env.collect(agent, 12).copy()
        found.append((batch, prepare(agent, batch, 0, CPU)))
    (short, rollout), (long, _) = found
    assert short["truncated"][8].all() and not long["truncated"][8].any()
    np.testing.assert_allclose(rollout.final_value[8], long["value"][9], atol=1e-5)


@pytest.mark.parametrize("net", NETS)
def test_observation_after_the_last_row_has_the_value_of_the_next_batch(net: str) -> None:
    with make_env(partial(Identity, length=9), 6, launcher="in-process") as env:
        agent = make_agent(*env.launch(), NETS[net], 0.99)
        batch = [env.collect(agent, 12).copy() for _ in "ab"][1]
        rollout = prepare(agent, batch, env.version, CPU)
        following = env.collect(agent, 1).copy()
    assert not following["episode_start"].any()
    np.testing.assert_allclose(rollout.last_value, following["value"][0], atol=1e-5)
    advantages, returns = rollout.advantages(0.9, 0.5)
    expected = batch["reward"][-1] + 0.9 * following["value"][0]
    np.testing.assert_allclose(returns[-1], expected, atol=1e-5)
    np.testing.assert_allclose(advantages[-1], expected - batch["value"][-1], atol=1e-5)


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


class RecordingNoise(GradientNoise):
    """Stores the gradients that it receives, with their numbers of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.gradients: list[tuple[torch.Tensor, int]] = []

    def add(self, gradient: Any, rows: int) -> None:
        self.gradients.append((gradient.clone(), rows))


@pytest.mark.parametrize(("size", "rows"), [(60, [30, 30]), (40, [40, 20])])
@pytest.mark.parametrize("net", ["plain", "lstm"])
def test_noise_is_measured_on_the_policy_without_the_critic(net: str, size: int, rows: list[int]) -> None:
    """If an epoch has a single minibatch, on its halves; this does not change the update."""
    found, noise = [], RecordingNoise()
    for measured in (None, noise):
        agent, _, rollout = collected("CartPole-v1", NETS[net], steps=10)
        optimizer = Optimizer(agent, 1e-3, 1e9, seed=0)

        def loss(part: Minibatch, agent: ActorCritic = agent) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            now = part.evaluate(agent)
            return now.logprob.mean() + 1e6 * now.value.mean(), {}

        schedule = Schedule(epochs=2, batch_size=size)
        optimizer.learn(rollout, rollout.columns(), loss, schedule, noise=measured)
        found.append(torch.cat([parameter.detach().flatten() for parameter in agent.parameters()]))
    assert torch.equal(found[0], found[1])
    assert [count for _, count in noise.gradients] == rows
    critic = sum(parameter.numel() for parameter in agent.critic.parameters())
    assert all(len(gradient) == len(found[0]) - critic for gradient, _ in noise.gradients)


def test_step_with_nan_gradients_is_skipped() -> None:
    agent, _, rollout = collected("CartPole-v1", NETS["plain"], steps=10)
    optimizer = Optimizer(agent, 1e-3, 0.5, seed=0)
    before = {name: tensor.clone() for name, tensor in agent.state_dict().items()}

    def loss(part: Minibatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return part.evaluate(agent).value.sum() * torch.nan, {}

    metrics = optimizer.learn(rollout, rollout.columns(), loss, Schedule(epochs=1, batch_size=30))
    assert metrics["actor/skipped_steps"] == 1
    assert all(torch.equal(before[name], tensor) for name, tensor in agent.state_dict().items())


def reward_scale(batches: list[Batch]) -> tuple[float, float]:
    """The standard deviation and the number of the discounted returns of these batches."""
    agent = make_agent(spaces.Box(-1, 1, (3,)), spaces.Discrete(2), NetConfig(normalize_reward=True), 0.9)
    statistics = Statistics(agent)
    for batch in batches:
        statistics.observe_rewards(batch)
    assert agent.reward_scale is not None
    return float(agent.reward_scale.moments.std), float(agent.reward_scale.moments.count)


def two_batches() -> tuple[Batch, Batch]:
    with make_env("CartPole-v1", 4, launcher="in-process") as env:
        agent = make_agent(*env.launch(), NetConfig(), 0.9)
        first, second = (env.collect(agent, 15).copy() for _ in "ab")
    return first, second


def test_two_chunks_of_a_slot_in_one_batch_are_consecutive() -> None:
    first, second = two_batches()
    arrays = {name: np.concatenate([first.arrays[name], second.arrays[name]], 1) for name in first}
    both = replace(
        first,
        arrays=arrays,
        slots=np.concatenate([first.slots, second.slots]),
        continues=np.concatenate([first.continues, second.continues]),
    )
    assert second.continues.all()
    np.testing.assert_allclose(reward_scale([both]), reward_scale([first, second]), rtol=1e-5)


def test_filler_rows_do_not_count_as_rewards() -> None:
    batch, _ = two_batches()
    where = 6  # a row without an action is inserted
    filled = {name: np.insert(array, where, array[where], axis=0) for name, array in batch.arrays.items()}
    filled["valid"][where], filled["reward"][where] = False, 0
    for name in ("terminated", "truncated"):
        filled[name][where] = False
    np.testing.assert_allclose(reward_scale([replace(batch, arrays=filled)]), reward_scale([batch]), rtol=1e-6)


def test_even_the_first_batch_is_learned_from_in_units_of_its_returns() -> None:
    with make_env("Pendulum-v1", 4, launcher="in-process") as env:
        config = PPOConfig(net=NetConfig(normalize_reward=True))
        learner = PPO(make_agent(*env.launch(), config.net, config.gamma), config, seed=0)
        batch = env.collect(learner.agent, 50).copy()
        rollout = learner.prepare(batch, env.version, 0.0)
    assert learner.agent.reward_scale is not None
    std = float(learner.agent.reward_scale.moments.std)
    assert std > 2
    np.testing.assert_allclose(rollout.reward, batch["reward"] / std, rtol=1e-5)


@pytest.mark.parametrize(("high", "scale"), [(255, 255), (1, 1), (16, 16)])
def test_bytes_that_are_not_an_image_are_divided_by_their_bound(high: int, scale: int) -> None:
    encoder = encoder_for(spaces.Box(0, high, (128,), np.uint8), normalize=False)
    obs = torch.full((2, 128), high, dtype=torch.uint8)
    assert (encoder(obs) == high / scale).all()
    normalized = encoder_for(spaces.Box(0, high, (128,), np.uint8), normalize=True)
    normalized.update(torch.randint(0, high + 1, (1000, 128), dtype=torch.uint8))
    assert normalized(torch.randint(0, high + 1, (1000, 128), dtype=torch.uint8)).std() == pytest.approx(1, abs=0.1)


def test_statistics_are_those_of_all_rows_seen() -> None:
    seen, rewards = [], []
    with make_env("Pendulum-v1", 4, launcher="in-process") as env:
        agent = make_agent(*env.launch(), NetConfig(normalize_obs=True, normalize_reward=True), 0.9)
        statistics = Statistics(agent)
        for _ in range(5):
            batch = env.collect(agent, 90).copy()
            statistics.observe_rewards(batch)
            statistics.observe(batch)
            seen.append(batch["obs"].reshape(-1, 3))
            rewards.append(batch)
    moments: Any = agent.encoders["obs"].moments  # type: ignore[index]
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


ACTOR = ("actor.*", "heads.*", "encoders.*")


@pytest.mark.parametrize("recurrent", ["none", "gru"])
def test_a_critic_that_is_not_sent_is_evaluated_by_the_learner(recurrent: Literal["none", "gru"]) -> None:
    """So that a run learns the same, whether or not workers get new weights of the critic."""
    net = NetConfig(recurrent=recurrent, core=8)
    config = PPOConfig(num_steps=16, net=net, minibatch_size=32, learning_rate=1e-2)
    learned = []
    for weights in ({}, {"only": (*ACTOR, "core.*") if recurrent == "gru" else ACTOR}):
        with make_env("CartPole-v1", 4, launcher="in-process", weights=weights) as env:
            training, agent = make_training(env, config, 4 * 64)
            training.run()
            learned.append(torch.cat([parameter.detach().flatten() for parameter in agent.parameters()]))
    torch.testing.assert_close(learned[1], learned[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("only", ["actor.*", ["actor.*", "heads.*", "critic.*"]], ids=repr)
def test_weights_that_the_policy_needs_must_be_sent(only: Any) -> None:
    with make_env("CartPole-v1", 4, launcher="in-process", weights={"only": only}) as env:
        config = PPOConfig(num_steps=16, net=NetConfig(normalize_obs=True))
        with pytest.raises(farstep.ConfigError, match=r"leaves out '(heads|encoders)\.[^']*', which the policy needs"):
            make_training(env, config, 64)
