"""Served inference: an acting server holds the policy, and batches are those of local inference."""

from __future__ import annotations

import os
import socket
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import farstep
from farstep.acting import messages as am
from farstep.errors import ConfigError
from farstep.testing import CountingEnv, TableAgent
from farstep.wire.channels.local import LocalLink
from farstep.wire.codec import pack
from tests.cluster.checks import (
    DEADLINE_S,
    arrays_of,
    assert_balanced,
    assert_same,
    assert_sound,
    cluster,
    eventually,
    in_process,
    within,
)
from tests.cluster.nodes import node_config
from tests.cluster.served.agents import (
    HoldingAgent,
    PriorAgent,
    RandomAgent,
    RandomRecurrentAgent,
    ThreadsAgent,
    VersionAgent,
    WhoAgent,
)
from tests.cluster.toys import NestedAgent, NestedEnv, RememberingAgent, counting_vector

pytestmark = pytest.mark.slow  # real processes, or learning


OVER_THE_NETWORK: dict[str, Any] = {"inference": {"where": "head"}, "transport": "tcp"}


def copied(batch: farstep.Batch) -> dict[str, np.ndarray]:
    is_nested = not isinstance(batch.last_obs, np.ndarray)
    arrays = {**batch.arrays} if is_nested else arrays_of(batch)
    return {name: array.copy() for name, array in arrays.items()}


def batches(agent: Any, inference: Any, env: Any = CountingEnv, **options: Any) -> list[dict[str, np.ndarray]]:
    """Three batches, with a new version before each, and a reset in between."""
    found = []
    with cluster(env, envs=5, workers=2, inference=inference, **options) as running:
        for steps in (7, 3, 6):
            batch = within(partial(running.collect, agent, steps))
            if env is CountingEnv:
                assert_sound(batch)
            found.append(copied(batch))
            within(lambda: running.publish(agent))
        assert_balanced(running.stats())
        within(lambda: running.reset(seed=9))
        found.append(copied(within(lambda: running.collect(agent, 4))))
    return found


@pytest.mark.parametrize("make", [TableAgent, RandomAgent, RememberingAgent, PriorAgent])
def test_batches_equal_those_of_local_inference(make: Any) -> None:
    for served, local in zip(batches(make(), "served"), batches(make(), "local"), strict=True):
        assert_same(served, local)


@pytest.mark.parametrize(
    "options",
    [
        {"env": NestedEnv, "agent": NestedAgent},
        {"env": counting_vector, "type": "vector", "env_kwargs": {"mode": "NEXT_STEP"}},
        {"stagger": {"horizon": 12, "init": "policy"}, "agent": RememberingAgent},
        {"transport": "tcp", "agent": RememberingAgent},
        {"transport": "shm", "where": "head"},
        {"transport": "tcp", "where": "head", "agent": RandomRecurrentAgent},
        {"transport": "ipc", "where": "head", "agent": PriorAgent},
        {
            "transport": "tcp",
            "where": "head",
            "stagger": {"horizon": 12, "init": "policy"},
            "agent": RememberingAgent,
        },
    ],
    ids=[
        *("nested", "vector", "stagger", "tcp"),
        *("head", "head-tcp", "head-ipc", "head-stagger"),
    ],
)
def test_other_environments_and_transports_give_the_same_batches(options: dict[str, Any]) -> None:
    make = options.pop("agent", TableAgent)
    env = options.pop("env", CountingEnv)
    served = {"copies": 2, "where": options.pop("where", "node")}
    if "transport" in options:
        options["config"] = farstep.LocalConfig(workers_per_node=2, transport=options.pop("transport"))
    compare = zip(batches(make(), served, env, **options), batches(make(), "local", env, **options), strict=True)
    for served, local in compare:
        assert_same(served, local)


@pytest.mark.parametrize("options", [{"inference": "served"}, OVER_THE_NETWORK], ids=["node", "head"])
def test_one_process_acts_for_all_workers(options: dict[str, Any]) -> None:
    with cluster(envs=6, workers=3, **options) as env:
        batch = within(lambda: env.collect(WhoAgent(), 20))
        (pid,) = np.unique(batch["pid"])
        eventually(lambda: env.stats()["acting"][0]["rows"] == 6 * 20)
        (server,) = env.stats()["acting"]
        assert pid == server["pid"] != os.getpid()
        assert (batch["slot"] == np.arange(6)).all()
        assert 1 <= server["batch_size"] <= 6
        assert env.stats()["pulls"] == {"total": 1, "per_worker": [1, 1, 1]}
        assert env.inference == "served on cpu, the agent's own act"
        assert any("acting server 3 joined" in event.text for event in env.events())


def test_servers_share_half_of_the_cores_of_the_machine_that_starts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farstep.launch.daemon.process.usable_cpus", lambda: 16)
    with cluster(envs=4, workers=2, inference={"copies": 2}) as env:
        assert (within(lambda: env.collect(ThreadsAgent(), 2))["threads"] == 4).all()


