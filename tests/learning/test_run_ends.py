"""The end of a run: which agent is evaluated and saved, and that resuming a finished run changes nothing."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from farstep.checkpoint import folder as checkpoint
from farstep.cli import main
from farstep.errors import CheckpointError
from farstep.event import Emit
from farstep.learners.loop.evaluation import EvaluationResult
from farstep.learners.loop.iteration import CheckpointMarker
from farstep.learners.ppo import PPOConfig
from farstep.learners.replay.buffer_checkpoints import BufferCheckpoints
from farstep.learners.replay.config import ReplayConfig
from tests.buffer.saving.test_saving import CASES, filled
from tests.learning.tasks import Rows, make_env, make_training

ROWS = 4 * 8
CONFIG = PPOConfig(num_steps=8)


class FakeEvaluator:
    """Finishes when it is waited for; records the agents and the checkpoints that existed by then."""

    def __init__(self, checkpoints: Path) -> None:
        self.steps: list[int] = []
        self.saved: list[bool] = []
        self._checkpoints = checkpoints
        self._waited = False

    @property
    def busy(self) -> bool:
        return bool(self.steps) and not self._waited

    def report_to(self, emit: Emit) -> None:
        pass

    def start(self, agent: Any, version: int, step: int) -> None:
        assert not self.busy
        self.steps.append(step)
        self._waited = False

    def wait(self) -> None:
        self._waited = bool(self.steps)
        self.saved.append(any(self._checkpoints.iterdir()))

    def take(self) -> EvaluationResult | None:
        if not self._waited:
            return None
        return EvaluationResult(self.steps[-1], 0, np.ones(1), np.ones(1))


@pytest.mark.parametrize(("every", "evaluated"), [(ROWS, [ROWS, 3 * ROWS]), (3 * ROWS, [ROWS, 3 * ROWS])])
def test_every_evaluation_is_logged_and_the_last_agent_has_one(
    every: int, evaluated: list[int], tmp_path: Path
) -> None:
    evaluator, sink = FakeEvaluator(tmp_path), Rows()
    with make_env("CartPole-v1", 4, launcher="in-process") as env:
        options: dict[str, Any] = {"evaluator": evaluator, "checkpoints": tmp_path, "sink": sink, "eval_every": every}
        make_training(env, CONFIG, 3 * ROWS, **options)[0].run()
    assert evaluator.steps == evaluated
    assert [row["eval/step"] for row in sink.rows if "eval/step" in row] == evaluated
    assert all(evaluator.saved), "an evaluation at the end must not keep the checkpoint waiting"


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def run(total: int, resume: bool) -> int:
        with make_env("CartPole-v1", 4, launcher="in-process") as env:
            training, _ = make_training(env, CONFIG, total, checkpoints=tmp_path)
            if resume:
                training.resume()
            return training.run().updates

    assert run(2 * ROWS, resume=False) == 2
    before = sorted(tmp_path.iterdir())
    assert run(2 * ROWS, resume=True) == 2
    assert "nothing to do" in caplog.text
    assert sorted(tmp_path.iterdir()) == before
    assert run(3 * ROWS, resume=True) == 3


def test_run_names_the_limits_that_it_has_reached(caplog: pytest.LogCaptureFixture) -> None:
    steps, target = "32 of 32 steps (raise --total-steps)", "--target-return 5 (raise it, or pass --target-return None)"
    for total, goal, reached in ((ROWS, 9.0, steps), (2 * ROWS, 5.0, target), (ROWS, 5.0, f"{steps} and {target}")):
        caplog.clear()
        with make_env("CartPole-v1", 4, launcher="in-process") as env:
            training, _ = make_training(env, CONFIG, total, target_return=goal)
            training.progress.steps, training.progress.episodes = ROWS, 100
            training.progress.returns.extend([6.0] * 100)
            assert training.run().updates == 0
        assert caplog.messages == [f"nothing to do: the run has reached {reached}"]


def test_a_run_names_the_commands_that_come_next_and_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    short = ["--launcher", "in-process", "--num-envs", "2", "--num-steps", "16", "--total-steps", "64"]
    assert main(["train", "ppo", "--env", "CartPole-v1", *short, "--name", "run"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[-3:] == [f"{each + ':':6} farstep {each} runs/run" for each in ("eval", "watch", "plot")]
    found = checkpoint.numbered(tmp_path / "runs" / "run" / "checkpoints")
    assert main(["train", "ppo", "--resume", "runs/run", "--total-steps", "128"]) == 0
    assert f"resumed from checkpoint {max(int(each.name) for each in found)} at step 64\n" in capsys.readouterr().out


@pytest.mark.parametrize("updates", [10, 9], ids=["to the end", "until a signal"])
def test_run_continues_on_a_full_disk_but_fails_without_its_last_checkpoint(
    updates: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the checkpoints after 2, 4, 6 and 8 updates and at the end, the second, third and last find no space."""
    is_full, sync = [False, True, True, False, True], os.fsync

    def fsync(descriptor: int) -> None:
        if is_full[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    def save(*arguments: Any, **options: Any) -> Path:
        try:
            return write(*arguments, **options)
        finally:
            del is_full[0]

    write = checkpoint.save
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(checkpoint, "save", save)
    with make_env("CartPole-v1", 4, launcher="in-process") as env:
        options: dict[str, Any] = {"checkpoints": tmp_path, "checkpoint_every": 2, "sink": Rows(updates)}
        training, _ = make_training(env, CONFIG, 10 * ROWS, **options)
        with pytest.raises(
            CheckpointError, match=f"No space left .* --resume continues from checkpoint 000002 at step {8 * ROWS}"
        ):
            training.run()
        warned = [event.text for event in env.events("warned") if "The run continues" in event.text]
    assert training.progress.updates == updates
    assert len(warned) == 1 and "make sure that the disk has free space" in warned[0]


def test_run_whose_folder_is_deleted_warns_once_and_fails_without_creating_another(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    with make_env("CartPole-v1", 4, launcher="in-process") as env:
        options: dict[str, Any] = {"checkpoints": folder / "checkpoints", "checkpoint_every": 1}
        training, _ = make_training(env, CONFIG, 5 * ROWS, sink=Deletes(folder, at=2), **options)
        with pytest.raises(CheckpointError, match=r"run was deleted or moved.* start a new run\. .*has no older"):
            training.run()
        warned = [event.text for event in env.events("warned") if "was deleted or moved" in event.text]
    assert len(warned) == 1 and "The run continues" in warned[0]
    assert not folder.exists()


class Deletes(Rows):
    """Deletes a folder when row `at` is logged."""

    def __init__(self, folder: Path, at: int) -> None:
        super().__init__()
        self._folder, self._at = folder, at

    def log(self, step: int, metrics: Any) -> None:
        super().log(step, metrics)
        if len(self.rows) == self._at:
            shutil.rmtree(self._folder)


def test_buffer_checkpoint_does_not_create_a_deleted_folder(tmp_path: Path) -> None:
    loop: Any = SimpleNamespace(
        checkpoints=tmp_path / "checkpoints", newest_checkpoint=CheckpointMarker(1, ROWS), save_last=lambda: None
    )
    with filled(CASES["uniform"]) as buffer:
        checkpoints = BufferCheckpoints(ReplayConfig(), lambda *_: None, loop)
        loop.checkpoints.mkdir()
        checkpoints.start(buffer)
        loop.checkpoints.rmdir()
        checkpoints.finish()
    assert not loop.checkpoints.exists()
