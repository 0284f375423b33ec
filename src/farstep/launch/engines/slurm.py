"""Starts node daemons as SLURM jobs or, inside an allocation (`SLURM_JOB_ID` is set), as a step of its job.

Each daemon reads the head's address and its keys from its standard input, never from arguments or the environment. The
batch script contains them; SLURM shows it only to its owner and to administrators.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from farstep.config.launch import SlurmConfig
from farstep.errors import LaunchError, counted, unknown_name
from farstep.event import Emit, traceback_of
from farstep.launch.addresses import own_addresses
from farstep.launch.daemon.guardian import Guardian
from farstep.launch.engines.engine import RECLAIMED, RESTARTS, Group, RequestStatus, setup_lines
from farstep.launch.engines.engine_processes import EngineProcess, EngineProcesses, after_setup, end_processes

_COMMAND_S = 60.0
_NO_CONTROLLER = (
    "Unable to contact slurm controller",
    "Could not establish a configuration source",
    "Unable to process configuration file",
)
"""Parts of errors of SLURM's programs that cannot reach slurmctld or read slurm.conf."""
CHECK_CONTROLLER = "check that slurmctld is running and that SLURM_CONF is right."
_INTERRUPTED_S = 3.0
"""Seconds to wait for sbatch after Ctrl-C. A job that it submits in this time is cancelled."""
_ENDED = {
    *("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY"),
    *("PREEMPTED", "REVOKED", "over"),
}
_WAITING = {"PENDING", "REQUEUED", "REQUEUE_HOLD", "CONFIGURING"}
NEVER_STARTS = "it requests more than it may get, so it would wait forever"
_REMEDY = "request fewer nodes, cores or minutes, or choose another partition, account or QOS"
_NEVER = {
    *("PartitionNodeLimit", "PartitionTimeLimit", "PartitionConfig", "BadConstraints", "InvalidAccount", "InvalidQOS"),
    *(f"{scope}Max{limit}PerJobLimit" for scope in ("Assoc", "QOS") for limit in ("Cpu", "Node", "WallDuration")),
}
"""SLURM's reasons for pending jobs that never start."""
HOPELESS_S = 30.0
"""Seconds for which SLURM must give such a reason before the job counts as hopeless."""
_HELD = "requeued held"
"""SLURM's reason ends with this if a job stays in the queue until an administrator releases it."""
_STEP = ("--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--label")
"""Options of `srun`: node daemons end independently of each other, and every line of output names its task."""
_TAIL_LINES = 15
_END_OF_INPUT = "FARSTEP-END"
_STAY_S = 600
"""Seconds that the script of a preempted job waits until SLURM kills it; longer than SLURM's grace time."""
REDACTED = "(keys of the run, created when it starts)"


