"""Workflows on clusters whose nodes join and leave. Nodes are processes of this machine, as in contract/test_nodes."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import farstep
from farstep.testing import FaultyEnv, TableAgent
from farstep.workflow import rollout_requests
from farstep.workflow.triggers import DataKeyTrigger, ObjectKeyTrigger
from tests.cluster.checks import assert_balanced, assert_sound, cluster, eventually, within
from tests.cluster.flows import full
from tests.cluster.nodes import node_config
from tests.cluster.tables import ENDLESS, Recorder, gaps_of

PAUSE_S = 0.01
"""Of a learner: processes start while it learns, and need the CPU time."""


def on_nodes(folder: Path, nodes: int, most: int, fewest: int = 1, **options: Any) -> farstep.ClusterEnv:
    """A cluster of one worker with one environment per node."""
    config = node_config(folder, nodes, most, min_nodes=fewest, workers_per_node=1, lease_s=4)
    return cluster(envs=1, config=config, env_kwargs=ENDLESS, **options)


class Ages(Recorder):
    """Also keeps how old the rows of each batch were when it was learned from."""

    def __call__(self, message: Any) -> None:
        version = self.flow.env.version
        self.lags: list[int] = [*getattr(self, "lags", ()), version - int(self.flow.batch(message)["version"].min())]
        super().__call__(message)
        time.sleep(PAUSE_S)

    def columns(self) -> list[int]:
        return [batch.shape[1] for batch in self.batches]


@pytest.mark.timeout(300)
def test_on_policy_workflow_continues_while_nodes_join_and_leave(tmp_path: Path) -> None:
    """Two of at most three nodes are enough, the third takes part when it joins, and one that is killed is not waited
    for: every row is of the newest version, and nothing is lost or counted twice."""
    with on_nodes(tmp_path, 2, 3) as env:
        flow = farstep.Workflow(env, TableAgent(), full(3 * 16), steps=4)
        learner = Ages(flow, flow.publish)
        flow.on(DataKeyTrigger(n="all", size=8), learner)
        flow.on(ObjectKeyTrigger("parameters"), flow.next_rollout)
        within(lambda: flow.run(until=lambda: learner.columns()[-3:] == [2, 2, 2]))
        env.scale(nodes=3)
        within(lambda: flow.run(until=lambda: learner.columns()[-3:] == [3, 3, 3]), 120)
        os.kill(env.stats()["nodes"][0]["pid"], signal.SIGKILL)
        before = len(learner.batches)
        within(lambda: flow.run(until=lambda: 2 in learner.columns()[before:]), 120)
        within(lambda: flow.run(until=lambda: learner.columns()[-2:] == [3, 3]), 120)  # it is replaced
        env.scale(nodes=1)
        within(lambda: flow.run(until=lambda: learner.columns()[-2:] == [1, 1]), 120)
        assert set(learner.lags) == {0}
        assert_balanced(env.stats())
    for batch in learner.batches:
        assert_sound(batch)


@pytest.mark.timeout(300)
def test_windows_of_the_nodes_that_are_present(tmp_path: Path) -> None:
    """Two windows per update: both of the only node, then also of the node that joins, then of the one that stays."""
    with on_nodes(tmp_path, 1, 2) as env:
        flow = farstep.Workflow(env, TableAgent(), full(2 * 16), max_staleness=1)
        learner = Ages(flow, flow.publish)
        flow.on(DataKeyTrigger(n=2, size=8, of="windows"), learner)

        def latest() -> list[int]:
            return [len(set(batch.slots.tolist())) for batch in learner.batches[-3:]]

        within(lambda: flow.run(until=lambda: latest() == [1, 1, 1]))
        env.scale(nodes=2)
        within(lambda: flow.run(until=lambda: 2 in latest()), 120)
        env.scale(nodes=1)
        within(lambda: flow.run(until=lambda: env.stats()["workers"]["alive"] == 1 and latest() == [1, 1, 1]), 120)
        assert max(learner.lags) <= 1
        assert_balanced(env.stats())
    gaps_of(learner.batches)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("n", "fewest", "killed"), [(2, 1, 1), ("all", 1, 2), ("all", 2, 1)])
def test_rollout_on_demand_survives_the_loss_of_its_nodes(n: Any, fewest: int, killed: int, tmp_path: Path) -> None:
    """Nodes are killed before they have what the trigger needs: those that replace them roll it, so that the trigger
    fires and asks for the next rollout, with no fewer workers than it waits for or `min_nodes` requires."""
    with on_nodes(tmp_path, 2, 2, fewest) as env:
        flow = farstep.Workflow(env, TableAgent(), full(2 * 16), steps=4)
        learner = Ages(flow, flow.publish)
        flow.on(DataKeyTrigger(n=n, size=8), learner)
        flow.on(ObjectKeyTrigger("parameters"), flow.next_rollout)
        within(lambda: flow.run(until=lambda: len(learner.batches) >= 2))
        for node in env.stats()["nodes"][:killed]:
            os.kill(node["pid"], signal.SIGKILL)
        before = len(learner.batches)
        within(lambda: flow.run(until=lambda: learner.columns()[before:][-2:] == [2, 2]), 120)
        assert min(learner.columns()[before:]) >= (fewest if n == "all" else n)
        assert set(learner.lags) == {0}
        assert_balanced(env.stats())


@pytest.mark.timeout(300)
def test_rejoined_worker_does_not_roll_a_stored_window_again(tmp_path: Path) -> None:
    """A worker leaves after its window was stored and before the busy learner took it: when the worker is back, the
    rollout is there, and one more would be learned from a version too late."""
    with on_nodes(tmp_path, 1, 1) as env:
        flow = farstep.Workflow(env, TableAgent(), full(64), steps=4)
        first, released, lags = threading.Event(), threading.Event(), list[int]()

        def learn(message: Any) -> None:
            lags.append(env.version - int(flow.batch(message)["version"].min()))
            flow.publish()
            first.set()
            released.wait(120)

        flow.on(DataKeyTrigger(n="all", size=8), learn, thread=True)
        flow.on(ObjectKeyTrigger("parameters"), flow.next_rollout)
        runner = threading.Thread(target=lambda: flow.run(until=lambda: len(lags) >= 5))
        runner.start()
        assert first.wait(60)
        eventually(lambda: flow.ledger.written(0) >= 16, 60)
        os.kill(env.stats()["nodes"][0]["pid"], signal.SIGKILL)
        eventually(lambda: env.stats()["workers"]["alive"] == 0, 60)
        eventually(lambda: env.stats()["workers"]["alive"] == 1, 60)
        eventually(lambda: flow.ledger.present == frozenset({0}), 60)
        released.set()
        runner.join(120)
        assert not runner.is_alive()
        assert set(lags) == {0}
        assert_balanced(env.stats())


@pytest.mark.timeout(300)
def test_stages_and_bounded_staleness_on_nodes_that_join(tmp_path: Path) -> None:
    with on_nodes(tmp_path, 1, 2, transfer=farstep.TransferTrigger.dual()) as env:
        flow = farstep.Workflow(env, TableAgent(), full(2 * 32), steps=8, max_staleness=1)
        stages, lags, columns = list[int](), list[int](), list[int]()

        def learn(message: Any) -> None:
            stages.append(message["stage"])
            if message["stage"] == 1:
                batch = flow.batch(message)
                columns.append(batch.shape[1])
                lags.append(env.version - int(batch["version"].min()))
                flow.publish()
                time.sleep(PAUSE_S)

        flow.on(DataKeyTrigger(n="all", size=8, keys=(("reward",), ("obs",))), learn, thread=True)
        within(lambda: flow.run(until=lambda: len(columns) >= 3))
        env.scale(nodes=2)
        within(lambda: flow.run(until=lambda: columns[-3:] == [2, 2, 2]), 120)
        env.scale(nodes=1)
        within(lambda: flow.run(until=lambda: columns[-3:] == [1, 1, 1]), 120)
        assert max(lags) <= 1
        assert_balanced(env.stats())


@pytest.mark.timeout(300)
def test_a_trigger_that_waits_for_absent_workers_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_requests, "ABSENT_S", 0.2)
    with on_nodes(tmp_path, 1, 2) as env, caplog.at_level(logging.WARNING, "farstep"):
        flow = farstep.Workflow(env, TableAgent(), full(64))
        flow.on(DataKeyTrigger(n=2, size=8), lambda message: None)
        within(lambda: flow.run(until=lambda: "DataKeyTrigger" in caplog.text))
    assert "waits for 2 workers, but 1 of at most 2 are present" in caplog.text and 'n="all"' in caplog.text


@pytest.mark.parametrize(("thread", "max_staleness"), [(True, 2)])
def test_all_workers_of_one_machine(thread: bool, max_staleness: int, tmp_path: Path) -> None:
    """`n="all"` equals the number of workers, and the trigger waits for one that is killed, as `collect` does."""
    fault = {"fault": "sigkill", "phase": "step", "at": 30, "marker": str(tmp_path / "killed")}
    with cluster(FaultyEnv, envs=4, workers=2, env_kwargs=fault) as env:
        flow = farstep.Workflow(env, TableAgent(), full(4 * 32), steps=4, max_staleness=max_staleness)
        learner = Ages(flow, flow.publish)
        flow.on(DataKeyTrigger(n="all", size=8), learner, thread=thread)
        within(lambda: flow.run(until=lambda: len(learner.batches) >= 8 and (tmp_path / "killed").exists()))
        assert set(learner.columns()) == {4}
        assert max(learner.lags) <= max_staleness
        assert_balanced(env.stats())
