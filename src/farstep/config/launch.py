"""Configurations of where workers run: shared options first, then one class per launcher.

`KubernetesConfig` is in `kubernetes.py`.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Literal

from farstep.config.base import Options
from farstep.config.env import is_number
from farstep.config.field_docs import show_fields
from farstep.errors import ConfigError, counted
from farstep.resources import usable_cpus

log = logging.getLogger("farstep")
LocalTransport = Literal["shm", "ipc", "tcp"]
StartMethod = Literal["zygote", "cold"]
ParkMethod = Literal["suspend", "criu"]
CpuAffinity = Literal["off", "auto"] | Sequence[int]
RESTART_WINDOW_S = 600.0
"""Seconds for which a failure counts against `restart_budget`, so that rare failures do not add up in a long run."""


@show_fields
@dataclasses.dataclass(frozen=True, kw_only=True)
class Timeouts(Options):
    """Timeouts in seconds, one per phase. A worker without progress for this long counts as stuck and is replaced."""

    connect_s: float = 60.0
    """Seconds from the start of a worker process until it connects, including its imports."""
    construct_s: float = 120.0
    """Seconds to construct one environment."""
    reset_s: float = 60.0
    """Seconds for one `env.reset`."""
    step_s: float = 60.0
    """Seconds for one `env.step`."""
    act_s: float = 60.0
    """Seconds for one call of the agent on a worker, including the first."""
    load_s: float = 60.0
    """Seconds to receive an agent or to load new weights."""
    idle_s: float = 60.0
    """Seconds for an idle worker to start on a new ticket; exceeded if the process is stopped."""
    transfer_s: float = 600.0
    """Seconds between two messages of one rollout. Generous, because workers may share a slow connection."""
    close_s: float = 5.0
    """Seconds that workers have to exit after `close()` before they are killed."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            self._at_least(field.name, 0.01)


