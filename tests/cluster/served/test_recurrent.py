"""A recurrent agent with acting servers on named nodes: with AAPS, resumed, and when a named node leaves."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import farstep
from farstep.launch.engines.ssh import SSHEngine
from farstep.sync import AAPS
from tests.cluster.checks import arrays_of, assert_balanced, assert_same, cluster, eventually, within
from tests.cluster.nodes import node_config, on_nodes
from tests.cluster.served.agents import RandomRecurrentAgent, WhoAgent
from tests.cluster.served.test_served import actions_in_progress, batches
from tests.cluster.tables import ENDLESS
from tests.cluster.toys import RememberingAgent

pytestmark = pytest.mark.slow  # real processes


class RecurrentCoinAgent(RememberingAgent):
    """Recurrent; the divergence between two such agents is known. The state counts the steps of the episode."""

    def __init__(self) -> None:
        super().__init__()
        self.logit = np.zeros(1)

    def get_parameters(self) -> Any:
        return {"logit": self.logit}

    def distribution(self, obs: Any, state: Any, episode_start: Any) -> Any:
        return {"bernoulli": np.repeat(self.logit, len(obs))[:, None]}


def assert_remembers(batch: Any) -> None:
    """Check that each row has the recurrent state of its own episode."""
    np.testing.assert_array_equal(batch["age"], batch["obs"][..., 1] + 1)


def test_recurrent_agent_acts_on_named_nodes_as_in_workers(tmp_path: Path) -> None:
    config = node_config(tmp_path, 2, workers_per_node=2)
    expected, *found = (
        batches(RandomRecurrentAgent(), inference, config=config)
        for inference in ("local", {"where": ["host1"]}, {"where": ["host0", "host1"]})
    )
    for served in found:
        for one, other in zip(served, expected, strict=True):
            assert_same(one, other)


def test_recurrent_server_on_a_named_node_pulls_when_the_divergence_exceeds_the_threshold(tmp_path: Path) -> None:
    agent = RecurrentCoinAgent()
    config = node_config(tmp_path, 2, workers_per_node=1)
    with cluster(envs=2, config=config, sync=AAPS(0.05, window=1), inference={"where": ["host1"]}) as env:
        versions = []
        for _ in range(10):
            batch = within(lambda: env.collect(agent, 5))
            assert_remembers(batch)
            versions.append(np.unique(batch["version"]).item())
            agent.logit += 0.2
        stats = env.stats()
    pulls = len(set(versions))
    assert versions == sorted(versions) and 2 < pulls < 10
    assert stats["pulls"] == {"total": pulls, "per_worker": [pulls, pulls]}


@pytest.mark.parametrize("options", [{}, {"sync": AAPS(0.05)}], ids=["always", "aaps"])
def test_saved_recurrent_run_continues_on_a_named_node(tmp_path: Path, options: dict[str, Any]) -> None:
    agent = RecurrentCoinAgent()
    config = node_config(tmp_path, 2, workers_per_node=1)

    def opened() -> farstep.ClusterEnv:
        return cluster(envs=2, config=config, inference={"where": ["host1"]}, **options)

    with opened() as env:
        actions = actions_in_progress(within(lambda: env.collect(agent, 8)))
        saved = within(env.save)
        expected = arrays_of(within(lambda: env.collect(agent, 6)).copy())
    with opened() as env:
        within(lambda: env.resume(agent, saved, actions))
        batch = within(lambda: env.collect(agent, 6))
        assert_remembers(batch)
        if env.cannot_replay:  # its episodes restart, with new states
            assert batch["episode_start"][0].all()
        else:
            assert_same(arrays_of(batch), expected)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["reclaimed", "lost"])
def test_recurrent_episodes_restart_when_the_named_node_leaves(
    tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SSHEngine, "grace_s", 3.0)  # the head does not release the node sooner
    agent = RecurrentCoinAgent()
    with on_nodes(tmp_path, 2, 2, workers=1, inference={"where": ["host1"]}, sync=AAPS(0.05)) as env:
        eventually(lambda: within(lambda: env.collect(agent, 5)).shape == (5, 2))
        (server,) = env.stats()["acting"]
        (node,) = [node for node in env.stats()["nodes"] if node["place"] == "ssh host1"]
        os.kill(node["pid"], number)
        eventually(lambda: env.stats()["acting"][0]["pid"] not in (0, server["pid"]))
        for _ in range(3):
            agent.logit += 0.2
            assert_remembers(within(lambda: env.collect(agent, 5)))
        eventually(lambda: within(lambda: env.collect(agent, 5)).shape == (5, 2))
        assert_balanced(env.stats())


def test_run_fails_if_the_named_node_does_not_return(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = WhoAgent()
    config = node_config(tmp_path, 2, min_nodes=1, workers_per_node=1, lease_s=4.0, queue_s=5.0)
    with cluster(envs=1, config=config, env_kwargs=ENDLESS, inference={"where": ["host1"]}) as env:
        eventually(lambda: within(lambda: env.collect(agent, 5)).shape == (5, 2))
        (node,) = [node for node in env.stats()["nodes"] if node["place"] == "ssh host1"]

        def refuse(*_: object) -> None:
            raise farstep.LaunchError("the node is gone")

        monkeypatch.setattr(SSHEngine, "request", refuse)
        os.kill(node["pid"], signal.SIGKILL)
        with pytest.raises(farstep.FarstepError, match="acting servers are to run on host1"):
            within(lambda: [env.collect(agent, 5) for _ in range(10_000)])
