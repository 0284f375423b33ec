"""Warnings about slow starts of workers and engines, and Ctrl-C during a start."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import farstep
from farstep.head.warnings import slow_calls
from farstep.testing import CountingEnv
from tests.cluster.checks import cluster, eventually, within

pytestmark = pytest.mark.timeout(120)


class GatedEnv(CountingEnv):
    """Cannot be built before the file is there."""

    def __init__(self, gate: str) -> None:
        super().__init__()
        while not Path(gate).exists():
            time.sleep(0.01)


def program(folder: Path, name: str, *lines: str) -> None:
    (folder / name).write_text("\n".join(["#!/bin/sh", *lines, ""]))
    (folder / name).chmod(0o755)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose programs are found first."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def test_workers_that_are_slow_to_build_environments_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One wait is one event, whose text the log repeats."""
    for name in ("FIRST_START_S", "WORKERS_START_S", "REPEAT_S"):
        monkeypatch.setattr(slow_calls, name, 0.05)
    gate = tmp_path / "gate"
    env = cluster(GatedEnv, env_kwargs={"gate": str(gate)})
    with caplog.at_level(logging.WARNING, "farstep"):
        launching = threading.Thread(target=env.launch)
        launching.start()
        try:
            eventually(lambda: caplog.text.count("s for worker 0, constructing (slot 0)") >= 3)
            (warned,) = [event for event in env.events("warned") if " s for " in event.text]
        finally:
            gate.touch()
            launching.join(60)
    assert warned.text in caplog.messages
    env.close()


def test_start_of_training_names_its_status_page_and_its_wait_and_can_be_interrupted(
    programs: Path,
) -> None:
    """A job that is submitted in the moment of Ctrl-C is cancelled."""
    program(programs, "sbatch", f"while [ ! -e {programs}/go ]; do sleep 0.05; done", "echo 77")
    program(programs, "scancel", f"echo $* >> {programs}/cancelled")
    command = [sys.executable, "-m", "farstep", "train", "ppo", "--env", "CartPole-v1", "--launcher", "slurm"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=programs, stdout=pipe, stderr=pipe, text=True) as head:
        assert head.stdout is not None and head.stderr is not None
        try:
            label, *status = within(head.stdout.readline).split()
            assert label == "status:" and "token" not in " ".join(status)  # other users may read the output
            found = subprocess.run([sys.executable, "-m", *status], cwd=programs, capture_output=True, timeout=60)
            assert b"/?token=" in found.stdout and b"while it trains" in found.stdout
            said = within(head.stderr.readline)
            assert "Slurm has not answered yet" in said
            head.send_signal(signal.SIGINT)
            (programs / "go").touch()
            _, rest = head.communicate(timeout=60)
        finally:
            (programs / "go").touch()  # sbatch is in a session of its own
            head.kill()
    assert "stopped by SIGINT before training began" in rest and head.returncode == 130
    assert (programs / "cancelled").read_text().splitlines()[0] == "77"
    assert not (programs / "runs").exists()


def test_refused_job_is_submitted_once_and_not_for_each_worker(programs: Path) -> None:
    program(programs, "sbatch", f"echo asked >> {programs}/asked", "echo no such cluster >&2", "exit 1")
    config = farstep.SlurmConfig(nodes=2, workers_per_node=2, log_folder=str(programs / "logs"))
    with pytest.raises(farstep.LaunchError, match=r"sbatch failed: no such cluster"):
        within(cluster(config=config).launch)
    assert (programs / "asked").read_text() == "asked\n"


def test_start_continues_without_a_thread_for_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other parts of the start raise their own typed errors if they lack resources."""

    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    env = cluster(envs=1, config=farstep.InProcessConfig())
    monkeypatch.setattr(threading.Thread, "start", none_left)
    try:
        assert env.launch()
    finally:
        env.close()
        monkeypatch.undo()


def test_start_that_ends_when_the_warning_is_due_causes_no_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An in-process worker builds its environments inside the head's event loop, longer than the warning waits."""
    for name in ("FIRST_START_S", "WORKERS_START_S"):
        monkeypatch.setattr(slow_calls, name, 0.05)

    class SlowToBuild(CountingEnv):
        def __init__(self) -> None:
            super().__init__()
            time.sleep(0.1)

    with cluster(SlowToBuild, envs=1, config=farstep.InProcessConfig()) as env:
        env.launch()
    assert "all of which are idle" not in caplog.text


def test_slow_start_of_workers_is_not_warned_about_like_a_wait_for_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a busy machine, each start of workers takes some seconds."""
    gate, is_unusual = tmp_path / "gate", slow_calls.WaitWarning.is_unusual

    def open_gate(warning: slow_calls.WaitWarning, now: float, *, nodes_are_missing: bool) -> bool:
        """Called when `FIRST_START_S` has passed."""
        gate.touch()
        return is_unusual(warning, now, nodes_are_missing=nodes_are_missing)

    monkeypatch.setattr(slow_calls, "FIRST_START_S", 0.05)
    monkeypatch.setattr(slow_calls, "WORKERS_START_S", 3600.0)
    monkeypatch.setattr(slow_calls.WaitWarning, "is_unusual", open_gate)
    with cluster(GatedEnv, env_kwargs={"gate": str(gate)}) as env:
        within(env.launch)
    assert "waiting" not in caplog.text
