"""Learners with a scaling rule: rows follow the workers, and a resumed run continues with its workers."""

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
from farstep.elastic import Fill, NoiseScale, Signals
from farstep.learners.aride import ArideConfig
from farstep.learners.async_ppo import AsyncPPOConfig
from farstep.learners.dqn import DQN, ApexConfig, DQNConfig, make_q_agent
from farstep.learners.impala import Impala, ImpalaConfig
from farstep.learners.loop.training import Limits, Stopped, Training
from farstep.learners.loop.worker_scaling import check_scaling
from farstep.learners.networks.nets import ActorCritic, NetConfig, make_agent
from farstep.learners.ppo import PPO, PPOConfig
from farstep.learners.replay.config import EpisodeReplayConfig, ReplayConfig
from farstep.learners.replay.start_checks import check_before_launch
from farstep.learners.sac import SACConfig
from tests.cluster.checks import assert_balanced, eventually, worker_pids
from tests.cluster.sharing import serving
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
    """Train until a signal after the given number of updates, and return the logged rows."""
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


REPLAY: dict[str, Any] = {"learning_starts": 40, "publish_every": 4, "report_every": 40, "buffer_size": 4_000}
LATER: dict[str, tuple[str, Config]] = {
    "impala": ("CartPole-v1", ImpalaConfig(num_steps=8, scaling="schedule:1:2:1:10")),
    "dqn": ("CartPole-v1", DQNConfig(replay=ReplayConfig(**REPLAY, scaling="schedule:1:2:1:60"))),
    "apex": ("CartPole-v1", ApexConfig(replay=ReplayConfig(**REPLAY, scaling="schedule:1:2:1:60"))),
    "sac": ("Pendulum-v1", SACConfig(replay=ReplayConfig(**REPLAY, scaling="schedule:1:2:1:60"))),
    "aride": ("CartPole-v1", ArideConfig(replay=EpisodeReplayConfig(**REPLAY, scaling="schedule:1:2:1:10"))),
}
"""Learners that collect while they learn, with a schedule that adds the second worker after some updates."""


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("impala", {}),
        ("impala", {"kl_threshold": 0.01, "release_idle": True}),
        ("dqn", {}),
        ("apex", {"release_idle": True}),
        ("sac", {"kl_threshold": 0.01, "release_idle": True}),
        ("aride", {"release_idle": True}),
    ],
)
def test_learner_that_collects_while_it_learns_follows_its_schedule(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """The second worker joins, the run is stopped, and the resumed run starts with both."""

    class UntilBoth(Rows):
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            super().log(step, metrics)
            if sum(row["workers/active"] == 2 for row in self.rows) == 2:
                signal.raise_signal(signal.SIGTERM)

    (task, config), active = LATER[name], list[list[float]]()
    for resumed in (False, True):
        with make_env(task, 4, workers=2, **options) as env:
            training, _ = make_training(env, config, 10**6, checkpoints=tmp_path, sink=(sink := UntilBoth()))
            if resumed:
                training.resume()
            with pytest.raises(Stopped):
                training.run()
            assert_balanced(stats := env.stats())
            assert set(stats["dropped"]) <= {"cancelled"}
            assert not env.events(["lost", "stuck"])
        active.append([row["workers/active"] for row in sink.rows])
    assert set(active[0]) == {1, 2} and active[0] == sorted(active[0])
    assert set(active[1]) == {2}


def test_fill_removes_workers_that_a_replay_learner_does_not_need() -> None:
    """The learner makes four updates per step, so that one worker is enough."""
    replay = {**REPLAY, "num_steps": 2, "updates_per_step": 4, "report_every": 10, "scaling": "fill"}
    config = DQNConfig(replay=ReplayConfig(**replay, concurrent=True))
    with make_env("CartPole-v1", 4, workers=2) as env:
        check_before_launch(config.replay, env, resumed=False)
        training, _ = make_training(env, config, 120, sink=(sink := Rows()))
        training.run()
    assert min(row["workers/active"] for row in sink.rows) == 1


def test_rule_keeps_the_smallest_number_of_workers_of_a_shared_run(tmp_path: Path) -> None:
    replay = ReplayConfig(**{**REPLAY, "num_steps": 2, "updates_per_step": 4, "scaling": "fill"})
    source = {"env_name": "CartPole-v1", "envs_per_node": 4, "seed": 1}
    with serving(tmp_path / "c", slots=2) as name:
        launch = farstep.LocalConfig(workers_per_node=2, coordinator=name, min_workers=2)
        with farstep.ClusterEnv(source, launch) as env:
            training, _ = make_training(env, DQNConfig(replay=replay), 120, sink=(sink := Rows()))
            training.run()
    assert {row["workers/active"] for row in sink.rows} == {2}


def test_fill_is_refused_if_learner_and_workers_alternate() -> None:
    replay = ReplayConfig(**{**REPLAY, "scaling": "fill"}, concurrent=False)
    with make_env("CartPole-v1", 4, workers=2) as env, pytest.raises(farstep.ConfigError, match="never ahead"):
        check_before_launch(replay, env, resumed=False)


@pytest.mark.parametrize("max_staleness", [None, 8])
def test_fill_removes_workers_that_impala_does_not_need(max_staleness: int | None) -> None:
    seen: list[Signals] = []
    chosen: list[int] = []

    class Slow(Impala):
        def update(self, batch: Any, *rest: Any) -> dict[str, float]:
            if chosen[-1] == 2:
                eventually(lambda: env.stats()["buffered"] >= (2 if max_staleness is None else 6))
            return super().update(batch, *rest)

    def rule(signals: Signals) -> int:
        seen.append(signals)
        chosen.append(Fill()(signals))
        return chosen[-1]

    config = ImpalaConfig(num_steps=8, max_staleness=max_staleness)
    with make_env("CartPole-v1", 4, workers=2) as env:
        learner = Slow(make_agent(*env.launch(), config.net, config.gamma), config, seed=1, scaling=rule)
        Training(learner, env, Limits(total_steps=20 * 32), sink=(sink := Rows())).run()
    assert min(row["workers/active"] for row in sink.rows) == 1
    assert seen[0].buffer_fill == 0 and {each.rows_per_worker for each in seen} == {16}
    assert max(each.buffer_fill or 0 for each in seen) == 1 and all(each.noise_scale is None for each in seen)


def test_alternating_replay_run_with_a_schedule_can_be_repeated() -> None:
    replay = {**REPLAY, "concurrent": False, "report_every": 8, "scaling": "schedule:1:2:1:20"}
    logged = []
    for launcher in ("in-process", "local"):
        with make_env("CartPole-v1", 4, launcher=launcher, workers=2) as env:
            training, _ = make_training(env, DQNConfig(replay=ReplayConfig(**replay)), 200, sink=(sink := Rows()))
            training.run()
        names = ["step", "workers/active", "replay/updates_per_step"]
        logged.append([[row[name] for name in names] for row in sink.rows])
    assert logged[0] == logged[1]
    assert {active for _, active, _ in logged[0]} == {1, 2}


def test_rule_without_effect_is_warned_about() -> None:
    with env_of(workers=2) as env:
        training, _ = make_training(env, PPOConfig(**SCHEDULE), 64)
        training.run()
        (text,) = [event.text for event in env.events("warned") if "scaling rule" in event.text]
    assert "asks for up to 4 workers, but the run has only 2 workers" in text


class FewestWorkers(NoiseScale):
    """Chooses as few workers as allowed, for any noise scale."""

    def __call__(self, signals: Signals) -> int:
        return 1


@pytest.mark.parametrize("net", [NetConfig(), NetConfig(recurrent="gru", core=8)], ids=["plain", "gru"])
def test_noise_scale_is_estimated_with_the_fewest_workers(net: NetConfig) -> None:
    """Each worker has one environment, and an update is a single minibatch."""
    config = PPOConfig(num_steps=STEPS, minibatch_size=1000, update_epochs=1, net=net)
    found = []

    class Sink:
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            found.append((metrics["workers/active"], learner.state()["scaling"]["trace"]))  # type: ignore[index]

    with make_env("CartPole-v1", 4, launcher="in-process", workers=4) as env:
        learner = PPO(agent_of(env, config), config, seed=1, scaling=FewestWorkers())
        Training(learner, env, Limits(total_steps=8 * STEPS), sink=Sink()).run()
    assert {workers for workers, _ in found} == {2 if net.is_recurrent else 1}
    assert len({trace for _, trace in found}) == len(found) > 3  # a new estimate each time


def test_unknown_noise_scale_is_warned_about() -> None:
    config = PPOConfig(num_steps=STEPS, scaling="noise", net=NetConfig(recurrent="gru", core=8))
    with make_env("CartPole-v1", 1, launcher="in-process", workers=1) as env:
        make_training(env, config, 2 * STEPS)[0].run()
        assert any("the gradient noise scale is unknown" in event.text for event in env.events("warned"))


def test_rules_that_cannot_work_are_refused() -> None:
    with pytest.raises(farstep.ConfigError, match="no buffer that fills"):
        PPOConfig(scaling="fill")
    with pytest.raises(farstep.ConfigError, match="which fixes the rows of an update"):
        AsyncPPOConfig(scaling="noise", num_chunks=2)
    with pytest.raises(farstep.ConfigError, match="one optimizer step per update"):
        ImpalaConfig(scaling="noise")
    with pytest.raises(farstep.ConfigError, match="no chunk ever waits for the learner"):
        ImpalaConfig(scaling="fill", max_staleness=0)
    with pytest.raises(farstep.ConfigError, match="samples batch_size items per update"):
        ReplayConfig(scaling="noise:0.5")
    with env_of() as env, pytest.raises(farstep.ConfigError, match="samples batch_size items per update"):
        DQN(make_q_agent(*env.launch(), DQNConfig()), DQNConfig(), seed=1, scaling=NoiseScale())


def test_schedule_that_may_leave_too_few_rows_to_start_learning_is_refused() -> None:
    config = ReplayConfig(learning_starts=600, buffer_size=1_000, concurrent=False, scaling="schedule:1:2:1:20")
    with make_env("CartPole-v1", 4, workers=2) as env, pytest.raises(farstep.ConfigError, match="only one worker may"):
        check_before_launch(config, env, resumed=False)


@pytest.mark.parametrize(
    "forged",
    [{"workers": 0}, {"workers": 2, "trace": -1.0}, {"workers": 2, "squared_norm": math.inf}, {"workers": 2, "x": 1}],
)
def test_forged_state_is_refused(forged: dict[str, object]) -> None:
    with pytest.raises(Refused):
        check_scaling(forged)
