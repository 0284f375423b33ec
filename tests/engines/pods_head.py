"""A head outside the pods' host: `python pods_head.py URL FOLDER` checks the contract of launchers on it."""

from __future__ import annotations

import functools
import sys
import threading
import time
from typing import Any

import numpy as np

import farstep
from farstep.testing import CountingEnv, TableAgent, check_launcher
from tests.engines.podman_pods import PodmanConfig, podman


def kill_pod(url: str, node: dict[str, Any]) -> None:
    podman(url, "pod", "kill", node["host"])


def started(make_config: Any, **options: Any) -> farstep.ClusterEnv:
    source = {"type": "factory", "env_name": CountingEnv, "envs_per_node": 4, "seed": 1}
    return farstep.ClusterEnv(source, make_config(nodes=2, workers_per_node=1, **options))


def collect_until(env: farstep.ClusterEnv, agent: TableAgent, width: int) -> None:
    deadline = time.monotonic() + 120
    while env.collect(agent, steps=4)["obs"].shape[1] != width:
        assert time.monotonic() < deadline, f"no batch of {width} columns"
        time.sleep(0.05)  # pods start meanwhile, and need the CPU time


def train(env: farstep.ClusterEnv) -> None:
    """New weights reach workers in pods, and rows have their actions."""
    agent = TableAgent()
    collect_until(env, agent, 8)
    for version in range(3):
        batch = env.collect(agent, steps=16)
        assert batch["obs"].shape[:2] == (16, 8) and (batch["version"] == version).all()
        for obs, action in zip(batch["obs"], batch["action"], strict=True):
            np.testing.assert_array_equal(action, agent.act(obs)["action"])
        agent.table[:] = (agent.table + 1) % 3
    hosts = {node["host"] for node in env.stats()["nodes"]}
    assert len(hosts) == 2 and all(host.startswith("farstep-") for host in hosts), hosts
    assert {node["place"] for node in env.stats()["nodes"]} == {"podman"}


def drain(env: farstep.ClusterEnv, url: str) -> None:
    """A pod that is stopped delivers its rows, and is replaced."""
    # Not the pod: podman takes its network away at once, which Kubernetes does last.
    stop = ("stop", "--time", "20", f"{env.stats()['nodes'][1]['host']}-node-daemon")
    stopping = threading.Thread(target=podman, args=(url, *stop))
    stopping.start()
    agent = TableAgent()
    collect_until(env, agent, 4)
    collect_until(env, agent, 8)
    stopping.join()
    assert not env.stats()["dropped"], env.stats()["dropped"]


if __name__ == "__main__":
    url, folder = sys.argv[1:]
    config = functools.partial(PodmanConfig.make, url, folder)
    with started(config, relay=True) as env:
        train(env)
    with started(config, min_nodes=1) as env:
        train(env)
        drain(env, url)
    check_launcher(config, kill_node=functools.partial(kill_pod, url))
    print("kept")
