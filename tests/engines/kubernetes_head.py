"""A head outside a real cluster: `python kubernetes_head.py KIND` checks the contract of launchers on it. With `inside`
in place of a kind, a head in one of its pods."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

from farstep import ClusterEnv
from farstep.config.kubernetes import KubernetesConfig
from farstep.errors import LaunchError
from farstep.testing import CountingEnv, TableAgent, check_launcher
from tests.engines import host_image


def make(kind: Any, **options: Any) -> KubernetesConfig:
    return KubernetesConfig(kind=kind, **{**host_image.options(), **options})


def crash(node: dict[str, Any]) -> None:
    """Ask the parent process, which runs the cluster, to crash a node."""
    print(f"crash {node['place']}", flush=True)
    assert sys.stdin.readline() == "crashed\n"


@contextlib.contextmanager
def without_cluster() -> Iterator[None]:
    known, os.environ["KUBECONFIG"] = os.environ["KUBECONFIG"], "/no/such/file"
    try:
        yield
    finally:
        os.environ["KUBECONFIG"] = known


def refused(kind: str) -> None:
    """A namespace where this user has no rights."""
    try:
        ClusterEnv({"env_name": "CartPole-v1"}, make(kind, namespace="default")).launch()
    except LaunchError as error:
        print(f"refused: {error}")
        assert "docs/kubernetes.md" in str(error)
        return
    raise AssertionError("farstep used a namespace without having the right to")


def train_inside() -> None:
    """Until the pod is deleted."""
    source = {"type": "factory", "env_name": CountingEnv, "envs_per_node": 2, "seed": 1}
    with ClusterEnv(source, make("job", workers_per_node=1)) as env:
        assert env.collect(TableAgent(), steps=8)["obs"].shape[:2] == (8, 2)
        print("training")
        signal.pause()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    if sys.argv[1] == "inside":
        train_inside()
    refused(sys.argv[1])
    scarce = functools.partial(make, sys.argv[1], nodes=3, requests={"cpu": "1500m"})  # two nodes have two cores each
    check_launcher(functools.partial(make, sys.argv[1]), kill_node=crash, scarce=scarce, missing=without_cluster)
