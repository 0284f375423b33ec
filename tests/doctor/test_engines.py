"""Checks of an engine before nodes are requested, where its programs are missing, fail or print unexpected output."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from farstep.config.launch import LaunchConfig, RayConfig, SlurmConfig, SSHConfig
from farstep.doctor.engines import engine
from farstep.doctor.findings import Finding
from farstep.doctor.programs import Program


def found(config: LaunchConfig) -> list[Finding]:
    return list(engine(config, lambda text: None))


def problem(config: LaunchConfig) -> str:
    (only,) = [finding for finding in found(config) if finding.level == "problem"]
    return f"{only.text} {only.fix}"


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with SLURM's programs, and no others on the path."""
    for name in ("sbatch", "squeue", "scancel", "sinfo"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    return tmp_path


def test_debug_needs_no_slurm(programs: Path) -> None:
    (programs / "sinfo").unlink()
    (finding,) = found(SlurmConfig(debug=True))
    assert finding.level == "ok" and "does not use SLURM" in finding.text


def test_missing_programs_of_slurm_are_named(programs: Path) -> None:
    (programs / "sinfo").unlink()
    assert "sinfo not found" in problem(SlurmConfig())


def test_inside_a_job_only_srun_is_needed(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert "srun not found" in problem(SlurmConfig())
    (programs / "sinfo").rename(programs / "srun")
    (finding,) = found(SlurmConfig())
    assert finding.level == "ok" and "inside SLURM job 7" in finding.text


def test_a_slurm_that_does_not_answer_is_quoted(programs: Path) -> None:
    (programs / "sinfo").write_text("#!/bin/sh\necho cannot contact slurmctld >&2\nexit 1\n")
    assert "SLURM does not answer: cannot contact slurmctld" in problem(SlurmConfig())


def test_a_partition_that_is_down_is_a_problem(programs: Path) -> None:
    (programs / "sinfo").write_text("#!/bin/sh\necho 'cpu|up|2|idle'\necho 'gpu|down|1|idle'\n")
    assert "the partition gpu is down" in problem(SlurmConfig(partition="gpu"))


def test_a_log_folder_that_cannot_be_written_to_is_a_problem(programs: Path) -> None:
    (programs / "sinfo").write_text("#!/bin/sh\necho 'cpu|up|2|idle'\n")
    assert "cannot be written to" in problem(SlurmConfig(log_folder=str(programs / "sinfo" / "logs")))


def test_a_missing_package_of_an_engine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "the package ray is not installed" in problem(RayConfig())


def test_a_missing_ssh_client_is_named(programs: Path) -> None:
    assert "'ssh' is not on this machine" in problem(SSHConfig(hosts=("a",)))


def test_a_host_that_answers_oddly_is_quoted(programs: Path) -> None:
    (programs / "ssh").write_text("#!/bin/sh\necho welcome\n")
    (programs / "ssh").chmod(0o755)
    assert "a: welcome try it by hand: ssh a" in problem(SSHConfig(hosts=("a",)))


def test_a_program_that_cannot_start_leaves_no_file_open() -> None:
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208 - an iterator would be an open file
    with pytest.raises(FileNotFoundError):
        Program([f"{sys.executable}-that-is-missing"])
    assert set(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
