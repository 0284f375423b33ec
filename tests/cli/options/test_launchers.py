"""The launcher that a command names, and the options that belong to it."""

from __future__ import annotations

from typing import get_args

import pytest

from farstep.cli.options.launchers import ENGINES, LAUNCHERS, chosen_launcher
from farstep.errors import ConfigError
from farstep.learners.options.run_config import LauncherName
from tests.cli.test_cli import said


@pytest.mark.parametrize("launcher", ENGINES)
def test_training_has_the_options_of_an_engine(launcher: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, output, _ = said(capsys, "train", "ppo", "--launcher", launcher, "--help")
    assert status == 0 and "--min-nodes" in output and "--learning-rate" in output


def test_launcher_is_found_at_any_position() -> None:
    assert chosen_launcher(["--env", "x", "--launcher=ssh", "--hosts", "a"]) == "ssh"
    assert chosen_launcher(["--launcher", "slurm"]) == "slurm"
    assert chosen_launcher([], "ssh") == "ssh"
    with pytest.raises(ConfigError, match="Did you mean 'local'"):
        chosen_launcher(["--launcher", "locl"])
    assert {"local", "in-process", "slurm", "ssh"} <= set(LAUNCHERS)


def test_every_launcher_can_be_named_in_a_run() -> None:
    assert set(get_args(LauncherName)) == set(LAUNCHERS)
