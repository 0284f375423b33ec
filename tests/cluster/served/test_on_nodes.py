"""Served inference on nodes: each node daemon starts an acting server for the workers of its node."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from farstep.errors import ConfigError
from farstep.testing import CountingEnv
from tests.cluster.checks import assert_balanced, cluster, eventually, within
from tests.cluster.nodes import node_config, on_nodes
from tests.cluster.served.agents import WhoAgent
from tests.cluster.tables import ENDLESS

pytestmark = pytest.mark.slow  # real processes, or learning


@pytest.mark.parametrize("relay", [False, True], ids=["direct", "relay"])
def test_each_node_has_a_server_which_leaves_with_it(tmp_path: Path, relay: bool) -> None:
    agent = WhoAgent()
    with on_nodes(tmp_path, 2, 2, inference="served", relay=relay) as env:
        eventually(lambda: within(lambda: env.collect(agent, 5)).shape == (5, 4))  # one node is enough to start
        batch = within(lambda: env.collect(agent, 10))
        servers = [entry["pid"] for entry in env.stats()["acting"]]
        np.testing.assert_array_equal(batch["pid"][0], np.repeat(servers, 2))
        np.testing.assert_array_equal(batch["slot"][0], batch.slots)
        os.kill(servers[1], signal.SIGKILL)
        batch = within(lambda: env.collect(agent, 10))
        assert batch.shape == (10, 4) and servers[1] not in batch["pid"]
        for version in range(1, 6):  # a ticket may arrive at a worker before the version arrives at its server
            within(lambda: env.publish(agent))
            assert (within(lambda: env.collect(agent, 5))["version"] == version).all()
        within(lambda: env.scale(nodes=1))
        eventually(lambda: len(env.stats()["nodes"]) == 1)
        assert within(lambda: env.collect(agent, 5)).shape == (5, 2)
        within(lambda: env.scale(nodes=2))
        eventually(lambda: within(lambda: env.collect(agent, 5)).shape == (5, 4))
        assert_balanced(env.stats())


class SlowToCloseEnv(CountingEnv):
    """One of two environments takes a while to close: the one that creates a file first."""

    def __init__(self, path: str, **options: Any) -> None:
        super().__init__(**options)
        self._path = Path(path)

    def close(self) -> None:
        try:
            self._path.touch(exist_ok=False)
            time.sleep(2)  # the head notices the end of the other worker meanwhile
        except FileExistsError:
            pass


def test_a_node_is_released_although_its_workers_end_one_after_the_other(tmp_path: Path) -> None:
    config = node_config(tmp_path, 2, min_nodes=1, workers_per_node=2)
    kwargs = {"path": str(tmp_path / "closing"), **ENDLESS}
    with cluster(SlowToCloseEnv, envs=2, config=config, env_kwargs=kwargs, inference="served") as env:
        eventually(lambda: within(lambda: env.collect(WhoAgent(), 5)).shape == (5, 4))
        within(lambda: env.scale(nodes=1))
        eventually(lambda: len(env.stats()["nodes"]) == 1)


@pytest.mark.parametrize("where", ["head", ["host1"]], ids=["head", "named"])
def test_a_server_elsewhere_acts_for_all_nodes_and_is_replaced(tmp_path: Path, where: str | list[str]) -> None:
    agent = WhoAgent()
    with on_nodes(tmp_path, 2, 2, inference={"where": where}) as env:
        batch = within(lambda: env.collect(agent, 10))
        (server,) = env.stats()["acting"]
        assert (batch["pid"] == server["pid"]).all()
        np.testing.assert_array_equal(batch["slot"][0], batch.slots)
        places = {node["place"] for node in env.stats()["nodes"] if 4 in node["workers"]}
        assert places == (set() if where == "head" else {"ssh host1"})
        os.kill(server["pid"], signal.SIGKILL)
        assert server["pid"] not in within(lambda: env.collect(agent, 10))["pid"]
        for version in (1, 2):
            within(lambda: env.publish(agent))
            assert (within(lambda: env.collect(agent, 5))["version"] == version).all()
        assert env.stats()["acting"][0]["restarts"] == 1
        assert_balanced(env.stats())


def test_node_is_released_while_the_head_serves(tmp_path: Path) -> None:
    agent = WhoAgent()
    with on_nodes(tmp_path, 2, 2, inference={"where": "head"}) as env:
        eventually(lambda: within(lambda: env.collect(agent, 5)).shape == (5, 4))
        within(lambda: env.scale(nodes=1))
        eventually(lambda: len(env.stats()["nodes"]) == 1)
        assert within(lambda: env.collect(agent, 5)).shape == (5, 2)
        assert_balanced(env.stats())


@pytest.mark.timeout(120)
def test_a_server_starts_again_with_its_node(tmp_path: Path) -> None:
    agent = WhoAgent()
    with on_nodes(tmp_path, 2, 2, inference={"where": ["host1"]}) as env:
        eventually(lambda: within(lambda: env.collect(agent, 5)).shape == (5, 4))
        (server,) = env.stats()["acting"]
        (node,) = [node for node in env.stats()["nodes"] if node["place"] == "ssh host1"]
        os.kill(node["pid"], signal.SIGKILL)
        eventually(lambda: env.stats()["acting"][0]["pid"] not in (0, server["pid"]))
        eventually(lambda: within(lambda: env.collect(agent, 5)).shape == (5, 4))
        assert server["pid"] not in within(lambda: env.collect(agent, 5))["pid"]
        assert_balanced(env.stats())


def test_nodes_with_servers_are_not_released(tmp_path: Path) -> None:
    with on_nodes(tmp_path, 2, 2, inference={"where": ["host0", "host1"], "copies": 2}) as env:
        batch = within(lambda: env.collect(WhoAgent(), 5))
        assert len(env.stats()["acting"]) == len(np.unique(batch["pid"])) == 4
        with pytest.raises(ConfigError, match="acting servers run on it"):
            env.scale(nodes=1)
        assert within(lambda: env.collect(WhoAgent(), 5)).shape == (5, 4)


def test_servers_cannot_run_on_nodes_that_the_run_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="host2 is a spare host"):
        on_nodes(tmp_path, 2, 3, inference={"where": ["host1", "host2"]}).launch()
    with pytest.raises(ConfigError, match="relay=True"):
        on_nodes(tmp_path, 2, 2, inference={"where": ["host1"]}, relay=True).launch()
    with pytest.raises(ConfigError, match="has only this machine"):
        cluster(inference={"where": ["host1"]}).launch()
    for invalid in ([], [""], ["a", "a"], [1], 3):
        with pytest.raises(ConfigError, match="a list of distinct nodes"):
            cluster(inference={"where": invalid})
