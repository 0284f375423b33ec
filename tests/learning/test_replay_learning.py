"""Replay learners solve a tiny task, survive the loss of a worker, and train twice identically."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from farstep.learners.aride import ArideConfig
from farstep.learners.dqn import ApexConfig, DQNConfig
from farstep.learners.networks.nets import NetConfig
from farstep.learners.networks.q_network import QNetConfig
from farstep.learners.networks.soft_actor import SACNetConfig
from farstep.learners.replay.config import EpisodeReplayConfig, ReplayConfig
from farstep.learners.sac import SACConfig
from tests.cluster.checks import worker_pids
from tests.learning.tasks import Config, Identity, Rows, make_env, make_training, trained

pytestmark = pytest.mark.timeout(600)

REPLAY = ReplayConfig(buffer_size=4_000, learning_starts=200, batch_size=64, updates_per_step=0.25, report_every=200)
OF_EPISODES = EpisodeReplayConfig(
    buffer_size=4_000, learning_starts=200, batch_size=16, report_every=200, publish_every=1
)
Q_NET, SAC_NET = QNetConfig(hidden=(32,)), SACNetConfig(hidden=(32,))
CONFIGS: dict[str, Config] = {
    "dqn": DQNConfig(replay=REPLAY, net=Q_NET, exploration_steps=1_000, learning_rate=3e-3, gamma=0.5, tau=0.1),
    "apex": ApexConfig(replay=REPLAY, net=Q_NET, learning_rate=3e-3, gamma=0.5, tau=0.1),
    "sac": SACConfig(replay=REPLAY, net=SAC_NET, policy_lr=1e-2, q_lr=1e-2, gamma=0.5),
    "aride": ArideConfig(
        replay=OF_EPISODES, net=NetConfig(hidden=(32,)), learning_rate=5e-3, gamma=0.5, refresh_every=5
    ),
}


@pytest.mark.parametrize(
    ("learner", "kind"),
    [
        ("dqn", "discrete"),
        ("apex", "discrete"),
        ("sac", "discrete"),
        ("sac", "continuous"),
        ("aride", "discrete"),
        ("aride", "dict"),
    ],
)
def test_identity_is_learned(learner: str, kind: str) -> None:
    """A random policy gets 2.5 of 10 with discrete actions and about 3 with continuous ones."""
    mean, _ = trained(partial(Identity, kind), CONFIGS[learner], 8_000, target=7.0, launcher="in-process")
    assert mean >= 7.0


def test_identity_is_learned_while_workers_roll() -> None:
    """With in-process workers, as above, rolling and learning always alternate."""
    mean, _ = trained(Identity, CONFIGS["dqn"], 8_000, target=7.0, launcher="local")
    assert mean >= 7.0


def train(config: Any, total_steps: int, launcher: str = "local", **options: Any) -> tuple[list[dict[str, float]], Any]:
    rows = Rows()
    with make_env(Identity, 4, launcher=launcher) as env:
        training, agent = make_training(env, config, total_steps, sink=rows, **options)
        training.run()
    return rows.rows, agent


@pytest.mark.parametrize("concurrent", [True, False])
def test_updates_per_step_are_held_and_reported(concurrent: bool) -> None:
    """The ratio counts updates after the first `learning_starts` rows, for any items of the sampler."""
    config = DQNConfig(replay=replace(REPLAY, updates_per_step=0.5, concurrent=concurrent), net=Q_NET, n_step=3)
    rows, _ = train(config, 1_200)
    last = rows[-1]
    assert last["step"] >= 1_200
    assert last["update"] == (last["step"] - 200) // 2
    assert last["replay/updates_per_step"] == pytest.approx(0.5, abs=0.01)
    assert last["replay/rows"] == last["step"]
    assert sum("train/critic/value_loss" in row for row in rows) >= 4
    assert last["train/actor/current_version"] > 10, "weights are published every 16 updates"


@pytest.mark.parametrize("learner", ["apex", "sac", "aride"])
def test_alternating_runs_with_one_seed_are_identical(learner: str) -> None:
    config: Any = CONFIGS[learner]
    config = replace(config, replay=replace(config.replay, concurrent=False))
    first, second = (train(config, 600, "in-process")[1].state_dict() for _ in range(2))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_filler_rows_do_not_count_as_steps() -> None:
    """Environments that wait at a gate send filler rows; the run ends after the steps that were requested."""
    with make_env(Identity, 4, launcher="in-process", stagger={"horizon": 20, "early": "gate"}) as env:
        training, _ = make_training(env, CONFIGS["apex"], 800)
        training.run()
        stats = env.stats()
    assert training.progress.steps >= 800
    assert stats["steps"] > training.progress.steps, "there were filler rows"


class KillsWorker(Rows):
    """Kills a worker after the second row of metrics."""

    def log(self, step: int, metrics: Any) -> None:
        super().log(step, metrics)
        if len(self.rows) == 2:
            os.kill(worker_pids()[0], signal.SIGKILL)


@pytest.mark.parametrize(
    ("learner", "ratio"), [("dqn", "updates"), ("apex", "updates"), ("sac", "updates"), ("aride", "samples")]
)
def test_learning_continues_when_a_worker_is_killed(learner: str, ratio: str) -> None:
    """The killed worker's running episodes are never complete; A-RIDE learns from the others."""
    with make_env(Identity, 4) as env:
        rows = KillsWorker()
        training, _ = make_training(env, CONFIGS[learner], 2_000, sink=rows)
        progress = training.run()
        assert env.stats()["workers"]["restarts"] == 1
    assert progress.steps >= 2_000
    expected = {"updates": pytest.approx(0.25, abs=0.01), "samples": pytest.approx(4.0, abs=0.2)}[ratio]
    assert rows.rows[-1][f"replay/{ratio}_per_step"] == expected
    assert np.isfinite([row.get("train/critic/value_loss", 0.0) for row in rows.rows]).all()
