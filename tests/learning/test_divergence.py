"""Learners with AAPS: workers keep older weights while these are close, and the learner knows how old a row is."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from farstep.learners.networks.nets import NetConfig
from farstep.learners.ppo import PPOConfig
from tests.learning.tasks import Identity, Rows, make_env, make_training

KINDS = ["discrete", "multi-discrete", "binary", "continuous", "dict"]


@pytest.mark.parametrize("recurrent", ["none", "lstm"])
@pytest.mark.parametrize("kind", KINDS)
def test_workers_pull_weights_only_above_the_threshold(kind: str, recurrent: Any) -> None:
    net = NetConfig(recurrent=recurrent, core=8, normalize_obs=True)
    config = PPOConfig(num_steps=16, minibatch_size=128, learning_rate=1e-4, update_epochs=2, net=net)
    with make_env(partial(Identity, kind), 8, launcher="in-process", kl_threshold=0.5) as env:
        sink = Rows()
        make_training(env, config, 16 * 8 * 10, sink=sink)[0].run()
        stats = env.stats()
    assert max(row["lag/versions_max"] for row in sink.rows) >= 5  # old weights were good enough for long
    assert stats["pulls"]["total"] < 10 * 2
    assert all(np.isfinite(value) for value in stats["divergence"].values())
