"""`farstep train --resume`: a run keeps its learner and the options that cannot change."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from tests.cli.test_cli import said


def test_a_run_of_another_learner_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"algorithm": "impala", "run": {}, "learner": {}}))
    status, _, error = said(capsys, "train", "ppo", "--resume", str(tmp_path))
    assert status == 1 and f"farstep train impala --resume {tmp_path}" in error


def test_a_run_folder_without_a_learner_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    status, _, error = said(capsys, "train", "--resume", str(tmp_path))
    assert status == 1 and f"{tmp_path}/config.json names no learner" in error


@pytest.mark.parametrize(
    ("option", "before"),
    [
        ("--hidden 32", "--hidden 64 64"),
        ("--no-normalize-obs", "--normalize-obs"),
        ("--seed 3", "--seed 1"),
        ("--env-kwargs '{\"a\": 1}'", "--env-kwargs '{}'"),
    ],
)
def test_error_names_options_that_cannot_change_as_they_are_typed(
    option: str, before: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"algorithm": "ppo", "run": {"env": "X"}, "learner": {}}))
    status, _, error = said(capsys, "train", "ppo", "--resume", str(tmp_path), *shlex.split(option))
    assert status == 1 and f"was started with {before} and cannot be resumed with {option}." in error
