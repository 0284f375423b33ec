"""Nodes from SLURM: an agent on each node of a job, told where to connect through its standard input.

A job is asked for with `sbatch`; inside an allocation (`SLURM_JOB_ID` is set) agents are a step of it instead, by
`srun`. The keys are in the script's standard input, never in arguments or the environment; SLURM shows a script to
its owner and to administrators only.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from farstep.config.launch import SlurmConfig
from farstep.errors import LaunchError, counted
from farstep.launch.addresses import own_addresses
from farstep.launch.daemon.guardian import Guardian
from farstep.launch.engine import RESTARTS, TAKEN_BACK, Group, RequestStatus, setup_lines
from farstep.launch.engine_processes import EngineProcess, EngineProcesses, after_setup, end_processes

log = logging.getLogger("farstep")
_COMMAND_S = 60.0
_INTERRUPTED_S = 3.0
"""Seconds that sbatch may still take after Ctrl-C: a job that it submits in that time is cancelled."""
_ENDED = {
    *("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY"),
    *("PREEMPTED", "REVOKED", "over"),
}
_WAITING = {"PENDING", "REQUEUED", "REQUEUE_HOLD", "CONFIGURING"}
NEVER_STARTS = "it asks for more than it may get, and would wait for ever"
_NEVER = {
    *("PartitionNodeLimit", "PartitionTimeLimit", "PartitionConfig", "BadConstraints", "InvalidAccount", "InvalidQOS"),
    *(f"{who}Max{what}PerJobLimit" for who in ("Assoc", "QOS") for what in ("Cpu", "Node", "WallDuration")),
}
"""SLURM's reasons for which it means that."""
_HELD = "requeued held"
"""A job that would stay in the queue until an administrator releases it."""
_STEP = ("--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--label")
"""Agents end one by one, and each line says whose it is."""
_TAIL_LINES = 15
_END_OF_INPUT = "FARSTEP-END"
_STAY_S = 600  # longer than SLURM gives those it preempts
REDACTED = "(keys of the run, made when it starts)"


class SlurmEngine:
    """Jobs, or steps of the job that the head runs in."""

    grace_s = 20.0

    def __init__(self, config: SlurmConfig, workers_per_node: int) -> None:
        self._config, self._per_node = config, workers_per_node
        self._inside = "SLURM_JOB_ID" in os.environ
        self._guardian = Guardian()
        self._steps: list[EngineProcess] = []
        self._jobs: list[Jobs] = []

    def listen_on(self) -> Sequence[str]:
        return self._config.head_address or own_addresses()

    def ask(self, nodes: int, bootstrap: bytes) -> Jobs | EngineProcesses:
        program = "srun" if self._inside else "sbatch"
        if shutil.which(program) is None:
            raise LaunchError(
                f"{program!r} is not on this machine; start farstep where jobs are submitted (Debian: slurm-client), "
                "or use LocalConfig."
            )
        if self._inside:
            step = EngineProcess(
                step_command(self._config, self._per_node, nodes), counted(nodes, "node"), bootstrap, nodes
            )
            self._steps.append(step)
            return EngineProcesses("srun", [step])
        folder = Path(self._config.log_folder).absolute()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LaunchError(f"log_folder={str(folder)!r} cannot be made: {error.strerror}; choose another.") from None
        together = [size for before in self._jobs for size in before.unreplaced()]
        together = together if self._jobs else [self._config.fewest_nodes]
        jobs = Jobs(folder, self._guardian)
        try:
            for size, script in self._scripts(nodes, together, bootstrap.decode()):
                jobs.submit(script, size)
        except BaseException:
            jobs.cancel()
            raise
        for before in self._jobs:
            before.were_replaced()
        self._jobs.append(jobs)
        return jobs

    def _scripts(self, nodes: int, together: Sequence[int], bootstrap: str) -> Iterator[tuple[int, str]]:
        """The jobs to submit, each with its number of nodes."""
        if self._config.spread:
            least = min(nodes, max(together, default=1))
            occupied = ",".join(filter(None, (before.hosts() for before in self._jobs)))
            yield nodes, batch_script(self._config, self._per_node, nodes, bootstrap, least, occupied)
            return
        for size in job_sizes(nodes, *together):
            yield size, batch_script(self._config, self._per_node, size, bootstrap)

    def close(self) -> None:
        end_processes(self._steps)
        self._guardian.close()


def job_sizes(nodes: int, *together: int) -> list[int]:
    """SLURM starts a job when all of its nodes are free: nodes that were requested together are one job, and the rest
    a job each, which may come later and go earlier."""
    sizes: list[int] = []
    for size in together:
        sizes += [min(size, nodes - sum(sizes))] if sum(sizes) < nodes else []
    return [*sizes, *[1] * (nodes - sum(sizes))]


