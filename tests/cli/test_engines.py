"""Engines on the command line: their options, what they would be asked for, and what the doctor says."""

from __future__ import annotations

import resource
import socket
from typing import Any, get_args

import pytest
import yaml

import farstep
from farstep.cli.options.launchers import ENGINES, LAUNCHERS, chosen_launcher
from farstep.doctor import machine
from farstep.doctor.findings import Finding, problem
from farstep.errors import ConfigError
from farstep.learners.options.run_config import LauncherName
from tests.cli.test_cli import said


def test_the_job_is_printed_without_keys(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--nodes", "3", "--partition", "gpu", "--gpus-per-node", "2", "--workers-per-node", "4"]
    more = ["--setup", "module load cuda", "source env/bin/activate", "--slurm-extra=--exclusive --mem=16G"]
    status, output, error = said(capsys, "slurm", "--print", *options, *more)
    lines = output.splitlines()
    assert status == 0 and not error and lines[0] == "#!/bin/bash"
    for option in ("nodes=3", "partition=gpu", "gpus-per-node=2", "cpus-per-task=4", "exclusive --mem=16G"):
        assert f"#SBATCH --{option}" in lines
    assert "module load cuda" in lines and "source env/bin/activate" in lines
    assert "(keys of the run, created when it starts)" in lines and "secret" not in output


def test_manifests_are_printed_without_keys(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--image", "x:1", "--nodes", "2", "--setup", "one", "two"]
    more = ["--pod-template", '{"spec": {"hostNetwork": true}}']
    status, output, _ = said(capsys, "kubernetes", "--print", *options, *more)
    secret, first, second = yaml.safe_load_all(output)
    assert status == 0 and "redacted" in secret["stringData"]["bootstrap"]
    assert [first["kind"], second["kind"]] == ["Job", "Job"]
    pod = first["spec"]["template"]["spec"]
    assert pod["hostNetwork"] is True and pod["containers"][0]["command"][3].splitlines()[1:3] == ["one", "two"]


def test_nodes_that_may_come_later_are_jobs_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    status, output, error = said(capsys, "slurm", "--print", "--nodes", "5", "--min-nodes", "2")
    assert status == 0 and "#SBATCH --nodes=2" in output and "3 more jobs of one node each" in error


@pytest.mark.parametrize("command", ["slurm", "doctor"])
def test_help_teaches(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, output, _ = said(capsys, command, "--help")
    assert status == 0 and f"farstep {command}" in output
    assert {"slurm": "--partition", "doctor": "--wait-s"}[command] in output


@pytest.mark.parametrize("launcher", ENGINES)
def test_training_has_the_options_of_an_engine(launcher: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, output, _ = said(capsys, "train", "ppo", "--launcher", launcher, "--help")
    assert status == 0 and "--min-nodes" in output and "--learning-rate" in output


def test_the_launcher_is_found_wherever_it_stands() -> None:
    assert chosen_launcher(["--env", "x", "--launcher=ssh", "--hosts", "a"]) == "ssh"
    assert chosen_launcher(["--launcher", "slurm"]) == "slurm"
    assert chosen_launcher([], "ssh") == "ssh"
    with pytest.raises(ConfigError, match="Did you mean 'local'"):
        chosen_launcher(["--launcher", "locl"])
    assert {"local", "in-process", "slurm", "ssh"} <= set(LAUNCHERS)


def test_the_papers_listing() -> None:
    config = farstep.SlurmConfig(
        job_name="clusterenv", nodes=4, gpus_per_node=2, partition="gpu", time_limit="24:00:00"
    )
    env = farstep.ClusterEnv(
        {"type": "gymnasium", "env_name": "LunarLander-v3", "envs_per_node": 64, "kl_threshold": 0.05}, config
    )
    assert env.num_envs == 256


@pytest.mark.parametrize("ssh", ["ssh -i 'my key'", ["ssh -i 'my key'"], ["ssh", "-i", "my key"]], ids=repr)
def test_the_command_of_ssh_may_be_one_line(ssh: Any) -> None:
    assert farstep.SSHConfig(hosts="a", ssh=ssh).ssh == ("ssh", "-i", "my key")


@pytest.mark.parametrize("ssh", ["", [], [""], [3]], ids=repr)
def test_a_command_of_ssh_that_cannot_be(ssh: Any) -> None:
    with pytest.raises(ConfigError, match=r"SSHConfig\.ssh is"):
        farstep.SSHConfig(hosts="a", ssh=ssh)


# ---- what the doctor says of this machine ----


def levels(found: list[Finding], word: str) -> list[str]:
    return [finding.level for finding in found if word in finding.text]


def test_little_of_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> str:
        raise socket.gaierror("unknown")

    monkeypatch.setattr(machine, "available_memory", lambda: 2.0**20)
    monkeypatch.setattr(machine, "_LITTLE_SHM", 2**60)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (64, 4096))
    monkeypatch.setattr(socket, "gethostbyname", unknown)
    found = list(machine.machine())
    for word in ("of memory", "/dev/shm", "only 64 files", "has no address"):
        assert levels(found, word) == ["warning"], word
    assert all(finding.fix for finding in found if finding.level != "ok")


def test_a_name_that_resolves_to_loopback_is_nothing_to_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    assert levels(list(machine.machine()), "resolves to 127.0.1.1") == ["ok"]


def test_a_head_that_only_it_can_reach() -> None:
    found = list(machine.addresses(farstep.SSHConfig(hosts="a", head_address="127.0.0.1")))
    assert [finding.level for finding in found] == ["warning", "ok"]
    assert "no other machine" in found[0].text


def test_a_finding_of_several_lines_is_indented() -> None:
    assert str(problem("first\nsecond", "do it.")).splitlines() == [
        "  problem  first",
        "           second",
        "           -> do it.",
    ]


def test_an_option_without_its_value(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, error = said(capsys, "kubernetes", "--print", "--image", "x", "--requests", "cpu")
    assert status == 1 and "--requests: expected alternating names and values, e.g. cpu 4 memory 8Gi." in error


def test_every_launcher_can_be_named_in_a_run() -> None:
    assert set(get_args(LauncherName)) == set(LAUNCHERS)
