"""The page about sharing: its script joins a coordinator that its command starts, and the status looks as printed."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from farstep.cli import main
from farstep.cli.options.train_options import parse_options

PAGE = (Path(__file__).parents[2] / "docs" / "sharing.md").read_text()
FARSTEP = [sys.executable, "-m", "farstep"]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.S | re.M)


def test_commands_of_the_page_share_slots(tmp_path: Path) -> None:
    commands, on_hosts, on_a_gpu = blocks("bash")
    start, run, status = (shlex.split(line, comments=True) for line in commands.splitlines())
    (tmp_path / "train.py").write_text(blocks("python")[0])
    environ = os.environ | {"XDG_STATE_HOME": str(tmp_path)}
    with subprocess.Popen([*FARSTEP, *start[1:]], env=environ, stdout=subprocess.PIPE, text=True) as coordinator:
        try:
            assert coordinator.stdout is not None and "shares 8 slots and 1 device" in coordinator.stdout.readline()
            subprocess.run([sys.executable, *run[1:]], env=environ, cwd=tmp_path, check=True, timeout=120)
            shown = subprocess.run([*FARSTEP, *status[1:]], env=environ, capture_output=True, text=True, timeout=60)
        finally:
            coordinator.terminate()
    assert coordinator.returncode == 0
    learner, *options = shlex.split(on_a_gpu.splitlines()[1])[2:]  # without training: the machine may have no GPU
    assert parse_options(learner, options).run.release_device
    learner, *options = shlex.split(on_hosts.splitlines()[1])[2:]
    assert parse_options(learner, options).nodes.coordinator == "default"
    assert shown.stdout.startswith("0 of 8 slots in use, 0 of 1 device in use; lease 10 s, process "), shown.stderr


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_teaches_how_to_start_and_join(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["coordinator", *arguments]) == 0
    shown = capsys.readouterr().out
    assert "farstep coordinator start --slots 8" in shown and 'coordinator="default"' in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["begin"], "unknown action"),
        (["start"], "needs --slots"),
        (["start", "--slots", "0"], "slots is 0"),
        (["start", "--slots", "2", "--lease-s", "0.1"], "at least 1 second"),
        (["start", "--slots", "2", "--name", ".."], "plain name"),
        (["status", "--name", "nowhere"], "farstep coordinator start --slots N --name nowhere"),
    ],
)
def test_mistakes_are_explained(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["coordinator", *arguments]) == 1
    assert message in capsys.readouterr().err
