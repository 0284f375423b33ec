"""A real SLURM cluster of Debian's packages, all of its daemons children of the test."""

from __future__ import annotations

import os
import secrets
import stat
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.engines.guarded import (
    Engine,
    EngineError,
    Guarded,
    free_ports,
    require,
    require_root,
    system_path,
    tail,
    wait_until,
)
from tests.engines.namespaces import Network

_CONFIGURATION = """
ClusterName=farstep
SlurmctldHost={controller}({controller_address})
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A requeued job waits until its credentials have expired: two minutes if nothing is said here, or less than 5.
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool/%n
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
# Nodes have the CPUs and the memory that are written here, not those of the machine.
SlurmdParameters=config_overrides
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0,batch_sched_delay=0
# Nodes that were down return by themselves, nodes that an administrator removed do not.
ReturnToService=1
SlurmdTimeout={node_timeout_s}
SlurmctldTimeout=10
MessageTimeout={node_timeout_s}
TCPTimeout=1
KillWait=2
JobRequeue=1
TreeWidth=65533
"""
# Version 22.05 reads this file although nothing here uses cgroups.
_CGROUPS = "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\nConstrainCores=no\nConstrainRAMSpace=no\n"


@dataclass(frozen=True)
class Job:
    """The entry of a job in `squeue`."""

    id: int
    name: str
    state: str
    partition: str
    nodes: str
    restarts: int


