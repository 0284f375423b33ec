"""Where workers run on a cluster: one configuration per engine, the shared words in `config.LaunchConfig`."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence

from farstep.config import LaunchConfig
from farstep.errors import ConfigError


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
    python: str | None = None
    """The interpreter on nodes; None: the path of this one."""
    setup: Sequence[str] = ()
    """Shell lines that nodes run first, e.g. `module load cuda` or `source env/bin/activate`."""

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
    ssh: Sequence[str] = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
    """The command that a host and a command line are appended to, as words or as one line."""
    nodes: int = 0
    """Of `hosts`, so many are used at a time; 0: all."""

    def __post_init__(self) -> None:
        hosts = (self.hosts,) if isinstance(self.hosts, str) else tuple(self.hosts)
        if not hosts or not all(isinstance(host, str) and host and not host.startswith("-") for host in hosts):
            raise ConfigError(
                f"SSHConfig.hosts is {self.hosts!r}; expected a list of hosts, e.g. ['node1', 'me@node2']."
            )
        object.__setattr__(self, "hosts", hosts)
        object.__setattr__(self, "nodes", self.nodes or len(hosts))
        words = (self.ssh,) if isinstance(self.ssh, str) else tuple(self.ssh)
        if not words or not all(isinstance(word, str) and word for word in words):
            raise ConfigError(f"SSHConfig.ssh is {self.ssh!r}; expected a command, e.g. 'ssh -T -i key'.")
        object.__setattr__(self, "ssh", tuple(shlex.split(words[0])) if len(words) == 1 else words)
        super().__post_init__()
        if self.most_nodes > len(hosts):
            raise ConfigError(f"SSHConfig asks for {self.most_nodes} nodes and has {len(hosts)} hosts.")


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
    log_folder: str = "slurm-logs"
    """Where jobs write what their nodes say; on a file system that this machine and the nodes share."""

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
