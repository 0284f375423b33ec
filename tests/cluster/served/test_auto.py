"""`inference="auto"`: all ways are measured with the first agent, and the choice is kept."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Any

import pytest

import farstep
from farstep.head import inference_choice
from farstep.testing import TableAgent
from tests.cluster.checks import (
    arrays_of,
    assert_balanced,
    assert_same,
    cluster,
    eventually,
    in_process,
    within,
    worker_pids,
)
from tests.cluster.nodes import on_nodes
from tests.cluster.parking import is_running
from tests.cluster.served.agents import RandomAgent, RandomRecurrentAgent, WhoAgent
from tests.cluster.served.test_served import actions_in_progress, batches
from tests.cluster.toys import RememberingAgent

pytestmark = pytest.mark.slow  # real processes, or learning

FACTORS = {"local": float("inf"), "served": 0.0}
"""How much faster acting servers must be, so that the measurement chooses this."""


@pytest.fixture(params=["local", "served"])
def choice(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(inference_choice, "PREFER_LOCAL", FACTORS[request.param])
    return str(request.param)


def announced(env: farstep.ClusterEnv) -> list[str]:
    return [event.text for event in env.events("announced")]


def test_measurement_chooses_and_announces_the_choice(choice: str) -> None:
    with cluster(envs=4, workers=2, inference="auto") as env:
        assert env.chosen_inference is None
        batch = within(lambda: env.collect(WhoAgent(), 5))
        servers = {server["pid"] for server in env.stats()["acting"]}
        assert env.chosen_inference == choice and (choice == "served") == env.inference.startswith("served")
        assert set(batch["pid"].ravel().tolist()) == servers if choice == "served" else not servers
        (text,) = announced(env)
        assert text.startswith(f"inference='auto': {choice} inference") and text.count("steps/s") == 2
        assert env.version == 0
        eventually(lambda: len(worker_pids()) == (3 if choice == "served" else 2))  # servers that do not act have ended
        within(lambda: env.collect(WhoAgent(), 5))
        stats = env.stats()
        assert_balanced(stats)
        assert stats["workers"]["restarts"] == 0 and not env.events("lost")


class SlowRowsAgent(TableAgent):
    """Needs 5 ms per row, in each process."""

    def act(self, obs: Any) -> dict[str, Any]:
        time.sleep(0.005 * len(obs))
        return super().act(obs)


class SlowCallsAgent(TableAgent):
    """Needs 5 ms per call, on a device that all processes share."""

    def __init__(self, device: Path) -> None:
        super().__init__()
        self._device = device

    def act(self, obs: Any) -> dict[str, Any]:
        with self._device.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            time.sleep(0.005)
        return super().act(obs)


def test_workers_act_if_servers_need_longer() -> None:
    with cluster(envs=4, workers=4, inference="auto") as env:
        within(lambda: env.publish(SlowRowsAgent()))
        assert env.chosen_inference == "local"


def test_servers_act_if_workers_need_longer(tmp_path: Path) -> None:
    (device := tmp_path / "device").touch()
    with cluster(envs=4, workers=4, inference="auto") as env:
        within(lambda: env.publish(SlowCallsAgent(device)))
        assert env.chosen_inference == "served"


@pytest.mark.usefixtures("torch_in_workers")
@pytest.mark.parametrize("slow", ["cpu", "gpu"])
def test_workers_with_gpus_can_act_on_the_cpu(slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")  # here and not above: workers import this file
    from tests.agents.gpu import fake_gpu

    class TwoDeviceAgent(torch.nn.Module):  # type: ignore[misc, name-defined]
        """Needs 20 ms more per call on one device, and returns on which device it acted. Cannot be recorded."""

        def __init__(self) -> None:
            super().__init__()
            self.head, self.is_on_fake_gpu = os.getpid(), False
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def __setstate__(self, state: dict[str, Any]) -> None:
            super().__setstate__(state)
            if os.getpid() != self.head:
                fake_gpu.install_device()

        def act(self, obs: Any, rng: Any) -> dict[str, Any]:
            time.sleep(0.02 * (self.is_on_fake_gpu == (slow == "gpu")))
            actions = torch.zeros(len(obs), dtype=torch.int64)
            return {"action": actions, "on_gpu": actions + self.is_on_fake_gpu}

        def get_parameters(self) -> Any:
            return self.state_dict()

    monkeypatch.setattr(inference_choice, "PREFER_LOCAL", FACTORS["local"])
    agent = TwoDeviceAgent()
    with cluster(envs=2, workers=2, inference="auto", gpus_per_node=1) as env:
        batch = within(lambda: env.collect(agent, 5))
        chosen = {"cpu": "local", "gpu": "local-cpu"}[slow]
        assert env.chosen_inference == chosen and announced(env)[0].count("steps/s") == 3
        assert (batch["on_gpu"] == (slow == "cpu")).all()
        saved = within(env.save)
    with cluster(envs=2, workers=2, inference="auto", gpus_per_node=1) as env:
        within(lambda: env.resume(agent, saved, actions_in_progress(batch)))
        assert (within(lambda: env.collect(agent, 5))["on_gpu"] == (slow == "cpu")).all()
        assert env.chosen_inference == chosen


class PidRecordingAgent(WhoAgent):
    """Creates a file named after its process id whenever it acts."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def act(self, obs: Any, slots: Any) -> dict[str, Any]:  # type: ignore[override]
        (self._folder / str(os.getpid())).touch()
        return super().act(obs, slots)


