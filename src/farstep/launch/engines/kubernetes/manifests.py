"""The manifests that farstep creates: a Secret, and Jobs or a Deployment whose pods run node daemons."""

from __future__ import annotations

import base64
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from farstep.config.kubernetes import KubernetesConfig
from farstep.launch.engines.engine import setup_lines

Manifest = dict[str, Any]

CONTAINER = "node-daemon"
_FOLDER, _FILE = "/run/farstep", "bootstrap"
_IN_BASH = 'if command -v bash > /dev/null; then exec bash -c "$0"; else exec sh -c "$0"; fi'
"""Runs the setup in bash, which supports `source`. If the image has no bash, uses sh."""
POD_USER = 1000
"""User id of the container. Pods do not run as root, even if the image would, unless `pod_template` sets it."""
_KEPT_S = 60
"""Seconds after which Kubernetes deletes an ended Job, if the head did not."""
_MERGE_KEYS = ("mountPath", "name")
RUN_LABEL, GROUP_LABEL = "farstep.run", "farstep.group"


def manifests(
    config: KubernetesConfig, run: str, group: int, nodes: int, bootstrap: bytes, grace_s: float
) -> list[Manifest]:
    """The manifests of a group of nodes: the Secret first, then the Jobs or the Deployment.

    Args:
        config: Options of the pods.
        run: Identifier of the run; it is part of all names.
        group: Number of the group within the run.
        nodes: Number of pods.
        bootstrap: Content of the Secret: the head's addresses and keys, as JSON.
        grace_s: Seconds for a pod to send its chunks before it is killed.
    """
    name, labels = group_name(run, group), group_labels(run, group)
    template = pod_template(config, name, labels, grace_s)
    if config.kind == "deployment":
        return [secret(name, labels, bootstrap), deployment(name, labels, template, nodes)]
    jobs = [job(f"{name}-{i}", labels, template, config.time_limit_s) for i in range(nodes)]
    return [secret(name, labels, bootstrap), *jobs]


def group_name(run: str, group: int) -> str:
    return f"farstep-{run}-{group}"


def group_labels(run: str, group: int) -> dict[str, str]:
    return {"app.kubernetes.io/managed-by": "farstep", RUN_LABEL: run, GROUP_LABEL: str(group)}


def secret(name: str, labels: Mapping[str, str], bootstrap: bytes) -> Manifest:
    """A Secret with the head's addresses and the keys of the node daemons."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "labels": dict(labels)},
        "type": "Opaque",
        "immutable": True,
        "data": {_FILE: base64.b64encode(bootstrap).decode()},
    }


def redacted(manifest: Manifest) -> Manifest:
    """The manifest for display: a Secret without its data."""
    if manifest["kind"] != "Secret":
        return manifest
    shown = {key: value for key, value in manifest.items() if key != "data"}
    return {**shown, "stringData": {_FILE: "(redacted: the head's addresses and keys)"}}


def job(name: str, labels: Mapping[str, str], template: Manifest, time_limit_s: int | None) -> Manifest:
    """A Job of one pod. Kubernetes never retries it, because the head requests replacements within its restart
    budget."""
    spec: Manifest = {
        "backoffLimit": 0,
        "ttlSecondsAfterFinished": _KEPT_S,
        "template": merged(template, {"spec": {"restartPolicy": "Never"}}),
    }
    if time_limit_s is not None:
        spec["activeDeadlineSeconds"] = time_limit_s
    metadata = {"name": name, "labels": dict(labels)}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


def deployment(name: str, labels: Mapping[str, str], template: Manifest, nodes: int) -> Manifest:
    """A Deployment of one pod per node. Kubernetes replaces pods that end."""
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "labels": dict(labels)},
        "spec": {
            "replicas": nodes,
            "revisionHistoryLimit": 0,
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": dict(labels)},
            "template": merged(template, {"spec": {"restartPolicy": "Always"}}),
        },
    }


def pod_template(config: KubernetesConfig, secret_name: str, labels: Mapping[str, str], grace_s: float) -> Manifest:
    """A pod with one node daemon. Only the pod's user and group can read the file from which it reads its bootstrap."""
    spec: Manifest = {
        "containers": [_container(config)],
        "volumes": [
            {"name": "farstep", "secret": {"secretName": secret_name, "defaultMode": 0o400, "optional": False}}
        ],
        "terminationGracePeriodSeconds": int(grace_s) + 5,
        "automountServiceAccountToken": config.service_account is not None,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": POD_USER,
            "runAsGroup": POD_USER,
            "fsGroup": POD_USER,  # otherwise only root could read the Secret's file
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": {RUN_LABEL: labels[RUN_LABEL]}},
            }
        ],
    }
    if config.node_selector:
        spec["nodeSelector"] = dict(config.node_selector)
    if config.tolerations:
        spec["tolerations"] = [dict(toleration) for toleration in config.tolerations]
    if config.service_account is not None:
        spec["serviceAccountName"] = config.service_account
    template: Manifest = merged({"metadata": {"labels": dict(labels)}, "spec": spec}, config.pod_template)
    return template


