"""A head outside a real cluster: `python kubernetes_head.py KIND` checks the contract of launchers on it."""

from __future__ import annotations

import functools
import logging
import sys
from typing import Any

import host_image

from farstep.errors import LaunchError
from farstep.launch_config import KubernetesConfig
from farstep.testing import check_launcher


def make(kind: str, **options: Any) -> KubernetesConfig:
    return KubernetesConfig(kind=kind, **host_image.options(), **options)


def crash(node: dict[str, Any]) -> None:
    """Whoever runs the cluster is asked for it."""
    print(f"crash {node['place']}", flush=True)
    assert sys.stdin.readline() == "crashed\n"


def refused(kind: str) -> None:
    """A namespace where this user has no rights."""
    from farstep import ClusterEnv

    try:
        ClusterEnv({"env_name": "CartPole-v1"}, make(kind, namespace="default")).launch()
    except LaunchError as error:
        print(f"refused: {error}")
        assert "docs/kubernetes.md" in str(error)
        return
    raise AssertionError("farstep used a namespace without having the right to")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    refused(sys.argv[1])
    check_launcher(functools.partial(make, sys.argv[1]), kill_node=crash)
