"""A run whose terminal is closed ends with a checkpoint; with nohup, it continues."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.checks import eventually

IN_TERMINAL = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run with nohup
if sys.argv[1] == "ignored":  # as nohup does
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    for fd in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), fd)
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""
OPTIONS = "--env CartPole-v1 --workers 1 --num-envs 2 --num-steps 32 --name hup --total-steps"


@contextlib.contextmanager
def run(folder: Path, total_steps: int, hangup: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Start a run in a terminal of its own. Yields its process and the other end of the terminal."""
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)
    train = ["-m", "farstep", "train", "ppo", *OPTIONS.split(), str(total_steps)]
    with subprocess.Popen(
        [sys.executable, "-c", IN_TERMINAL, hangup, *train],
        cwd=folder,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    ) as process:
        os.close(theirs)
        try:
            yield process, ours
        finally:
            process.kill()


def has_trained(folder: Path, terminal: int) -> bool:
    """Whether the run has finished an update. Reads its output, so that it does not wait for a reader."""
    with contextlib.suppress(BlockingIOError):
        while os.read(terminal, 65536):
            pass
    return bool(lines_of(folder / "runs" / "hup" / "metrics.jsonl"))


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize(("hangup", "status"), [("default", 129), ("ignored", 0)])
def test_a_run_whose_terminal_is_closed(hangup: str, status: int, tmp_path: Path) -> None:
    total_steps = 2_000 if hangup == "ignored" else 10_000_000
    with run(tmp_path, total_steps, hangup) as (process, terminal):
        eventually(lambda: has_trained(tmp_path, terminal), 60)
        os.close(terminal)
        assert process.wait(60) == status
    events = [json.loads(line) for line in lines_of(tmp_path / "runs" / "hup" / "events.jsonl")]
    assert "checkpointed" in [event["kind"] for event in events]
    steps = json.loads(lines_of(tmp_path / "runs" / "hup" / "metrics.jsonl")[-1])["step"]
    assert (steps >= total_steps) == (hangup == "ignored")


def test_a_second_hangup_does_not_stop_the_checkpoint(tmp_path: Path) -> None:
    with run(tmp_path, 10_000_000, "default") as (process, terminal):
        eventually(lambda: has_trained(tmp_path, terminal), 60)
        for _ in range(2):
            process.send_signal(signal.SIGHUP)
        assert process.wait(60) == 129
        os.close(terminal)
    assert any("checkpointed" in line for line in lines_of(tmp_path / "runs" / "hup" / "events.jsonl"))
