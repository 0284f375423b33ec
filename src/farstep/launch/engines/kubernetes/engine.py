"""Starts node daemons in the pods of Kubernetes Jobs, or of a Deployment."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence

from farstep.config.kubernetes import KubernetesConfig
from farstep.errors import FarstepError, LaunchError
from farstep.event import Emit, traceback_of
from farstep.launch.addresses import own_addresses
from farstep.launch.daemon.guardian import Guardian
from farstep.launch.daemon.process import import_path
from farstep.launch.engines.engine import Group, RequestStatus
from farstep.launch.engines.kubernetes.api import Api, RefusedError, containers
from farstep.launch.engines.kubernetes.manifests import GROUP_LABEL, RUN_LABEL, Manifest, manifests, owned, owner

_MAX_LOGS = 8
_MAX_RESTARTS = 5
"""A failing pod of a Deployment is given up after this many restarts."""
_COST = "controller.kubernetes.io/pod-deletion-cost"
_CLEAN_UP = (
    "import sys; from farstep.launch.engines.kubernetes.engine import clean_up; clean_up(sys.argv[1], sys.argv[2], "
    "sys.argv[3:])"
)


class KubernetesEngine:
    """Creates Jobs or Deployments with one node daemon per pod. They are deleted even if the head is killed."""

    grace_s = 20.0

    def __init__(self, config: KubernetesConfig, emit: Emit) -> None:
        self._config, self._emit = config, emit
        self._api: Api | None = None
        self._owners: list[dict[str, str]] = []
        self._guardian = Guardian(environment={"PYTHONPATH": os.pathsep.join(import_path())})
        self._requests = 0

    def listen_on(self) -> Sequence[str]:
        """The configured addresses, or the addresses of this machine (in a pod, of the pod)."""
        return self._config.head_address or own_addresses()

    def request(self, nodes: int, bootstrap: bytes) -> Pods:
        if self._api is None:
            self._api = Api(self._config.namespace, self._config.kube_context)
            # Read the pod once, at the start: the head may run for a moment after its pod was deleted.
            head = self._api.own_pod()
            self._owners = [] if head is None else [owner(head)]
        run, number = str(json.loads(bootstrap)["run"]), self._requests
        self._requests += 1
        wanted = manifests(self._config, run, number, nodes, bootstrap, self.grace_s)
        group = Pods(self._api, wanted, self._owners, self._guardian, self._emit)
        try:
            group.create()
        except BaseException:
            group.cancel()
            raise
        return group

    def close(self) -> None:
        self._guardian.close()
        if self._api is not None:
            self._api.close()


class Pods(Group):
    """Pods that were requested together."""

    def __init__(
        self, api: Api, wanted: Sequence[Manifest], owners: Sequence[dict[str, str]], guardian: Guardian, emit: Emit
    ) -> None:
        self._api, self._owners, self._guardian, self._emit = api, owners, guardian, emit
        self._secret, *self._workloads = wanted
        self._name = self._secret["metadata"]["name"]
        labels = self._secret["metadata"]["labels"]
        self._selector = ",".join(f"{label}={labels[label]}" for label in (RUN_LABEL, GROUP_LABEL))
        self._created: list[str] = []
        """Objects that may exist. This includes requests that timed out, because they may have succeeded."""
        self._released: set[str] = set()
        """Pods of a Deployment whose daemons the head has ended."""

    @property
    def _deployed(self) -> bool:
        return bool(self._workloads[0]["kind"] == "Deployment")

    def create(self) -> None:
        """Create all objects. The Jobs or the Deployment own the Secret; the head's pod, if any, owns all objects."""
        api = self._api
        names = [_name(each) for each in (*self._workloads, self._secret)]
        command = [sys.executable, "-c", _CLEAN_UP, api.namespace, api.context or "", *names]
        self._guardian.register(self._name, command)
        self._create(owned(self._secret, self._owners))
        owners = [owner(self._create(owned(each, self._owners))) for each in self._workloads]
        api.patch(_name(self._secret), {"metadata": {"ownerReferences": owners}})

    def _create(self, manifest: Manifest) -> Manifest:
        self._created.append(_name(manifest))
        try:
            return self._api.create(manifest)
        except RefusedError:
            self._created.pop()
            raise

    def status(self) -> RequestStatus:
        pods = self._api.pods(self._selector)
        if self._deployed:
            nodes = self._shrink(pods)
        else:
            nodes = sum(not has_ended(job) for job in self._api.jobs(self._selector))
        pending = sum(pod.get("status", {}).get("phase") == "Pending" for pod in pods)
        return RequestStatus(f"Kubernetes {self._name} has {describe(pods)}", nodes, pending)

    def _shrink(self, pods: Sequence[Manifest]) -> int:
        """Remove released pods from the Deployment. Return its new number of pods."""
        name = _name(self._workloads[0])
        deployment = self._api.get(name)
        if deployment is None:
            return 0
        for pod in filter(was_released, pods):  # the annotation makes Kubernetes delete exactly these pods
            self._api.patch(f"Pod/{pod['metadata']['name']}", {"metadata": {"annotations": {_COST: "-1000"}}})
            self._released.add(pod["metadata"]["name"])
        replicas = max(0, int(self._workloads[0]["spec"]["replicas"]) - len(self._released))
        if replicas < int(deployment["spec"]["replicas"]):
            self._api.patch(name, {"spec": {"replicas": replicas}})
        return 0 if pods and all(map(keeps_failing, pods)) else replicas

    def logs(self) -> str:
        with contextlib.suppress(LaunchError):
            pods = self._api.pods(self._selector)
            tails = ((pod["metadata"]["name"], self._api.log_tail(pod)) for pod in pods[:_MAX_LOGS])
            return "\n".join(f"pod {name}:\n{tail}" for name, tail in tails if tail)
        return ""

    def cancel(self) -> None:
        try:
            self._api.delete(self._created)
        except LaunchError as error:
            text = f"{error} The objects of this run ({self._selector}) will be deleted when it answers."
            self._emit("warned", text, traceback=traceback_of(error))
            return
        self._guardian.unregister(self._name)


