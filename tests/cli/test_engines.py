"""Engines on the command line: the printed jobs and manifests, and the help."""

from __future__ import annotations

import pytest
import yaml

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
def test_help_names_the_command_and_its_options(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, output, _ = said(capsys, command, "--help")
    assert status == 0 and f"farstep {command}" in output
    assert {"slurm": "--partition", "doctor": "--wait-s"}[command] in output


def test_an_option_without_its_value(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, error = said(capsys, "kubernetes", "--print", "--image", "x", "--requests", "cpu")
    assert status == 1 and "--requests: expected alternating names and values, e.g. cpu 4 memory 8Gi." in error
