"""Options of replay learners: wrong ones are refused before anything starts, with the options' own names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from farstep.cli import main
from farstep.core import Array
from farstep.learners.replay.recorded_episodes import RecordedEpisodes

BROKEN = ["--env", "tests.cli.test_cli:Broken", "--env-type", "factory"]
"""An environment that cannot be launched: errors about options must come first."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, without runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(arguments: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The error of a command that must fail and leave no run folder."""
    assert main(arguments) == 1
    assert not (folder / "runs").exists()
    return capsys.readouterr().err


def recorded(steps: int, **arrays: Array) -> RecordedEpisodes:
    """One episode of CartPole."""
    ends = np.arange(steps) == steps - 1
    rows: dict[str, Array] = {"obs": np.zeros((steps, 4), np.float32), "action": np.zeros(steps, np.int64)}
    rows |= {"reward": np.ones(steps, np.float32), "terminated": ends, "truncated": np.zeros(steps, bool), **arrays}
    return RecordedEpisodes(rows, {"obs": np.zeros((1, 4), np.float32)}, np.array([steps]))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("dqn --buffer-size 0", "--buffer-size is 0; it must be an integer"),
        ("dqn --buffer-size 500", "--learning-starts is 1000, more than the 500 rows that the buffer holds (--buffer-"),
        ("dqn --frame-stack -1", "--frame-stack is -1; expected the number of frames of a stack, at least 2, or 0"),
        ("apex --updates-per-step 0", "--updates-per-step is 0.0; expected a number above 0"),
        ("sac --gamma 2", "--gamma is 2.0; expected a number from 0 to 1"),
        ("aride --samples-per-step 0", "--samples-per-step is 0.0"),
        ("dqn --buffer-size 10 --learning-starts 5", "--buffer-size is 10, less than one chunk of 4 steps of 16 env"),
        ("dqn --buffer-size 1001 --no-concurrent", "--learning-starts is 1,000, but 16 environments share only 992"),
        ("aride --warmup missing.npz", "missing.npz cannot be read: No such file or directory. Record episodes with"),
        ("aride --warmup notes.txt", "notes.txt is damaged, or is not a file of recorded episodes. Record episodes w"),
        ("aride --warmup short.npz --buffer-size 64 --learning-starts 8", "short.npz has 70 steps, but the replay b"),
    ],
)
def test_wrong_options_are_refused_by_their_names_before_the_launch(
    options: str, said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "notes.txt").write_text("not a recording")
    recorded(70).save(folder / "short.npz")
    text = refusal(["train", *options.split(), *BROKEN], folder, capsys)
    assert said in text
    assert "--record notes.txt" not in text and "pickle" not in text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("dqn --frame-stack 4", "--frame-stack is 4, but no observation is an image"),
        ("dqn --buffer-size 90000000000", "Lower --buffer-size"),
        ("aride --warmup no-logprob.npz", "no-logprob.npz has no array 'logprob', which this learner needs"),
        ("aride --warmup other-obs.npz", "other-obs.npz: 'obs' is float32[3] per step"),
    ],
)
def test_options_that_do_not_fit_the_environments_leave_no_run_folder(
    options: str, said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(3).save(folder / "no-logprob.npz")
    recorded(3, logprob=np.zeros(3, np.float32), obs=np.zeros((3, 3), np.float32)).save(folder / "other-obs.npz")
    assert said in refusal(
        ["train", *options.split(), "--env", "CartPole-v1", "--launcher", "in-process"], folder, capsys
    )


def test_a_run_announces_its_disk_use_and_a_recording_without_log_probabilities_warns(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["train", "dqn", "--env", "CartPole-v1", "--launcher", "in-process", "--num-envs", "2", "--name", "short"]
    assert main([*run, "--total-steps", "64", "--learning-starts", "32", "--buffer-size", "1000"]) == 0
    assert "a checkpoint of the full replay buffer takes" in capsys.readouterr().out

    evaluate = ["eval", "runs/short", "--sample", "--episodes", "1", "--record"]
    assert main([*evaluate, "episodes.npz"]) == 0
    warning = capsys.readouterr().err
    assert "episodes.npz has no log-probabilities" in warning and "aride --warmup" in warning
    assert main([*evaluate, "episodes.npz"]) == 0, "a recording may be replaced"
    capsys.readouterr()

    (folder / "notes.txt").write_text("keep me")
    assert main([*evaluate, "notes.txt"]) == 1
    assert "notes.txt exists and is not a recording of farstep, so it is not replaced" in capsys.readouterr().err
    assert (folder / "notes.txt").read_text() == "keep me"
