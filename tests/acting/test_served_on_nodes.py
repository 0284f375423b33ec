"""Served inference on nodes: each node daemon starts an acting server for the workers of its node."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from tests.acting.agents import WhoAgent
from tests.cluster.checks import assert_balanced, eventually, within
from tests.cluster.test_parking_on_nodes import on_nodes

pytestmark = pytest.mark.slow  # real processes, or learning


@pytest.mark.parametrize("relay", [False, True], ids=["direct", "relay"])
def test_each_node_has_a_server_which_leaves_with_it(tmp_path: Path, relay: bool) -> None:
    agent = WhoAgent()
    with on_nodes(tmp_path, 2, 2, inference="served", relay=relay) as env:
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


def test_a_server_with_the_head_acts_for_all_nodes(tmp_path: Path) -> None:
    agent = WhoAgent()
    with on_nodes(tmp_path, 2, 2, inference={"where": "head"}) as env:
        batch = within(lambda: env.collect(agent, 10))
        (server,) = env.stats()["acting"]
        assert (batch["pid"] == server["pid"]).all()
        np.testing.assert_array_equal(batch["slot"][0], batch.slots)
        os.kill(server["pid"], signal.SIGKILL)
        assert server["pid"] not in within(lambda: env.collect(agent, 10))["pid"]
        for version in (1, 2):
            within(lambda: env.publish(agent))
            assert (within(lambda: env.collect(agent, 5))["version"] == version).all()
        within(lambda: env.scale(nodes=1))
        eventually(lambda: len(env.stats()["nodes"]) == 1)
        assert within(lambda: env.collect(agent, 5)).shape == (5, 2)
        assert env.stats()["acting"][0]["restarts"] == 1
        assert_balanced(env.stats())
