"""farstep executes nothing from a run folder or the current folder that this user has not written or trusted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from farstep.cli import main
from farstep.observe.run_folder import RunFolder
from farstep.version import VERSION

pytestmark = pytest.mark.slow

TRAIN = ["train", "ppo", "--env", "CartPole-v1", "--launcher", "in-process", "--num-envs", "4", "--num-steps", "16"]
PLANTED = """
import pathlib
pathlib.Path(__file__).with_name("executed").touch()
raise ImportError("planted")
"""
FARSTEP = {
    "module": [sys.executable, "-m", "farstep"],
    "script": [str(Path(sys.executable).with_name("farstep"))],
}


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user who has no key yet."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of 64 steps and the state of the user who made it."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        assert main([*TRAIN, "--total-steps", "64", "--folder", str(folder), "--name", "run"]) == 0
    return folder


@pytest.fixture
def run(trained: Path, state: Path, tmp_path: Path) -> Path:
    """A run of this user."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return tmp_path / "run"


def resumed(run: Path, *more: str) -> int:
    return main(["train", "ppo", "--resume", str(run), *more])


def change_config(run: Path, **options: Any) -> None:
    config = json.loads((run / "config.json").read_text())
    config["run"] |= options
    (run / "config.json").write_text(json.dumps(config))


def test_own_runs_resume_without_trust(run: Path, state: Path) -> None:
    assert resumed(run, "--total-steps", "128") == 0
    assert resumed(run, "--total-steps", "192") == 0, "config.json was written again"
    key = state / "farstep" / "run.key"
    assert key.stat().st_mode & 0o777 == 0o600 and key.parent.stat().st_mode & 0o777 == 0o700


FOREIGN: dict[str, Callable[[Path, Path], object]] = {
    "changed": lambda run, state: change_config(run, total_steps=128),
    "without tag": lambda run, state: (run / "config.json").write_text(json.dumps(RunFolder(run).read_config())),
    "of another user": lambda run, state: (state / "farstep" / "run.key").write_bytes(bytes(32)),
    "of a user without a key": lambda run, state: (state / "farstep" / "run.key").unlink(),
    "with a key that others can read": lambda run, state: (state / "farstep" / "run.key").chmod(0o644),
    "with a damaged key": lambda run, state: (state / "farstep" / "run.key").write_bytes(b""),
}
REASONS = {
    "changed": "its signature does not match",
    "without tag": "it has no signature",
    "of another user": "its signature does not match",
    "of a user without a key": "run.key does not exist",
    "with a key that others can read": "mode 0644, 0600 expected",
    "with a damaged key": "0 bytes, 32 expected",
}


@pytest.mark.parametrize("how", FOREIGN)
def test_a_config_of_another_user_needs_trust(
    how: str, run: Path, state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    FOREIGN[how](run, state)
    for arguments in (
        ["eval", str(run)],
        ["watch", str(run)],
        ["train", "ppo", "--resume", str(run), "--total-steps", "256"],
    ):
        assert main(arguments) == 1
        error = capsys.readouterr().err
        assert REASONS[how] in error and "the gymnasium environment 'CartPole-v1'" in error and "--trust" in error
    assert main(["plot", str(run), "--out", str(run / "a.png")]) == 0, "to draw it executes nothing"


def test_trusted_run_resumes_and_is_tagged_as_own(run: Path, state: Path) -> None:
    shutil.rmtree(state)  # as on another machine
    assert main(["watch", str(run), "--max-steps", "2", "--trust"]) == 0
    assert resumed(run, "--total-steps", "128") == 1
    assert resumed(run, "--total-steps", "128", "--trust") == 0
    assert resumed(run, "--total-steps", "192") == 0
    assert main(["watch", str(run), "--max-steps", "2"]) == 0


@pytest.mark.parametrize("part", ["", "run", "learner", "learner.net", "nodes"])
def test_unknown_option_in_config_json_is_an_error(part: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another version of farstep wrote it; ignoring the option would change the run."""
    config = json.loads((run / "config.json").read_text())
    if part == "nodes":
        config["run"]["launcher"], config["nodes"] = "ssh", {"hosts": ["a"]}
    place = config
    for name in filter(None, part.split(".")):
        place = place[name]
    place["new_option"] = 1
    (run / "config.json").write_text(json.dumps(config))
    known = f"config.json has the option {f'{part}.new_option'.lstrip('.')!r}, which farstep {VERSION} does not know"
    assert resumed(run, "--total-steps", "128", "--trust") == 1
    assert known in capsys.readouterr().err
    if part != "nodes":  # which only training uses
        assert main(["watch", str(run), "--trust"]) == 1
        assert known in capsys.readouterr().err


def test_trust_without_a_run_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TRAIN, "--trust"]) == 1
    assert "add --resume RUN" in capsys.readouterr().err


def test_a_malicious_config_is_executed_only_on_trust(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "planted.py").write_text(PLANTED)
    change_config(run, env_type="factory", env="planted:make")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    assert resumed(run, "--total-steps", "128") == 1
    assert not (tmp_path / "executed").exists()
    assert "the factory environment 'planted:make'" in capsys.readouterr().err
    assert resumed(run, "--total-steps", "128", "--trust") == 1
    assert (tmp_path / "executed").exists()
    assert "the factory environment 'planted:make'" not in capsys.readouterr().err


@pytest.mark.parametrize(("program", "command"), [("module", "plot run"), ("module", "doctor"), ("script", "plot run")])
def test_modules_in_the_current_folder_are_not_imported(program: str, command: str, tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "run", {})
    run.metrics_file.write_text('{"step": 1, "env/return_mean": 1.0}\n{"step": 2, "env/return_mean": 2.0}\n')
    for name in ("json", "matplotlib", "typing", "tyro", "argparse", "numpy"):
        (tmp_path / f"{name}.py").write_text(PLANTED)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [*FARSTEP[program], *command.split()],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert not (tmp_path / "executed").exists(), done.stdout + done.stderr
    assert "planted" not in done.stdout + done.stderr and "Traceback" not in done.stderr
    if command == "plot run":
        assert done.returncode == 0 and (tmp_path / "run.png").exists(), done.stderr


def test_training_imports_modules_of_the_current_folder_behind_all_others(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text(PLANTED)
    (tmp_path / "mine.py").write_text("from farstep.testing import CountingEnv as Env\n")
    options = [
        "--env",
        "mine:Env",
        "--env-type",
        "factory",
        "--num-envs",
        "2",
        "--num-steps",
        "8",
        "--launcher",
        "in-process",
    ]
    command = [*FARSTEP["script"], "train", "ppo", *options, "--total-steps", "16"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "executed").exists()
