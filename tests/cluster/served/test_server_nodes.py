"""Served inference on a node without workers: hosts that `where` names in addition to `SSHConfig.hosts`."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import farstep
from farstep.cluster_env import status_page_of
from farstep.errors import LaunchError
from farstep.testing import CountingEnv
from tests.cluster.checks import DEADLINE_S, assert_balanced, cluster, eventually, within
from tests.cluster.nodes import SHELL, node_config, on_nodes
from tests.cluster.served.agents import ThreadsAgent, WhoAgent
from tests.cluster.tables import ENDLESS

pytestmark = pytest.mark.slow  # real processes
SERVED: dict[str, Any] = {"inference": {"where": ["gpu"]}}


def set_shell(folder: Path, for_gpu: str) -> None:
    """Let the program in place of ssh run a line first if the host is `gpu`."""
    new = folder / "new"
    new.write_text(SHELL.replace("shift", f'if [ "$1" = gpu ]; then {for_gpu}; fi\nshift'))
    new.chmod(0o755)
    new.rename(folder / "shell")


def node_of(env: farstep.ClusterEnv, host: str) -> dict[str, Any]:
    (node,) = [node for node in env.stats()["nodes"] if node["place"] == f"ssh {host}"]
    return dict(node)


def test_a_node_without_workers_acts_for_the_other_nodes(tmp_path: Path) -> None:
    agent = WhoAgent()
    with on_nodes(tmp_path, 1, 2, **SERVED) as env:
        batch = within(lambda: env.collect(agent, 10))
        (server,) = env.stats()["acting"]
        assert batch.shape == (10, 2) and (batch["pid"] == server["pid"]).all()
        np.testing.assert_array_equal(batch["slot"][0], batch.slots)
        assert node_of(env, "host0")["workers"] == [0, 1] and node_of(env, "gpu")["workers"] == [4]
        workers = env.stats()["workers"]
        assert (workers["alive"], workers["starting"], workers["queued"], workers["lost"]) == (2, 0, 0, 0)
        os.kill(server["pid"], signal.SIGKILL)
        assert server["pid"] not in within(lambda: env.collect(agent, 10))["pid"]
        assert env.stats()["acting"][0]["restarts"] == 1
        for version in (1, 2):
            within(lambda: env.publish(agent))
            assert (within(lambda: env.collect(agent, 5))["version"] == version).all()
        within(lambda: env.scale(nodes=2))  # only nodes with workers count
        eventually(lambda: within(lambda: env.collect(agent, 5)).shape == (5, 4))
        within(lambda: env.scale(nodes=1))
        eventually(lambda: len(env.stats()["nodes"]) == 2)
        assert within(lambda: env.collect(agent, 5)).shape == (5, 2)
        assert node_of(env, "gpu")["workers"] == [4]
        assert_balanced(env.stats())


@pytest.mark.timeout(180)
def test_calls_wait_for_the_node_of_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farstep.head.server.FIRST_START_S", 0.1)
    agent, ready = WhoAgent(), tmp_path / "ready"
    with contextlib.closing(on_nodes(tmp_path, 1, 1, **SERVED)) as env:
        set_shell(tmp_path, f"until [ -e {ready} ]; do sleep 0.1; done")
        page = status_page_of(env).source

        def is_shown(state: str, text: str) -> bool:
            shown = page.read()
            return shown["state"] == state and text in shown["diagnoses"][0]["text"]

        waits = "waiting for 1 node for acting servers (gpu) not connected yet: ssh runs on gpu"
        launching = threading.Thread(target=env.launch)
        launching.start()
        eventually(lambda: is_shown("starting", waits))
        assert launching.is_alive()
        ready.touch()
        launching.join(DEADLINE_S)
        server = within(lambda: env.collect(agent, 5))["pid"][0, 0]
        ready.unlink()
        os.kill(node_of(env, "gpu")["pid"], signal.SIGKILL)
        eventually(lambda: len(env.stats()["nodes"]) == 1)
        collecting = threading.Thread(target=env.collect, args=(agent, 5))
        collecting.start()
        eventually(lambda: is_shown("waiting for nodes", "nodes: 1 node for acting servers (gpu) not connected yet"))
        assert "min_nodes" not in page.read()["diagnoses"][0]["remedy"]
        ready.touch()
        collecting.join(DEADLINE_S)
        assert not collecting.is_alive() and server not in within(lambda: env.collect(agent, 5))["pid"]
        assert_balanced(env.stats())


@pytest.mark.timeout(120)
def test_a_run_whose_server_has_no_node_any_more_ends(tmp_path: Path) -> None:
    agent = WhoAgent()
    config = node_config(tmp_path, 1, workers_per_node=2, lease_s=4.0, restart_budget=1)
    with cluster(CountingEnv, envs=2, config=config, env_kwargs=ENDLESS, **SERVED) as env:
        within(lambda: env.collect(agent, 5))
        set_shell(tmp_path, "echo 'connect to gpu: No route to host' >&2; exit 255")
        os.kill(node_of(env, "gpu")["pid"], signal.SIGKILL)
        with pytest.raises(LaunchError, match=r"(?s)servers on gpu: ssh ended on gpu.*restart_budget=1.*No route"):
            within(lambda: [env.collect(agent, 5) for _ in range(1_000_000)])


def test_an_unreachable_host_of_a_server_is_named(tmp_path: Path) -> None:
    with contextlib.closing(on_nodes(tmp_path, 1, 1, **SERVED)) as env:
        set_shell(tmp_path, "echo 'Could not resolve hostname gpu' >&2; exit 255")
        with pytest.raises(LaunchError, match=r"(?s)acting servers on gpu: ssh ended on gpu.*Could not resolve"):
            within(env.launch)


def test_servers_use_all_cores_of_a_node_without_workers(tmp_path: Path) -> None:
    config = node_config(tmp_path, 1, workers_per_node=2, cpu_affinity=[0])
    with cluster(envs=2, config=config, inference={"where": ["gpu"], "copies": 2}) as env:
        threads = within(lambda: env.collect(ThreadsAgent(), 2))["threads"]
        assert (threads == max(1, farstep.resources.usable_cpus() // 2)).all()
