"""Where workers run: the words that all share, then a configuration per launcher (that of Kubernetes is beside it)."""

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
from farstep.errors import ConfigError, counted
from farstep.resources import usable_cpus

log = logging.getLogger("farstep")
LocalTransport = Literal["shm", "ipc", "tcp"]
RESTART_WINDOW_S = 600.0
"""In which `restart_budget` is what may fail: rare faults never add up."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timeouts(Options):
    """How long each phase may go without progress before its worker counts as stuck, in seconds."""

    connect_s: float = 60.0
    """From the start of a worker until it says hello (imports happen here)."""
    construct_s: float = 120.0
    """Building one environment."""
    reset_s: float = 60.0
    """One `env.reset`."""
    step_s: float = 60.0
    """One `env.step`."""
    act_s: float = 60.0
    """One call of the agent on a worker, the first one included."""
    load_s: float = 60.0
    """Receiving an agent or loading new weights."""
    idle_s: float = 60.0
    """From a ticket to an idle worker until it begins with it (a stopped process never does)."""
    transfer_s: float = 600.0
    """From one message of a rollout that is on its way until the next (workers may share a slow connection)."""
    close_s: float = 5.0
    """From `close()` until workers that are still there are killed."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            self._at_least(field.name, 0.01)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchConfig(Options):
    """The words that all launch configurations share."""

    nodes: int = 1
    """How many nodes; each hosts `envs_per_node` environments."""
    workers_per_node: int | None = None
    """Worker processes on each node; None takes one per usable core (local nodes share this machine's)."""
    cpus_per_worker: int = 1
    """Threads that torch and BLAS may use in one worker."""
    gpus_per_node: int = 0
    """GPUs on each node, shared by its workers, which act on them (0: on the CPU). Local nodes share this machine's."""
    time_limit: str | None = None
    """Wall-clock limit in the engine's notation; engines without one ignore it."""
    timeouts: Timeouts = Timeouts()
    """Limits per phase; a mapping of them is accepted."""
    restart_budget: int = 10
    """Restarts of failed workers or environments allowed in any ten minutes; then the next call raises.

    If descriptors, processes or memory run out, the start of a replacement is retried for `Timeouts.connect_s` seconds
    without using the budget; then the call raises `ResourceError`.
    """

    def __post_init__(self) -> None:
        object.__setattr__(self, "timeouts", Timeouts.of(self.timeouts))
        self._at_least("nodes", 1)
        self._at_least("cpus_per_worker", 1)
        self._at_least("gpus_per_node", 0)
        self._at_least("restart_budget", 0)
        if self.workers_per_node is not None:
            self._at_least("workers_per_node", 1)

    def num_workers(self, envs_per_node: int) -> int:
        """Workers in all: never more than environments, since an idle worker is a wasted process."""
        return self.most_nodes * min(self.workers_on_node, envs_per_node)

    @property
    def workers_on_node(self) -> int:
        """Workers that a node has, if it has environments for all of them."""
        return self.workers_per_node or max(1, self._cores_per_node() // self.cpus_per_worker)

    @property
    def most_nodes(self) -> int:
        """How many nodes there may ever be."""
        return self.nodes

    @property
    def fewest_nodes(self) -> int:
        """How many must be there for batches to go on."""
        return self.nodes

    def resolved(self) -> LaunchConfig:
        """The configuration to launch: this one, unless an option such as `SlurmConfig.debug` replaces it."""
        return self

    def gpu_of(self, rank: int) -> int | None:
        """Which of a node's GPUs its worker number `rank` acts on; None: the CPU."""
        return rank % self.gpus_per_node if self.gpus_per_node else None

    def _cores_per_node(self) -> int:
        return usable_cpus()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ThisMachine(LaunchConfig):
    """A launch configuration whose nodes are all this machine."""

    def _cores_per_node(self) -> int:
        return usable_cpus() // self.nodes


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalConfig(_ThisMachine):
    """Workers as processes of this machine."""

    transport: LocalTransport = "shm"
    """`shm`: shared memory (fastest); `ipc`, `tcp`: ZeroMQ as a remote worker would use it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._one_of("transport", LocalTransport)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InProcessConfig(_ThisMachine):
    """Workers inside the caller's process and thread: for debugging, `breakpoint()` works."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gpus_per_node:
            raise ConfigError(
                f"InProcessConfig.gpus_per_node is {self.gpus_per_node}, but workers in the caller's process act on "
                "the CPU; leave it 0, or use LocalConfig."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig(LaunchConfig):
    """What all engines share that put an agent on each of several nodes."""

    min_nodes: int | None = None
    """Training begins, and goes on, with so many nodes; the others join when they come. None: all of `nodes`."""
    max_nodes: int | None = None
    """Up to how many `ClusterEnv.scale` may go; None: `nodes`."""
    head_address: str | Sequence[str] | None = None
    """Addresses of this machine to listen on, and for nodes to connect to; None: those of all its interfaces."""
    lease_s: float = 10.0
    """A node that is not heard of for so long is lost; an agent that does not reach the head for so long ends."""
    queue_s: float = 24 * 3600.0
    """How long to wait for `min_nodes` nodes before giving up."""
    encrypted: bool = True
    """Seal bulk data; False only where nobody else can listen or connect. All the rest is always encrypted."""
    python: str | None = None
    """The interpreter on nodes; None: the path of this one."""
    setup: Sequence[str] = ()
    """Shell lines that nodes run first, e.g. `module load cuda`, or `source env/bin/activate` with python="python"."""

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
        for name in ("setup", "head_address"):
            value = getattr(self, name)
            lines = () if value is None else (value,) if isinstance(value, str) else tuple(value)
            if not all(isinstance(line, str) and line for line in lines):
                raise ConfigError(f"{type(self).__name__}.{name} is {value!r}; expected text, or a list of texts.")
            object.__setattr__(self, name, lines)

    @property
    def most_nodes(self) -> int:
        return self.nodes if self.max_nodes is None else self.max_nodes

    @property
    def fewest_nodes(self) -> int:
        return self.nodes if self.min_nodes is None else self.min_nodes


@dataclasses.dataclass(frozen=True, kw_only=True)
class SSHConfig(EngineConfig):
    """Workers on hosts that can be logged in to by ssh without a password."""

    hosts: Sequence[str] = ()
    """A node each, as ssh takes them (`name`, `user@name`, an alias of its configuration)."""
    ssh: Sequence[str] = (
        *("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
        *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=2"),
    )
    """The command that a host and a command line are appended to, as words or as one line. One that does not end when
    its host has gone keeps that host from being asked again."""
    nodes: int = 0
    """Of `hosts`, so many are used at a time; 0: all."""

    def __post_init__(self) -> None:
        hosts = (self.hosts,) if isinstance(self.hosts, str) else tuple(self.hosts)
        if not hosts or not all(isinstance(h, str) and len(h.split()) == 1 and not h.startswith("-") for h in hosts):
            raise ConfigError(
                f"SSHConfig.hosts is {self.hosts!r}; expected a list of hosts, e.g. ['node1', 'me@node2']."
            )
        if len(set(hosts)) < len(hosts):
            raise ConfigError(f"SSHConfig.hosts is {self.hosts!r}; each host can be one node: name it once.")
        object.__setattr__(self, "hosts", hosts)
        object.__setattr__(self, "nodes", self.nodes or len(hosts))
        words = (self.ssh,) if isinstance(self.ssh, str) else tuple(self.ssh)
        if not words or not all(isinstance(word, str) and word for word in words):
            raise ConfigError(f"SSHConfig.ssh is {self.ssh!r}; expected a command, e.g. 'ssh -T -i key'.")
        object.__setattr__(self, "ssh", tuple(shlex.split(words[0])) if len(words) == 1 else words)
        super().__post_init__()
        if self.most_nodes > len(hosts):
            raise ConfigError(
                f"SSHConfig asks for {counted(self.most_nodes, 'node')} and has {counted(len(hosts), 'host')}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlurmConfig(EngineConfig):
    """Workers on nodes that SLURM gives; inside an allocation, on the nodes of that."""

    job_name: str = "farstep"
    partition: str | None = None
    """The paper's word for `slurm_partition`."""
    slurm_partition: str | None = None
    slurm_account: str | None = None
    slurm_qos: str | None = None
    slurm_constraint: str | None = None
    slurm_extra: Sequence[str] = ()
    """Further options of sbatch, e.g. `--exclusive`, `--mem=16G`."""
    spread: bool = False
    """Put every node on a host of its own, without reserving whole hosts: nodes that are requested at the same time are
    one job of at least `min_nodes` nodes, which excludes the hosts of the run's other jobs."""
    log_folder: str = "slurm-logs"
    """Where jobs write what their nodes say; on a file system that this machine and the nodes share."""
    gpu_type: str | None = None
    """Which GPUs, as the cluster names them: `a100` asks for `--gres=gpu:a100:N`, N being `gpus_per_node` (at least 1);
    the paper's `gpu:a100` is the same, and its `gpu` means any."""
    debug: bool = False
    """Run the same number of workers on this machine instead, on its CPU, without SLURM."""

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
                raise ConfigError(f"SlurmConfig.{name} is {value!r}; expected a word.")
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
                f"SlurmConfig.gpu_type is {self.gpu_type!r}; expected the name that the cluster has for the GPUs, e.g. "
                "'a100' (sinfo --format=%G lists them); how many of them is gpus_per_node."
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
        """The option of sbatch and srun that asks for the GPUs of a node."""
        if self.gpu_type is not None:
            return f"--gres=gpu:{self.gpu_type}:{self.gpus_per_node}"
        return f"--gpus-per-node={self.gpus_per_node}" if self.gpus_per_node else None

    def resolved(self) -> LaunchConfig:
        if not self.debug:
            return self
        log.warning("debug=True: SLURM is not used; all workers of %d nodes run on this machine's CPU", self.nodes)
        return LocalConfig(
            nodes=self.nodes,
            workers_per_node=self.workers_on_node,
            cpus_per_worker=self.cpus_per_worker,
            timeouts=self.timeouts,
            restart_budget=self.restart_budget,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RayConfig(EngineConfig):
    """Workers on the nodes of a Ray cluster; each of `nodes` is an actor with the resources of its workers."""

    address: str | None = None
    """Of the cluster: `auto` finds one that runs, `local` starts one on this machine. None: the one that this program
    has joined, or `auto`, or else `local`."""
    resources_per_node: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """What an actor takes beyond CPUs (`workers_per_node` times `cpus_per_worker`) and `gpus_per_node`: Ray's custom
    resources, or `memory` in bytes."""
    namespace: str | None = None
    """Ray's namespace for the actors; None: one without a name."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("address", "namespace"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise ConfigError(f"RayConfig.{name} is {value!r}; expected text, e.g. 'auto', or None.")
        if self.address is not None and self.address.startswith("ray://"):
            raise ConfigError(
                f"RayConfig.address is {self.address!r}, of a Ray Client server; give the cluster's own address "
                "(host:6379), and run on a machine that its nodes can reach."
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
                    f"RayConfig.{name} is {getattr(self, name)!r}, but Ray itself starts Python on its nodes; call "
                    "ray.init(runtime_env=...) first, which actors of farstep then use, too."
                )
