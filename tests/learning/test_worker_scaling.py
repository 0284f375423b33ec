"""PPO with a scaling rule: rows per update follow the workers, and a resumed run continues with its workers."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import farstep
from farstep.checkpoint.files import Refused
from farstep.elastic import Signals
from farstep.learners.async_ppo import AsyncPPOConfig
from farstep.learners.loop.training import Limits, Stopped, Training
from farstep.learners.loop.worker_scaling import check_scaling
from farstep.learners.networks.nets import ActorCritic, NetConfig, make_agent
from farstep.learners.ppo import PPO, PPOConfig
from tests.cluster.checks import worker_pids
from tests.learning.tasks import Config, Rows, make_env, make_training

ENVS, STEPS, WORKERS = 8, 8, 4
ROWS = STEPS * ENVS // WORKERS
"""Rows of one worker per update."""
SCHEDULE: dict[str, Any] = {"num_steps": STEPS, "update_epochs": 1, "scaling": "schedule:1:4:1:2"}


def env_of(workers: int = WORKERS, launcher: str = "in-process", **options: Any) -> farstep.ClusterEnv:
    return make_env("CartPole-v1", ENVS, launcher=launcher, workers=workers, **options)


def agent_of(env: farstep.ClusterEnv, config: PPOConfig) -> ActorCritic:
    return make_agent(*env.launch(), config.net, config.gamma)


def rows_of_updates(rows: list[dict[str, float]], start: float = 0) -> list[float]:
    return np.diff([start, *(row["step"] for row in rows)]).tolist()


def run(config: Config, updates: int, folder: Path | None = None, resume: bool = False, **options: Any) -> Rows:
    """Train until a signal after so many updates, and return what was logged."""
    sink = Rows(updates)
    with env_of(**options) as env:
        training, _ = make_training(env, config, 10**6, checkpoints=folder, sink=sink)
        if resume:
            training.resume()
        with pytest.raises(Stopped):
            training.run()
    return sink


def test_rows_per_update_follow_the_schedule() -> None:
    logged = run(PPOConfig(**SCHEDULE), 9).rows
    workers = [1, 1, 2, 2, 3, 3, 4, 4, 4]
    assert [row["workers/active"] for row in logged] == workers
    assert rows_of_updates(logged) == [each * ROWS for each in workers]


def test_columns_are_the_slots_of_the_workers_that_run() -> None:
    slots = []

    class Recorded(PPO):
        def update(self, batch: Any, *rest: Any) -> dict[str, float]:
            slots.append(batch.slots.tolist())
            return super().update(batch, *rest)

    config = PPOConfig(num_steps=STEPS, update_epochs=1)
    with env_of() as env:
        learner = Recorded(agent_of(env, config), config, seed=1, scaling=lambda signals: 3 - signals.update)
        Training(learner, env, Limits(total_steps=6 * ROWS)).run()
    assert slots == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3], [0, 1]]


@pytest.mark.parametrize(
    ("scaling", "net"), [("schedule:1:4:1:2", NetConfig()), ("noise:0.05", NetConfig(recurrent="gru", core=8))]
)
def test_resumed_run_equals_an_uninterrupted_run(scaling: str, net: NetConfig, tmp_path: Path) -> None:
    config = PPOConfig(**{**SCHEDULE, "scaling": scaling, "minibatch_size": 8}, net=net)
    whole = run(config, 7).rows
    run(config, 4, tmp_path)
    rest = run(config, 3, tmp_path, resume=True).rows
    names = ["step", "workers/active", "train/actor/total_loss", "env/episodes"]
    assert [[row[name] for name in names] for row in rest] == [[row[name] for name in names] for row in whole[4:]]


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (PPOConfig(**SCHEDULE), {"kl_threshold": 0.01}),
        (PPOConfig(**SCHEDULE), {"stagger": {"horizon": 16}}),
        (AsyncPPOConfig(**SCHEDULE, staleness_threshold=1), {}),
    ],
    ids=["aaps", "stagger", "async-ppo"],
)
def test_run_that_restarts_episodes_resumes_with_its_workers(
    config: Config, options: dict[str, Any], tmp_path: Path
) -> None:
    run(config, 5, tmp_path, **options)
    assert [row["workers/active"] for row in run(config, 4, tmp_path, resume=True, **options).rows] == [3, 4, 4, 4]


def test_run_resumed_without_a_rule_uses_all_workers(tmp_path: Path) -> None:
    run(PPOConfig(**SCHEDULE), 3, tmp_path)
    fixed = run(PPOConfig(**{**SCHEDULE, "scaling": None}), 2, tmp_path, resume=True).rows
    assert rows_of_updates(fixed)[1:] == [WORKERS * ROWS]


def test_run_resumed_on_fewer_workers_scales_within_them(tmp_path: Path) -> None:
    run(PPOConfig(**SCHEDULE), 7, tmp_path)
    assert [row["workers/active"] for row in run(PPOConfig(**SCHEDULE), 2, tmp_path, True, workers=2).rows] == [2, 2]


def test_schedule_continues_after_workers_are_killed() -> None:
    """Worker 0 is killed while it runs, and worker 1 while it is parked. Later both take part in an update."""

    class Kills(Rows):
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            super().log(step, metrics)
            if len(self.rows) == 1:
                for pid in worker_pids():
                    os.kill(pid, signal.SIGKILL)
            elif step - self.rows[-2]["step"] == STEPS * ENVS:
                signal.raise_signal(signal.SIGTERM)

    with env_of(workers=2, launcher="local") as env:
        config = PPOConfig(num_steps=STEPS, update_epochs=1, scaling="schedule:1:2:1:2")
        training, _ = make_training(env, config, 10**6, sink=(sink := Kills()))
        with pytest.raises(Stopped):
            training.run()
    assert [row["workers/active"] for row in sink.rows[:3]] == [1, 1, 2]
    assert sink.rows[-1]["workers/restarts"] == 2


def test_function_sees_rows_and_noise_scale() -> None:
    seen: list[Signals] = []

    def rule(signals: Signals) -> int:
        seen.append(signals)
        return 2

    config = PPOConfig(num_steps=STEPS, minibatch_size=4, update_epochs=1)
    with env_of() as env:
        learner = PPO(agent_of(env, config), config, seed=1, scaling=rule)
        Training(learner, env, Limits(total_steps=4 * ROWS)).run()
    assert [(each.update, each.workers, each.max_workers) for each in seen] == [(0, 4, 4), (1, 2, 4), (2, 2, 4)]
    assert {each.rows_per_worker for each in seen} == {ROWS}
    assert seen[0].noise_scale is None and all((each.noise_scale or 0) > 0 for each in seen[1:])


def test_rule_without_effect_is_warned_about() -> None:
    with env_of(workers=2) as env:
        training, _ = make_training(env, PPOConfig(**SCHEDULE), 64)
        training.run()
        training, _ = make_training(env, PPOConfig(num_steps=STEPS, minibatch_size=1000, scaling="noise"), 64)
        training.run()
        first, second = [event.text for event in env.events("warned") if "scaling rule" in event.text]
    assert "asks for up to 4 workers, but the run has only 2 workers" in first
    assert "an update needs at least two minibatches" in second


def test_rules_that_cannot_work_are_refused() -> None:
    with pytest.raises(farstep.ConfigError, match="no buffer that fills"):
        PPOConfig(scaling="fill")
    with pytest.raises(farstep.ConfigError, match="which fixes the rows of an update"):
        AsyncPPOConfig(scaling="noise", num_chunks=2)


@pytest.mark.parametrize(
    "forged",
    [{"workers": 0}, {"workers": 2, "trace": -1.0}, {"workers": 2, "squared_norm": math.inf}, {"workers": 2, "x": 1}],
)
def test_forged_state_is_refused(forged: dict[str, object]) -> None:
    with pytest.raises(Refused):
        check_scaling(forged)
