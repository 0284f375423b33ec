"""The status page before, during and after the launch: of runs that share a coordinator, and of `make_vec`."""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
import time
import urllib.request
import weakref
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import farstep
from farstep.cluster_env import status_page_of
from farstep.errors import ClosedError
from farstep.head.server import Server
from farstep.launch.in_process import InProcessLauncher
from farstep.testing import CountingEnv, TableAgent
from tests.cluster.nodes import SHELL, node_config
from tests.cluster.sharing import PATIENCE_S, serving, shared, wait_until
from tests.observe.status.test_status_command import DESCRIBED

pytestmark = pytest.mark.slow  # real processes


def test_page_says_that_the_run_waits_for_slots_of_its_coordinator(tmp_path: Path) -> None:
    with serving(tmp_path / "c", slots=1) as name, shared(name, workers=1) as first:
        second = shared(name, workers=1)
        try:
            source = status_page_of(second).source

            def shown() -> dict[str, Any]:
                return source.read()

            assert shown()["state"] == "starting" and "first call" in shown()["diagnoses"][0]["text"]
            launching = threading.Thread(target=second.launch)
            launching.start()
            wait_until(lambda: shown()["state"] == "waiting for slots")
            assert f"1 slot of coordinator '{name}'" in shown()["diagnoses"][0]["text"]
            assert 'farstep_diagnosis_causes_info{rank="0",value="no slots"} 1.0' in source.metrics()
            assert first.stats()["coordinator"] == {"name": name, "granted": 1, "wanted": 1}
            first.close()
            launching.join(PATIENCE_S)
            second.collect(TableAgent(), steps=4)
            data = shown()
            assert data["state"] == "running" and data["workers"]["state"] == ["alive"]
            assert data["slots"]["coordinator"]["granted"] == 1 and data["slots"]["held_seconds"] > 0
        finally:
            second.close()
        assert shown()["state"] == "ended"


def test_page_says_that_a_call_waits_for_a_lost_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farstep.head.server.FIRST_START_S", 0.1)
    config = node_config(tmp_path, 2, workers_per_node=1)
    with farstep.ClusterEnv(DESCRIBED, config) as env:
        source = status_page_of(env).source
        env.collect(TableAgent(), steps=2)
        shown = source.read()
        assert shown["state"] == "running" and shown["hosts"] == list(dict.fromkeys(shown["workers"]["host"]))
        shell, ready = tmp_path / "shell", tmp_path / "ready"
        (tmp_path / "slow").write_text(SHELL.replace("shift", f"until [ -e {ready} ]; do sleep 0.1; done; shift"))
        (tmp_path / "slow").chmod(0o755)
        (tmp_path / "slow").rename(shell)
        os.kill(env.stats()["nodes"][1]["pid"], signal.SIGKILL)
        collecting = threading.Thread(target=env.collect, args=(TableAgent(),), kwargs={"steps": 2})
        wait_until(lambda: len(env.stats()["nodes"]) == 1)
        collecting.start()
        wait_until(lambda: source.read()["state"] == "waiting for nodes")
        (found,) = source.read()["diagnoses"]
        assert "waiting for nodes: 1 of 2 nodes" in found["text"] and "min_nodes" in found["remedy"]
        wait_until(lambda: None in source.read()["workers"]["host"])
        assert source.read()["workers"]["unconnected_nodes"].startswith("1 of 2 nodes not connected yet: ")
        ready.touch()
        collecting.join(PATIENCE_S)
        assert not collecting.is_alive() and source.read()["state"] == "running"


def test_page_that_was_opened_before_the_launch_ends_without_one() -> None:
    """The leak check fails if its threads or its socket stay."""
    env = farstep.ClusterEnv(DESCRIBED, farstep.InProcessConfig())
    _ = env.status_url
    env.close()
    with pytest.raises(ClosedError):
        _ = env.status_url


def test_page_of_an_environment_that_is_not_closed_ends_with_it() -> None:
    env = farstep.ClusterEnv(DESCRIBED, farstep.InProcessConfig())
    source = status_page_of(env).source
    env.collect(TableAgent(), steps=2)
    del env
    wait_until(lambda: not source.is_live)


