"""The folder of a run: creation, reading, and a lock for one writing process."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from farstep.checkpoint import folder as checkpoint
from farstep.errors import CheckpointError, ConfigError, RunError
from farstep.observe.event_files import EventFile
from farstep.observe.loggers import JsonlLogger
from farstep.observe.run_folder import RunFolder, run_name

NOON = datetime.datetime(2026, 1, 31, 12, 0, 5)


class Mode(enum.Enum):
    FAST = "fast"


@dataclasses.dataclass(frozen=True)
class Options:
    seed: int = 1
    mode: Mode = Mode.FAST
    root: Path = Path("runs")


@pytest.mark.parametrize(
    ("env_id", "seed", "name"),
    [
        ("CartPole-v1", 7, "CartPole-v1-ppo-seed7-20260131-120005"),
        ("ALE/Pong-v5", None, "ALE_Pong-v5-ppo-20260131-120005"),
        ("../my_module:Éa", 0, "_my_module__a-ppo-seed0-20260131-120005"),
    ],
)
def test_a_run_is_named_after_what_it_does(env_id: str, seed: int | None, name: str, tmp_path: Path) -> None:
    assert run_name(env_id, "ppo", seed, NOON) == name
    assert RunFolder.create(tmp_path, name, {}).path == tmp_path / name


def test_a_new_run_has_its_parts_and_its_options(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "new" / "root", "first", {"learner": Options(), "gamma": 0.99})
    assert run.config_file.name == "config.json" and run.metrics_file.name == "metrics.jsonl"
    assert all(folder.is_dir() for folder in (run.checkpoints, run.videos))
    again = RunFolder.open(str(run.path))
    assert again == run
    assert again.read_config() == {"learner": {"seed": 1, "mode": "fast", "root": "runs"}, "gamma": 0.99}
    run.write_config({"gamma": float("inf"), "env": Options})
    assert run.read_config() == {"gamma": float("inf"), "env": f"{__name__}:Options"}
    assert sorted(path.name for path in run.path.iterdir()) == ["checkpoints", "config.json", "videos"]


def test_a_taken_name_gets_a_number(tmp_path: Path) -> None:
    names = [RunFolder.create(tmp_path, "a", {"number": number}).path.name for number in range(3)]
    assert names == ["a", "a-2", "a-3"]
    assert RunFolder.open(tmp_path / "a").read_config() == {"number": 0}


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", ".."])
def test_name_that_leaves_the_root_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="plain name"):
        RunFolder.create(tmp_path, name, {})


def test_options_without_a_form_as_json_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a object cannot be written as JSON"):
        RunFolder.create(tmp_path, "a", {"x": object()})
    assert not list(tmp_path.iterdir())


def test_a_root_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"no run can be written under .*file.*Choose another folder"):
        RunFolder.create(tmp_path / "file", "a", {})


def test_error_for_an_unknown_run_names_the_nearest_runs(tmp_path: Path) -> None:
    for name in ("CartPole-1", "CartPole-2", "Pong-1", "Pong-2", "Pong-3", "Pong-4"):
        RunFolder.create(tmp_path, name, {})
    with pytest.raises(RunError, match=r"CartPol-2 does not exist; expected .*config\.json.* Runs in .*: CartPole-2, "):
        RunFolder.open(tmp_path / "CartPol-2")
    with pytest.raises(RunError, match=r"has no config\.json; .* Runs in .*, .* and 1 more\."):
        RunFolder.open(tmp_path)
    with pytest.raises(RunError, match="is a file"):
        RunFolder.open(tmp_path / "Pong-1" / "config.json")
    with pytest.raises(RunError, match="has no runs either"):
        RunFolder.open(tmp_path / "no" / "such")


@pytest.mark.parametrize("content", ["{", "[]", "\udcff"])
def test_a_config_that_cannot_be_read_is_named(content: str, tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "a", {})
    run.config_file.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(RunError, match=re.escape(str(run.config_file))):
        run.read_config()


def test_one_process_trains_in_a_folder(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "a", {})
    message = f"process {os.getpid()} on host {re.escape(socket.gethostname())} is already training in "
    with run.lock():
        with pytest.raises(RunError, match=message), run.lock():
            pass
        with pytest.raises(RunError, match=message), run.lock():  # the refusal has not taken the lock away
            pass
    with run.lock():
        assert json.loads((run.path / ".lock").read_bytes())["pid"] == os.getpid()


HOLDER = """
import sys, time
from farstep.observe.run_folder import RunFolder
with RunFolder.open(sys.argv[1]).lock():
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "a", {})
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(run.path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(RunError, match=f"process {holder.pid} on host"), run.lock():
            pass
        holder.kill()
    with run.lock():
        pass


def test_no_file_is_written_through_a_link(tmp_path: Path) -> None:
    run, target = RunFolder.create(tmp_path, "run", {}), tmp_path / "target"
    target.write_text("mine")
    (run.path / ".lock").symlink_to(target)
    with pytest.raises(RunError, match="Remove the symbolic link"), run.lock():
        pass
    run.metrics_file.symlink_to(target)
    with pytest.raises(RunError, match="metrics cannot be written"):
        JsonlLogger(run.metrics_file)
    run.events_file.symlink_to(target)
    with pytest.raises(RunError, match=r"events.jsonl cannot be written"):
        EventFile(run.events_file)
    assert target.read_text() == "mine"
    (run.checkpoints / ".lock").symlink_to(tmp_path / "new")
    with pytest.raises(CheckpointError, match="could not be saved"):
        checkpoint.save(run.checkpoints, {"x": np.zeros(1)}, {})
    assert not (tmp_path / "new").exists()