def test_a_network_is_computed_with_one_thread_or_with_all(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr("farstep.launch.daemon.process.usable_cpus", lambda: 8)

    class Network(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 3)

        def act(self, obs: Any, rng: Any) -> Any:  # takes `rng`, so that it is not recorded
            return {"action": self.layer(obs).argmax(-1), "threads": torch.full((len(obs),), torch.get_num_threads())}

        def get_parameters(self) -> dict[str, Any]:
            return dict(self.named_parameters())

    with cluster(envs=4, workers=2, inference="served") as env:
        assert set(within(lambda: env.collect(Network(), 50))["threads"].flat) == {1, 4}


def test_a_process_without_the_secret_is_not_served() -> None:
    with cluster(envs=4, workers=2, inference="served") as env:
        within(lambda: env.collect(TableAgent(), 2))
        (address,) = addresses_of(env.stats()["acting"][0]["pid"])
        wrong = am.Join(0, 0, 0, [0], [0], b"", {}, {}, [1], am.proof("guess", "worker"))
        for message in (wrong, am.Save(), am.Prioritize()):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                sock.settimeout(DEADLINE_S)
                sock.connect("\0" + address)
                LocalLink(sock).send([am.encode(message), pack({})])
                assert sock.recv(1 << 16) == b""
        assert_sound(within(lambda: env.collect(TableAgent(), 5)))
        assert env.stats()["acting"][0]["restarts"] == 0


def addresses_of(pid: int) -> set[str]:
    """The abstract addresses on which an acting server listens, as any process of its user can find them."""
    sockets = {path.readlink().name for path in Path(f"/proc/{pid}/fd").iterdir()}
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return {line[7][1:] for line in lines if len(line) > 7 and f"socket:[{line[6]}]" in sockets and line[5] == "01"}


def test_max_batch_bounds_the_rows_of_a_call() -> None:
    with cluster(envs=8, workers=2, inference={"max_batch": 2, "window_ms": 5}) as env:
        assert within(lambda: env.collect(WhoAgent(), 10))["rows"].max() == 2


def test_a_window_lets_the_server_wait_for_all_groups() -> None:
    agent = WhoAgent()
    with cluster(envs=4, workers=2, inference={"window_ms": 1e6}) as env:
        within(lambda: env.collect(agent, 1))  # one worker may join after the other one's first request
        assert (within(lambda: env.collect(agent, 10))["rows"] == 4).all()


@pytest.mark.parametrize("where", ["node", "head"])
def test_the_window_does_not_wait_for_a_worker_that_is_parked(where: str) -> None:
    inference = {"window_ms": 1000, "where": where}
    with cluster(envs=4, workers=2, inference=inference, transport="tcp") as env:
        assert within(lambda: env.collect(WhoAgent(), 3)).shape == (3, 4)
        within(lambda: env.scale(workers=1))
        assert within(lambda: env.collect(WhoAgent(), 200)).shape == (200, 2)


def test_every_row_has_the_version_that_chose_its_action() -> None:
    agent, learner = HoldingAgent(), VersionAgent()
    with cluster(envs=4, workers=2, inference="served") as env:
        seen = set()
        stream = env.stream(agent, steps=30, max_staleness=8)
        for _ in range(4):
            batch = within(lambda: next(stream))
            np.testing.assert_array_equal(batch["number"], batch["version"])
            seen |= {len(np.unique(column)) for column in batch["version"].T}
            for _ in range(2):
                agent.number = agent.number + 1
                within(lambda: env.publish(agent))
        stream.close()
        assert env.stats()["versions"]["lag_max"] <= 8
        assert_balanced(env.stats())
    assert learner.number == 0


@pytest.mark.parametrize("options", [{"inference": "served"}, OVER_THE_NETWORK], ids=["node", "head"])
def test_a_synchronous_chunk_has_one_version_although_others_are_published_meanwhile(options: dict[str, Any]) -> None:
    agent, stop = HoldingAgent(), threading.Event()
    with cluster(envs=4, workers=2, **options) as env:
        within(lambda: env.collect(agent, 1))

        def publish() -> None:
            while not stop.is_set():
                agent.number = agent.number + 1
                env.publish(agent)
                stop.wait(0.005)

        thread = threading.Thread(target=publish)
        thread.start()
        try:
            for _ in range(3):
                batch = within(lambda: env.collect(agent, 40))
                np.testing.assert_array_equal(batch["number"], batch["version"])
                assert (batch["version"] == batch["version"][0]).all()
        finally:
            stop.set()
            thread.join()


@pytest.mark.parametrize("options", [{"inference": "served"}, OVER_THE_NETWORK], ids=["node", "head"])
def test_a_stopped_rollout_loses_no_row_of_recurrent_episodes(options: dict[str, Any]) -> None:
    with cluster(envs=4, workers=2, **options) as env:
        agent = RememberingAgent()
        for _ in range(3):
            stream = env.stream(agent, steps=50, max_staleness=3)
            within(partial(next, stream))
            stream.close()  # cancels chunks in the middle
            batch = within(lambda: env.collect(agent, 10))
            assert_sound(batch)
            np.testing.assert_array_equal(batch["age"], batch["obs"][..., 1] + 1)


def actions_in_progress(batch: farstep.Batch) -> list[dict[str, np.ndarray]]:
    """For each slot, the actions since its last episode began, which must be in this batch."""
    starts = batch["episode_start"]
    first = len(starts) - 1 - np.argmax(starts[::-1], axis=0)
    ended = (batch["terminated"] | batch["truncated"])[-1]
    return [{"action": batch["action"][len(starts) if ended[i] else t :, i].copy()} for i, t in enumerate(first)]


@pytest.mark.parametrize(
    ("make", "options"), [(RememberingAgent, {}), (RandomAgent, {}), (RememberingAgent, OVER_THE_NETWORK)]
)
def test_saved_runs_continue_with_state_and_generators(make: Any, options: dict[str, Any]) -> None:
    agent, options = make(), {"inference": "served", **options}
    with cluster(envs=3, workers=2, **options) as env:
        actions = actions_in_progress(within(lambda: env.collect(agent, 30)))
        saved = within(env.save)
        expected = arrays_of(within(lambda: env.collect(agent, 6)).copy())
    with cluster(envs=3, workers=2, **options) as env:
        within(lambda: env.resume(agent, saved, actions))
        found = arrays_of(within(lambda: env.collect(agent, 6)))
        same = ("obs", "action", "reward", "age" if make is RememberingAgent else "draw")
        assert_same({name: found[name] for name in same}, {name: expected[name] for name in same})


@pytest.mark.parametrize("options", [{"inference": "served"}, OVER_THE_NETWORK], ids=["node", "head"])
def test_workers_can_be_parked_and_another_agent_used(options: dict[str, Any]) -> None:
    with cluster(envs=4, workers=2, release_idle=True, **options) as env:
        assert_sound(within(lambda: env.collect(TableAgent(), 5)))
        within(lambda: env.scale(workers=1))
        assert within(lambda: env.collect(RememberingAgent(), 5)).shape[1] == 2
        within(lambda: env.scale(workers=2))
        assert_sound(within(lambda: env.collect(TableAgent(), 5)))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"inference": {"where": "hed"}}, "Did you mean 'head'"),
        ({"inference": {"dtype": "float16"}}, "needs device='cuda'"),
        ({"inference": {"dtype": "int8"}}, "bfloat16"),
        ({"inference": {"device": "tpu"}}, "expected 'cpu' or 'cuda'"),
        ({"inference": {"copies": 0}}, "at least 1"),
        ({"inference": {"windows_ms": 1}}, "window_ms"),
        ({"inference": "server"}, "served"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        farstep.EnvConfig(env_name="CartPole-v1", **options)


def test_workers_in_the_callers_process_cannot_be_served() -> None:
    with pytest.raises(ConfigError, match="InProcessConfig starts no processes"):
        cluster(config=in_process(), inference="served").launch()


def test_workers_that_send_through_their_daemon_cannot_be_served_by_the_head(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="relay=True"):
        cluster(config=node_config(tmp_path, 1, relay=True), inference={"where": "head"}).launch()


@pytest.mark.usefixtures("torch_in_workers")
def test_a_network_says_once_that_its_actions_are_not_bit_for_bit_the_same() -> None:
    torch = pytest.importorskip("torch")

    class Network(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 3)

        def act(self, obs: Any) -> Any:
            return self.layer(obs).argmax(-1)

        def get_parameters(self) -> dict[str, Any]:
            return dict(self.named_parameters())

    agent = Network()
    with cluster(envs=4, workers=2, inference="served") as env:
        for _ in range(2):
            with torch.no_grad():
                agent.layer.bias += 0.1
            within(lambda: env.collect(agent, 5))
        assert env.inference == "served on cpu, fast"
        assert sum("not bit for bit" in event.text for event in env.events("warned")) == 1


@pytest.mark.usefixtures("torch_in_workers")
def test_a_network_that_is_not_recorded_says_why() -> None:
    torch = pytest.importorskip("torch")

    class Network(torch.nn.Module):  # type: ignore[misc,name-defined]
        def act(self, obs: Any, slots: Any) -> Any:
            return slots % 3

        def get_parameters(self) -> dict[str, Any]:
            return {}

    with cluster(envs=4, workers=2, inference="served") as env:
        within(lambda: env.collect(Network(), 5))
        assert env.inference.startswith("served on cpu, eager: act takes slots")
        (warning,) = (event.text for event in env.events("warned") if "fast path" in event.text)
        assert warning.startswith("acting servers call the agent without the fast path, because act takes slots")
