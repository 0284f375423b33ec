"""Checks that the programs of an engine are installed and that the engine answers, before nodes are requested."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from farstep.config.launch import LaunchConfig, SlurmConfig, SSHConfig
from farstep.doctor.findings import Finding, Report, ok, problem
from farstep.doctor.programs import Program
from farstep.errors import counted, unknown_name
from farstep.launch.engines.slurm import CHECK_CONTROLLER
from farstep.version import VERSION

_ANSWER_S = 30.0
_PACKAGES = {"RayConfig": ("ray", "ray"), "KubernetesConfig": ("kubernetes", "kubernetes")}
_VERSION = "import farstep.version as v, platform; print(v.VERSION, platform.python_version())"
_SSH_FIXES = {
    "Permission denied": "set up a login without a password: ssh-copy-id {host}, or an IdentityFile in ~/.ssh/config.",
    "Host key verification failed": "log in once by hand (ssh {host}) and accept its key.",
    "Could not resolve": "correct the name, or add 'Host {host}' with a HostName to ~/.ssh/config.",
    "Connection refused": "start sshd there, or set its Port in ~/.ssh/config.",
    "timed out": "check that it is running and that no firewall blocks ssh.",
    "No module named": "install farstep {version} for {python} there, or --setup '. ENV/bin/activate' --python python.",
    "No such file": "set the path of Python on that host: --python PATH.",
    "not found": "set the path of Python on that host: --python PATH.",
}
"""Fixes for errors of ssh, by a part of the error message."""


def engine(config: LaunchConfig, report: Report) -> Iterator[Finding]:
    """Run the checks that need no node.

    Args:
        config: The launcher to check.
        report: Called with progress messages.

    Yields:
        One finding per check.
    """
    if isinstance(config, SlurmConfig):
        yield from _slurm(config)
    elif isinstance(config, SSHConfig):
        yield from _ssh(config, report)
    elif (name := type(config).__name__) in _PACKAGES:
        package, extra = _PACKAGES[name]
        if importlib.util.find_spec(package) is None:
            yield problem(f"the package {package} is not installed", f"pip install 'farstep[{extra}]'.")
        else:
            yield ok(f"the package {package} is installed")


# ---- SLURM ----


def _slurm(config: SlurmConfig) -> Iterator[Finding]:
    if config.debug:
        yield ok("--debug does not use SLURM: the nodes below are workers on this machine")
        return
    inside = os.environ.get("SLURM_JOB_ID")
    needed = ["srun"] if inside else ["sbatch", "squeue", "scancel", "sinfo"]
    if missing := [program for program in needed if shutil.which(program) is None]:
        yield problem(
            f"{', '.join(missing)} not found on this machine",
            "run farstep on a machine that can submit jobs (a login node), or install SLURM's client "
            "(Debian: slurm-client).",
        )
        return
    if inside:
        yield ok(f"inside SLURM job {inside}: srun uses the nodes of this allocation")
        return
    sinfo = Program(["sinfo", "--noheader", "--format=%R|%a|%D|%T"])
    status, output = sinfo.end(time.monotonic() + _ANSWER_S)
    if status != 0:
        output = output if status is not None else f"timed out after {_ANSWER_S:g} s"
        yield problem(f"SLURM does not answer: {output}", CHECK_CONTROLLER)
        return
    lines = [line.split("|") for line in output.splitlines() if line.count("|") == 3]
    partitions = {name: availability for name, availability, _, _ in lines}
    nodes = ", ".join(f"{count} {state} in {name}" for name, _, count, state in lines)
    yield ok(f"SLURM answers; its nodes: {nodes}")
    wanted = config.partition or config.slurm_partition
    for name in (
        wanted.split(",") if wanted else ()
    ):  # a list is allowed: SLURM uses the first partition with free nodes
        if name not in partitions:
            yield problem(unknown_name("partition", name, partitions), "choose one of them.")
        elif partitions[name] != "up":
            yield problem(f"the partition {name} is {partitions[name]}", "choose another partition, or wait.")
    yield _log_folder(Path(config.log_folder).absolute())


def _log_folder(folder: Path) -> Finding:
    """Check that the folder can be written to, or could be created. Do not create it."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        return problem(
            f"{folder} cannot be written to", "set --log-folder to a folder on a file system shared with the nodes."
        )
    return ok(f"jobs write their logs to {folder}")


# ---- ssh ----


def _ssh(config: SSHConfig, report: Report) -> Iterator[Finding]:
    if shutil.which(config.ssh[0]) is None:
        yield problem(f"{config.ssh[0]!r} is not on this machine", "install an ssh client (Debian: openssh-client).")
        return
    python = config.python or sys.executable
    line = "\n".join([*config.setup, f"{shlex.quote(python)} -c {shlex.quote(_VERSION)}"])
    programs = {host: Program([*config.ssh, host, line]) for host in config.hosts}
    report(f"connecting to {counted(len(programs), 'host')} by ssh")
    deadline = time.monotonic() + _ANSWER_S
    for host, program in programs.items():
        yield _host(host, python, *program.end(deadline))


def _host(host: str, python: str, status: int | None, output: str) -> Finding:
    if status is None:
        output = f"{output}\ntimed out after {_ANSWER_S:g} s".strip()
    if status == 0 and len(words := output.split()[-2:]) == 2:
        if words[0] == VERSION:
            return ok(f"{host} answers to ssh, with farstep {words[0]} and Python {words[1]}")
        return problem(f"{host} has farstep {words[0]}, this machine {VERSION}", f"install farstep {VERSION} there.")
    fix = next((fix for words, fix in _SSH_FIXES.items() if words in output), f"try it by hand: ssh {host}")
    last = "\n".join(output.splitlines()[-3:]) or f"status {status}"
    return problem(f"{host}: {last}", fix.format(host=host, version=VERSION, python=python))