@show_fields
@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchConfig(Options):
    """The options that all launch configurations share."""

    nodes: int = 1
    """Number of nodes; each hosts `envs_per_node` environments."""
    workers_per_node: int | None = None
    """Worker processes per node. None: one per usable core; local nodes share the cores of this machine."""
    cpus_per_worker: int = 1
    """Threads that torch and BLAS may use in one worker."""
    cpu_affinity: CpuAffinity = "off"
    """Pin each worker to `cpus_per_worker` cores of its own. `off`: the kernel moves workers between cores. `auto`: out
    of the cores that the job may use, on one NUMA node if it has enough. A list: out of these cores, in this order, on
    every node. If there are more workers than cores, workers share cores."""
    gpus_per_node: int = 0
    """GPUs per node, shared by its workers for acting; local nodes share this machine's GPUs. 0: act on the CPU."""
    time_limit: str | None = None
    """Wall-clock limit in the notation of the engine. None: no limit. Engines without time limits ignore it."""
    timeouts: Timeouts = Timeouts()
    """Timeouts per phase, in seconds; a mapping is accepted: `{"step_s": 5}`."""
    start_method: StartMethod = "zygote"
    """`zygote`: one process per node imports what workers need, and forks them; a restart takes milliseconds. `cold`:
    each worker imports for itself, in a new interpreter. Workers also start cold if an import starts a thread, because
    such a process cannot be forked safely, or if the imports take longer than three quarters of `connect_s` (45 s by
    default)."""
    restart_budget: int = 10
    """Number of failed workers or environments that are restarted in any ten minutes; the next failure raises. A start
    that fails because file descriptors, processes or memory ran out does not use the budget: it is retried for
    `Timeouts.connect_s` seconds, then raises `ResourceError`."""
    coordinator: str | None = None
    """Name or path of the coordinator whose slots this run shares with others (`farstep coordinator start`). Each
    running worker takes a slot. None: all workers run."""
    priority: int = 1
    """Share of the coordinator's slots relative to other runs, from 1 to 100."""
    min_workers: int = 1
    """Number of workers without which the run waits for slots of the coordinator."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "timeouts", Timeouts.of(self.timeouts))
        self._at_least("nodes", 1)
        self._at_least("cpus_per_worker", 1)
        self._at_least("gpus_per_node", 0)
        self._at_least("restart_budget", 0)
        self._one_of("start_method", StartMethod)
        self._check_affinity()
        if self.workers_per_node is not None:
            self._at_least("workers_per_node", 1)
        self._check_coordinator()

    def _check_affinity(self) -> None:
        cores = self.cpu_affinity
        if cores in ("off", "auto"):
            return
        numbers = () if isinstance(cores, str) or not isinstance(cores, Sequence) else tuple(cores)
        valid = all(isinstance(core, int) and not isinstance(core, bool) and core >= 0 for core in numbers)
        if not numbers or not valid or len(set(numbers)) < len(numbers):
            raise ConfigError(
                f"{type(self).__name__}.cpu_affinity is {cores!r}; expected 'off', 'auto' or a list of different core "
                "numbers, e.g. [0, 1, 2, 3]."
            )
        object.__setattr__(self, "cpu_affinity", numbers)

    def _check_coordinator(self) -> None:
        self._at_least("priority", 1)
        self._at_least("min_workers", 1)
        kind = type(self).__name__
        if self.priority > 100:
            raise ConfigError(f"{kind}.priority is {self.priority}; expected 1 to 100.")
        if self.coordinator is None:
            if (self.priority, self.min_workers) != (1, 1):
                raise ConfigError(
                    f"{kind} has priority={self.priority} and min_workers={self.min_workers}, which only a coordinator "
                    "uses; also give coordinator='default'."
                )
        elif not isinstance(self.coordinator, str) or not self.coordinator:
            raise ConfigError(f"{kind}.coordinator is {self.coordinator!r}; expected a name or a path, or None.")

    def num_workers(self, envs_per_node: int) -> int:
        """Compute the largest number of workers during the run, on all nodes.

        Args:
            envs_per_node: Number of environments per node.

        Returns:
            `workers_on_node` workers, but at most one per environment, on each of `most_nodes` nodes.
        """
        return self.most_nodes * min(self.workers_on_node, envs_per_node)

    @property
    def workers_on_node(self) -> int:
        """Number of workers per node, if the node has at least one environment per worker."""
        return self.workers_per_node or max(1, self._cores_per_node() // self.cpus_per_worker)

    @property
    def most_nodes(self) -> int:
        """Largest number of nodes during the run."""
        return self.nodes

    @property
    def fewest_nodes(self) -> int:
        """Number of nodes required to start and to continue."""
        return self.nodes

    def resolved(self) -> LaunchConfig:
        """Choose the configuration to launch.

        Returns:
            This configuration; for `SlurmConfig` with `debug`, a `LocalConfig`.
        """
        return self

    def gpu_of(self, rank: int) -> int | None:
        """Choose the GPU that a worker acts on.

        Args:
            rank: Number of the worker on its node, from 0.

        Returns:
            Number of the GPU on the node, from 0; None: the CPU.
        """
        return rank % self.gpus_per_node if self.gpus_per_node else None

    def _cores_per_node(self) -> int:
        return usable_cpus()


@show_fields
@dataclasses.dataclass(frozen=True, kw_only=True)
class _ThisMachine(LaunchConfig):
    """A launch configuration whose nodes are all this machine."""

    def _cores_per_node(self) -> int:
        return usable_cpus() // self.nodes


@show_fields
@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalConfig(_ThisMachine):
    """Run workers as processes on this machine."""

    transport: LocalTransport = "shm"
    """`shm`: shared memory (fastest). `ipc`, `tcp`: ZeroMQ sockets, as remote workers use them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._one_of("transport", LocalTransport)


