"""Learners solve tiny tasks: repeat the observation as action (Identity), and remember one bit (Recall)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from farstep.learners.networks.nets import NetConfig
from farstep.learners.ppo import PPOConfig
from tests.learning.tasks import DEFAULTS, Identity, Recall, trained

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize(
    ("learner", "kind"),
    [(learner, "discrete") for learner in DEFAULTS]
    + [("ppo", kind) for kind in ("multi-discrete", "binary", "continuous", "dict")],
)
def test_identity_is_learned(learner: str, kind: str) -> None:
    """A policy that ignores the observation gets at most 5 of 10.

    The task is easy: larger minibatches and fewer epochs than by default do.
    """
    sizes: dict[str, Any] = {} if learner == "impala" else {"num_steps": 64, "update_epochs": 4}
    sizes |= {"ppo": {"minibatch_size": 256}, "async-ppo": {"global_batch_size": 256}}.get(learner, {})
    config = replace(DEFAULTS[learner], learning_rate=3e-3, **sizes)
    mean, _ = trained(partial(Identity, kind), config, 120_000, target=6.0, launcher="in-process")
    assert mean >= 6.0


@pytest.mark.parametrize("recurrent", ["gru", "lstm"])
def test_recurrent_agent_solves_recall(recurrent: Any) -> None:
    config = PPOConfig(learning_rate=4e-3, num_steps=20, update_epochs=4, net=NetConfig(recurrent=recurrent, core=16))
    mean, _ = trained(partial(Recall, 3), config, 30_000, target=0.95, launcher="in-process")
    assert mean >= 0.95


def test_agent_without_memory_cannot_solve_recall() -> None:
    """With memory, 3,000 steps are enough."""
    config = PPOConfig(learning_rate=4e-3, num_steps=20, update_epochs=4)
    mean, _ = trained(partial(Recall, 3), config, 5_000, target=0.95, launcher="in-process")
    assert mean < 0.75
