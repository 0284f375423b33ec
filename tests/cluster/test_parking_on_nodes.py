"""Parking through node daemons. Nodes are processes of this machine, as in contract/test_nodes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

import farstep
from farstep.errors import LaunchError
from farstep.launch.daemon.criu import PROGRAM
from farstep.launch.engines.ssh import SSHEngine
from farstep.testing import TableAgent
from tests.cluster.checks import assert_balanced, cluster, eventually, within
from tests.cluster.nodes import node_config, on_nodes, shell_in
from tests.cluster.parking import (
    Trajectories,
    collect_while_scaling,
    is_running,
    parking_head,
    settled,
    state_of,
    stream_while_scaling,
)
from tests.cluster.parking_head import TellingEnv

PAUSE_S = 0.02
"""Between batches while processes start or timers run; without a pause, collecting would use all CPU time."""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("relay", [False, True], ids=["direct", "relay"])
def test_workers_on_nodes_are_parked_and_unparked_without_loss(tmp_path: Path, relay: bool) -> None:
    with on_nodes(tmp_path, 2, 2, relay=relay) as env:
        eventually(lambda: env.stats()["workers"]["alive"] == 4)
        agent, seen = TableAgent(), Trajectories()
        collect_while_scaling(env, agent, seen, 25)
        stream_while_scaling(env, agent, seen, 25)


@pytest.mark.timeout(120)
def test_scale_to_more_workers_than_the_nodes_have_requests_nodes(tmp_path: Path) -> None:
    with on_nodes(tmp_path, 1, 2) as env:
        agent, seen = TableAgent(), Trajectories()
        seen.add(env.collect(agent, steps=2))
        env.scale(workers=3)
        within(lambda: add_until(env, seen, columns=3))
        stats = settled(env, parked=1)
        assert len(stats["nodes"]) == 2 and stats["workers"]["queued"] == 0
        assert [event.worker for event in env.events("parked")] == [3]
        env.scale(workers=1)
        within(lambda: add_until(env, seen, columns=1))
        assert len(settled(env, parked=3)["nodes"]) == 2  # none is released
        env.scale(nodes=1)  # all its workers run, and the parked workers of the other node end
        within(lambda: add_until(env, seen, columns=2))
        eventually(lambda: len(env.stats()["nodes"]) == 1)
        assert not env.events(["lost", "stuck"]) and not env.stats()["workers"]["restarts"]


def add_until(env: farstep.ClusterEnv, seen: Trajectories, columns: int) -> None:
    while seen.columns[-1] != columns:
        seen.add(env.collect(TableAgent(), steps=2))
        time.sleep(PAUSE_S)


@pytest.mark.timeout(120)
def test_parked_worker_outlives_its_connection_and_the_lease(tmp_path: Path) -> None:
    """A suspended process answers no heartbeat: the head closes its connection. The daemon reports it as running."""
    with on_nodes(tmp_path, 1, 1, lease_s=4) as env:
        agent, seen = TableAgent(), Trajectories()
        seen.add(env.collect(agent, steps=2))
        env.scale(workers=1)
        settled(env, parked=1)
        ends = time.monotonic() + 4.5
        while time.monotonic() < ends:
            seen.add(env.collect(agent, steps=2))
            time.sleep(PAUSE_S)
        env.scale(workers=2)
        within(lambda: add_until(env, seen, columns=2), 30)
        assert not env.events(["lost", "stuck", "restarted"])
        assert_balanced(env.stats())


@pytest.mark.timeout(120)
def test_node_that_is_lost_with_parked_workers_is_replaced_when_they_are_needed(tmp_path: Path) -> None:
    with on_nodes(tmp_path, 2, 2, workers=1) as env:
        agent = TableAgent()
        eventually(lambda: env.stats()["workers"]["alive"] == 2)
        env.scale(workers=1)
        settled(env, parked=1)
        os.kill(env.stats()["nodes"][1]["pid"], signal.SIGKILL)
        eventually(lambda: any("was silent" in e.text or "is lost" in e.text for e in env.events("lost")), 30)
        assert env.collect(agent, steps=2).slots.tolist() == [0]
        assert env.stats()["workers"]["parked"] == 1 and env.stats()["workers"]["queued"] == 0
        env.scale(workers=2)
        eventually(lambda: env.stats()["workers"]["alive"] == 2)
        assert env.collect(agent, steps=2).slots.tolist() == [0, 1]
        assert not env.stats()["workers"]["restarts"]  # the node is to blame


def park_second(env: farstep.ClusterEnv, agent: TableAgent) -> int:
    """Park the second of two workers, and return its process id."""
    eventually(lambda: env.stats()["workers"]["alive"] == 2)
    pid = int(env.step(agent)[4]["pid"][1])
    env.scale(workers=1)
    settled(env, parked=1)
    return pid


@pytest.mark.timeout(120)
def test_node_that_its_engine_reclaims_ends_with_its_parked_workers(tmp_path: Path) -> None:
    with on_nodes(tmp_path, 2, 2, workers=1, env=TellingEnv) as env:
        agent = TableAgent()
        pid = park_second(env, agent)
        daemon = env.stats()["nodes"][1]["pid"]
        os.kill(daemon, signal.SIGTERM)
        eventually(lambda: not is_running(pid) and not is_running(daemon), 30)
        assert env.events("requeued") and not env.events(["lost", "stuck"])
        assert len(env.step(agent)[4]["pid"]) == 1
        env.scale(workers=2)
        eventually(lambda: env.stats()["workers"]["alive"] == 2)
        assert len(env.step(agent)[4]["pid"]) == 2


@pytest.mark.timeout(120)
def test_parked_worker_on_a_node_that_is_killed_is_restarted_when_it_is_unparked(tmp_path: Path) -> None:
    with on_nodes(tmp_path, 1, 1, env=TellingEnv) as env:
        agent = TableAgent()
        pid = park_second(env, agent)
        eventually(lambda: state_of(pid) == "T")
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: env.events("lost"))
        assert env.stats()["workers"]["parked"] == 1
        env.scale(workers=2)
        eventually(lambda: env.stats()["workers"]["alive"] == 2)
        assert len(env.step(agent)[4]["pid"]) == 2 and env.stats()["workers"]["restarts"] == 1


@pytest.mark.timeout(120)
def test_parked_worker_that_was_killed_is_not_restarted_because_its_node_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SSHEngine, "grace_s", 3.0)  # the head does not release the node sooner
    with on_nodes(tmp_path, 2, 2, workers=1, env=TellingEnv) as env:
        agent = TableAgent()
        pid = park_second(env, agent)
        eventually(lambda: state_of(pid) == "T")
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: env.events("lost"))
        daemon = env.stats()["nodes"][1]["pid"]
        os.kill(daemon, signal.SIGTERM)
        eventually(lambda: not is_running(daemon), 30)
        assert len(env.step(agent)[4]["pid"]) == 1
        workers = env.stats()["workers"]
        assert workers["parked"] == 1 and not workers["restarts"] and not env.events("restarted")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("killed", ["head", "head on nodes", "daemon"])
def test_no_stopped_process_outlives_a_killed_head_or_daemon(killed: str, tmp_path: Path) -> None:
    shell = "" if killed == "head" else shell_in(tmp_path)
    with parking_head(tmp_path, shell) as pids:
        os.kill(pids["daemons" if killed == "daemon" else "head"][0], signal.SIGKILL)
        eventually(lambda: not any(map(is_running, pids["workers"])), 30)


@pytest.mark.parametrize(
    ("program", "reason"),
    [("/bin/false", "/bin/false check' failed"), ("/nowhere/criu", "criu is not installed")],
    ids=["broken", "absent"],
)
def test_node_without_a_working_criu_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, reason: str
) -> None:
    """Also where criu does not work: test_criu.py is skipped there."""
    monkeypatch.setenv(PROGRAM, program)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    config = node_config(tmp_path, 1, workers_per_node=2, relay=True, park_method="criu")
    with pytest.raises(LaunchError, match=rf"(?s){reason}.*park_method='suspend'"), cluster(config=config) as env:
        env.launch()