def _container(config: KubernetesConfig) -> Manifest:
    requests, limits = dict(config.requests), dict(config.limits)
    if "cpu" not in requests and "cpu" not in limits:
        requests["cpu"] = str(config.cores_per_node)
    if config.gpus_per_node:
        limits["nvidia.com/gpu"] = str(config.gpus_per_node)
    # Pass the file as stdin. A daemon that opens the file itself requires mode 0600, but fsGroup sets mode 0440.
    daemon = f"{shlex.quote(config.python or 'python3')} -m farstep.launch.daemon.node_daemon"
    start = f'exec {daemon} --place "$FARSTEP_NODE" < {_FOLDER}/{_FILE}'
    return {
        "name": CONTAINER,
        "image": config.image,
        "imagePullPolicy": config.image_pull_policy,
        "command": ["/bin/sh", "-c", _IN_BASH, "\n".join([*setup_lines(config.setup), start])],
        "env": [{"name": "FARSTEP_NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}],
        "resources": {key: value for key, value in (("requests", requests), ("limits", limits)) if value},
        "volumeMounts": [{"name": "farstep", "mountPath": _FOLDER, "readOnly": True}],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }


def owned(manifest: Manifest, owners: Sequence[Mapping[str, str]]) -> Manifest:
    """The manifest with owners. Kubernetes deletes the object when all its owners are deleted."""
    if not owners:
        return manifest
    return {**manifest, "metadata": {**manifest["metadata"], "ownerReferences": [dict(each) for each in owners]}}


def owner(of: Mapping[str, Any]) -> dict[str, str]:
    """A reference, for `ownerReferences`, to an object that the API server returned."""
    metadata = of["metadata"]
    return {"apiVersion": of["apiVersion"], "kind": of["kind"], "name": metadata["name"], "uid": metadata["uid"]}


def merged(base: Any, over: Any) -> Any:
    """Merge `over` into `base`: mappings by key, lists of named items by name; other values are replaced."""
    if isinstance(base, Mapping) and isinstance(over, Mapping):
        both = {key: merged(value, over[key]) if key in over else value for key, value in base.items()}
        both |= {key: value for key, value in over.items() if key not in base}
        return {key: value for key, value in both.items() if value is not None}
    if isinstance(base, Sequence) and isinstance(over, Sequence) and not isinstance(over, str):
        for key in _MERGE_KEYS:
            if over and all(isinstance(item, Mapping) and key in item for item in (*base, *over)):
                named = {item[key]: item for item in base}
                for item in over:
                    named[item[key]] = merged(named[item[key]], item) if item[key] in named else item
                return list(named.values())
    return list(over) if isinstance(over, (list, tuple)) else over