@show_fields
@dataclasses.dataclass(frozen=True, kw_only=True)
class InProcessConfig(_ThisMachine):
    """Run workers inside the caller's process and thread, for debugging: `breakpoint()` works in environments."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gpus_per_node:
            raise ConfigError(
                f"InProcessConfig.gpus_per_node is {self.gpus_per_node}, but workers in the caller's process act on "
                "the CPU; leave it 0, or use LocalConfig."
            )
        if self.cpu_affinity != "off":
            raise ConfigError(
                f"InProcessConfig.cpu_affinity is {self.cpu_affinity!r}, but workers in the caller's thread use its "
                "cores; leave it 'off', or use LocalConfig."
            )
        if self.coordinator is not None:
            raise ConfigError(
                f"InProcessConfig.coordinator is {self.coordinator!r}, but all its workers run in the caller's thread, "
                "so parking some of them would free no core; use LocalConfig."
            )


@show_fields
@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig(LaunchConfig):
    """The options of engines that start a node daemon on each of several nodes."""

    min_nodes: int | None = None
    """Minimum number of nodes required to start and to keep training; more join as they arrive. None: `nodes`."""
    max_nodes: int | None = None
    """Largest number of nodes that `ClusterEnv.scale` may request. None: `nodes`."""
    head_address: str | Sequence[str] | None = None
    """Addresses of this machine that nodes connect to. None: the addresses of all network interfaces."""
    lease_s: float = 10.0
    """Seconds of silence after which a node is declared lost. Within the same time, a node daemon that
    cannot reach the head ends its workers and exits."""
    queue_s: float = 24 * 3600.0
    """Seconds to wait for `min_nodes` nodes before giving up."""
    relay: bool = False
    """Workers send through their node daemon, over shared memory, so that the head has one control and one bulk
    connection per node. False: each worker connects to the head itself."""
    park_method: ParkMethod = "suspend"
    """`suspend`: parked workers keep their memory. `criu`: the program criu writes them to disk, in the folder of
    temporary files of their node, and restores them within a second. This needs `relay`, criu 4 and the permission to
    use it on all nodes, and no GPUs."""
    encrypted: bool = True
    """Encrypt rollouts and weights. Use False only on a private network. Control messages are always encrypted."""
    python: str | None = None
    """Python interpreter on the nodes. None: the path of the current interpreter."""
    setup: Sequence[str] = ()
    """Shell lines to run first on each node, e.g. `module load cuda`, or `source env/bin/activate` with
    python="python"."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("min_nodes", "max_nodes"):
            if getattr(self, name) is not None:
                self._at_least(name, 1)
        self._at_least("lease_s", 1.0)
        self._at_least("queue_s", 0.01)
        if not self.fewest_nodes <= self.nodes <= self.most_nodes:
            raise ConfigError(
                f"{type(self).__name__} has min_nodes={self.min_nodes}, nodes={self.nodes} and "
                f"max_nodes={self.max_nodes}; expected min_nodes <= nodes <= max_nodes."
            )
        self._one_of("park_method", ParkMethod)
        if self.park_method == "criu" and (not self.relay or self.gpus_per_node):
            why = "workers keep GPU memory" if self.relay else "workers have connections of their own"
            what = "leave gpus_per_node 0" if self.relay else "also set relay=True"
            raise ConfigError(
                f"{type(self).__name__}.park_method is 'criu', which cannot write workers to disk here, because {why}; "
                f"{what}, or leave park_method 'suspend'."
            )
        for name in ("setup", "head_address"):
            value = getattr(self, name)
            lines = () if value is None else (value,) if isinstance(value, str) else tuple(value)
            if not all(isinstance(line, str) and line for line in lines):
                raise ConfigError(f"{type(self).__name__}.{name} is {value!r}; expected a string or a list of strings.")
            object.__setattr__(self, name, lines)

    @property
    def most_nodes(self) -> int:
        """Largest number of nodes during the run."""
        return self.nodes if self.max_nodes is None else self.max_nodes

    @property
    def fewest_nodes(self) -> int:
        """Number of nodes required to start and to continue."""
        return self.nodes if self.min_nodes is None else self.min_nodes