def _name(manifest: Manifest) -> str:
    return f"{manifest['kind']}/{manifest['metadata']['name']}"


def clean_up(namespace: str, context: str, objects: Sequence[str]) -> None:
    """Delete objects. The guardian runs this when the head has ended."""
    try:
        api = Api(namespace, context or None)
        with contextlib.closing(api):
            api.delete(objects)
    except FarstepError as error:
        sys.exit(f"farstep: {error}")


# ---- interpreting the API server's answers ----


def has_ended(job: Manifest) -> bool:
    """Whether a Job will start no more pods."""
    conditions = job.get("status", {}).get("conditions") or []
    return any(each["type"] in ("Complete", "Failed") and each["status"] == "True" for each in conditions)


def was_released(pod: Manifest) -> bool:
    """Whether the head has ended the pod's daemon, and the pod is not marked for deletion yet."""
    if pod["metadata"].get("deletionTimestamp") or _COST in pod["metadata"].get("annotations", {}):
        return False
    ends = [status.get(key, {}).get("terminated") for status in containers(pod) for key in ("state", "lastState")]
    return any(end is not None and end.get("exitCode") == 0 for end in ends)


def keeps_failing(pod: Manifest) -> bool:
    """Whether the pod has been restarted `_MAX_RESTARTS` times and waits for another restart."""
    return any(
        status.get("restartCount", 0) >= _MAX_RESTARTS and "waiting" in status.get("state", {})
        for status in containers(pod)
    )


def describe(pods: Sequence[Manifest]) -> str:
    """The states of pods in words, e.g. `pods: 1 Running, 1 Pending (Unschedulable: 0/2 nodes are available)`."""
    if not pods:
        return "no pods yet"
    states = Counter(_state(pod) for pod in pods)
    return "pods: " + ", ".join(f"{count} {state}" for state, count in sorted(states.items()))


def _state(pod: Manifest) -> str:
    status = pod.get("status", {})
    phase = "Terminating" if pod["metadata"].get("deletionTimestamp") else str(status.get("phase", "Unknown"))
    reasons = [_because(status)] if status.get("reason") else []
    reasons += [
        _because(state[key])
        for container in containers(pod)
        for state in [container.get("state", {})]
        for key in ("waiting", "terminated")
        if key in state
    ]
    reasons += [
        _because(condition)
        for condition in status.get("conditions") or []
        if condition["type"] == "PodScheduled" and condition["status"] == "False"
    ]
    return f"{phase} ({'; '.join(filter(None, reasons))})" if any(reasons) else phase


def _because(thing: Manifest) -> str:
    message = str(thing.get("message", "")).strip().splitlines()
    return ": ".join(filter(None, [str(thing.get("reason", "")), message[-1] if message else ""]))
