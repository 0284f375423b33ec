"""The requests that farstep sends to a Kubernetes API server, through the official client (extra `kubernetes`)."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from farstep.errors import LaunchError
from farstep.launch.engines.kubernetes.manifests import CONTAINER, Manifest

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""The folder of the service account's token and namespace, in a pod."""
_TIMEOUT_S = (5.0, 30.0)
"""Time limits in seconds: to connect, and to wait for an answer."""
_LOG_LINES = 40


class Api:
    """The requests that farstep sends. Answers are plain mappings; failures raise `LaunchError` with an explanation."""

    def __init__(self, namespace: str | None, context: str | None) -> None:
        try:
            client: Any = importlib.import_module("kubernetes.client")
            config: Any = importlib.import_module("kubernetes.config")
        except ImportError as error:
            raise LaunchError(
                f"KubernetesConfig needs the package kubernetes ({error}). Install it: pip install farstep[kubernetes]"
            ) from None
        self._exception = client.ApiException
        self.context = context
        settings = client.Configuration()
        self._inside = context is None and "KUBERNETES_SERVICE_HOST" in os.environ and (ACCOUNT / "token").exists()
        try:
            if self._inside:
                config.load_incluster_config(client_configuration=settings)
                default = (ACCOUNT / "namespace").read_text().strip()
            else:
                # Pass the path explicitly, because the package reads KUBECONFIG only when it is imported.
                file = os.environ.get("KUBECONFIG") or "~/.kube/config"
                config.load_kube_config(config_file=file, context=context, client_configuration=settings)
                contexts, current = config.list_kube_config_contexts(config_file=file)
                chosen = current if context is None else next(each for each in contexts if each["name"] == context)
                default = chosen["context"].get("namespace", "")
        except (config.ConfigException, OSError) as error:
            raise LaunchError(
                f"no Kubernetes cluster is configured ({' '.join(str(error).split())}). Set KUBECONFIG to a file that "
                "kubectl works with, or run the head in a pod with a service account."
            ) from None
        settings.retries = False
        self._server = settings.host
        self._client = client.ApiClient(settings)
        self._core, self._batch, self._apps = (
            each(self._client) for each in (client.CoreV1Api, client.BatchV1Api, client.AppsV1Api)
        )
        self.namespace = namespace or default or "default"

    def close(self) -> None:
        self._client.close()
        self._client.rest_client.pool_manager.clear()

    def own_pod(self) -> Manifest | None:
        """The pod of this process, if it is in the run's namespace and can therefore own the objects of the run."""
        if not self._inside or (ACCOUNT / "namespace").read_text().strip() != self.namespace:
            return None
        name = os.environ.get("POD_NAME") or os.environ.get("HOSTNAME") or socket.gethostname()
        return self.get(f"Pod/{name}")

    def create(self, manifest: Manifest) -> Manifest:
        kind = manifest["kind"]
        created = self._call(f"create a {kind}", self._method("create", kind), body=manifest)
        return {**manifest, "metadata": {**manifest["metadata"], "uid": created["metadata"]["uid"]}}

    def get(self, name: str) -> Manifest | None:
        kind, _, name = name.partition("/")
        found = self._call(f"read the {kind} {name}", self._method("read", kind), name, missing={})
        return {"apiVersion": "v1", "kind": kind, **found} if found else None

    def patch(self, name: str, body: Mapping[str, object]) -> None:
        kind, _, name = name.partition("/")
        self._call(f"change the {kind} {name}", self._method("patch", kind), name, missing={}, body=body)

    def delete(self, names: Sequence[str]) -> None:
        """Delete these objects, if they exist, and all objects that they own."""
        for kind, _, name in (each.partition("/") for each in names):
            method = self._method("delete", kind)
            self._call(f"delete the {kind} {name}", method, name, missing={}, propagation_policy="Background")

    def pods(self, selector: str) -> list[Manifest]:
        return self._list("Pod", selector)

    def jobs(self, selector: str) -> list[Manifest]:
        return self._list("Job", selector)

    def _list(self, kind: str, selector: str) -> list[Manifest]:
        found = self._call(f"list {kind}s", self._method("list", kind), label_selector=selector)
        return list(found["items"])

    def log_tail(self, pod: Manifest) -> str:
        """The last lines of the node daemon's log. If a restarted daemon has no log yet, return the last lines of its
        predecessor's log."""
        name, restarted = pod["metadata"]["name"], any(status.get("restartCount") for status in containers(pod))
        for previous in (False, True) if restarted else (False,):
            options = {"container": CONTAINER, "tail_lines": _LOG_LINES, "previous": previous}
            with contextlib.suppress(LaunchError):
                read = self._core.read_namespaced_pod_log
                if tail := self._raw("read logs", read, name, **options).decode(errors="replace").strip():
                    return tail
        return ""

    def _method(self, verb: str, kind: str) -> Any:
        group = {"Job": self._batch, "Deployment": self._apps}.get(kind, self._core)
        return getattr(group, f"{verb}_namespaced_{kind.lower()}")

    def _call(
        self, action: str, method: Any, *names: str, missing: Manifest | None = None, **options: object
    ) -> Manifest:
        """The answer to a request, or `missing` if the object does not exist."""
        try:
            return dict(json.loads(self._raw(action, method, *names, **options)))
        except _NotFoundError:
            if missing is None:
                raise
            return missing

    def _raw(self, action: str, method: Any, *names: str, **options: object) -> bytes:
        import urllib3

        try:
            answer = method(
                *names, namespace=self.namespace, _preload_content=False, _request_timeout=_TIMEOUT_S, **options
            )
            return bytes(answer.data)
        except self._exception as error:
            raise self._refusal(action, error) from None
        except ValueError as error:  # newer clients validate requests
            raise RefusedError(
                f"Kubernetes' client refused to {action}: {' '.join(str(error).split())}. Check that "
                "KubernetesConfig.pod_template follows Kubernetes' schema, and that the package kubernetes is recent "
                "enough."
            ) from None
        except (urllib3.exceptions.HTTPError, OSError) as error:
            reason = " ".join(str(getattr(error, "reason", None) or error).split())
            raise LaunchError(
                f"the Kubernetes API server at {self._server} does not answer ({reason}). Check that it is running and "
                "that the context is the right one."
            ) from None

    def _refusal(self, action: str, error: Any) -> LaunchError:
        text = str(error.body or error.reason)
        with contextlib.suppress(ValueError, TypeError):
            text = str(json.loads(text)["message"])
        text = text.strip().rstrip(".")
        if error.status in (401, 403):
            return RefusedError(
                f"Kubernetes does not allow this user to {action} in the namespace {self.namespace!r}: {text}. "
                "docs/kubernetes.md has the Role that farstep needs."
            )
        if error.status == 404 and "namespaces" in text:
            return RefusedError(
                f"the namespace {self.namespace!r} does not exist. Create it: kubectl create namespace {self.namespace}"
            )
        if error.status >= 500:
            return LaunchError(f"the Kubernetes API server failed to {action}: {text}.")
        refused = f"Kubernetes refused to {action} in the namespace {self.namespace!r}: {text}."
        return _NotFoundError(refused) if error.status == 404 else RefusedError(refused)


class RefusedError(LaunchError):
    """The API server answered and refused the request."""


class _NotFoundError(RefusedError):
    """The object does not exist."""


def containers(pod: Manifest) -> list[Manifest]:
    """The status of each container of a pod; empty before the pod is assigned to a node."""
    return list(pod.get("status", {}).get("containerStatuses") or [])
