"""`env.events()` has what happens in a run: with worker, host and, for failures, the traceback or the output."""

from __future__ import annotations

import logging
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

import farstep
from farstep.config.launch import SSHConfig
from farstep.testing import FaultyEnv, TableAgent
from tests.cluster.checks import cluster, eventually, in_process, within

pytestmark = pytest.mark.timeout(300)
HOST = socket.gethostname()


class LoudEnv(FaultyEnv):
    """Prints something before its process is killed."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._calls + 1 == self._at:
            print("the last words", flush=True)
        return super().step(action)


def of_worker(env: farstep.ClusterEnv) -> list[farstep.Event]:
    """The events of worker 0; a slow start on a busy machine adds others."""
    return [event for event in env.events() if event.worker == 0]


def test_a_killed_worker_is_lost_and_restarted(tmp_path: Path) -> None:
    fault = {"fault": "sigkill", "phase": "step", "marker": str(tmp_path / "killed")}
    with cluster(LoudEnv, envs=1, env_kwargs=fault) as env:
        within(lambda: env.collect(TableAgent(), steps=6))
        joined, lost, restarted = of_worker(env)
        assert [event.kind for event in (joined, lost, restarted)] == ["joined", "lost", "restarted"]
        assert "was killed by SIGKILL" in lost.text and "\n" not in lost.text
        assert "the last words" in lost.traceback
        assert (lost.worker, lost.node, restarted.worker, restarted.node) == (0, HOST, 0, HOST)
        assert env.events("restarted") == env.events(["restarted", "parked"], since=lost.time) == [restarted]
    assert of_worker(env) == [joined, lost, restarted]  # also after the end


def test_a_stuck_environment_has_its_stack(tmp_path: Path) -> None:
    fault = {"fault": "hang", "phase": "step", "marker": str(tmp_path / "hung")}
    limits = farstep.Timeouts(step_s=3.0)
    with cluster(FaultyEnv, envs=1, env_kwargs=fault, timeouts=limits) as env:
        within(lambda: env.collect(TableAgent(), steps=6))
        (stuck,) = env.events("stuck")
    assert "no progress in phase 'step' for 3 s" in stuck.text and stuck.node == HOST
    assert "in do_fault" in stuck.traceback
    assert [event.kind for event in of_worker(env)] == ["joined", "stuck", "restarted"]


def test_an_environment_that_raises_has_its_traceback(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fault = {"fault": "raise", "phase": "step", "marker": str(tmp_path / "raised")}
    with cluster(FaultyEnv, envs=1, env_kwargs=fault, config=in_process()) as env:
        env.collect(TableAgent(), steps=6)
        (warned,) = [event for event in env.events("warned") if event.worker is not None]
    assert "deliberate" in warned.text and warned.text.endswith("; continuing with the next episodes")
    assert "in do_fault" in warned.traceback and "UnpicklableError" in warned.traceback
    assert warned.worker == 0 and warned.text in caplog.messages


def test_an_environment_that_always_raises_is_logged_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    fault = {"fault": "raise", "phase": "step"}
    env = cluster(FaultyEnv, envs=2, env_kwargs=fault, config=in_process(restart_budget=9))
    with env, pytest.raises(farstep.RemoteEnvError, match=r"10 failures within 10 minutes(?s:.*)in do_fault"):
        env.collect(TableAgent(), steps=6)
    warned = [event for event in env.events("warned") if "continuing" in event.text]
    assert len(warned) == 9 and all("in do_fault" in event.traceback for event in warned)
    assert "(9 such failures so far); continuing" in warned[-1].text
    assert [text for text in caplog.messages if "raised" in text] == [warned[0].text]


def test_the_failure_that_ends_a_run_is_its_last_event(caplog: pytest.LogCaptureFixture) -> None:
    fault = {"fault": "raise", "phase": "step"}
    env = cluster(FaultyEnv, envs=1, env_kwargs=fault, config=in_process(restart_budget=0))
    with pytest.raises(farstep.RemoteEnvError):
        env.collect(TableAgent(), steps=6)
    env.close()
    assert env.events()[-1].text.startswith("the run failed: the environment raised")
    assert "in do_fault" in env.events()[-1].traceback
    assert "the environment raised" not in caplog.text  # the exception has it


def test_an_agent_that_raises_later_has_its_traceback() -> None:
    class LaterAgent(TableAgent):
        calls = 0

        def act(self, obs: Any) -> Any:
            self.calls += 1
            if self.calls > 3:
                raise ArithmeticError("too often")
            return super().act(obs)

    env = cluster(envs=1, config=in_process())
    with pytest.raises(farstep.RemoteEnvError):
        env.collect(LaterAgent(), steps=9)
    env.close()
    assert "ArithmeticError: too often" in env.events("warned")[-1].traceback


def test_users_emit_events_of_known_kinds(caplog: pytest.LogCaptureFixture) -> None:
    env = cluster(config=in_process())
    with caplog.at_level(logging.INFO, "farstep"):
        env.emit_event("checkpointed", "wrote weights.pt")
    assert [(event.kind, event.text) for event in env.events()] == [("checkpointed", "wrote weights.pt")]
    assert caplog.messages == ["wrote weights.pt"]
    with pytest.raises(farstep.ConfigError, match=r"unknown kind of event 'evaluate'. Did you mean 'evaluated'\?"):
        env.emit_event("evaluate", "7.5")  # type: ignore[arg-type]
    with pytest.raises(farstep.ConfigError, match="unknown kind of event 'lots'"):
        env.events("lots")  # type: ignore[arg-type]
    assert len(env.events()) == 1


SHELL = """#!/bin/sh
shift
FARSTEP_RESTARTS=0 exec sh -c "$*"
"""


def test_nodes_join_and_are_lost_and_requested_again_and_scaled(tmp_path: Path) -> None:
    """Nodes are processes of this machine, started by a shell in place of ssh."""
    shell = tmp_path / "shell"
    shell.write_text(SHELL)
    shell.chmod(0o755)
    config = SSHConfig(hosts=["a", "b"], ssh=(str(shell),), nodes=1, max_nodes=2, min_nodes=1, workers_per_node=1)
    with cluster(envs=1, config=config) as env:
        agent = TableAgent()
        within(lambda: env.collect(agent, steps=2))
        node, worker = env.events("joined")
        assert "connected, with" in node.text and (node.node, node.worker) == (HOST, None)
        assert (worker.node, worker.worker) == (HOST, 0)
        env.scale(nodes=2)
        assert [event.text for event in env.events("scaled")] == ["scaled from 1 to 2 nodes"]
        eventually(lambda: len(env.events("joined")) == 4, 120)
        os.kill(env.stats()["nodes"][1]["pid"], signal.SIGKILL)
        eventually(lambda: len(env.events("joined")) == 6, 120)
        (lost,), (again,) = env.events("lost"), env.events("resubmitted")
        assert lost.node == HOST and "is lost" in lost.text
        assert again.text.endswith("requesting 1 node again") and lost.time < again.time
        os.kill(env.stats()["nodes"][1]["pid"], signal.SIGTERM)  # as SLURM does before it preempts a job
        (reclaimed,) = eventually(lambda: env.events("requeued"))
        assert reclaimed.node == HOST and "is being reclaimed by its engine (SIGTERM)" in reclaimed.text
        eventually(lambda: len(env.events("joined")) == 8, 120)
        env.scale(nodes=1)
        env.scale(nodes=1)  # changes nothing
        assert [event.text for event in env.events("scaled")][1:] == ["scaled from 2 to 1 node"]
