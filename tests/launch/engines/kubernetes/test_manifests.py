"""Manifests: valid by the schemas of Kubernetes, and with the values of the options."""

from __future__ import annotations

import base64
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from farstep.config.kubernetes import KubernetesConfig
from farstep.errors import ConfigError
from farstep.launch.engines.kubernetes.manifests import manifests, merged, redacted
from tests.launch.engines.kubernetes.fake_kubernetes import VERSIONS

FULL: dict[str, Any] = {
    "requests": {"cpu": "500m", "memory": "1Gi"},
    "limits": {"memory": "2Gi"},
    "gpus_per_node": 2,
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "node_selector": {"pool": "gpu"},
    "service_account": "farstep",
    "image_pull_policy": "Never",
    "setup": ["source /env/bin/activate"],
    "python": "/opt/my python/bin/python",
    "pod_template": {
        "metadata": {"annotations": {"team": "rl"}},
        "spec": {
            "volumes": [{"name": "data", "hostPath": {"path": "/data"}}],
            "containers": [{"name": "node-daemon", "volumeMounts": [{"name": "data", "mountPath": "/data"}]}],
        },
    },
}


def asked(nodes: int = 2, **options: Any) -> list[dict[str, Any]]:
    return manifests(KubernetesConfig(image="farstep:1", **options), "ab12", 3, nodes, b'{"key": 1}', 20.0)


def pod_of(manifest: dict[str, Any]) -> dict[str, Any]:
    return manifest["spec"]["template"]["spec"]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("options", [{}, FULL], ids=["plain", "full"])
@pytest.mark.parametrize("kind", ["job", "deployment"])
def test_kubernetes_schemas_accept_it(kind: str, options: dict[str, Any], version: str) -> None:
    for manifest in (*asked(kind=kind, **options), *map(redacted, asked(kind=kind))):
        kubernetes_validate.validate(manifest, version, strict=True)


def test_job_of_a_node_is_never_retried_and_expires() -> None:
    secret, *jobs = asked(nodes=3, time_limit="1:00:00")
    assert [job["metadata"]["name"] for job in jobs] == [f"farstep-ab12-3-{i}" for i in range(3)]
    for job in jobs:
        assert (job["kind"], job["spec"]["backoffLimit"], job["spec"]["activeDeadlineSeconds"]) == ("Job", 0, 3600)
        assert job["spec"]["ttlSecondsAfterFinished"] > 0
        assert pod_of(job)["restartPolicy"] == "Never"
        assert job["metadata"]["labels"]["farstep.run"] == "ab12"
    assert secret["metadata"]["labels"] == jobs[0]["metadata"]["labels"]


def test_a_deployment_has_a_pod_per_node() -> None:
    _, deployment = asked(nodes=3, kind="deployment")
    assert (deployment["kind"], deployment["spec"]["replicas"]) == ("Deployment", 3)
    assert deployment["spec"]["selector"]["matchLabels"].items() <= (
        deployment["spec"]["template"]["metadata"]["labels"].items()
    )
    assert pod_of(deployment)["restartPolicy"] == "Always"


def test_keys_are_in_the_secret_alone_which_only_the_pods_user_can_read() -> None:
    secret, job, _ = asked()
    assert base64.b64decode(secret["data"]["bootstrap"]) == b'{"key": 1}'
    assert pod_of(job)["volumes"] == [
        {
            "name": "farstep",
            "secret": {"secretName": secret["metadata"]["name"], "defaultMode": 0o400, "optional": False},
        }
    ]
    (container,) = pod_of(job)["containers"]
    assert container["volumeMounts"] == [{"name": "farstep", "mountPath": "/run/farstep", "readOnly": True}]
    assert "key" not in str(container)
    shown = redacted(secret)
    assert "data" not in shown and "redacted" in shown["stringData"]["bootstrap"]


