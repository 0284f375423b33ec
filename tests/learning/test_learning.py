"""Each learner solves something: what is shown must be done, a pole balanced, a pendulum swung up, a bit remembered."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from tasks import Config, Identity, Recall, make_env, make_training, trained

from farstep.learners.async_ppo import AsyncPPOConfig
from farstep.learners.impala import ImpalaConfig
from farstep.learners.nets import NetConfig
from farstep.learners.ppo import PPOConfig

CONFIGS: dict[str, Config] = {"ppo": PPOConfig(), "async-ppo": AsyncPPOConfig(), "impala": ImpalaConfig()}
"""The defaults: what a newcomer gets."""


@pytest.mark.parametrize(("learner", "num_envs"), [("ppo", 16), ("async-ppo", 64), ("impala", 16)])
def test_cart_pole_is_solved(learner: str, num_envs: int) -> None:
    """Asynchronous PPO with 64 environments: it once fell behind PPO the more environments it had."""
    mean, _ = trained("CartPole-v1", CONFIGS[learner], 500_000, num_envs, target=475.0)
    assert mean >= 475


@pytest.mark.parametrize(
    ("learner", "kind"),
    [(learner, "discrete") for learner in CONFIGS]
    + [("ppo", kind) for kind in ("multi-discrete", "binary", "continuous", "dict")],
)
def test_identity_is_learned(learner: str, kind: str) -> None:
    """A random policy gets 2.5 to 5 of 10."""
    mean, _ = trained(partial(Identity, kind), CONFIGS[learner], 120_000, target=8.0, launcher="inprocess")
    assert mean >= 8.0


def test_pendulum_is_swung_up() -> None:
    mean, _ = trained("Pendulum-v1", PPOConfig(), 400_000, target=-250.0)
    assert mean >= -250.0  # a policy that does nothing gets about -1,200


@pytest.mark.parametrize("recurrent", ["gru", "lstm"])
def test_what_was_shown_once_is_remembered(recurrent: Any) -> None:
    config = PPOConfig(learning_rate=2e-3, num_steps=20, net=NetConfig(recurrent=recurrent, core=16))
    mean, _ = trained(Recall, config, 60_000, target=0.95, launcher="inprocess")
    assert mean >= 0.95


def test_without_memory_it_cannot_be_remembered() -> None:
    config = PPOConfig(learning_rate=2e-3, num_steps=20)
    mean, _ = trained(Recall, config, 30_000, target=0.95, launcher="inprocess")
    assert mean < 0.75


def test_ppo_learns_while_workers_pull_weights_only_above_a_threshold() -> None:
    """The rule of the paper with the threshold of the README: the learned policy is as good as with every version."""
    with make_env("CartPole-v1", 16, kl_threshold=0.05) as env:
        training, agent = make_training(env, PPOConfig(), 60_000)
        training.run()
        pulls, versions = env.stats()["weight_syncs"]["total"], env.version
    assert pulls < versions  # of two workers: at most every other version each
    agent.greedy = True
    with make_env("CartPole-v1", 8, seed=2, launcher="inprocess") as env:
        assert env.collect(agent, steps=500).episodes["return"].tolist() == [500.0] * 8


def test_clipping_around_the_policy_that_acted_stalls_with_old_weights() -> None:
    """Why PPO clips around the learner's own policy: with the plain loss workers stop pulling."""
    with make_env("CartPole-v1", 16, kl_threshold=0.2, launcher="inprocess") as env:
        training, _ = make_training(env, PPOConfig(decoupled=False), 60_000)
        progress = training.run()
        assert env.stats()["weight_syncs"]["total"] <= 4
    assert float(np.mean(progress.returns)) < 100