@show_fields
@dataclasses.dataclass(frozen=True, kw_only=True)
class SSHConfig(EngineConfig):
    """Run workers on hosts that accept ssh logins without a password."""

    hosts: Sequence[str] = ()
    """Required: one host per node, as ssh accepts them (`name`, `user@name`, or an alias in the ssh configuration)."""
    ssh: Sequence[str] = (
        *("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
        *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=2"),
    )
    """The ssh command, as one string or a list of words; the host and the remote command are appended. The command must
    exit when the connection is lost; otherwise farstep does not retry that host."""
    nodes: int = 0
    """Number of hosts to use at the same time. 0: all."""

    def __post_init__(self) -> None:
        hosts = (self.hosts,) if isinstance(self.hosts, str) else tuple(self.hosts)
        if not hosts or not all(isinstance(h, str) and len(h.split()) == 1 and not h.startswith("-") for h in hosts):
            raise ConfigError(
                f"SSHConfig.hosts is {self.hosts!r}; expected a list of hosts, e.g. ['node1', 'me@node2']."
            )
        if len(set(hosts)) < len(hosts):
            raise ConfigError(
                f"SSHConfig.hosts is {self.hosts!r}; list each host only once, since a host can be only one node."
            )
        object.__setattr__(self, "hosts", hosts)
        object.__setattr__(self, "nodes", self.nodes or len(hosts))
        words = (self.ssh,) if isinstance(self.ssh, str) else tuple(self.ssh)
        if not words or not all(isinstance(word, str) and word for word in words):
            raise ConfigError(f"SSHConfig.ssh is {self.ssh!r}; expected a command, e.g. 'ssh -T -i key'.")
        object.__setattr__(self, "ssh", tuple(shlex.split(words[0])) if len(words) == 1 else words)
        super().__post_init__()
        if self.most_nodes > len(hosts):
            raise ConfigError(
                f"SSHConfig requests {counted(self.most_nodes, 'node')} and has {counted(len(hosts), 'host')}."
            )


@show_fields
@dataclasses.dataclass(frozen=True, kw_only=True)
class SlurmConfig(EngineConfig):
    """Run workers in SLURM jobs, or on the nodes of the allocation that the program runs in."""

    job_name: str = "farstep"
    """Name of the jobs."""
    partition: str | None = None
    """Alias of `slurm_partition`, from the ClusterEnv paper."""
    slurm_partition: str | None = None
    """Partition to submit to. None: the cluster's default."""
    slurm_account: str | None = None
    """Account to charge. None: your default account."""
    slurm_qos: str | None = None
    """Quality of service. None: the cluster's default."""
    slurm_constraint: str | None = None
    """Features that nodes must have, as in `sbatch --constraint`. None: any node."""
    slurm_extra: Sequence[str] = ()
    """Further sbatch options, e.g. `--exclusive`, `--mem=16G`."""
    spread: bool = False
    """Place every node on a different host without reserving whole hosts. Nodes that are requested together then form
    one job of at least `min_nodes` nodes; this job excludes the hosts of the run's other jobs."""
    log_folder: str = "slurm-logs"
    """Folder for the output of the jobs, on a file system that this machine and the nodes share."""
    gpu_type: str | None = None
    """GPU type as the cluster names it: `a100` requests `--gres=gpu:a100:N`, with N = `gpus_per_node` (at least 1). The
    paper's forms `gpu:a100` (the same) and `gpu` (any type) are accepted."""
    debug: bool = False
    """Do not use SLURM: run the same number of workers on the CPU of this machine."""

    def __post_init__(self) -> None:
        super().__post_init__()
        extra = (self.slurm_extra,) if isinstance(self.slurm_extra, str) else tuple(self.slurm_extra)
        if not all(isinstance(option, str) and option.startswith("-") and "\n" not in option for option in extra):
            raise ConfigError(
                f"SlurmConfig.slurm_extra is {self.slurm_extra!r}; expected options such as '--exclusive'."
            )
        object.__setattr__(self, "slurm_extra", extra)
        for name in ("job_name", "partition", "slurm_partition", "slurm_account", "slurm_qos", "slurm_constraint"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value or "\n" in value):
                raise ConfigError(f"SlurmConfig.{name} is {value!r}; expected a string without line breaks.")
        if self.partition and self.slurm_partition and self.partition != self.slurm_partition:
            raise ConfigError("SlurmConfig has both partition and slurm_partition; they mean the same, give one.")
        if not isinstance(self.debug, bool):
            raise ConfigError(f"SlurmConfig.debug is {self.debug!r}; expected True or False.")
        if self.gpu_type is not None:
            self._choose_gpus(extra)

    def _choose_gpus(self, extra: Sequence[str]) -> None:
        kind = self.gpu_type.removeprefix("gpu:") if isinstance(self.gpu_type, str) else ""
        if not re.fullmatch(r"[\w.-]+", kind):
            raise ConfigError(
                f"SlurmConfig.gpu_type is {self.gpu_type!r}; expected the cluster's name of a GPU type, e.g. "
                "'a100' (sinfo --format=%G lists them); gpus_per_node is their number."
            )
        if chosen := re.search(r"(^|\s)(--gres|--gpus|-G)\S*", " ".join(extra)):
            raise ConfigError(
                f"SlurmConfig has gpu_type={self.gpu_type!r}, and slurm_extra has {chosen[0].strip()!r}, which would "
                "request other GPUs; use only one of them."
            )
        object.__setattr__(self, "gpu_type", None if kind == "gpu" else kind)
        object.__setattr__(self, "gpus_per_node", self.gpus_per_node or 1)

    @property
    def gpu_option(self) -> str | None:
        """The option of sbatch and srun that requests the GPUs of a node; None without GPUs."""
        if self.gpu_type is not None:
            return f"--gres=gpu:{self.gpu_type}:{self.gpus_per_node}"
        return f"--gpus-per-node={self.gpus_per_node}" if self.gpus_per_node else None

    def resolved(self) -> LaunchConfig:
        """Choose the configuration to launch. With `debug`, log a warning.

        Returns:
            This configuration; with `debug`, a `LocalConfig` with the same number of nodes and workers, without GPUs.
        """
        if not self.debug:
            return self
        log.warning("debug=True: running all workers of %d nodes on the CPU of this machine, without SLURM", self.nodes)
        return LocalConfig(
            nodes=self.nodes,
            workers_per_node=self.workers_on_node,
            cpus_per_worker=self.cpus_per_worker,
            timeouts=self.timeouts,
            restart_budget=self.restart_budget,
            coordinator=self.coordinator,
            priority=self.priority,
            min_workers=self.min_workers,
        )


@show_fields
@dataclasses.dataclass(frozen=True, kw_only=True)
class RayConfig(EngineConfig):
    """Run workers on a Ray cluster. Each node is one Ray actor that reserves the resources of its workers."""

    address: str | None = None
    """Address of the cluster: `auto` finds a running cluster, `local` starts a cluster on this machine. None: the
    cluster that this program has joined, otherwise as `auto`, otherwise as `local`."""
    resources_per_node: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Further resources of each actor: Ray's custom resources, or `memory` in bytes. CPUs (`workers_per_node` times
    `cpus_per_worker`) and GPUs (`gpus_per_node`) are added."""
    namespace: str | None = None
    """Ray namespace of the actors. None: an anonymous one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("address", "namespace"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise ConfigError(f"RayConfig.{name} is {value!r}; expected text, e.g. 'auto', or None.")
        if self.address is not None and self.address.startswith("ray://"):
            raise ConfigError(
                f"RayConfig.address is {self.address!r}, the address of a Ray Client server; give the "
                "address of the cluster (host:6379), and run on a machine that the nodes of the cluster can "
                "reach."
            )
        resources = self.resources_per_node
        if not isinstance(resources, Mapping) or not all(
            isinstance(name, str) and name and is_number(amount) and 0 < amount < math.inf
            for name, amount in resources.items()
        ):
            raise ConfigError(
                f"RayConfig.resources_per_node is {resources!r}; expected amounts by name, e.g. {{'camera': 1}}."
            )
        for name, word in (("CPU", "cpus_per_worker"), ("GPU", "gpus_per_node")):
            if name in resources:
                raise ConfigError(f"RayConfig.resources_per_node has {name}; give {word} instead.")
        object.__setattr__(self, "resources_per_node", {name: float(amount) for name, amount in resources.items()})
        for name in ("python", "setup"):
            if getattr(self, name):
                raise ConfigError(
                    f"RayConfig.{name} is {getattr(self, name)!r}, but Ray starts Python on its nodes; call "
                    "ray.init(runtime_env=...) before launch instead, which also applies to farstep's actors."
                )
