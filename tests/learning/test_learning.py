"""Learners solve CartPole-v1 and Pendulum-v1 with their default options."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np
import pytest

from farstep.learners.ppo import PPOConfig
from farstep.learners.sac import SACConfig
from tests.learning.tasks import (
    DEFAULTS,
    Evaluations,
    Solved,
    best_evaluation,
    make_env,
    make_training,
)

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize(
    ("learner", "num_envs", "launcher"),
    [("ppo", 16, "in-process"), ("async-ppo", 64, "local"), ("impala", 16, "in-process")],
)
def test_cart_pole_is_solved(learner: str, num_envs: int, launcher: str) -> None:
    """Asynchronous PPO with 64 environments: it once fell behind PPO the more environments it had."""
    assert best_evaluation("CartPole-v1", DEFAULTS[learner], 200_000, num_envs, 475.0, launcher) >= 475


@pytest.mark.long
@pytest.mark.parametrize(
    ("config", "total_steps", "launcher"),
    [(PPOConfig(), 200_000, "in-process"), (SACConfig(), 40_000, "local")],
    ids=["ppo", "sac-concurrent"],
)
def test_pendulum_is_swung_up(config: PPOConfig | SACConfig, total_steps: int, launcher: str) -> None:
    """A policy that does nothing gets about -1,200. With local workers, SAC learns while they roll."""
    assert best_evaluation("Pendulum-v1", config, total_steps, 16, -250.0, launcher) >= -250


def learns_above_a_threshold(learner: str, total_steps: int, target: float, launcher: str) -> None:
    """Train with default options and the README's threshold, and check that the policy that acts learns, too.

    The most probable actions are good even where a learner stalls, so that they alone show little.
    """
    evaluations = Evaluations("CartPole-v1", target)
    with make_env("CartPole-v1", 16, kl_threshold=0.05, launcher=launcher) as env:
        training, evaluations.agent = make_training(env, DEFAULTS[learner], total_steps, sink=evaluations)
        with contextlib.suppress(Solved):
            training.run()
        pulls, versions = env.stats()["pulls"]["total"] / env.num_workers, env.version
    assert max(evaluations.returns) >= target
    assert float(np.mean(training.progress.returns)) > 45  # a policy that stalls: 22
    assert 1 < pulls <= 0.75 * versions


def test_ppo_learns_by_default_while_workers_pull_weights_only_above_a_threshold() -> None:
    """The budget is that of a run which pulls every version."""
    learns_above_a_threshold("ppo", 60_000, 475.0, "local")


def test_impala_learns_by_default_while_workers_pull_weights_only_above_a_threshold() -> None:
    """V-trace weights rows by the ratio of the learner's policy to the one that acted, and clips around neither."""
    learns_above_a_threshold("impala", 150_000, 300.0, "in-process")


# Cheaper than the defaults (half the epochs, a higher rate): what follows is about a loss that stalls.
QUICK = PPOConfig(num_steps=128, update_epochs=4, minibatch_size=256, learning_rate=2e-3)


@pytest.mark.parametrize("decoupled", [False, True])
def test_clipping_around_the_policy_that_acted_stalls_with_old_weights(decoupled: bool) -> None:
    """Why PPO clips around the learner's own policy: with the plain loss workers stop pulling."""
    with make_env("CartPole-v1", 16, kl_threshold=0.2, launcher="in-process") as env:
        training, _ = make_training(env, replace(QUICK, decoupled=decoupled), 25_000)
        progress = training.run()
        pulls = env.stats()["pulls"]["total"]
    mean = float(np.mean(progress.returns))
    assert (pulls > 4 and mean > 60) if decoupled else (pulls <= 4 and mean < 40)
