"""Runs of replay learners resume with their learner and their replay buffer."""

from __future__ import annotations

import math
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import farstep
from farstep.checkpoint.folder import numbered
from farstep.event import EventKind
from farstep.learners.dqn import ApexConfig, DQNConfig
from farstep.learners.loop.training import Stopped
from farstep.learners.replay.config import ReplayConfig
from farstep.learners.sac import SACConfig
from tests.learning.tasks import Identity, Rows, make_env, make_training
from tests.learning.test_replay_learning import CONFIGS as LEARNING_CONFIGS
from tests.learning.test_replay_learning import Q_NET, SAC_NET

pytestmark = pytest.mark.timeout(600)

REPLAY = ReplayConfig(buffer_size=4_000, learning_starts=100, batch_size=16, updates_per_step=0.25, report_every=100)
CONFIGS: dict[str, Any] = {
    "dqn": DQNConfig(replay=REPLAY, net=Q_NET),
    "apex": ApexConfig(replay=REPLAY, net=Q_NET),
    "sac": SACConfig(replay=REPLAY, net=SAC_NET),
    "aride": LEARNING_CONFIGS["aride"],
}


class Run:
    """A run in a folder: trains, or resumes and trains on; keeps its metrics and events."""

    def __init__(
        self,
        config: Any,
        folder: Path,
        total_steps: int,
        *,
        resume: bool = False,
        sink: Rows | None = None,
        launcher: str = "in-process",
        num_envs: int = 4,
    ) -> None:
        self.sink = Rows() if sink is None else sink
        with make_env(Identity, num_envs, launcher=launcher) as env:
            training, self.agent = make_training(env, config, total_steps, sink=self.sink, checkpoints=folder)
            if resume:
                training.resume()
            self.started_at = training.progress.steps
            self.before = {name: tensor.clone() for name, tensor in self.agent.state_dict().items()}
            try:
                training.run()
            finally:
                self.events = env.events()

    @property
    def rows(self) -> list[dict[str, float]]:
        return self.sink.rows

    def texts(self, kind: EventKind) -> str:
        return "\n".join(event.text for event in self.events if event.kind == kind)


def saved_counters(folder: Path) -> tuple[int, int, int]:
    """Rows, inserted rows and sampled rows of the buffer's checkpoint."""
    with farstep.Buffer.restore(folder / "buffer") as buffer:
        return len(buffer), buffer.limiter.inserts, buffer.limiter.samples


@pytest.mark.parametrize(
    ("learner", "launcher"), [("dqn", "in-process"), ("apex", "local"), ("sac", "in-process"), ("aride", "local")]
)
def test_stopped_run_resumes_with_its_rows_and_counters(learner: str, launcher: str, tmp_path: Path) -> None:
    with pytest.raises(Stopped, match="SIGTERM"):
        Run(CONFIGS[learner], tmp_path, 5_000, sink=Rows(stop_at=5), launcher=launcher)
    rows, inserts, samples = saved_counters(tmp_path)
    assert rows == inserts >= 500 and samples > 0
    num_envs = 6 if launcher == "local" else 4  # a pooled buffer takes more environments
    run = Run(CONFIGS[learner], tmp_path, inserts + 300, resume=True, launcher=launcher, num_envs=num_envs)
    assert f"restored {rows:,} rows" in run.texts("checkpointed")
    assert "starts empty" not in run.texts("warned")
    first, last = run.rows[0], run.rows[-1]
    assert "train/critic/value_loss" in first or "train/critic/q_mean" in first, "it learns from the first rows on"
    assert last["replay/rows"] == last["step"] >= inserts + 300
    if learner == "aride":  # its items are episodes: the last batch may be incomplete
        held, wanted = last["replay/samples_per_step"], CONFIGS[learner].replay.samples_per_step
        assert held == pytest.approx(wanted, rel=0.2), "the ratio holds over both parts of the run"
    else:
        assert last["replay/updates_per_step"] == pytest.approx(0.25, abs=0.01)
        assert last["update"] == (last["step"] - 100) // 4, "the ratio holds over both parts of the run"


def test_priorities_are_restored(tmp_path: Path) -> None:
    Run(CONFIGS["apex"], tmp_path, 384)
    with farstep.Buffer.restore(tmp_path / "buffer") as buffer:
        buffer.limit(min_diff=-math.inf)
        probabilities = buffer.sample(64, timeout_s=0)[1].probabilities
    assert probabilities.max() > 2 * probabilities.min() > 0
    run = Run(CONFIGS["apex"], tmp_path, 448, resume=True)
    assert "restored 384 rows" in run.texts("checkpointed")