def test_servers_on_nodes_end_if_workers_act(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference_choice, "PREFER_LOCAL", FACTORS["local"])
    (folder := tmp_path / "pids").mkdir()
    agent = PidRecordingAgent(folder)
    with on_nodes(tmp_path, 2, 2, inference="auto") as env:
        batch = within(lambda: env.collect(agent, 5))
        servers = {int(path.name) for path in folder.iterdir()} - set(batch["pid"].ravel().tolist())
        assert len(servers) == 2 and batch.shape == (5, 4)
        eventually(lambda: not any(map(is_running, servers)))
        within(lambda: env.scale(nodes=1))
        eventually(lambda: len(env.stats()["nodes"]) == 1)
        within(lambda: env.scale(nodes=2))
        eventually(lambda: within(lambda: env.collect(agent, 5)).shape == (5, 4))
        joined = [event.text for event in env.events("joined") if event.text.startswith("acting server")]
        assert len(joined) == 2  # none on the new node
        assert_balanced(env.stats())


def test_batches_are_those_without_a_measurement(choice: str) -> None:
    options = {"transport": "tcp"} if choice == "served" else {}
    found, expected = (batches(RandomRecurrentAgent(), inference, **options) for inference in ("auto", "local"))
    for measured, local in zip(found, expected, strict=True):
        assert_same(measured, local)


def test_a_resumed_run_keeps_the_choice(choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = RememberingAgent()
    with cluster(envs=3, workers=2, inference="auto") as env:
        actions = actions_in_progress(within(lambda: env.collect(agent, 30)))
        saved = within(env.save)
        expected = arrays_of(within(lambda: env.collect(agent, 6)).copy())
    assert saved["inference"] == choice
    monkeypatch.setattr(inference_choice, "PREFER_LOCAL", FACTORS["served" if choice == "local" else "local"])
    with cluster(envs=3, workers=2, inference="auto") as env:
        within(lambda: env.resume(agent, saved, actions))
        found = arrays_of(within(lambda: env.collect(agent, 6)))
        same = ("obs", "action", "reward", "age")
        assert_same({name: found[name] for name in same}, {name: expected[name] for name in same})
        assert env.chosen_inference == choice
        assert announced(env) == [f"inference='auto': {choice} inference, as before this run was resumed"]
        eventually(lambda: len(worker_pids()) == (3 if choice == "served" else 2))


def test_workers_do_not_act_if_their_copies_do_not_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference_choice, "available_memory", lambda: -1.0)
    with cluster(envs=2, workers=2, inference="auto") as env:
        within(lambda: env.publish(RandomAgent()))
        assert env.chosen_inference == "served" and "would take" in announced(env)[0]
        assert env.version == 0


def test_workers_act_where_servers_cannot() -> None:
    with cluster(inference="auto", config=in_process()) as env:
        within(lambda: env.collect(RandomAgent(), 5))
        assert env.chosen_inference is None and env.stats()["acting"] == [] == announced(env)