class SlurmCluster(Engine):
    """One controller, and nodes of four CPUs and 2000 MB each, in a partition `main`; needs root.

    Nodes are n1, n2, ... on this machine. With `network` its first host is the controller and all others are nodes;
    programs that talk to SLURM have to run on one of its hosts then. With `preemption` there is a partition `urgent`,
    whose jobs take nodes away from jobs in `main`: the steps (srun) of those get SIGTERM at once, their scripts only
    after `grace_s`, and what has not ended by then is queued again. Each node has as many `gpus`, which are none: jobs
    just get their numbers; with `gpu_type` they are of that type. `settings` are further lines of slurm.conf.

    A node that dies or is cut off is down, and its jobs are queued again, about five seconds after `node_timeout_s`;
    they start six seconds later. One that is reached again is back after up to half a minute, one that
    `start_node` started at once.
    """

    def __init__(
        self,
        nodes: int = 4,
        *,
        preemption: bool = False,
        grace_s: int = 5,
        gpus: int = 0,
        gpu_type: str | None = None,
        node_timeout_s: int = 3,
        network: Network | None = None,
        settings: Sequence[str] = (),
    ) -> None:
        self.nodes = [f"n{i + 1}" for i in range(nodes)] if network is None else network.hosts[1:]
        self.controller = "localhost" if network is None else network.hosts[0]
        self._preemption, self._grace_s, self._gpus, self._gpu_type = preemption, grace_s, gpus, gpu_type
        self._node_timeout_s, self._network, self._settings = node_timeout_s, network, settings
        self._running: dict[str, Guarded] = {}

    def _start(self) -> None:
        require("munge", "munged")
        require("slurm-wlm", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "sinfo")
        require_root("SLURM's daemons")
        self.folder.chmod(0o755)
        for name in ("munge", "state", "run", "log", *(f"spool/{node}" for node in self.nodes)):
            (self.folder / name).mkdir(parents=True, mode=0o755)
        (self.folder / "slurm.conf").write_text(self._configuration())
        (self.folder / "cgroup.conf").write_text(_CGROUPS)
        gpus = [self.folder / f"gpu{number}" for number in range(self._gpus)]
        for gpu in gpus:
            os.mknod(gpu, stat.S_IFCHR | 0o666, os.makedev(1, 3))  # SLURM wants a device: /dev/null's will do
        kind = f" Type={self._gpu_type}" if self._gpu_type else ""
        (self.folder / "gres.conf").write_text("".join(f"Name=gpu{kind} File={gpu}\n" for gpu in gpus))
        self.environment = {"SLURM_CONF": str(self.folder / "slurm.conf")}
        """What programs need in their environment to talk to this cluster."""
        self._start_munge()
        self._start_daemon("slurmctld", self.controller, "slurmctld", "-D", "-c")
        for node in self.nodes:
            self._start_daemon(node, node, "slurmd", "-D", "-N", node)
        self.wait_until_idle()

    def command(self, *words: str, timeout_s: float = 20.0) -> str:
        """The output of one of SLURM's programs, run on the host of the controller."""
        process = self._popen(self.controller, words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            output, errors = process.communicate(timeout=timeout_s)
        finally:
            process.end()
        if process.returncode != 0:
            raise EngineError(f"{' '.join(words)} ended with {process.returncode}: {errors}{self._logs()}")
        return str(output)

    def jobs(self) -> dict[int, Job]:
        """All jobs, by their numbers, those too that have ended in the last minutes."""
        columns = ["JobID", "Name", "State", "Partition", "NodeList", "RestartCnt"]
        lines = self.command("squeue", "-h", "-a", "-t", "all", "-O", ",".join(f"{column}:|" for column in columns))
        found = {}
        for line in lines.splitlines():
            number, name, state, partition, nodes, restarts, _ = line.split("|")
            found[int(number)] = Job(int(number), name, state, partition, nodes, int(restarts))
        return found

    def states(self) -> dict[str, str]:
        """Of all nodes: idle, mixed, allocated, down, completing, ...; with a * if it does not answer."""
        lines = self.command("sinfo", "-h", "-N", "-p", "main", "-o", "%N %T").splitlines()
        return dict(line.split() for line in lines)

    def wait_until_idle(self) -> None:
        """Returns when no node runs anything any more."""
        self._wait_for(dict.fromkeys(self.nodes, "idle"))

    def kill_node(self, name: str) -> None:
        """A power failure: slurmd and all processes of its jobs are killed."""
        self._running.pop(name).end()

    def start_node(self, name: str) -> None:
        """Starts what `kill_node` killed, and waits until the controller has it back."""
        self._start_daemon(name, name, "slurmd", "-D", "-N", name)
        self._wait_for({name: "idle"})

    def stop_controller(self) -> None:
        """SLURM's programs get no answer any more; processes on nodes continue."""
        self.command("scontrol", "shutdown", "slurmctld")  # it saves what it knows
        self._running.pop("slurmctld").end()

    def start_controller(self) -> None:
        """Starts what `stop_controller` ended, with all that it knew."""
        self._start_daemon("slurmctld", self.controller, "slurmctld", "-D")
        self._wait_for({})  # it answers

    def down(self, name: str) -> None:
        """As an administrator takes a node out; jobs on it are killed and queued again."""
        # A controller that was just started takes a node back when it hears of it for the first time.
        wait_until(lambda: not self.states()[name].endswith("*"), f"{name} to answer", 30.0)
        self.command("scontrol", "update", f"nodename={name}", "state=down", "reason=test")
        self._wait_for({name: "down"})

    def resume(self, name: str) -> None:
        """Undoes `down`."""
        self.command("scontrol", "update", f"nodename={name}", "state=resume")

    def resume_all(self) -> None:
        """Undoes every `down`."""
        for name, state in self.states().items():
            if state == "down":
                self.resume(name)

    def _configuration(self) -> str:
        controller_port, *ports = free_ports(1 + len(self.nodes))
        lines = [
            _CONFIGURATION.format(
                folder=self.folder,
                controller=self.controller,
                controller_address=self._address(self.controller),
                controller_port=controller_port,
                node_timeout_s=self._node_timeout_s,
            ),
            "GresTypes=gpu",
            *self._settings,
        ]
        gpus = ":".join(["gpu", *([self._gpu_type] if self._gpu_type else []), str(self._gpus)])
        for node, port in zip(self.nodes, ports, strict=True):
            host = "localhost" if self._network is None else node
            place = f"NodeHostname={host} NodeAddr={self._address(node)} Port={port}"
            lines.append(f"NodeName={node} {place} CPUs=4 RealMemory=2000 Gres={gpus} State=UNKNOWN")
        partition = "Nodes=ALL MaxTime=INFINITE State=UP DefMemPerCPU=100"
        main = f"PartitionName=main {partition} Default=YES"
        if self._preemption:
            lines += ["PreemptType=preempt/partition_prio", "PreemptMode=REQUEUE"]
            lines += [f"{main} PriorityTier=1 PreemptMode=REQUEUE GraceTime={self._grace_s}"]
            lines += [f"PartitionName=urgent {partition} PriorityTier=10 PreemptMode=OFF"]
        else:
            lines.append(main)
        return "\n".join(lines) + "\n"

    def _address(self, name: str) -> str:
        return "127.0.0.1" if self._network is None else self._network.address(name)

    def _start_munge(self) -> None:
        """The authentication service of SLURM; hosts share its key through the file system."""
        folder = self.folder / "munge"
        (folder / "key").write_bytes(secrets.token_bytes(128))
        (folder / "key").chmod(0o400)
        names = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={folder / name}" for option, name in names.items()]
        log = (folder / "out").open("wb")
        with log:
            command = ["munged", "--foreground", "--force", *options]
            munge = self._guarded(Guarded(command, stdout=log, stderr=log, env=system_path()))
        logs = [folder / "out", folder / "log"]
        wait_until((folder / "socket").exists, "munged", logs=logs, alive=[munge])

    def _start_daemon(self, name: str, host: str, *words: str) -> None:
        with (self.folder / "log" / f"{name}.out").open("ab") as log:
            daemon = self._popen(host, [*words, "-f", str(self.folder / "slurm.conf")], stdout=log, stderr=log)
        self._running[name] = self._guarded(daemon)

    def _popen(self, host: str, command: Sequence[str], **options: Any) -> Guarded:
        environment = {**system_path(), **self.environment}
        if self._network is not None:
            return self._network.popen(host, command, env=environment, **options)
        return Guarded(command, env=environment, **options)

    def _wait_for(self, wanted: dict[str, str], timeout_s: float = 30.0) -> None:
        """Until nodes are in these states."""

        def is_so() -> bool:
            try:
                states = self.states()
            except EngineError:
                return False  # the controller is not there yet
            return all(states.get(node) == state for node, state in wanted.items())

        logs = [self.folder / "log" / f"{name}.out" for name in ("slurmctld", *wanted)]
        # Each question starts a program, so a shorter pause would cost more than it gains.
        wait_until(is_so, f"nodes to be {wanted}", timeout_s, logs, list(self._running.values()), pause_s=0.2)

    def _logs(self) -> str:
        return tail(self.folder / "log" / "slurmctld.out")