def test_size_and_place_are_announced_before_the_run(tmp_path: Path) -> None:
    run = Run(CONFIGS["dqn"], tmp_path, 200)
    first = next(event.text for event in run.events if event.kind == "announced")
    assert first.startswith("a checkpoint of the full replay buffer takes 0.2 MiB in ")
    assert str(tmp_path / "buffer") in first


class FailsAfterCheckpoint(Rows):
    """Waits until the buffer has a checkpoint, then fails."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder / "buffer"

    def log(self, step: int, metrics: Any) -> None:
        super().log(step, metrics)
        if metrics["update"] > 0 and len(self.rows) > 3:
            for _ in range(3_000):
                if numbered(self._folder):
                    raise ZeroDivisionError("of the test")
                threading.Event().wait(0.01)


def test_failed_run_resumes_with_the_last_regular_checkpoint_of_its_buffer(tmp_path: Path) -> None:
    config = replace(CONFIGS["dqn"], replay=replace(REPLAY, buffer_checkpoint_s=0.01))
    Run(config, tmp_path, 192)  # its checkpoint of the learner is there when the next run fails
    shutil.rmtree(tmp_path / "buffer")
    with pytest.raises(ZeroDivisionError):
        Run(config, tmp_path, 5_000, resume=True, sink=FailsAfterCheckpoint(tmp_path))
    rows, inserts, _ = saved_counters(tmp_path)
    run = Run(config, tmp_path, 704, resume=True)
    assert f"restored {rows:,} rows" in run.texts("checkpointed")
    assert run.started_at == 192 and run.rows[-1]["replay/rows"] == inserts + 512


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("none written", "--buffer-checkpoint-s 0"),
        ("removed", "does not exist"),
        ("newer than the learner", "belongs to checkpoint 000002 of the learner, but the run continues from 000001"),
        ("another size", "has room for 4,000 rows, but --buffer-size is 3,000"),
        ("other environments", "the buffer has 4 columns"),
        ("other arrays", "priority"),
    ],
)
def test_buffer_that_does_not_fit_is_not_used(case: str, reason: str, tmp_path: Path) -> None:
    config = replace(CONFIGS["apex"], worker_priorities=False)
    if case == "none written":
        config = replace(config, replay=replace(REPLAY, buffer_checkpoint_s=0))
    Run(config, tmp_path, 192)
    num_envs = 4
    match case:
        case "none written":
            assert not (tmp_path / "buffer").exists()
        case "removed":
            shutil.rmtree(tmp_path / "buffer")
        case "newer than the learner":
            Run(config, tmp_path, 256, resume=True)
            shutil.rmtree(tmp_path / "000002")
        case "another size":
            config = replace(config, replay=replace(REPLAY, buffer_size=3_000))
        case "other environments":
            num_envs = 8
        case "other arrays":
            config = replace(config, worker_priorities=True)
    run = Run(config, tmp_path, 512, resume=True, num_envs=num_envs)
    assert "the replay buffer starts empty: " in run.texts("warned")
    assert reason in run.texts("warned")
    assert run.rows[-1]["replay/rows"] == 512 - run.started_at == 320
    assert any(not torch.equal(tensor, run.before[name]) for name, tensor in run.agent.state_dict().items())


def test_buffer_of_a_concurrent_run_is_not_used_if_learner_and_workers_take_turns(tmp_path: Path) -> None:
    Run(CONFIGS["dqn"], tmp_path, 192, launcher="local")
    run = Run(CONFIGS["dqn"], tmp_path, 512, resume=True)  # in-process
    assert "starts empty: it was saved without --no-concurrent" in run.texts("warned")


def test_run_without_an_update_says_so(tmp_path: Path) -> None:
    replay = replace(REPLAY, learning_starts=400)
    run = Run(replace(CONFIGS["dqn"], replay=replay), tmp_path, 192)
    assert "nothing was learned: 192 steps were too few" in run.texts("warned")
    assert "nothing was learned" not in Run(CONFIGS["dqn"], tmp_path / "other", 192).texts("warned")


def test_checkpoint_of_the_buffer_that_cannot_be_written_does_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "buffer").write_text("not a folder")
    run = Run(CONFIGS["dqn"], tmp_path, 384)
    assert run.rows[-1]["step"] == 384
    assert "the run continues without a new checkpoint of its replay buffer" in run.texts("warned")
    assert numbered(tmp_path), "the learner has its checkpoint"


def test_changed_ratio_applies_to_new_rows(tmp_path: Path) -> None:
    Run(CONFIGS["dqn"], tmp_path, 512)
    config = replace(CONFIGS["dqn"], replay=replace(REPLAY, updates_per_step=1.0))
    run = Run(config, tmp_path, 704, resume=True)
    assert "restored 512 rows" in run.texts("checkpointed")
    assert run.rows[-1]["update"] == (512 - 100) // 4 + 192