def test_interrupted_launches_keep_the_page_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while workers start, and again while they end."""
    start, close = Server.begin, Server.close
    servers = []
    waits: list[str] = []

    def interrupted(self: Server) -> None:
        servers.append(weakref.ref(self))
        shown.append(source.read())
        waits.append(self.supervisor.whereabouts())
        start(self)
        raise KeyboardInterrupt

    def interrupted_again(self: Server) -> None:
        close(self)
        raise KeyboardInterrupt

    shown: list[dict[str, Any]] = []
    with closing(farstep.ClusterEnv(DESCRIBED, farstep.InProcessConfig())) as env:
        url, source = env.status_url, status_page_of(env).source
        with monkeypatch.context() as patch:
            patch.setattr(Server, "begin", interrupted)
            patch.setattr(Server, "close", interrupted_again)
            for _ in range(2):
                with pytest.raises(KeyboardInterrupt):
                    env.launch()
        gc.collect()
        assert len(servers) == 2 and not any(server() for server in servers)
        assert waits == ["2 workers: 2 starting (workers 0, 1)"] * 2
        assert [data["diagnoses"][0]["text"] for data in shown] == [
            "The run is waiting for worker processes to start."
        ] * 2
        assert source.read()["state"] == "starting" and "first call" in source.read()["diagnoses"][0]["text"]
        env.collect(TableAgent(), steps=2)
        assert env.status_url == url and source.read()["state"] == "running"


def test_page_answers_while_a_command_of_the_engine_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[dict[str, Any]] = []
    states: list[str] = []

    def slow(self: InProcessLauncher) -> None:
        reading = threading.Thread(target=lambda: shown.append(source.read()))
        reading.start()
        reading.join(PATIENCE_S)
        states.extend(data["state"] for data in shown)

    monkeypatch.setattr(InProcessLauncher, "prepare", slow)
    with closing(farstep.ClusterEnv(DESCRIBED, farstep.InProcessConfig())) as env:
        source = status_page_of(env).source
        env.launch()
    assert states == ["starting"]


def test_first_diagnosis_of_the_page_covers_the_time_since_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead_s = 0.0
    clock = SimpleNamespace(time=time.time, monotonic=lambda: time.monotonic() + ahead_s)
    monkeypatch.setattr("farstep.run.launch_monitor.time", clock)
    monkeypatch.setattr("farstep.observe.diagnosis.run_monitor.time", clock)
    with closing(farstep.ClusterEnv(DESCRIBED, farstep.InProcessConfig())) as env:
        source = status_page_of(env).source
        env.collect(TableAgent(), steps=64)
        ahead_s = 60.0
        assert source.read()["diagnoses"][0]["cause"] == env.diagnose().cause != "unknown"


def test_fork_of_an_environment_has_a_page_of_its_own_until_the_launch() -> None:
    with closing(farstep.ClusterEnv(DESCRIBED, farstep.InProcessConfig())) as env:
        url = env.status_url

        def status() -> int:
            child = os.fork()
            if not child:
                try:
                    os._exit(1 if env.status_url == url else 2)
                except ClosedError:
                    os._exit(3)
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

        assert status() == 2
        env.launch()
        assert status() == 3 and env.status_url == url


def test_resumed_run_continues_its_progress_and_counts_weights_from_its_version() -> None:
    with farstep.ClusterEnv(DESCRIBED, farstep.InProcessConfig()) as env:
        source, agent = status_page_of(env).source, TableAgent()
        source.describe("ppo", {}, total_steps=100)
        env.collect(agent, steps=2)
        for _ in range(3):
            env.publish(agent)
        source.resumed(40)
        data = source.read()
    assert data["progress"]["steps"] == 40
    assert data["weights"]["possible"] == data["weights"]["bytes_saved"] == 0


def test_page_shows_acting_servers() -> None:
    config = farstep.LocalConfig(workers_per_node=2)
    with farstep.ClusterEnv(DESCRIBED | {"inference": "served"}, config) as env:
        source = status_page_of(env).source
        env.collect(TableAgent(), steps=8)
        data = source.read()
    (server,) = data["acting"]
    assert server["number"] == 2 and server["host"] == data["workers"]["host"][0]
    assert server["batch_size"] > 0 and server["restarts"] == 0 and data["hosts"] == []


def test_make_vec_has_a_page() -> None:
    envs = farstep.make_vec(CountingEnv, 2, farstep.LocalConfig(workers_per_node=1))
    try:
        envs.reset()
        url = envs.status_url
        for _ in range(3):
            envs.step(envs.action_space.sample())
        with urllib.request.urlopen(url.replace("/?", "/data?"), timeout=PATIENCE_S) as answer:
            data = json.loads(answer.read())
        assert data["workers"]["state"] == ["alive"] and data["progress"]["steps"] == 6
        assert "weights" not in data and "lags" not in data and data["acting"] == []
        assert envs.status_url == url
    finally:
        envs.close()
    with pytest.raises(ClosedError):
        _ = envs.status_url
