"""`farstep eval`: repeatable evaluations of the stored policy, and errors."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from farstep.cli import main
from farstep.observe.terminal.episode_progress import EpisodeProgress
from farstep.testing import FakeClock

HERE = ["--launcher", "in-process", "--num-envs", "2", "--num-steps", "32"]


def train(folder: Path, *options: str) -> Path:
    assert main(["train", "ppo", *HERE, "--folder", str(folder), "--name", "run", *options]) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an evaluation of 5 episodes at its end, and two checkpoints."""
    options = ["--total-steps", "192", "--eval-every", "1000", "--eval-episodes", "5", "--checkpoint-every", "1"]
    return train(tmp_path_factory.mktemp("runs"), "--env", "CartPole-v1", *options)


def result(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["eval", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["eval", *arguments]) == 1
    found = capsys.readouterr().err
    assert found.startswith("farstep: ") and "Traceback" not in found
    return found


@pytest.mark.slow
def test_evaluation_equals_the_one_at_the_end_of_training(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logged = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    found = result(capsys, str(run), "--episodes", "5")
    assert (found["return"]["mean"], found["return"]["std"], found["length"]["mean"]) == (
        logged["eval/return_mean"],
        logged["eval/return_std"],
        logged["eval/length_mean"],
    )
    assert (found["version"], found["step"], found["greedy"]) == (logged["eval/version"], logged["eval/step"], True)


def test_json_has_every_episode_and_sampling_follows_the_seed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sampled = ["--episodes", "5", "--num-envs", "2", "--sample", "--seed"]
    first, again, other = (result(capsys, str(run), *sampled, seed) for seed in ("7", "7", "8"))
    assert first == again and first["returns"] != other["returns"]
    assert len(first["returns"]) == len(first["lengths"]) == first["episodes"] == 5
    values = np.array(first["returns"])
    expected = {"mean": values.mean(), "std": values.std(), "min": values.min(), "max": values.max()}
    assert first["return"] == pytest.approx(expected)


def test_checkpoint_is_chosen_by_its_number(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    older, newest = sorted(int(folder.name) for folder in (run / "checkpoints").glob("0*"))
    assert result(capsys, str(run), "--episodes", "1", "--checkpoint", str(older))["step"] == 128
    assert main(["eval", str(run), "--episodes", "1"]) == 0
    output = capsys.readouterr().out
    assert f"checkpoint {newest}, version 3, after 192 steps; 1 episode with most likely actions, seed 2\n" in output
    assert output.count("\n") == 3 and "return  mean" in output and "length  mean" in output
    assert f"it has {older}, {newest}" in error(capsys, str(run), "--checkpoint", "77")


def test_damaged_checkpoint_is_named_with_the_others(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    older, newest = sorted((run / "checkpoints").glob("0*"))
    seal = (older / "DONE").read_bytes()
    (older / "DONE").write_bytes(b"00000000\n")
    try:
        message = error(capsys, str(run), "--checkpoint", str(int(older.name)))
    finally:
        (older / "DONE").write_bytes(seal)
    assert "does not match its checksum" in message and f"{int(newest.name)}." in message


def test_episodes_that_do_not_end_and_runs_without_checkpoints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(tmp_path, "--env", "Pendulum-v1", "--total-steps", "64")
    message = error(capsys, str(run), "--episodes", "1", "--max-steps", "64")
    assert "no episode ended within 64 steps" in message and "--max-steps" in message
    message = error(capsys, str(run), "--episodes", "1", "--max-steps", "199")
    assert "no episode ended within 199 steps" in message  # each has 200
    (run / "checkpoints").rename(run / "moved")
    assert "has no checkpoint yet; the first is written after 10 updates" in error(capsys, str(run))
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"tag": "another"}))
    assert "--trust" in error(capsys, str(run))


def test_progress_has_an_eta() -> None:
    clock, stream = FakeClock(), io.StringIO()
    progress = EpisodeProgress(20, stream, clock)
    for finished in (0, 5, 5, 10):
        clock.advance(10.0)
        progress.update(finished)
        progress.update(finished)
    progress.close()
    assert stream.getvalue().splitlines() == [
        "0 of 20 episodes (0 %)",
        "5 of 20 episodes (25 %), 0:01:00 left",
        "5 of 20 episodes (25 %), 0:01:30 left",
        "10 of 20 episodes (50 %), 0:00:40 left",
    ]
