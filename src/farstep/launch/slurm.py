"""Nodes from SLURM: an agent on each node of a job, told where to connect through its standard input.

A job is asked for with `sbatch`; inside an allocation (`SLURM_JOB_ID` is set) agents are a step of it instead, by
`srun`. The keys are in the script's standard input, never in arguments or the environment; SLURM shows a script to
its owner and to administrators only.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from farstep.errors import LaunchError
from farstep.launch.addresses import own_addresses
from farstep.launch.engine import Standing
from farstep.launch.guardian import Guardian
from farstep.launch.sessions import Session, Sessions
from farstep.launch_config import SlurmConfig

_COMMAND_S = 60.0
_ENDED = {"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY", ""}
_TAIL_LINES = 15
_END_OF_INPUT = "FARSTEP-END"
REDACTED = "(keys of the run, made when it starts)"


class SlurmEngine:
    """Jobs, or steps of the job that the head runs in."""

    grace_s = 20.0
    tells_lost = False

    def __init__(self, config: SlurmConfig, workers_per_node: int) -> None:
        self._config, self._per_node = config, workers_per_node
        self._inside = "SLURM_JOB_ID" in os.environ
        self._guardian = Guardian()
        self._steps: list[Session] = []

    def listen_on(self) -> Sequence[str]:
        return self._config.head_address or own_addresses()

    def ask(self, nodes: int, bootstrap: bytes) -> Job | Sessions:
        program = "srun" if self._inside else "sbatch"
        if shutil.which(program) is None:
            raise LaunchError(
                f"{program!r} is not on this machine; start farstep where jobs are submitted (Debian: slurm-client), "
                "or use LocalConfig."
            )
        if self._inside:
            step = Session(step_command(self._config, self._per_node, nodes), f"{nodes} nodes", bootstrap, nodes)
            self._steps.append(step)
            return Sessions("srun", [step])
        self._folder.mkdir(parents=True, exist_ok=True)
        script = batch_script(self._config, self._per_node, nodes, bootstrap.decode())
        answer = _run(["sbatch", "--parsable"], script)
        if not (found := re.match(r"\s*(\d+)", answer)):
            raise LaunchError(f"sbatch answered {answer.strip()!r} instead of the number of a job.")
        self._guardian.promise(found[1], ["scancel", found[1]])
        return Job(found[1], nodes, self._folder, self._guardian)

    @property
    def _folder(self) -> Path:
        return Path(self._config.log_folder).absolute()

    def close(self) -> None:
        for step in self._steps:
            step.end()
        self._guardian.close()


def batch_script(config: SlurmConfig, workers_per_node: int, nodes: int, bootstrap: str = REDACTED) -> str:
    """What `sbatch` is given, and `farstep slurm --print` shows."""
    options = {
        "job-name": config.job_name,
        "nodes": nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": workers_per_node * config.cpus_per_worker,
        "gpus-per-node": config.gpus_per_node or None,
        "partition": config.partition or config.slurm_partition,
        "time": config.time_limit,
        "account": config.slurm_account,
        "qos": config.slurm_qos,
        "constraint": config.slurm_constraint,
        "output": f"{Path(config.log_folder).absolute()}/%j.log",
        "open-mode": "append",
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None]
    lines += ["#SBATCH --requeue", "#SBATCH --no-kill"]  # other nodes go on when one fails
    lines += [f"#SBATCH {extra}" for extra in config.slurm_extra]
    agent = " ".join(["srun", "--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--label", *_agent(config)])
    return "\n".join(
        ["#!/bin/bash", *lines, "", *config.setup, f"{agent} <<'{_END_OF_INPUT}'", bootstrap, _END_OF_INPUT, ""]
    )


def step_command(config: SlurmConfig, workers_per_node: int, nodes: int) -> list[str]:
    """What runs agents inside the allocation that the head is in."""
    options = [
        *(f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--overlap", "--no-kill"),
        *("--kill-on-bad-exit=0", "--wait=0", "--label"),
        f"--cpus-per-task={workers_per_node * config.cpus_per_worker}",
        *([f"--gpus-per-node={config.gpus_per_node}"] if config.gpus_per_node else []),
    ]
    setup = "\n".join([*config.setup, f"exec {' '.join(_agent(config))}"])
    return ["srun", *options, "sh", "-c", setup]


def _agent(config: SlurmConfig) -> list[str]:
    python = shlex.quote(config.python or sys.executable)
    return [python, "-m", "farstep.launch.node_agent", "--place", "'SLURM job $SLURM_JOB_ID, node $SLURMD_NODENAME'"]


class Job:
    """A job that was submitted (see `engine.Group`)."""

    def __init__(self, number: str, nodes: int, folder: Path, guardian: Guardian) -> None:
        self._number, self._nodes, self._folder, self._guardian = number, nodes, folder, guardian

    def standing(self) -> Standing:
        line = _run(["squeue", "--noheader", "--states=all", f"--jobs={self._number}", "--format=%T|%r|%D"], missing="")
        state, reason, nodes = (line.strip().splitlines()[0] if line.strip() else "||").split("|")
        if state in _ENDED:
            how = f"is {state} ({reason})" if state else "is over"
            return Standing(f"SLURM job {self._number} {how}", 0)
        why = f" ({reason})" if reason not in ("", "None") else ""
        return Standing(f"SLURM job {self._number} is {state}{why}", int(nodes or self._nodes))

    def logs(self) -> str:
        path = self._folder / f"{self._number}.log"
        if not path.exists():
            return f"{path} is not there (yet, or not on this machine: log_folder must be on a file system of both)."
        lines = path.read_text(errors="replace").splitlines()
        return "\n".join([f"The end of {path}:", *lines[-_TAIL_LINES:]])

    def cancel(self) -> None:
        _run(["scancel", self._number], missing="")
        self._guardian.release(self._number)


def _run(command: Sequence[str], text: str = "", missing: str | None = None) -> str:
    """A command's output; where it fails, `missing`, or an error that says what it said."""
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=_COMMAND_S, check=False, start_new_session=True
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{command[0]} did not answer for {_COMMAND_S:g} s; is slurmctld running?") from None
    if done.returncode == 0:
        return done.stdout
    if missing is not None and "Invalid job id" in done.stderr:
        return missing
    raise LaunchError(f"{command[0]} failed: {done.stderr.strip() or f'status {done.returncode}'}")
