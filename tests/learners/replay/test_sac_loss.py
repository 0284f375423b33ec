"""SAC's losses and densities, against numbers computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch.distributions import Normal, TanhTransform, TransformedDistribution

from farstep.errors import ConfigError, SpaceError
from farstep.learners.networks.soft_actor import SACNetConfig, SoftActor, squashed
from farstep.learners.replay.batches import ReplayBatch
from farstep.learners.sac import (
    SAC,
    SACConfig,
    actor_loss,
    critic_loss,
    make_soft_actor,
    soft_value,
    temperature_loss,
)

BOX = spaces.Box(-1, 1, (3,), np.float32)
SMALL = SACConfig(net=SACNetConfig(hidden=(16,)), alpha=0.01, policy_lr=1e-2, q_lr=1e-2)


def test_soft_value_of_a_sampled_action_takes_the_smaller_critic() -> None:
    q = torch.tensor([[1.0, 5.0], [2.0, 4.0]])
    assert soft_value(q, torch.tensor([-1.0, 0.5]), torch.tensor(0.2)).tolist() == pytest.approx([1.2, 3.9])


def test_soft_value_of_all_actions_is_an_expectation_of_the_critics_mean() -> None:
    q = torch.tensor([[[1.0, 3.0]], [[2.0, 2.0]]])
    logprob = torch.tensor([[math.log(0.25), math.log(0.75)]])
    expected = 0.25 * (1.5 - 0.1 * math.log(0.25)) + 0.75 * (2.5 - 0.1 * math.log(0.75))
    assert soft_value(q, logprob, torch.tensor(0.1)).tolist() == pytest.approx([expected])
    assert float(actor_loss(q, logprob, torch.tensor(0.1))) == pytest.approx(-expected)


def test_critic_loss_adds_both_critics() -> None:
    q, target = torch.tensor([[1.0, 2.0], [3.0, 2.0]]), torch.tensor([2.0, 4.0])
    assert float(critic_loss(q, target)) == pytest.approx(0.5 * ((1 + 4) / 2 + (1 + 4) / 2))


def test_temperature_rises_while_the_entropy_is_too_low() -> None:
    log_alpha = torch.zeros(1, requires_grad=True)
    temperature_loss(log_alpha, torch.tensor([0.5, 0.7]), 1.0).backward()
    assert log_alpha.grad is not None
    assert float(log_alpha.grad) == pytest.approx(-0.4), "a descent step raises it"


@pytest.mark.parametrize(("space", "largest"), [(spaces.Discrete(4), math.log(4)), (BOX, 3 * math.log(2))])
def test_an_entropy_that_no_policy_has_is_refused(space: spaces.Box | spaces.Discrete, largest: float) -> None:
    def made(target: float, alpha: float | None = None) -> SAC:
        config = SACConfig(target_entropy=target, alpha=alpha)
        return SAC(make_soft_actor(BOX, space, config), config, seed=1)

    made(0.99 * largest)
    made(2 * largest, alpha=0.1)
    with pytest.raises(ConfigError, match=r"at most .* nats"):
        made(1.01 * largest)


def test_density_of_squashed_samples_is_that_of_torch() -> None:
    generator = torch.Generator().manual_seed(1)
    mean, log_std, noise = (torch.randn(50, 3, generator=generator, dtype=torch.float64) for _ in range(3))
    action, logprob = squashed(mean + log_std.exp() * noise, noise, log_std)
    transform = TransformedDistribution(Normal(mean, log_std.exp()), [TanhTransform(cache_size=1)])
    usable = action.abs().amax(-1) < 0.999
    expected = transform.log_prob(action).sum(-1)
    assert torch.allclose(logprob[usable], expected[usable], atol=1e-6)


def test_actions_have_the_bounds_of_the_space() -> None:
    space = spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 10.0], np.float32))
    agent = SoftActor(BOX, space, SACNetConfig(hidden=()))
    agent.load_state_dict({**agent.state_dict(), "head.weight": 10 * torch.randn(4, 3)})
    action = agent.act(torch.randn(500, 3))["action"].detach()
    assert all(space.contains(row.numpy()) for row in action)
    low, high = torch.tensor([[-2.0, 0.0]]), torch.tensor([[2.0, 10.0]])
    assert agent.scaled(torch.cat([low, high])).tolist() == [[-1.0, -1.0], [1.0, 1.0]]


@pytest.mark.parametrize("action_space", [spaces.Discrete(4, start=-1), spaces.Box(-1, 1, (2,), np.float32)])
@pytest.mark.slow
def test_learner_finds_the_action_that_is_rewarded(action_space: spaces.Space) -> None:
    """A bandit: every episode is one step long, and one action is the best for every observation."""
    torch.manual_seed(1)
    agent = make_soft_actor(BOX, action_space, SMALL)
    learner = SAC(agent, SMALL, seed=1)
    action_space.seed(1)
    for _ in range(300):
        obs = torch.rand(64, 3) * 2 - 1
        action = torch.as_tensor(np.stack([action_space.sample() for _ in range(64)]))
        reward = (action == 1).float() if agent.is_discrete else 1 - (action - 0.5).abs().sum(-1)
        rows = {"obs": obs, "action": action, "reward": reward, "discount": torch.zeros(64), "next_obs": obs}
        learner.step(ReplayBatch(rows, torch.ones(64), np.arange(64)))
    agent.greedy = True
    best = agent.act(torch.rand(100, 3) * 2 - 1)["action"]
    wanted = torch.ones(100) if agent.is_discrete else torch.full((100, 2), 0.5)
    assert (best - wanted).abs().max() < 0.25


def test_temperature_has_a_learning_rate_of_its_own() -> None:
    """The first step of Adam is as long as the learning rate."""
    config = SACConfig(net=SMALL.net, policy_lr=0.0, q_lr=0.0, alpha_lr=0.25)
    space = spaces.Box(-1, 1, (2,), np.float32)
    learner = SAC(make_soft_actor(BOX, space, config), config, seed=1)
    obs = torch.zeros(8, 3)
    rows = {"obs": obs, "action": torch.zeros(8, 2), "reward": torch.zeros(8), "discount": torch.ones(8)}
    batch = ReplayBatch({**rows, "next_obs": obs}, torch.ones(8), np.arange(8))
    alphas = [float(learner.step(batch)[0]["actor/alpha"]) for _ in range(2)]
    assert alphas == pytest.approx([1.0, math.exp(-0.25)], rel=1e-4), "the entropy of a new policy is above the target"


def test_unbounded_and_unsupported_actions_are_refused() -> None:
    with pytest.raises(SpaceError, match="bounded"):
        make_soft_actor(BOX, spaces.Box(-np.inf, np.inf, (1,), np.float32), SMALL)
    with pytest.raises(SpaceError, match="MultiBinary"):
        make_soft_actor(BOX, spaces.MultiBinary(2), SMALL)