def batch_script(
    config: SlurmConfig,
    workers_per_node: int,
    nodes: int,
    bootstrap: str = REDACTED,
    least: int | None = None,
    occupied: str = "",
) -> str:
    """The script that is given to `sbatch`, and that `farstep slurm --print` shows.

    Args:
        config: The options of the job.
        workers_per_node: Workers that each node's cores are for.
        nodes: Number of nodes.
        bootstrap: The configuration that node daemons get, with the keys of the run.
        least: Fewest nodes with which SLURM may start the job; None: all of them.
        occupied: Hosts that the job must not use, in SLURM's list format.
    """
    options = {
        "job-name": config.job_name,
        "nodes": nodes if least in (None, nodes) else f"{least}-{nodes}",
        "exclude": occupied or None,
        "ntasks-per-node": 1,
        "cpus-per-task": workers_per_node * config.cpus_per_worker,
        "partition": config.partition or config.slurm_partition,
        "time": config.time_limit,
        "account": config.slurm_account,
        "qos": config.slurm_qos,
        "constraint": config.slurm_constraint,
        "output": f"{str(Path(config.log_folder).absolute()).replace('%', '%%')}/%j.log",
        "open-mode": "append",
    }
    lines = [f"#SBATCH --{name}={shlex.quote(str(value))}" for name, value in options.items() if value is not None]
    lines += [f"#SBATCH {config.gpu_option}"] if config.gpu_option else []
    lines += ["#SBATCH --requeue", "#SBATCH --no-kill"]  # other nodes go on when one fails
    lines += [f"#SBATCH {extra}" for extra in config.slurm_extra]
    # Steps take no number of cores over from their job since SLURM 22.05: without it, workers may be bound to one.
    cores = f"--cpus-per-task={options['cpus-per-task']}"
    agent = " ".join(["srun", cores, *_STEP, *_agent(config)])
    # A job that ends by itself while it is preempted counts as completed and is not queued again.
    stay = f"[ $status -ne {TAKEN_BACK} ] || sleep {_STAY_S}"
    told = [f"{agent} <<'{_END_OF_INPUT}'", bootstrap, _END_OF_INPUT, "status=$?", stay, "exit $status", ""]
    return "\n".join(["#!/bin/bash", *lines, "", *setup_lines(config.setup), *told])


