"""Ctrl-C while workers still import modules ends a run at once, with the usual status and message."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from farstep.testing import CountingEnv
from tests.cluster.checks import cluster, eventually

SLOW_IMPORT = '''
import importlib.abc, os, pathlib, sys, time
import gymnasium

class Blocking(importlib.abc.MetaPathFinder):
    """Never finishes importing the agent's module in a worker."""

    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            pathlib.Path({marker!r}).touch()
            while True:
                time.sleep(0.05)

if "FARSTEP_WORKER" in os.environ:  # the head imports this module, too
    sys.meta_path.insert(0, Blocking())

def make():
    return gymnasium.make("CartPole-v1")
'''


@pytest.mark.parametrize("learner", ["dqn", pytest.param("impala", marks=pytest.mark.long)])
def test_sigint_ends_a_run_whose_workers_still_import_the_agent(learner: str, tmp_path: Path) -> None:
    marker = tmp_path / "importing"
    module = f"farstep.learners.networks.{'q_network' if learner == 'dqn' else 'nets'}"
    (tmp_path / "slow_import.py").write_text(SLOW_IMPORT.format(module=module, marker=str(marker)))
    command = [sys.executable, "-m", "farstep", "train", learner, "--env", "slow_import.make", "--env-type", "factory"]
    command += ["--num-envs", "1", "--workers", "1", "--name", "stopped"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as head:
        try:
            eventually(marker.exists)
            head.send_signal(signal.SIGINT)
            said, _ = head.communicate(timeout=45)  # the import never ends
        finally:
            head.kill()
    assert head.returncode == 130, said
    assert f"stopped by SIGINT; continue with: farstep train {learner} --resume runs/stopped" in said


@pytest.fixture
def default_hangup() -> Iterator[None]:
    """Runs that the test starts do not ignore SIGHUP, even if the tests themselves run with nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


ENDLESS = """
import pathlib, threading

def make():
    pathlib.Path({marker!r}).touch()
    threading.Event().wait()
"""


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
    ids=["INT", "TERM", "HUP"],
)
@pytest.mark.usefixtures("default_hangup")
def test_signal_during_the_launch_leaves_no_run_folder(number: signal.Signals, status: int, tmp_path: Path) -> None:
    marker = tmp_path / "constructing"
    (tmp_path / "endless.py").write_text(ENDLESS.format(marker=str(marker)))
    command = [sys.executable, "-m", "farstep", "train", "ppo", "--env", "endless.make", "--env-type", "factory"]
    command += ["--num-envs", "1", "--workers", "1"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as head:
        try:
            eventually(marker.exists)
            assert (tmp_path / "runs").exists()
            head.send_signal(number)
            said, _ = head.communicate(timeout=45)  # the constructor never returns
        finally:
            head.kill()
    assert (head.returncode, (tmp_path / "runs").exists()) == (status, False), said
    assert f"stopped by {number.name} before training began" in said


class EndlessConstructor(CountingEnv):
    """Signals that its constructor runs, and never returns from it."""

    def __init__(self, marker: str) -> None:
        Path(marker).touch()
        threading.Event().wait()


def test_close_does_not_wait_for_workers_that_cannot_read_its_message(tmp_path: Path) -> None:
    marker = tmp_path / "constructing"
    env = cluster(EndlessConstructor, env_kwargs={"marker": str(marker)}, timeouts={"close_s": 3600.0})

    def interrupt() -> None:
        eventually(marker.exists)
        os.kill(os.getpid(), signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    with pytest.raises(KeyboardInterrupt):
        try:
            interrupting.start()
            env.launch()  # ends the workers before it raises
        finally:
            interrupting.join()
    env.close()
