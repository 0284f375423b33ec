"""Where workers run on a cluster: one configuration per engine, the shared words in `config.LaunchConfig`."""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Literal

from farstep.config import LaunchConfig, is_number
from farstep.errors import ConfigError

KubernetesKind = Literal["job", "deployment"]
ImagePullPolicy = Literal["IfNotPresent", "Always", "Never"]


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class KubernetesConfig(EngineConfig):
    """Workers in pods of a Kubernetes cluster; a node is a pod."""

    image: str = ""
    """What pods run: an image with farstep and the environments in it (the repository's Dockerfile makes one)."""
    namespace: str | None = None
    """Where the objects are created; None: that of the kubeconfig's context, or of the head's own pod."""
    kind: KubernetesKind = "job"
    """`job`: a Job per node, which is asked for again by the head when its pod fails. `deployment`: one Deployment for
    all, whose pods Kubernetes itself replaces; it needs somebody to delete it if the head's machine is lost."""
    requests: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """What each pod asks for, e.g. `{"cpu": "4", "memory": "8Gi"}`; without `cpu` (here and in `limits`), as many cores
    as its workers have threads."""
    limits: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """What each pod may use at most; `gpus_per_node` adds `nvidia.com/gpu`."""
    tolerations: Sequence[Mapping[str, object]] = ()
    """Taints of nodes that do not keep pods away, as Kubernetes writes them."""
    node_selector: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Labels that nodes must have."""
    pod_template: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """Merged deeply into the pods' template (`metadata`, `spec`), over all the above. Items of lists are matched by
    `mountPath` or `name` (the container's is `agent`); null removes a key."""
    image_pull_policy: ImagePullPolicy = "IfNotPresent"
    """When nodes look for the image in its registry."""
    service_account: str | None = None
    """The account of the pods; its token is mounted only if one is named here. None: the namespace's default."""
    kube_context: str | None = None
    """The kubeconfig's context; None: its current one, or the service account of the head's own pod."""
    python: str | None = "python3"
    """The interpreter in the image."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.image, str) or not self.image.strip():
            raise ConfigError(
                f"KubernetesConfig.image is {self.image!r}; expected the name of an image that has farstep in it. "
                "docs/kubernetes.md shows how to build one."
            )
        self._one_of("kind", KubernetesKind)
        self._one_of("image_pull_policy", ImagePullPolicy)
        for name in ("requests", "limits", "node_selector"):
            object.__setattr__(self, name, self._texts(name))
        if not isinstance(self.pod_template, Mapping) or not set(self.pod_template) <= {"metadata", "spec"}:
            raise ConfigError(
                f"KubernetesConfig.pod_template is {self.pod_template!r}; expected a mapping with 'metadata' or "
                "'spec', e.g. {'spec': {'hostNetwork': True}}."
            )
        if isinstance(self.tolerations, (str, Mapping)) or not all(isinstance(t, Mapping) for t in self.tolerations):
            raise ConfigError(
                f"KubernetesConfig.tolerations is {self.tolerations!r}; expected a list of mappings, e.g. "
                "[{'key': 'nvidia.com/gpu', 'operator': 'Exists'}]."
            )
        object.__setattr__(self, "tolerations", tuple(self.tolerations))
        for resources in (self.requests, self.limits):
            if "cpu" in resources:
                _cores(resources["cpu"])
        if self.time_limit_s is not None and self.kind == "deployment":
            raise ConfigError(
                f"KubernetesConfig.time_limit is {self.time_limit!r} with kind='deployment', whose pods Kubernetes "
                "does not let end by themselves; use kind='job'."
            )

    def _texts(self, name: str) -> dict[str, str]:
        value = getattr(self, name)
        if not isinstance(value, Mapping) or not all(isinstance(v, (str, int, float)) for v in value.values()):
            raise ConfigError(
                f"KubernetesConfig.{name} is {value!r}; expected a mapping of texts, e.g. {{'cpu': '4'}}."
            )
        return {str(key): str(each) for key, each in value.items()}

    @property
    def time_limit_s(self) -> int | None:
        """`time_limit` in seconds: `3600`, `60:00` or `1:00:00`."""
        if self.time_limit is None:
            return None
        if not re.fullmatch(r"\d+(:[0-5]?\d){0,2}", str(self.time_limit)):
            raise ConfigError(
                f"KubernetesConfig.time_limit is {self.time_limit!r}; expected seconds ('3600') or hours, minutes and "
                "seconds ('1:00:00')."
            )
        seconds = 0
        for part in str(self.time_limit).split(":"):
            seconds = 60 * seconds + int(part)
        return seconds

    @property
    def cores_per_node(self) -> int:
        """For how many threads a pod has room, by what it asks for."""
        asked = self.requests.get("cpu") or self.limits.get("cpu")
        if asked is not None:
            return max(1, math.floor(_cores(asked)))
        if self.workers_per_node is not None:
            return self.workers_per_node * self.cpus_per_worker
        return super()._cores_per_node()

    def _cores_per_node(self) -> int:
        return self.cores_per_node


def _cores(quantity: str) -> float:
    """Kubernetes' way to write a number of cores: `2`, `0.5`, `500m`."""
    if not re.fullmatch(r"\d+(\.\d+)?m?", quantity):
        raise ConfigError(
            f"KubernetesConfig asks for cpu {quantity!r}; expected a number of cores: '2', '0.5', '500m'."
        )
    return float(quantity.removesuffix("m")) / (1000 if quantity.endswith("m") else 1)
