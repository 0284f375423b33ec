"""The status page before, during and after the launch: of runs that share a coordinator, and of `make_vec`."""

from __future__ import annotations

import json
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import farstep
from farstep.cluster_env import status_page_of
from farstep.errors import ClosedError
from farstep.testing import CountingEnv, TableAgent
from tests.cluster.test_sharing import PATIENCE_S, serving, shared, wait_until
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
        assert "weights" not in data and "lags" not in data
        assert envs.status_url == url
    finally:
        envs.close()
    with pytest.raises(ClosedError):
        _ = envs.status_url
