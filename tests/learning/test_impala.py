"""IMPALA as a user relies on it: slow workers, killed workers, and a signal while it waits for rows."""

from __future__ import annotations

import math
import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import farstep
from farstep.learners.impala import Impala, ImpalaConfig
from farstep.learners.loop.training import Limits, Stopped, Training
from farstep.learners.networks.nets import NetConfig, make_agent
from tests.cluster.checks import assert_balanced, cluster, eventually, in_process, within
from tests.cluster.faulty import MortalEnv
from tests.cluster.flows import GatedEnv
from tests.cluster.tables import gaps_of, helper
from tests.learning.tasks import Rows


class Recording(Impala):
    """Keeps what it learns from, and how old the rows were."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: list[farstep.Batch] = []
        self.ages: list[int] = []

    def update(self, batch: farstep.Batch, version: int, *args: Any) -> dict[str, float]:
        self.seen.append(batch.copy())
        self.ages.append(version - int(batch["version"].min()))
        return super().update(batch, version, *args)


def learner_for(env: farstep.ClusterEnv, **options: Any) -> Recording:
    config = ImpalaConfig(num_steps=4, **options)
    return Recording(make_agent(*env.launch(), config.net, config.gamma), config, 1)


def training_until(
    is_done: Callable[[], bool], learner: Recording, env: farstep.ClusterEnv, sink: Rows | None = None
) -> Training:
    """A training that ends after the update at which `is_done` returns True."""
    training = Training(learner, env, Limits(total_steps=10**6), sink=sink)
    report = training.report
    training.report = lambda iteration: report(iteration) and not is_done()  # type: ignore[method-assign]
    return training


class Calls(Rows):
    """Calls a function when there are `at` rows of metrics."""

    def __init__(self, at: int, then: Any) -> None:
        super().__init__()
        self._at, self._then = at, then

    def log(self, step: int, metrics: Any) -> None:
        super().log(step, metrics)
        if len(self.rows) == self._at:
            self._then()


@pytest.mark.parametrize(
    ("workers", "given", "chunks", "staleness"), [(1, None, 1, 1), (4, None, 2, 1), (7, None, 4, 1), (7, 2, 2, 3)]
)
def test_defaults_let_all_workers_collect_at_the_same_time(
    workers: int, given: int | None, chunks: int, staleness: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounds = []

    def make_workflow(*args: Any, max_staleness: int) -> farstep.Workflow:
        bounds.append(max_staleness)
        return farstep.Workflow(*args, max_staleness=max_staleness)

    monkeypatch.setattr("farstep.learners.impala.Workflow", make_workflow)
    with cluster(envs=workers, config=in_process(workers)) as env:
        learner = learner_for(env, num_chunks=given)
        within(training_until(lambda: True, learner, env).run)
    assert learner.seen[0]["reward"].shape == (4, chunks) and bounds == [staleness]
    assert (staleness + 1) * chunks >= workers


def test_a_slow_worker_holds_up_no_update_and_its_old_rows_are_not_used(tmp_path: Path) -> None:
    """The first eight updates are made of rows of one worker; then the other one may step."""
    sink = Calls(8, (tmp_path / "gate").touch)
    with cluster(GatedEnv, envs=2, workers=2, env_kwargs={"folder": str(tmp_path)}) as env:
        learner = learner_for(env, critic_warmup_updates=2, net=NetConfig(recurrent="lstm"))
        slots: set[int] = set()

        def is_heard() -> bool:
            slots.update(learner.seen[-1].slots.tolist())
            return len(slots) == 2

        within(training_until(is_heard, learner, env, sink).run)
        assert_balanced(env.stats())
        assert env.stats()["dropped"]["stale"] >= 1, "the slow worker's first chunk"
    assert len({slot for batch in learner.seen[:8] for slot in batch.slots.tolist()}) == 1
    assert max(learner.ages) == max(row["lag/versions_max"] for row in sink.rows) <= 1
    gaps_of(learner.seen)


def test_divergence_from_the_policy_that_acted_is_logged() -> None:
    """Workers keep their first weights; from this metric `farstep train` warns about rows that are too old."""
    sink = Rows()
    with cluster(envs=2, config=in_process(2), kl_threshold=math.inf) as env:
        learner = learner_for(env, learning_rate=0.05)
        within(training_until(lambda: len(sink.rows) == 6, learner, env, sink).run)
    found = [row["train/actor/behave_k3"] for row in sink.rows]
    assert found[0] == pytest.approx(0.0, abs=1e-6) and found[-1] > 1e-3


def test_rows_of_a_killed_worker_are_neither_lost_nor_repeated(tmp_path: Path) -> None:
    kwargs = {"marker": str(tmp_path / "killed"), "at": 30, "length": None}
    with cluster(MortalEnv, envs=2, workers=2, env_kwargs=kwargs) as env:
        learner = learner_for(env, max_staleness=50)  # so that no row is too old
        within(training_until(lambda: len(gaps_of(learner.seen)) == 3, learner, env).run)
        stats = env.stats()
        assert stats["workers"]["restarts"] == 1 and not stats["dropped"].get("stale")
        assert_balanced(stats)
    slots = [slot for batch in learner.seen for slot in batch.slots.tolist()]
    gaps = Counter(gaps_of(learner.seen))
    assert sorted(gaps.values()) == [1, 2], "only the killed worker's slot has a gap"
    dead = max(gaps, key=gaps.__getitem__)
    for slot in set(slots):
        columns = [
            batch["obs"][:, column]
            for batch in learner.seen
            for column, each in enumerate(batch.slots.tolist())
            if each == slot
        ]
        rows = np.concatenate(columns)
        episodes = [rows[rows[:, 0] == episode, 1].tolist() for episode in dict.fromkeys(rows[:, 0])]
        assert len(episodes) == (2 if slot == dead else 1)
        assert all(counts == list(range(len(counts))) for counts in episodes)


def test_a_signal_while_the_learner_waits_for_rows_stops_the_run(tmp_path: Path) -> None:
    """The only worker cannot finish a chunk before the gate opens, so the learner waits when the signal arrives."""
    with cluster(GatedEnv, envs=1, workers=1, env_kwargs={"folder": str(tmp_path)}) as env:
        training = Training(learner_for(env), env, Limits(total_steps=100), checkpoints=tmp_path / "checkpoints")

        def interrupt() -> None:
            eventually(lambda: env.stats()["in_flight"])  # the run has begun, and handles signals
            os.kill(os.getpid(), signal.SIGTERM)

        with helper(interrupt), pytest.raises(Stopped):
            training.run()
        assert training.newest_checkpoint is not None and training.progress.steps == 0
        (tmp_path / "gate").touch()
