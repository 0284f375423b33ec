"""Each learner solves something: what is shown must be done, a pole balanced, a pendulum swung up, a bit remembered."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from tasks import Config, Identity, Recall, trained

from farstep.learners.async_ppo import AsyncPPOConfig
from farstep.learners.impala import ImpalaConfig
from farstep.learners.nets import NetConfig
from farstep.learners.ppo import PPOConfig

QUICK: dict[str, Any] = {"learning_rate": 2e-3, "gamma": 0.98, "anneal_lr": False}
CONFIGS: dict[str, Config] = {
    "ppo": PPOConfig(num_steps=64, update_epochs=8, gae_lambda=0.8, ent_coef=0.0, value_clip=None, **QUICK),
    "async-ppo": AsyncPPOConfig(
        num_steps=64, update_epochs=8, gae_lambda=0.8, entropy_bonus=0.0, value_clip=None, **QUICK
    ),
    "impala": ImpalaConfig(num_steps=32, **{**QUICK, "learning_rate": 1e-3}),
}


@pytest.mark.parametrize("learner", CONFIGS)
def test_cart_pole_is_solved(learner: str) -> None:
    mean, _ = trained("CartPole-v1", CONFIGS[learner], 500_000, target=475.0)
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
    config = PPOConfig(
        num_steps=128,
        learning_rate=1e-3,
        anneal_lr=False,
        gamma=0.9,
        gae_lambda=0.95,
        update_epochs=10,
        num_minibatches=16,
        ent_coef=0.0,
        value_clip=None,
        net=NetConfig(normalize_obs=True, normalize_reward=True),
    )
    mean, _ = trained("Pendulum-v1", config, 400_000, target=-250.0)
    assert mean >= -250.0  # a policy that does nothing gets about -1,200


@pytest.mark.parametrize("recurrent", ["gru", "lstm"])
def test_what_was_shown_once_is_remembered(recurrent: Any) -> None:
    config = PPOConfig(
        num_steps=20, ent_coef=0.01, update_epochs=4, net=NetConfig(recurrent=recurrent, core=16), **QUICK
    )
    mean, _ = trained(Recall, config, 60_000, target=0.95, launcher="inprocess")
    assert mean >= 0.95


def test_without_memory_it_cannot_be_remembered() -> None:
    config = PPOConfig(num_steps=20, ent_coef=0.01, update_epochs=4, **QUICK)
    mean, _ = trained(Recall, config, 30_000, target=0.95, launcher="inprocess")
    assert mean < 0.75
