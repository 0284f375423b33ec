"""`farstep train` writes the events of a run to its folder, and a resumed run appends to them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import gymnasium
import pytest

import farstep
from farstep.checkpoint import folder as checkpoint
from farstep.cli import main
from farstep.event import Event
from farstep.learners.loop.evaluation import Evaluator
from farstep.learners.ppo import PPOConfig
from farstep.observe.event_files import read_events
from farstep.testing import CountingEnv, FaultyEnv
from tests.learning.tasks import make_env, make_training


def events_of(run: Path) -> list[Event]:
    """The events of a run, without warnings about a slow machine."""
    return [event for event in read_events(run / "events.jsonl") if event.kind != "warned"]


def test_train_writes_checkpoints_and_evaluations_and_resume_appends(tmp_path: Path) -> None:
    train = ["train", "ppo", "--env", "CartPole-v1", "--launcher", "in-process", "--num-envs", "4", "--num-steps", "16"]
    options = ["--eval-every", "64", "--eval-episodes", "1", "--folder", str(tmp_path), "--name", "run"]
    assert main([*train, *options, "--total-steps", "64"]) == 0
    first = events_of(tmp_path / "run")
    assert {event.kind for event in first[:-2]} == {"joined"}
    assert [event.kind for event in first[-2:]] == ["checkpointed", "evaluated"]
    assert first[-2].text == "wrote checkpoint 000001 at step 64"
    assert first[-1].text.startswith("evaluated version 1 in 1 episode at step 64: mean return ")
    resume = ["train", "ppo", "--resume", str(tmp_path / "run")]
    assert main([*resume, "--total-steps", "128"]) == 0
    both = events_of(tmp_path / "run")
    assert both[: len(first)] == first
    resumed = [event for event in both[len(first) :] if event.kind == "loaded"]
    assert [event.text for event in resumed] == ["resumed from checkpoint 000001 at step 64"]
    rest = [event.kind for event in both[len(first) :] if event.kind != "loaded"]
    assert rest == [event.kind for event in first]
    assert all(a.time < b.time for a, b in pairwise(both))


def test_the_last_event_of_a_run_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise farstep.CheckpointError("the checkpoint could not be saved.")

    monkeypatch.setattr(checkpoint, "save", fail)
    train = ["train", "ppo", "--env", "CartPole-v1", "--launcher", "in-process", "--num-envs", "4", "--num-steps", "16"]
    assert main([*train, "--total-steps", "64", "--folder", str(tmp_path), "--name", "run"]) == 1
    last = read_events(tmp_path / "run" / "events.jsonl")[-1]
    assert (last.kind, last.text) == (
        "warned",
        "the run failed: the checkpoint could not be saved. The run ended at step 64 without its last checkpoint; it "
        "has no older checkpoint to --resume from.",
    )


def test_a_damaged_checkpoint_is_an_event_of_the_resumed_run(tmp_path: Path) -> None:
    config = PPOConfig(num_steps=8)
    with make_env("CartPole-v1", 4, launcher="in-process") as env:
        training, _ = make_training(env, config, 32, checkpoints=tmp_path)
        for _ in range(2):
            training.save()
    (tmp_path / "000002" / "meta.json").write_text("{")
    with make_env("CartPole-v1", 4, launcher="in-process") as env:
        make_training(env, config, 32, checkpoints=tmp_path)[0].resume()
        texts = [event.text for event in env.events("warned")]
    assert [text for text in texts if f"{tmp_path / '000002'} is not used: " in text]


def test_an_evaluation_that_fails_has_its_traceback() -> None:
    with make_env("CartPole-v1", 4, launcher="in-process") as env:

        def fail(*_: Any) -> None:
            raise ArithmeticError("no result")

        evaluator = Evaluator(env.env_config, 1, seed=0, after=fail, launch=env.config)
        try:
            training, _ = make_training(env, PPOConfig(num_steps=8), 32, evaluator=evaluator)
            training.run()
        finally:
            evaluator.close()
        (warned,) = [event for event in env.events("warned") if event.traceback]
    assert warned.text == "an evaluation failed and is skipped: ArithmeticError: no result"
    assert "in fail" in warned.traceback


def env_that_dies_once(marker: str) -> gymnasium.Env[Any, Any]:
    return gymnasium.wrappers.TimeLimit(FaultyEnv("sigkill", "step", marker=marker), 8)


def test_a_worker_of_the_evaluation_that_dies_is_seen_in_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    marker = {"marker": str(tmp_path / "died-once")}
    faulty = farstep.EnvConfig(type="factory", env_name=env_that_dies_once, env_kwargs=marker, envs_per_node=1)
    healthy = farstep.EnvConfig(type="factory", env_name=CountingEnv, envs_per_node=1)
    evaluator = Evaluator(faulty, 1, seed=0)
    try:
        with farstep.ClusterEnv(healthy, farstep.InProcessConfig()) as env:
            training, _ = make_training(env, PPOConfig(num_steps=8), 16, evaluator=evaluator)
            training.run()
            found = [event for event in env.events() if event.text.startswith("evaluation: ")]
    finally:
        evaluator.close()
    assert [event.kind for event in found if event.kind != "warned"] == ["joined", "lost", "restarted"]
    assert "killed by SIGKILL" in next(event.text for event in found if event.kind == "lost")
    assert {event.worker for event in found} == {None}, "the run has a worker 0 of its own"
    lines = [record.getMessage() for record in caplog.records if "SIGKILL" in record.getMessage()]
    assert len(lines) == 1 and lines[0].startswith("evaluation: "), "logged once"