def step_command(config: SlurmConfig, workers_per_node: int, nodes: int) -> list[str]:
    """What runs agents inside the allocation that the head is in."""
    options = [
        *(f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--overlap", *_STEP),
        f"--cpus-per-task={workers_per_node * config.cpus_per_worker}",
        *([config.gpu_option] if config.gpu_option else []),
    ]
    # In bash, as batch scripts: setup lines may say `source`.
    return ["srun", *options, "bash", "-c", after_setup(config.setup, " ".join(_agent(config)))]


def _agent(config: SlurmConfig) -> list[str]:
    python = shlex.quote(config.python or sys.executable)
    place = "'SLURM job $SLURM_JOB_ID, node $SLURMD_NODENAME'"
    # Not a command-line option: a daemon of another version would reject it before it reports its version.
    restarts = f"{RESTARTS}={config.restart_budget}"
    return ["env", restarts, python, "-m", "farstep.launch.daemon.node_daemon", "--place", place]


class Jobs(Group):
    """Jobs that were submitted together."""

    def __init__(self, folder: Path, guardian: Guardian) -> None:
        self._folder, self._guardian = folder, guardian
        self._sizes: dict[str, int] = {}
        self._here: set[str] = set()
        """Jobs of which agents are there."""
        self._came: set[str] = set()
        """Jobs of which some were, since the job last began."""
        self._began: set[str] = set()
        """Jobs that SLURM has started at least once."""
        self._most: dict[str, int] = {}
        """Most nodes that each job requests; `_sizes` has the number that SLURM granted."""
        self._granted: set[str] = set()
        """Jobs whose number of nodes was read since they last began; later a smaller one means that a node failed."""
        self._ended: dict[str, int] = {}
        """Jobs that did not end by themselves, with their number of nodes; 0 once these were requested again."""

    def submit(self, script: str, nodes: int) -> None:
        with _Command(["sbatch", "--parsable"]) as sbatch:
            try:
                answer = sbatch.output(script)
            except LaunchError:
                raise
            except BaseException:
                with contextlib.suppress(LaunchError):
                    self._submitted(sbatch.output(timeout_s=_INTERRUPTED_S), nodes)
                raise
        self._submitted(answer, nodes)

    def _submitted(self, answer: str, nodes: int) -> None:
        if not (found := re.match(r"\s*(\d+)", answer)):
            raise LaunchError(f"sbatch answered {answer.strip()!r} instead of the number of a job.")
        self._sizes[found[1]] = self._most[found[1]] = nodes
        self._guardian.promise(found[1], ["scancel", found[1]])

    def there(self, places: Sequence[str]) -> None:
        self._here = {place.partition(",")[0].rpartition(" ")[2] for place in places}
        self._came |= self._here

    def unreplaced(self) -> list[int]:
        """Sizes of the jobs that were cancelled, failed or timed out, and were not requested again."""
        return [size for size in self._ended.values() if size]

    def were_replaced(self) -> None:
        self._ended = dict.fromkeys(self._ended, 0)

    def hosts(self) -> str:
        """The hosts of its jobs, in SLURM's list format."""
        options = ["--noheader", "--states=RUNNING,CONFIGURING", f"--jobs={','.join(self._sizes)}", "--format=%N"]
        return ",".join(filter(None, map(str.strip, _run(["squeue", *options], missing="").splitlines())))

    def standing(self) -> RequestStatus:
        options = ["--noheader", "--noconvert", "--states=all", f"--jobs={','.join(self._sizes)}"]
        said = _run(["squeue", *options, "--format=%A|%T|%D|%P|%N|%r"], missing="")
        lines = [line.split("|", 5) for line in said.splitlines() if line.count("|") >= 5]
        states = {number.strip(): rest for number, *rest in lines}
        parts, nodes, over, anew = [], 0, [], []
        for number in self._sizes:
            state, count, partition, hosts, reason = states.get(number, ("over", "0", "", "", ""))
            size = self._size(number, state, held := int(count.partition("-")[0]))  # of a range, the least
            parts.append(f"SLURM job {number} is {state}{_because(reason, partition)}")
            if hosts and state not in _WAITING:
                self._began.add(number)
            nodes += 0 if state in _ENDED else size
            over += [f"SLURM job {number}"] if state in _ENDED else []
            anew += [f"SLURM job {number}"] if state in _WAITING else []
            if state in _WAITING and reason.endswith(_HELD):
                self._cancel(number, "could not be started, and SLURM holds it")
            elif state in _WAITING:
                self._came.discard(number)
            elif state == "RUNNING" and held < size and number in self._came - self._here:
                # With its first node went `srun`, and the agents on the others, which SLURM would keep for the job. (If
                # none had failed, agents may only be cut off for a while.)
                self._cancel(number, "has lost all of its agents")
        return RequestStatus("; ".join(parts), nodes, over=over, anew=anew)

    def _size(self, number: str, state: str, held: int) -> int:
        """Nodes that a job has or requests; also notes the size of a job that must be requested again."""
        if state in _WAITING:
            self._sizes[number] = self._most[number]
            self._granted.discard(number)
        elif state == "RUNNING" and number not in self._granted and held:
            self._sizes[number] = min(held, self._most[number])
            self._granted.add(number)
        if state in _ENDED - {"COMPLETED"}:
            self._ended.setdefault(number, self._sizes[number])
        return self._sizes[number]

    def _cancel(self, number: str, why: str) -> None:
        log.warning("SLURM job %s %s: cancelled, so that others can be asked for", number, why)
        _run(["scancel", number], missing="")
        self._came.discard(number)

    def logs(self) -> str:
        return "\n".join(map(self._log, self._sizes))

    def _log(self, number: str) -> str:
        path = self._folder / f"{number}.log"
        if not path.exists() and number not in self._began:
            return f"SLURM job {number} has not started, so it has no log."
        if not path.exists():
            return f"{path} is not there (yet, or not on this machine: log_folder must be on a file system of both)."
        lines = path.read_text(errors="replace").splitlines() or ["(nothing was written to it)"]
        return "\n".join([f"The end of {path}:", *lines[-_TAIL_LINES:]])

    def cancel(self) -> None:
        try:
            if self._sizes:
                _run(["scancel", *self._sizes], missing="")
        except LaunchError as error:  # their agents leave anyhow, and the guardian goes on trying
            log.warning("%s; jobs %s are cancelled when SLURM answers again", error, ", ".join(self._sizes))
            return
        for number in self._sizes:
            self._guardian.release(number)


def _because(reason: str, partition: str) -> str:
    """Why a job is as it is."""
    if reason in ("", "None"):
        return ""
    in_another = "," in partition and reason.startswith("Partition")  # SLURM tries one after the other
    return f" ({reason}: {NEVER_STARTS})" if reason in _NEVER and not in_another else f" ({reason})"


def _run(command: Sequence[str], missing: str | None = None) -> str:
    """A command's output; `missing` if it does not know the job."""
    with _Command(command) as running:
        return running.output(missing=missing)


class _Command(contextlib.AbstractContextManager["_Command"]):
    """One of SLURM's programs; it is killed at the end of the block."""

    def __init__(self, command: Sequence[str]) -> None:
        self._name = command[0]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )

    def output(self, text: str | None = None, missing: str | None = None, timeout_s: float = _COMMAND_S) -> str:
        """Write `text` to the program and return its stdout; may be called again after an interruption.

        Raises:
            LaunchError: The program failed (the message quotes its stderr), or did not end within `timeout_s`.
        """
        try:
            output, errors = self._process.communicate(text, timeout_s)
        except subprocess.TimeoutExpired:
            said = f"{self._name} did not answer for {timeout_s:g} s; is slurmctld running, and is SLURM_CONF right?"
            raise LaunchError(said) from None
        if self._process.returncode == 0:
            return output
        if missing is not None and "Invalid job id" in errors:
            return missing
        raise LaunchError(f"{self._name} failed: {errors.strip() or f'status {self._process.returncode}'}")

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        with self._process:
            return
