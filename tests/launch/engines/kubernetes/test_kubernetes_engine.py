"""The Kubernetes engine with a fake API server: objects, status and errors."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from farstep.config.kubernetes import KubernetesConfig
from farstep.errors import LaunchError
from farstep.head.events import EventLog
from farstep.launch.daemon.guardian import Guardian
from farstep.launch.engines.kubernetes import api as kubernetes_api
from farstep.launch.engines.kubernetes.engine import KubernetesEngine, Pods
from tests.launch.engines.kubernetes.fake_kubernetes import FakeKubernetes, kubeconfig, serving

pytestmark = pytest.mark.slow  # imports the client library of Kubernetes, which takes seconds

BOOTSTRAP = json.dumps({"run": "ab12", "secret": "s3cret"}).encode()


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKubernetes]:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with serving(tmp_path) as (fake, file):
        monkeypatch.setenv("KUBECONFIG", str(file))
        yield fake


@pytest.fixture
def engine() -> Iterator[Any]:
    engines: list[KubernetesEngine] = []

    def make(**options: Any) -> KubernetesEngine:
        engines.append(KubernetesEngine(KubernetesConfig(image="farstep:1", **options), EventLog().emit))
        return engines[-1]

    yield make
    for each in engines:
        each.close()


def request(engine: KubernetesEngine, nodes: int = 2) -> Pods:
    return engine.request(nodes, BOOTSTRAP)


def test_jobs_own_their_secret_and_are_deleted_when_cancelled(cluster: FakeKubernetes, engine: Any) -> None:
    group = request(engine())
    assert cluster.names() == ["jobs/farstep-ab12-0-0", "jobs/farstep-ab12-0-1", "secrets/farstep-ab12-0"]
    owners = cluster.objects["secrets"]["farstep-ab12-0"]["metadata"]["ownerReferences"]
    assert [(owner["apiVersion"], owner["kind"], owner["name"]) for owner in owners] == [
        ("batch/v1", "Job", "farstep-ab12-0-0"),
        ("batch/v1", "Job", "farstep-ab12-0-1"),
    ]
    group.cancel()
    group.cancel()
    assert cluster.names() == []


def test_a_second_group_has_names_of_its_own(cluster: FakeKubernetes, engine: Any) -> None:
    one = engine(kind="deployment")
    first, second = request(one, 1), request(one, 1)
    assert len(cluster.objects["deployments"]) == 2
    first.cancel()
    assert cluster.names() == ["deployments/farstep-ab12-1", "secrets/farstep-ab12-1"]
    second.cancel()


def test_finished_jobs_provide_no_more_nodes(cluster: FakeKubernetes, engine: Any) -> None:
    group = request(engine())
    assert group.status().nodes == 2 and "no pods yet" in group.status().text
    jobs = cluster.objects["jobs"]
    jobs["farstep-ab12-0-0"]["status"] = {"conditions": [{"type": "Failed", "status": "True"}]}
    jobs["farstep-ab12-0-1"]["status"] = {"conditions": [{"type": "Suspended", "status": "False"}]}
    assert group.status().nodes == 1
    del jobs["farstep-ab12-0-1"]
    assert group.status().nodes == 0
    group.cancel()


@pytest.mark.parametrize(
    ("status", "text"),
    [
        ({"phase": "Running"}, "pods: 1 Running"),
        (
            {
                "phase": "Pending",
                "conditions": [
                    {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes: cpu"}
                ],
            },
            "1 Pending (Unschedulable: 0/2 nodes: cpu)",
        ),
        (
            {
                "phase": "Pending",
                "containerStatuses": [{"state": {"waiting": {"reason": "ImagePullBackOff", "message": "no x:1"}}}],
            },
            "1 Pending (ImagePullBackOff: no x:1)",
        ),
        (
            {
                "phase": "Failed",
                "containerStatuses": [
                    {"state": {"terminated": {"reason": "Error", "exitCode": 1, "message": "a\nfarstep: no head\n"}}}
                ],
            },
            "1 Failed (Error: farstep: no head)",
        ),
        ({"phase": "Failed", "reason": "Evicted", "message": "low on memory"}, "1 Failed (Evicted: low on memory)"),
    ],
)
def test_pods_that_do_not_run_have_a_reason(
    cluster: FakeKubernetes, engine: Any, status: dict[str, Any], text: str
) -> None:
    group = request(engine(), 1)
    cluster.add_pod("p", cluster.objects["jobs"]["farstep-ab12-0-0"], **status)
    assert text in group.status().text
    group.cancel()


def test_a_deployment_shrinks_by_the_pods_whose_daemons_were_released(cluster: FakeKubernetes, engine: Any) -> None:
    group = request(engine(kind="deployment"), 3)
    deployment = cluster.objects["deployments"]["farstep-ab12-0"]
    ended = {"terminated": {"exitCode": 0}}
    for name, state in (
        ("here", {"state": {"running": {}}, "lastState": {"terminated": {"exitCode": 1}}, "restartCount": 1}),
        ("left", {"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": ended, "restartCount": 1}),
        ("moved", {"state": ended}),
    ):
        cluster.add_pod(name, deployment, phase="Running", containerStatuses=[state])
    cluster.objects["pods"]["moved"]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert group.status().nodes == 2
    assert deployment["spec"]["replicas"] == 2
    assert [name for name, pod in cluster.objects["pods"].items() if pod["metadata"].get("annotations")] == ["left"]
    assert group.status().nodes == 2, "once is enough"
    group.cancel()
    assert group.status().nodes == 0


def test_deployment_whose_pods_only_crash_is_not_waited_for(cluster: FakeKubernetes, engine: Any) -> None:
    group = request(engine(kind="deployment"), 1)
    crashed = {"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "restartCount": 5}
    cluster.add_pod("p", cluster.objects["deployments"]["farstep-ab12-0"], containerStatuses=[crashed])
    assert group.status().nodes == 0 and "CrashLoopBackOff" in group.status().text
    group.cancel()


def test_logs_are_the_ends_of_the_pods(cluster: FakeKubernetes, engine: Any) -> None:
    group = request(engine(), 2)
    for name in ("p", "q"):
        cluster.add_pod(name, cluster.objects["jobs"]["farstep-ab12-0-0"])
    cluster.logs["p"] = "farstep: no head\n"
    assert group.logs() == "pod p:\nfarstep: no head"
    group.cancel()


@pytest.mark.parametrize(
    ("options", "namespace"),
    [({}, "default"), ({"kube_context": "second"}, "rl"), ({"namespace": "rl"}, "rl")],
)
def test_the_namespace_is_that_of_the_context(
    cluster: FakeKubernetes, engine: Any, options: dict[str, Any], namespace: str
) -> None:
    cluster.namespaces = {namespace}
    request(engine(**options)).cancel()


def test_a_missing_namespace_is_one_sentence(cluster: FakeKubernetes, engine: Any) -> None:
    with pytest.raises(LaunchError, match=r"'nowhere' does not exist. Create it: kubectl create namespace nowhere"):
        request(engine(namespace="nowhere"))


@pytest.mark.parametrize("kind", ["secrets", "jobs"])
def test_missing_rights_are_one_sentence_and_leave_nothing(cluster: FakeKubernetes, engine: Any, kind: str) -> None:
    cluster.forbidden = {("POST", kind), ("DELETE", "jobs")}
    with pytest.raises(LaunchError, match=rf"not allow this user to create .*{kind} is forbidden.*docs/kubernetes.md"):
        request(engine())
    assert cluster.names() == []


def test_objects_that_do_not_fit_the_schemas_are_refused_by_name(cluster: FakeKubernetes, engine: Any) -> None:
    with pytest.raises(LaunchError, match=r"refused to create a Job.*hostNetwrk"):
        request(engine(pod_template={"spec": {"hostNetwrk": True}}))


def test_an_unknown_context_is_one_sentence(cluster: FakeKubernetes, engine: Any) -> None:
    with pytest.raises(LaunchError, match=r"no Kubernetes cluster is configured.*third"):
        request(engine(kube_context="third"))


def test_no_configuration_is_one_sentence(engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nowhere"))
    with pytest.raises(LaunchError, match=r"no Kubernetes cluster is configured.*Set KUBECONFIG"):
        request(engine())


def test_no_server_is_one_sentence(engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kubeconfig").write_text(kubeconfig("http://127.0.0.1:9"))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    # The guardian cannot delete anything: there is no server.
    monkeypatch.setattr("farstep.launch.engines.kubernetes.engine.Guardian", functools.partial(Guardian, 0.1))
    with pytest.raises(LaunchError, match=r"http://127.0.0.1:9 does not answer"):
        request(engine())


def test_a_missing_package_is_one_sentence(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes.client", None)
    with pytest.raises(LaunchError, match=r"needs the package kubernetes.*pip install farstep\[kubernetes\]"):
        request(engine())


def test_objects_that_a_pod_creates_are_owned_by_it(
    cluster: FakeKubernetes, engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service account's files, with the fake in place of the cluster's address."""
    for name, text in (("token", "t"), ("namespace", "rl")):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(kubernetes_api, "ACCOUNT", tmp_path)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("HOSTNAME", "head-0")
    host = json.loads((tmp_path / "kubeconfig").read_text())["clusters"][0]["cluster"]["server"]
    monkeypatch.setattr(
        "kubernetes.config.load_incluster_config",
        lambda client_configuration: setattr(client_configuration, "host", host),
    )
    cluster.objects["pods"]["head-0"] = {"metadata": {"name": "head-0", "uid": "u-1", "labels": {}}}
    head = engine()
    group = request(head, 1)
    (job,) = cluster.objects["jobs"].values()
    assert job["metadata"]["ownerReferences"] == [{"apiVersion": "v1", "kind": "Pod", "name": "head-0", "uid": "u-1"}]
    (secret,) = cluster.objects["secrets"].values()
    assert secret["metadata"]["ownerReferences"][0]["kind"] == "Job"
    cluster.answer("DELETE", "/api/v1/namespaces/rl/pods/head-0", None)
    cluster.collect()
    assert cluster.names() == []
    late = request(head, 1)  # it has not noticed yet
    cluster.collect()
    assert cluster.names() == []
    group.cancel()
    late.cancel()


HEAD = """
import signal, sys
from farstep.launch.engines.kubernetes.engine import KubernetesEngine
from farstep.config.kubernetes import KubernetesConfig
from farstep.head.events import EventLog
engine = KubernetesEngine(KubernetesConfig(image="farstep:1"), EventLog().emit)
engine.request(2, sys.argv[1].encode())
print(flush=True)
signal.pause()
"""


def test_a_killed_head_leaves_no_objects(cluster: FakeKubernetes) -> None:
    command = [sys.executable, "-c", HEAD, BOOTSTRAP.decode()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=dict(os.environ)) as head:
        assert head.stdout is not None and head.stdout.readline()
        assert len(cluster.names()) == 3
        os.kill(head.pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while cluster.names():
        assert time.monotonic() < deadline, cluster.names()
        time.sleep(0.05)