class SlurmEngine:
    """Starts node daemons in jobs, or in steps of the job that the head runs in."""

    grace_s = 20.0

    def __init__(self, config: SlurmConfig, workers_per_node: int, emit: Emit) -> None:
        self._config, self._per_node, self._emit = config, workers_per_node, emit
        self._inside = "SLURM_JOB_ID" in os.environ
        self._guardian = Guardian()
        self._steps: list[EngineProcess] = []
        self._jobs: list[Jobs] = []

    def listen_on(self) -> Sequence[str]:
        return self._config.head_address or own_addresses()

    def request(self, nodes: int, bootstrap: bytes) -> Jobs | EngineProcesses:
        program = "srun" if self._inside else "sbatch"
        if shutil.which(program) is None:
            raise LaunchError(
                f"{program!r} is not on this machine; start farstep on a machine that can submit jobs (Debian package "
                "slurm-client), or use LocalConfig."
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
            raise LaunchError(
                f"log_folder={str(folder)!r} cannot be created: {error.strerror}; choose another."
            ) from None
        together = [size for before in self._jobs for size in before.unreplaced()]
        together = together if self._jobs else [self._config.fewest_nodes]
        jobs = Jobs(folder, self._guardian, self._emit)
        try:
            for size, script in self._scripts(nodes, together, bootstrap.decode()):
                jobs.submit(script, size)
        except BaseException as error:
            jobs.cancel()
            if isinstance(error, LaunchError) and "invalid partition" in str(error).lower():
                raise LaunchError(f"{error}\n{self._unknown_partitions()}".rstrip()) from None
            raise
        for before in self._jobs:
            before.set_replaced()
        self._jobs.append(jobs)
        return jobs

    def _unknown_partitions(self) -> str:
        """Return an error message for each partition that SLURM does not list; "" if `sinfo` fails."""
        wanted = self._config.partition or self._config.slurm_partition or ""
        try:
            known = set(_run(["sinfo", "--noheader", "--format=%R"]).split())
        except (LaunchError, OSError):
            return ""
        return "\n".join(unknown_name("partition", name, known) for name in wanted.split(",") if name not in known)

    def _scripts(self, nodes: int, together: Sequence[int], bootstrap: str) -> Iterator[tuple[int, str]]:
        """The batch scripts to submit, each with its number of nodes. `job_sizes` explains `together`."""
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
    """Split a request for nodes into jobs.

    SLURM starts a job only when enough nodes for the whole job are free. Nodes that are needed at the same time share a
    job. Every other node gets its own job, which may start later and end earlier.

    Args:
        nodes: Number of nodes of all jobs.
        together: For each set of nodes that are needed at the same time, its number of nodes.

    Returns:
        The number of nodes of each job.
    """
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
    """The script for `sbatch`, also printed by `farstep slurm --print`.

    Args:
        config: The options of the job.
        workers_per_node: Workers per node, for the number of cores.
        nodes: Number of nodes.
        bootstrap: The standard input of node daemons, with the keys of the run.
        least: Minimum number of nodes with which SLURM may start the job; None: all nodes.
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
    lines += ["#SBATCH --requeue", "#SBATCH --no-kill"]  # the job continues when one of its nodes fails
    lines += [f"#SBATCH {extra}" for extra in config.slurm_extra]
    # Since SLURM 22.05, steps do not inherit the number of cores from their job; workers might all share one core.
    cores = f"--cpus-per-task={options['cpus-per-task']}"
    daemon = " ".join(["srun", cores, *_STEP, *_daemon_command(config)])
    # If a preempted job exits by itself, SLURM counts it as completed and does not requeue it. So wait for the kill.
    stay = f"[ $status -ne {RECLAIMED} ] || sleep {_STAY_S}"
    start = [f"{daemon} <<'{_END_OF_INPUT}'", bootstrap, _END_OF_INPUT, "status=$?", stay, "exit $status", ""]
    return "\n".join(["#!/bin/bash", *lines, "", *setup_lines(config.setup), *start])


def step_command(config: SlurmConfig, workers_per_node: int, nodes: int) -> list[str]:
    """The `srun` command that starts node daemons inside the allocation of the head."""
    options = [
        *(f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--overlap", *_STEP),
        f"--cpus-per-task={workers_per_node * config.cpus_per_worker}",
        *([config.gpu_option] if config.gpu_option else []),
    ]
    # Use bash, as batch scripts do, because setup lines may use `source`.
    return ["srun", *options, "bash", "-c", after_setup(config.setup, " ".join(_daemon_command(config)))]


def _daemon_command(config: SlurmConfig) -> list[str]:
    python = shlex.quote(config.python or sys.executable)
    place = "'SLURM job $SLURM_JOB_ID, node $SLURMD_NODENAME'"
    # Not a command-line option, because a daemon of another version would reject it before reporting its version.
    restarts = f"{RESTARTS}={config.restart_budget}"
    return ["env", restarts, python, "-m", "farstep.launch.daemon.node_daemon", "--place", place]


class Jobs(Group):
    """Jobs that were submitted together."""

    def __init__(self, folder: Path, guardian: Guardian, emit: Emit) -> None:
        self._folder, self._guardian, self._emit = folder, guardian, emit
        self._sizes: dict[str, int] = {}
        """Number of nodes of each job, by job id."""
        self._connected: set[str] = set()
        """Jobs that have a connected node daemon."""
        self._seen: set[str] = set()
        """Jobs that have had a connected node daemon since their last start."""
        self._started: set[str] = set()
        """Jobs that SLURM has started at least once."""
        self._requested: dict[str, int] = {}
        """Maximum number of nodes that each job requests; `_sizes` has the number that SLURM granted."""
        self._granted: set[str] = set()
        """Jobs whose granted number of nodes is known since their last start. If the number falls later, a node
        failed."""
        self._ended: dict[str, int] = {}
        """Jobs that were cancelled, failed or timed out, with their number of nodes; 0 after the nodes were requested
        again."""
        self._never_since: dict[str, float] = {}
        """Jobs that never start according to SLURM, and since when SLURM reports this (`time.monotonic`)."""

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
        self._sizes[found[1]] = self._requested[found[1]] = nodes
        self._guardian.register(found[1], ["scancel", found[1]])

    def set_connected(self, places: Sequence[str]) -> None:
        self._connected = {place.partition(",")[0].rpartition(" ")[2] for place in places}
        self._seen |= self._connected

    def unreplaced(self) -> list[int]:
        """Sizes of the jobs that were cancelled, failed or timed out, and have not been requested again."""
        return [size for size in self._ended.values() if size]

    def set_replaced(self) -> None:
        self._ended = dict.fromkeys(self._ended, 0)

    def hosts(self) -> str:
        """The hosts of these jobs, in SLURM's list format."""
        options = ["--noheader", "--states=RUNNING,CONFIGURING", f"--jobs={','.join(self._sizes)}", "--format=%N"]
        return ",".join(filter(None, map(str.strip, _run(["squeue", *options], missing="").splitlines())))

    def status(self) -> RequestStatus:
        options = ["--noheader", "--noconvert", "--states=all", f"--jobs={','.join(self._sizes)}"]
        answer = _run(["squeue", *options, "--format=%A|%T|%D|%P|%N|%r"], missing="")
        lines = [line.split("|", 5) for line in answer.splitlines() if line.count("|") >= 5]
        states = {number.strip(): rest for number, *rest in lines}
        parts, nodes, hopeless, ended, restarting = [], 0, 0, {}, []
        for number in self._sizes:
            state, count, partition, hosts, reason = states.get(number, ("over", "0", "", "", ""))
            size = self._size(number, state, held := int(count.partition("-")[0]))  # a range: take its minimum
            never = state in _WAITING and _never_starts(reason, partition)
            hopeless += size if self._is_hopeless(number, never) else 0
            parts.append(f"SLURM job {number} is {state}{_in_words(reason, never)}")
            if hosts and state not in _WAITING:
                self._started.add(number)
            nodes += 0 if state in _ENDED else size
            if state in _ENDED:
                ended[f"SLURM job {number}"] = parts[-1]
            restarting += [f"SLURM job {number}"] if state in _WAITING else []
            if state in _WAITING and reason.endswith(_HELD):
                self._cancel(number, "could not be started, and SLURM holds it")
            elif state in _WAITING:
                self._seen.discard(number)
            elif state == "RUNNING" and held < size and number in self._seen - self._connected:
                # The first node failed, and with it `srun` and all daemons of the job, but SLURM keeps the other nodes
                # allocated. (If no node failed, the daemons may be disconnected only temporarily.)
                self._cancel(number, "has lost all of its node daemons")
        return RequestStatus("; ".join(parts), nodes, ended=ended, restarting=restarting, hopeless=hopeless)

    def _is_hopeless(self, number: str, never: bool) -> bool:
        """Whether SLURM has long said that a job never starts. Wait a little, because a reason may be temporary."""
        if not never:
            self._never_since.pop(number, None)
            return False
        return time.monotonic() - self._never_since.setdefault(number, time.monotonic()) >= HOPELESS_S

    def _size(self, number: str, state: str, held: int) -> int:
        """Number of nodes that a job has or requests. This also records the sizes of jobs to request again."""
        if state in _WAITING:
            self._sizes[number] = self._requested[number]
            self._granted.discard(number)
        elif state == "RUNNING" and number not in self._granted and held:
            self._sizes[number] = min(held, self._requested[number])
            self._granted.add(number)
        if state in _ENDED - {"COMPLETED"}:
            self._ended.setdefault(number, self._sizes[number])
        return self._sizes[number]

    def _cancel(self, number: str, why: str) -> None:
        text = f"SLURM job {number} {why}: cancelling it, so that its nodes can be requested again"
        logs = ""
        with contextlib.suppress(OSError):
            logs = self._log(number)
        self._emit("lost", text, traceback=logs)
        _run(["scancel", number], missing="")
        self._seen.discard(number)

    def logs(self) -> str:
        return "\n".join(map(self._log, self._sizes))

    def _log(self, number: str) -> str:
        path = self._folder / f"{number}.log"
        if not path.exists() and number not in self._started:
            return f"SLURM job {number} has not started, so it has no log."
        if not path.exists():
            return (
                f"{path} does not exist (yet); log_folder must be on a file system that nodes share with this machine."
            )
        lines = path.read_text(errors="replace").splitlines() or ["(it is empty)"]
        return "\n".join([f"The end of {path}:", *lines[-_TAIL_LINES:]])

    def cancel(self) -> None:
        try:
            if self._sizes:
                _run(["scancel", *self._sizes], missing="")
        except LaunchError as error:  # the daemons end anyway, and the guardian continues to retry
            text = f"{error}; jobs {', '.join(self._sizes)} will be cancelled when SLURM answers again"
            self._emit("warned", text, traceback=traceback_of(error))
            return
        for number in self._sizes:
            self._guardian.unregister(number)


def _never_starts(reason: str, partition: str) -> bool:
    in_another = "," in partition and reason.startswith("Partition")  # SLURM tries the partitions one by one
    return reason in _NEVER and not in_another


def _in_words(reason: str, never: bool) -> str:
    """Return SLURM's reason for the state of a job, in parentheses."""
    if reason in ("", "None"):
        return ""
    return f" ({reason}: {NEVER_STARTS}; {_REMEDY})" if never else f" ({reason})"


def _run(command: Sequence[str], missing: str | None = None) -> str:
    """Run a command and return its output, or `missing` if SLURM does not know the job."""
    with _Command(command) as running:
        return running.output(missing=missing)


class _Command(contextlib.AbstractContextManager["_Command"]):
    """Context manager: a running SLURM program, killed at the end."""

    def __init__(self, command: Sequence[str]) -> None:
        self._name = command[0]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )

    def output(self, text: str | None = None, missing: str | None = None, timeout_s: float = _COMMAND_S) -> str:
        """Write `text` to the program and return its stdout. May be called again after an interruption.

        Raises:
            LaunchError: The program failed (the message quotes its stderr), or did not end within `timeout_s`.
        """
        try:
            output, errors = self._process.communicate(text, timeout_s)
        except subprocess.TimeoutExpired:
            raise LaunchError(f"{self._name} did not answer for {timeout_s:g} s; {CHECK_CONTROLLER}") from None
        if self._process.returncode == 0:
            return output
        if missing is not None and "Invalid job id" in errors:
            return missing
        advice = f"; {CHECK_CONTROLLER}" if any(part in errors for part in _NO_CONTROLLER) else ""
        raise LaunchError(f"{self._name} failed: {errors.strip() or f'status {self._process.returncode}'}{advice}")

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        with self._process:
            return
