"""The configuration for workers on Kubernetes."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Literal

from farstep.config.field_docs import show_fields
from farstep.config.launch import EngineConfig
from farstep.errors import ConfigError

KubernetesKind = Literal["job", "deployment"]
ImagePullPolicy = Literal["IfNotPresent", "Always", "Never"]

_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_PART = r"[a-z0-9]+([._-]+[a-z0-9]+)*"
_IMAGE = rf"((\[[0-9a-fA-F:]+\]|[\w.-]+)(:\d+)?/)?{_PART}(/{_PART})*(:\w[\w.-]{{0,127}})?(@\w+:[0-9a-f]+)?"


@show_fields
@dataclasses.dataclass(frozen=True, kw_only=True)
class KubernetesConfig(EngineConfig):
    """Run workers in pods of a Kubernetes cluster; each node is one pod."""

    image: str = ""
    """Required: container image with farstep and the environments; the repository's Dockerfile builds one."""
    namespace: str | None = None
    """Namespace of the created objects. None: the namespace of the kubeconfig context, or of the pod of the head."""
    kind: KubernetesKind = "job"
    """`job`: one Job per node; when its pod fails, the head resubmits the Job. `deployment`: one Deployment for all
    nodes; Kubernetes replaces its pods. If the machine of the head is lost, you must delete the Deployment yourself."""
    requests: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Resources that each pod requests, e.g. `{"cpu": "4", "memory": "8Gi"}`. If neither this nor `limits` has `cpu`:
    one core per thread of the pod's workers."""
    limits: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Resource limits of each pod; `gpus_per_node` adds `nvidia.com/gpu`."""
    tolerations: Sequence[Mapping[str, object]] = ()
    """Taints that the pods tolerate, as in a Kubernetes pod spec."""
    node_selector: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Labels that the Kubernetes nodes must have."""
    pod_template: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """Overrides for the pod template (`metadata`, `spec`), merged recursively over the options above. List items are
    matched by `mountPath` or `name` (the container is named `node-daemon`); null removes a key."""
    image_pull_policy: ImagePullPolicy = "IfNotPresent"
    """When Kubernetes pulls the image from its registry."""
    service_account: str | None = None
    """Service account of the pods; its token is mounted. None: the default account of the namespace, without a
    token."""
    kube_context: str | None = None
    """Context of the kubeconfig. None: the current context, or the service account of the head's pod."""
    python: str | None = "python3"
    """Python interpreter in the image."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.image, str) or not self.image.strip():
            raise ConfigError(
                f"KubernetesConfig.image is {self.image!r}; expected the name of an image that has farstep in it. "
                "docs/kubernetes.md shows how to build one."
            )
        if not re.fullmatch(_IMAGE, self.image):
            raise ConfigError(
                f"KubernetesConfig.image is {self.image!r}; expected [REGISTRY/]NAME[:TAG], with a lower-case name "
                "without spaces."
            )
        if self.namespace is not None and not re.fullmatch(_LABEL, self.namespace):
            raise ConfigError(
                f"KubernetesConfig.namespace is {self.namespace!r}; expected at most 63 lower-case letters, digits and "
                "hyphens."
            )
        self._one_of("kind", KubernetesKind)
        self._one_of("image_pull_policy", ImagePullPolicy)
        for name in ("requests", "limits", "node_selector"):
            object.__setattr__(self, name, self._texts(name))
        if not _is_template(self.pod_template):
            raise ConfigError(
                f"KubernetesConfig.pod_template is {self.pod_template!r}; expected a mapping with the "
                "mappings 'metadata' or 'spec', e.g. 'spec': {'hostNetwork': True}. 'containers' in 'spec' "
                "must be a list of mappings with a 'name' (farstep's container is named 'node-daemon')."
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
                f"KubernetesConfig.time_limit is {self.time_limit!r} with kind='deployment', but Kubernetes restarts "
                "the pods of a Deployment when they end; use kind='job'."
            )

    def _texts(self, name: str) -> dict[str, str]:
        value = getattr(self, name)
        if not isinstance(value, Mapping) or not all(isinstance(v, (str, int, float)) for v in value.values()):
            raise ConfigError(
                f"KubernetesConfig.{name} is {value!r}; expected a mapping of strings, e.g. {{'cpu': '4'}}."
            )
        return {str(key): str(each) for key, each in value.items()}

    @property
    def time_limit_s(self) -> int | None:
        """`time_limit` (`3600`, `60:00` or `1:00:00`) in seconds; None without a limit."""
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
        """Number of cores that a pod requests, at least 1."""
        requested = self.requests.get("cpu") or self.limits.get("cpu")
        if requested is not None:
            return max(1, math.floor(_cores(requested)))
        if self.workers_per_node is not None:
            return self.workers_per_node * self.cpus_per_worker
        return super()._cores_per_node()

    def _cores_per_node(self) -> int:
        return self.cores_per_node


def _is_template(given: object) -> bool:
    if not isinstance(given, Mapping) or not set(given) <= {"metadata", "spec"}:
        return False
    if not all(isinstance(part, Mapping) for part in given.values()):
        return False
    containers = given.get("spec", {}).get("containers", ())
    return isinstance(containers, (list, tuple)) and all(isinstance(c, Mapping) and "name" in c for c in containers)


def _cores(quantity: str) -> float:
    """Parse a Kubernetes quantity of cores: `2`, `0.5`, `500m`."""
    if not re.fullmatch(r"\d+(\.\d+)?m?", quantity):
        raise ConfigError(
            f"KubernetesConfig requests cpu {quantity!r}; expected a number of cores: '2', '0.5', '500m'."
        )
    return float(quantity.removesuffix("m")) / (1000 if quantity.endswith("m") else 1)
