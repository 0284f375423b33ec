"""Lost and refused node daemons. Nodes are processes of this machine: a shell stands in for ssh.

The files of real engines in tests/cluster have the contract of launchers.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import time
from pathlib import Path
from typing import Any, cast

import pytest

import farstep
from farstep.config.launch import SSHConfig
from farstep.errors import LaunchError
from farstep.launch.engines.ssh import SSHEngine
from farstep.testing import CountingEnv, TableAgent
from farstep.version import VERSION

pytestmark = pytest.mark.slow

PAUSE_S = 0.05
"""Between batches: processes start meanwhile, and need the CPU time."""
SHELL = """#!/bin/sh
shift
FARSTEP_RESTARTS={restarts} exec sh -c "$*"
"""


def kill_daemon(node: dict[str, Any]) -> None:
    os.kill(node["pid"], signal.SIGKILL)


def config(folder: Path, nodes: int = 1, max_nodes: int | None = None, restarts: int = 0, **options: Any) -> SSHConfig:
    shell = folder / "shell"
    shell.write_text(SHELL.format(restarts=restarts))
    shell.chmod(0o755)
    hosts = [f"host{i}" for i in range(max_nodes or nodes)]
    return SSHConfig(hosts=hosts, ssh=(str(shell),), nodes=nodes, max_nodes=max_nodes, **options)


def wait_for_columns(env: farstep.ClusterEnv, columns: int) -> None:
    deadline = time.monotonic() + 120
    while env.collect(TableAgent(), steps=4)["obs"].shape[1] != columns:
        assert time.monotonic() < deadline, f"no batch of {columns} columns"
        time.sleep(PAUSE_S)


@pytest.mark.timeout(300)
def test_an_engine_that_fails_for_a_while_does_not_end_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[int] = []

    def request(engine: SSHEngine, nodes: int, bootstrap: bytes, really: Any = SSHEngine.request) -> Any:
        requested.append(nodes)
        if len(requested) == 2:
            raise LaunchError("the engine does not answer.")
        return really(engine, nodes, bootstrap)

    monkeypatch.setattr(SSHEngine, "request", request)
    source = {"type": "factory", "env_name": CountingEnv, "envs_per_node": 1, "seed": 1}
    with farstep.ClusterEnv(source, config(tmp_path, nodes=2, min_nodes=1, workers_per_node=1)) as env:
        wait_for_columns(env, 2)
        kill_daemon(env.stats()["nodes"][1])
        wait_for_columns(env, 1)
        wait_for_columns(env, 2)
    assert requested == [2, 1, 1]


@pytest.mark.timeout(300)
def test_node_that_was_declared_lost_joins_again(tmp_path: Path) -> None:
    """Without its engine, which sees no lost node."""
    endless = functools.partial(CountingEnv, length=None)  # at an episode's end, info would be the reset's
    source = {"type": "factory", "env_name": endless, "envs_per_node": 1, "seed": 1}
    with farstep.ClusterEnv(source, config(tmp_path, nodes=2, min_nodes=1, workers_per_node=1, lease_s=2)) as env:
        wait_for_columns(env, 2)
        pid = env.stats()["nodes"][1]["pid"]
        os.kill(pid, signal.SIGSTOP)
        wait_for_columns(env, 1)
        _, reward, *_, info = env.step(TableAgent())
        assert len(reward) == len(info["action"]) == len(info["count"]) == 1  # infos are of the rows beside them
        assert [part.complete for part in env.parts(TableAgent(), steps=4)] == [True]  # without the absent worker
        os.kill(pid, signal.SIGCONT)
        wait_for_columns(env, 2)
        assert pid in [node["pid"] for node in env.stats()["nodes"]]


@pytest.mark.timeout(300)
def test_killed_daemon_is_restarted_by_its_supervisor_during_a_run(tmp_path: Path) -> None:
    """As SLURM starts it: the engine is not requested for a replacement, and the run continues."""
    source = {"type": "factory", "env_name": CountingEnv, "envs_per_node": 2, "seed": 1}
    agent = TableAgent()
    requested = config(tmp_path, workers_per_node=1, restart_budget=0, restarts=3)
    with farstep.ClusterEnv(source, requested) as env:

        def killed() -> int:
            kill_daemon(env.stats()["nodes"][0])
            return int(env.stats()["nodes"][0]["pid"])

        def replaced(pid: int) -> bool:
            return [node["pid"] for node in env.stats()["nodes"]] not in ([], [pid])

        env.collect(agent, steps=4)
        pid = killed()
        while not replaced(pid):
            assert env.collect(agent, steps=4)["obs"].shape == (4, 2, 3)
            time.sleep(PAUSE_S)
        stream = env.stream(agent, steps=4, max_staleness=1)
        next(stream)
        pid = killed()
        while not replaced(pid):
            assert next(stream)["obs"].shape == (4, 2, 3)
            time.sleep(PAUSE_S)
        cast(Any, stream).close()
        flow = farstep.Workflow(env, agent, farstep.Buffer(2 * 16, farstep.FullBatch()))
        flow.on(farstep.DataKeyTrigger(n=1, size=4), lambda message: flow.batch(message))
        flow.run(until=lambda: flow.ledger.env_steps >= 8)
        pid = killed()
        flow.run(until=lambda: replaced(pid))
        stats = env.stats()
        assert stats["rolled"] == (
            stats["delivered"] + sum(stats["dropped"].values()) + stats["buffered"] + stats["in_flight"]
        )


@pytest.mark.timeout(60)
def test_a_supervisor_gives_up_when_its_restarts_are_used_up(tmp_path: Path) -> None:
    source = {"type": "factory", "env_name": CountingEnv, "envs_per_node": 1, "seed": 1}
    requested = config(tmp_path, workers_per_node=1, restart_budget=0, restarts=1)
    with farstep.ClusterEnv(source, requested) as env:
        env.collect(TableAgent(), steps=4)
        with pytest.raises(LaunchError, match="1 node is missing"):
            while True:
                for node in env.stats()["nodes"]:
                    with contextlib.suppress(ProcessLookupError):  # the head may still list one that was killed
                        kill_daemon(node)
                env.collect(TableAgent(), steps=4)


@pytest.mark.timeout(300)
def test_new_agent_waits_for_the_replacement_of_the_only_node(tmp_path: Path) -> None:
    source = {"type": "factory", "env_name": CountingEnv, "envs_per_node": 1, "seed": 1}
    with farstep.ClusterEnv(source, config(tmp_path, workers_per_node=1)) as env:
        env.collect(TableAgent(), steps=4)
        kill_daemon(env.stats()["nodes"][0])
        deadline = time.monotonic() + 60
        while env.stats()["nodes"]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert env.collect(TableAgent(), steps=4)["obs"].shape == (4, 1, 3)


OTHER_VERSION = """
import farstep.version
farstep.version.VERSION = "9.9"
import msgspec
import farstep.wire.node_messages as n
n.encode = lambda message: msgspec.msgpack.encode({**msgspec.to_builtins(message), "place": 7})
"""


def test_a_daemon_whose_hello_cannot_be_decoded_is_refused_with_both_versions(tmp_path: Path) -> None:
    """Another version of farstep may encode it differently."""
    (tmp_path / "sitecustomize.py").write_text(OTHER_VERSION)
    folders = f"{tmp_path}:{Path(farstep.__file__).parents[1]}"
    env = farstep.ClusterEnv({"env_name": "CartPole-v1"}, config(tmp_path, setup=[f"export PYTHONPATH={folders}"]))
    with pytest.raises(LaunchError, match=rf"farstep {re.escape(VERSION)} here and 9\.9 on the worker"):
        env.launch()


@pytest.mark.timeout(300)
def test_times_of_workers_on_a_node_that_leaves_and_returns_continue(tmp_path: Path) -> None:
    source = {"type": "factory", "env_name": CountingEnv, "envs_per_node": 1, "seed": 1}
    with farstep.ClusterEnv(source, config(tmp_path, nodes=1, max_nodes=2, min_nodes=1, workers_per_node=1)) as env:
        wait_for_columns(env, 1)
        first, second = env.stats()["time"]["per_worker"]
        assert first["env"] > 0 == sum(second.values()), "the second worker has no node yet"
        env.scale(2)
        wait_for_columns(env, 2)
        joined = env.stats()["time"]["per_worker"][1]
        env.scale(1)
        wait_for_columns(env, 1)
        env.scale(2)
        wait_for_columns(env, 2)
        stats = env.stats()
    assert stats["time"]["per_worker"][1]["env"] > joined["env"] > 0
    assert len(stats["workers"]["steps_per_second"]) == 2
