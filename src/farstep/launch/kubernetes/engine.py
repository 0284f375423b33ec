"""Nodes that are pods of a Kubernetes cluster, which are asked for as Jobs or as a Deployment."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Sequence

from farstep.config.kubernetes import KubernetesConfig
from farstep.errors import FarstepError, LaunchError
from farstep.launch.addresses import own_addresses
from farstep.launch.daemon.guardian import Guardian
from farstep.launch.daemon.process import import_path
from farstep.launch.engine import Group, RequestStatus
from farstep.launch.kubernetes.api import Api, RefusedError, containers
from farstep.launch.kubernetes.manifests import GROUP_LABEL, RUN_LABEL, Manifest, manifests, owned, owner

log = logging.getLogger("farstep")
_MOST_LOGS = 8
_MOST_RESTARTS = 5
"""A pod of a Deployment that ended so often without being told to is not waited for."""
_COST = "controller.kubernetes.io/pod-deletion-cost"
_CLEAN_UP = (
    "import sys; from farstep.launch.kubernetes.engine import clean_up; "
    "clean_up(sys.argv[1], sys.argv[2], sys.argv[3:])"
)


class KubernetesEngine:
    """Jobs or Deployments with an agent per pod; they are deleted with their group, however the head ends."""

    grace_s = 20.0

    def __init__(self, config: KubernetesConfig) -> None:
        self._config = config
        self._api: Api | None = None
        self._owners: list[dict[str, str]] = []
        self._guardian = Guardian(environment={"PYTHONPATH": os.pathsep.join(import_path())})
        self._asked = 0

    def listen_on(self) -> Sequence[str]:
        """In a pod, the interfaces' addresses are the pod's own."""
        return self._config.head_address or own_addresses()

    def request(self, nodes: int, bootstrap: bytes) -> Pods:
        if self._api is None:
            self._api = Api(self._config.namespace, self._config.kube_context)
            # Known from now on, also to a head that goes on for a moment after its pod was deleted.
            head = self._api.own_pod()
            self._owners = [] if head is None else [owner(head)]
        run, number = str(json.loads(bootstrap)["run"]), self._asked
        self._asked += 1
        wanted = manifests(self._config, run, number, nodes, bootstrap, self.grace_s)
        group = Pods(self._api, wanted, self._owners, self._guardian)
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
    """Pods that were asked for together."""

    def __init__(
        self, api: Api, wanted: Sequence[Manifest], owners: Sequence[dict[str, str]], guardian: Guardian
    ) -> None:
        self._api, self._owners, self._guardian = api, owners, guardian
        self._secret, *self._workloads = wanted
        self._name = self._secret["metadata"]["name"]
        labels = self._secret["metadata"]["labels"]
        self._selector = ",".join(f"{label}={labels[label]}" for label in (RUN_LABEL, GROUP_LABEL))
        self._there: list[str] = []
        """Objects that were created, or perhaps were."""
        self._let_go: set[str] = set()
        """Pods of a Deployment whose agents ended because the head said so."""

    @property
    def _deployed(self) -> bool:
        return bool(self._workloads[0]["kind"] == "Deployment")

    def create(self) -> None:
        """The Secret belongs to what needs it, and all to the head's pod, if the head is in one, from the start."""
        api = self._api
        names = [_name(each) for each in (*self._workloads, self._secret)]
        command = [sys.executable, "-c", _CLEAN_UP, api.namespace, api.context or "", *names]
        self._guardian.register(self._name, command)
        self._create(owned(self._secret, self._owners))
        owners = [owner(self._create(owned(each, self._owners))) for each in self._workloads]
        api.patch(_name(self._secret), {"metadata": {"ownerReferences": owners}})

    def _create(self, manifest: Manifest) -> Manifest:
        self._there.append(_name(manifest))
        try:
            return self._api.create(manifest)
        except RefusedError:
            self._there.pop()
            raise

    def status(self) -> RequestStatus:
        pods = self._api.pods(self._selector)
        if self._deployed:
            nodes = self._shrink(pods)
        else:
            nodes = sum(not has_ended(job) for job in self._api.jobs(self._selector))
        coming = sum(pod.get("status", {}).get("phase") == "Pending" for pod in pods)
        return RequestStatus(f"Kubernetes {self._name} has {describe(pods)}", nodes, coming)

    def _shrink(self, pods: Sequence[Manifest]) -> int:
        """How many pods the Deployment will have; one less for each agent that the head let go."""
        name = _name(self._workloads[0])
        deployment = self._api.get(name)
        if deployment is None:
            return 0
        for pod in filter(was_let_go, pods):  # or it would be Kubernetes' guess which of them to end
            self._api.patch(f"Pod/{pod['metadata']['name']}", {"metadata": {"annotations": {_COST: "-1000"}}})
            self._let_go.add(pod["metadata"]["name"])
        replicas = max(0, int(self._workloads[0]["spec"]["replicas"]) - len(self._let_go))
        if replicas < int(deployment["spec"]["replicas"]):
            self._api.patch(name, {"spec": {"replicas": replicas}})
        return 0 if pods and all(map(is_hopeless, pods)) else replicas

    def logs(self) -> str:
        with contextlib.suppress(LaunchError):
            pods = self._api.pods(self._selector)
            tails = ((pod["metadata"]["name"], self._api.log_tail(pod)) for pod in pods[:_MOST_LOGS])
            return "\n".join(f"pod {name}:\n{tail}" for name, tail in tails if tail)
        return ""

    def cancel(self) -> None:
        try:
            self._api.delete(self._there)
        except LaunchError as error:
            log.warning("%s Kubernetes' objects of this run (%s) are deleted when it answers.", error, self._selector)
            return
        self._guardian.unregister(self._name)


def _name(manifest: Manifest) -> str:
    return f"{manifest['kind']}/{manifest['metadata']['name']}"


def clean_up(namespace: str, context: str, objects: Sequence[str]) -> None:
    """What the guardian runs."""
    try:
        api = Api(namespace, context or None)
        with contextlib.closing(api):
            api.delete(objects)
    except FarstepError as error:
        sys.exit(f"farstep: {error}")


# ---- what the API server's answers mean ----


def has_ended(job: Manifest) -> bool:
    """Whether a Job will start no pod any more."""
    conditions = job.get("status", {}).get("conditions") or []
    return any(each["type"] in ("Complete", "Failed") and each["status"] == "True" for each in conditions)


def was_let_go(pod: Manifest) -> bool:
    """Whether its agent ended because the head said so, and nobody has drawn the consequence yet."""
    if pod["metadata"].get("deletionTimestamp") or _COST in pod["metadata"].get("annotations", {}):
        return False
    ends = [status.get(key, {}).get("terminated") for status in containers(pod) for key in ("state", "lastState")]
    return any(end is not None and end.get("exitCode") == 0 for end in ends)


def is_hopeless(pod: Manifest) -> bool:
    """Whether it ends as often as it is started."""
    return any(
        status.get("restartCount", 0) >= _MOST_RESTARTS and "waiting" in status.get("state", {})
        for status in containers(pod)
    )


def describe(pods: Sequence[Manifest]) -> str:
    """In a few words, e.g. `pods: 1 Running, 1 Pending (Unschedulable: 0/2 nodes are available)`."""
    if not pods:
        return "no pods yet"
    said = Counter(_state(pod) for pod in pods)
    return "pods: " + ", ".join(f"{count} {state}" for state, count in sorted(said.items()))


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
