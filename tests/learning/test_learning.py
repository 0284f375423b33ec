"""Learners solve CartPole-v1 and Pendulum-v1 with their default options."""

from __future__ import annotations

import numpy as np
import pytest

from farstep.learners.ppo import PPOConfig
from tests.learning.tasks import DEFAULTS, make_env, make_training, trained

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize(
    ("learner", "num_envs", "launcher"),
    [("ppo", 16, "in-process"), ("async-ppo", 64, "local"), ("impala", 16, "in-process")],
)
def test_cart_pole_is_solved(learner: str, num_envs: int, launcher: str) -> None:
    """Asynchronous PPO with 64 environments: it once fell behind PPO the more environments it had."""
    mean, _ = trained("CartPole-v1", DEFAULTS[learner], 500_000, num_envs, target=475.0, launcher=launcher)
    assert mean >= 475


def test_pendulum_is_swung_up() -> None:
    mean, _ = trained("Pendulum-v1", PPOConfig(), 400_000, target=-250.0)
    assert mean >= -250.0  # a policy that does nothing gets about -1,200


def test_ppo_learns_while_workers_pull_weights_only_above_a_threshold() -> None:
    """The rule of the paper with the threshold of the README: the learned policy is as good as with every version."""
    with make_env("CartPole-v1", 16, kl_threshold=0.05) as env:
        training, agent = make_training(env, PPOConfig(), 60_000)
        training.run()
        pulls, versions = env.stats()["pulls"]["total"], env.version
    assert pulls < versions  # of two workers: at most every other version each
    agent.greedy = True
    with make_env("CartPole-v1", 8, seed=2, launcher="in-process") as env:
        assert env.collect(agent, steps=500).episodes["return"].tolist() == [500.0] * 8


def test_clipping_around_the_policy_that_acted_stalls_with_old_weights() -> None:
    """Why PPO clips around the learner's own policy: with the plain loss workers stop pulling."""
    with make_env("CartPole-v1", 16, kl_threshold=0.2, launcher="in-process") as env:
        training, _ = make_training(env, PPOConfig(decoupled=False), 60_000)
        progress = training.run()
        assert env.stats()["pulls"]["total"] <= 4
    assert float(np.mean(progress.returns)) < 100