def test_pods_have_no_more_rights_than_they_need() -> None:
    _, job, _ = asked()
    pod = pod_of(job)
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"]
    assert pod["containers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }


def test_options_reach_the_pod() -> None:
    _, job, _ = asked(**FULL)
    pod, (container,) = pod_of(job), pod_of(job)["containers"]
    assert container["resources"] == {
        "requests": {"cpu": "500m", "memory": "1Gi"},
        "limits": {"memory": "2Gi", "nvidia.com/gpu": "2"},
    }
    assert container["imagePullPolicy"] == "Never"
    assert container["command"][:2] == ["/bin/sh", "-c"]
    _, first, *_, second = container["command"][3].splitlines()
    assert first == "source /env/bin/activate"
    assert second.startswith("exec '/opt/my python/bin/python' -m farstep.launch.daemon.node_daemon")
    assert [mount["mountPath"] for mount in container["volumeMounts"]] == ["/run/farstep", "/data"]
    assert [volume["name"] for volume in pod["volumes"]] == ["farstep", "data"]
    assert (pod["serviceAccountName"], pod["nodeSelector"]) == ("farstep", {"pool": "gpu"})
    assert pod["tolerations"] == FULL["tolerations"]
    assert job["spec"]["template"]["metadata"]["annotations"] == {"team": "rl"}


@pytest.mark.parametrize("shells", [["sh", "bash"], ["sh"]], ids=["bash", "no bash"])
def test_setup_runs_before_the_daemon(shells: list[str], tmp_path: Path) -> None:
    """With the commands of pods; `python` only prints its arguments."""
    (tmp_path / "bin").mkdir()
    for shell in shells:
        (tmp_path / "bin" / shell).symlink_to(shutil.which(shell) or "")
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$SHELL_IS $*"; read line; echo "$line"\n')
    python.chmod(0o755)
    (tmp_path / "bootstrap").write_text("the keys\n")
    (tmp_path / "activate").write_text("export SHELL_IS=sourced\n")
    setup = ["set -u", f"{'source' if 'bash' in shells else '.'} {tmp_path}/activate"]
    _, job, *_ = asked(setup=setup, python=str(python))
    command = [part.replace("/run/farstep", str(tmp_path)) for part in pod_of(job)["containers"][0]["command"]]
    environment = {"PATH": str(tmp_path / "bin"), "FARSTEP_NODE": "a node"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "sourced -m farstep.launch.daemon.node_daemon --place a node\nthe keys\n"
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("options", "cpu", "workers"),
    [
        ({"workers_per_node": 3, "cpus_per_worker": 2}, "6", 3),
        ({"requests": {"cpu": "2500m"}}, "2500m", 2),
        ({"requests": {"cpu": 4}, "cpus_per_worker": 2}, "4", 2),
        ({"requests": {"cpu": "0.1"}}, "0.1", 1),
        ({"limits": {"cpu": "3"}}, None, 3),
    ],
)
def test_workers_and_cores_fit_together(options: dict[str, Any], cpu: str | None, workers: int) -> None:
    config = KubernetesConfig(image="i", **options)
    (container,) = pod_of(asked(**options)[1])["containers"]
    assert container["resources"].get("requests", {}).get("cpu") == cpu
    assert config.num_workers(envs_per_node=8) == workers


@pytest.mark.parametrize(
    ("base", "over", "both"),
    [
        ({"a": {"b": 1, "c": 2}}, {"a": {"c": 3}}, {"a": {"b": 1, "c": 3}}),
        ({"a": 1, "b": 2}, {"a": None}, {"b": 2}),
        (
            [{"name": "x", "v": 1}],
            [{"name": "y"}, {"name": "x", "w": 2}],
            [{"name": "x", "v": 1, "w": 2}, {"name": "y"}],
        ),
        ([{"name": "v", "mountPath": "/a"}], [{"name": "v", "mountPath": "/b"}], None),
        (["ALL"], ["KILL"], ["KILL"]),
        ([{"key": "a"}], [{"key": "b"}], [{"key": "b"}]),
        ([{"name": "x"}], [], []),
    ],
)
def test_templates_are_merged_as_kubernetes_would(base: Any, over: Any, both: Any) -> None:
    before = repr(base)
    assert merged(base, over) == (base + over if both is None else both)
    assert repr(base) == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"image": ""}, ["image", "''", "docs/kubernetes.md"]),
        ({"kind": "pod"}, ["kind", "'pod'", "job"]),
        ({"image": "far step"}, ["'far step'", "NAME"]),
        ({"image": "Farstep:1"}, ["'Farstep:1'", "lower-case"]),
        ({"image": "farstep:1:2"}, ["'farstep:1:2'"]),
        ({"namespace": "My_Team"}, ["'My_Team'", "lower-case"]),
        ({"pod_template": {"spec": 3}}, ["pod_template", "'spec': 3"]),
        ({"pod_template": {"spec": {"containers": "x"}}}, ["pod_template", "node-daemon"]),
        ({"pod_template": {"spec": {"containers": [{"image": "x"}]}}}, ["pod_template", "name"]),
        ({"image_pull_policy": "never"}, ["image_pull_policy", "Never"]),
        ({"requests": {"cpu": "two"}}, ["'two'", "500m"]),
        ({"requests": ["cpu"]}, ["requests", "mapping"]),
        ({"pod_template": {"volumes": []}}, ["pod_template", "'spec'"]),
        ({"tolerations": {"key": "x"}}, ["tolerations", "list"]),
        ({"time_limit": "1h"}, ["time_limit", "'1h'", "3600"]),
        ({"time_limit": "3600", "kind": "deployment"}, ["time_limit", "deployment", "kind='job'"]),
        ({"imagee": "x"}, ["imagee", "image"]),
        ({"nodes": 2, "min_nodes": 3}, ["min_nodes"]),
    ],
    ids=str,
)
def test_mistakes_are_named(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        KubernetesConfig.of({"image": "i", **options})
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "image",
    [
        "farstep",
        "farstep:1.0_a",
        "localhost/farstep",
        "registry.example:5000/team/far-step__x.y:latest",
        "10.0.0.1:5000/a/b/c@sha256:" + "0" * 64,
        "Registry.Example/a",
    ],
)
def test_names_that_images_may_have(image: str) -> None:
    assert KubernetesConfig(image=image).image == image
