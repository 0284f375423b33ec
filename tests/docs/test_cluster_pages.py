"""The pages of engines: commands and code work, every option is described, and every promise names its test."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import farstep
from farstep.cli import doctor, main
from farstep.config.launch import EngineConfig, SlurmConfig, SSHConfig
from tests.engines.guarded import require, require_root

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ["cluster.md", "slurm.md", "ssh.md"]
OWN = {"slurm.md": SlurmConfig, "ssh.md": SSHConfig}


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (DOCS / page).read_text(), re.S | re.M)


def commands(page: str, name: str) -> list[list[str]]:
    """The arguments of each `farstep NAME ...`, in blocks and in the text."""
    text = "\n".join([*blocks(page, "bash"), *re.findall(r"`(farstep [^`\n]+)`", (DOCS / page).read_text())])
    return [shlex.split(line)[2:] for line in text.splitlines() if line.startswith(f"farstep {name} ")]


@pytest.mark.parametrize("page", PAGES)
def test_commands_have_existing_options(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    from farstep.cli.options import train_options

    assert commands(page, "train") and commands(page, "doctor")
    for learner, *arguments in commands(page, "train"):
        options = train_options.parse_options(learner, arguments)
        assert options.run.num_envs % options.nodes.nodes == 0
    for arguments in commands(page, "doctor"):
        assert isinstance(doctor.parsed(arguments).config, EngineConfig)
    for arguments in commands(page, "slurm"):
        assert main(["slurm", *arguments]) == 0
        assert capsys.readouterr().out.startswith("#!/bin/bash")


@pytest.mark.parametrize("page", PAGES)
def test_the_code_makes_a_cluster(page: str) -> None:
    names: dict[str, Any] = {}
    for code in blocks(page, "python"):
        exec(code, names)
    assert isinstance(names["env"], farstep.ClusterEnv)


@pytest.mark.slow
def test_the_command_of_the_page_starts_a_slurm_cluster() -> None:
    require("slurm-wlm", "slurmctld", "slurmd")
    require("munge", "munged")
    require_root("SLURM's daemons")
    (command,) = [block for block in blocks("slurm.md", "bash") if "SlurmCluster" in block]
    script = command.replace("python -c", f"{shlex.quote(sys.executable)} -c", 1)
    ended = subprocess.run(
        ["bash", "-c", script], input="sinfo -h -o %D", capture_output=True, text=True, timeout=120, cwd=DOCS.parent
    )
    assert (ended.returncode, ended.stdout) == (0, "2\n"), ended.stderr


@pytest.mark.parametrize("page", OWN)
def test_every_option_of_an_engine_is_on_its_page(page: str) -> None:
    own = {field.name for field in fields(OWN[page])} - {field.name for field in fields(EngineConfig)}
    assert not {name for name in own if f"`{name}`" not in (DOCS / page).read_text()}


def test_options_that_engines_share_are_on_one_page() -> None:
    page = (DOCS / "cluster.md").read_text()
    assert not {field.name for field in fields(EngineConfig) if f"`{field.name}`" not in page}


def test_every_promise_has_its_test() -> None:
    table = (DOCS / "cluster.md").read_text().partition("## When something dies")[2]
    rows = [row for row in table.splitlines() if row.startswith("| ") and not row.startswith("| what ")]
    assert len(rows) >= 11
    for row in rows:
        linked = re.findall(r"\[`(test_\w+)`\]\(\.\./([\w/.]+)\)", row)
        assert linked, row
        for name, path in linked:
            assert f"def {name}(" in (DOCS.parent / path).read_text(), f"{path} has no {name}"
