"""Workers on a real Ray cluster: the contract of launchers, lost nodes, a lost cluster, a killed head, no room."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import farstep
from farstep.cli import main
from farstep.launch.engines.ray.engine import RayEngine
from farstep.testing import TableAgent, check_launcher
from tests.cluster.checks import assert_balanced, assert_sound, cluster, eventually, within
from tests.docs.test_readme import example

if importlib.util.find_spec("ray") is None and os.environ.get("FARSTEP_ENGINES") != "required":
    pytest.skip("pip install farstep[ray]", allow_module_level=True)

from tests.engines.ray_nodes import QUIET, RayCluster

LEASE_S = 20.0  # ten, and as much again for a busy machine
PAUSE_S = 0.1
"""Between batches while Ray's timers run; without a pause, collecting takes all CPU time that there is."""
TAG = "FARSTEP_TEST_TAG"
HEAD = """
import json, signal
import farstep
from farstep.testing import CountingEnv, TableAgent

config = farstep.RayConfig(nodes=2, workers_per_node=1)
env = farstep.ClusterEnv({"type": "factory", "env_name": CountingEnv, "envs_per_node": 2, "seed": 5}, config)
_, info = env.reset()
env.collect(TableAgent(), steps=4)
print(json.dumps(env.stats()["nodes"]), flush=True)
signal.pause()
"""
JOINED = """
import os, sys
import ray
import farstep
from farstep.testing import CountingEnv, TableAgent

ray.init(address=sys.argv[1], namespace="mine", runtime_env={"env_vars": {"OF_THE_USER": "yes"}}, log_to_driver=False)


class TellingEnv(CountingEnv):
    def reset(self, **options):
        obs, info = super().reset(**options)
        return obs, {**info, "told": os.environ.get("OF_THE_USER", "no")}


config = farstep.RayConfig(workers_per_node=1)
with farstep.ClusterEnv({"type": "factory", "env_name": TellingEnv, "seed": 5}, config) as env:
    _, info = env.reset()
    assert list(info["told"]) == ["yes"], info
    assert any(actor["namespace"] == "mine" for actor in ray.util.list_named_actors(all_namespaces=True))
assert ray.is_initialized()
assert any(node["Alive"] for node in ray.nodes())
print("still mine")
"""


@pytest.fixture(scope="module", autouse=True)
def patient_ray() -> Iterator[None]:
    """A long timeout of Ray's processes after the loss of the first node; also for clusters that farstep starts."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**QUIET, "RAY_gcs_rpc_server_reconnect_timeout_s": "5"}.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[RayCluster]:
    with RayCluster(nodes=1, cpus=4, head_cpus=4) as started, pytest.MonkeyPatch.context() as patch:
        for name, value in started.environment.items():
            patch.setenv(name, value)
        yield started


def join(patch: pytest.MonkeyPatch, started: RayCluster) -> None:
    for name, value in started.environment.items():
        patch.setenv(name, value)


class Continuity:
    """Checks that batches continue, slot by slot, where the ones before ended, or are marked as not continuing."""

    def __init__(self) -> None:
        self._last: dict[int, Any] = {}

    def __call__(self, batch: farstep.Batch) -> None:
        for i, slot in enumerate(batch.slots):
            if not batch["episode_start"][0, i] and batch.continues[i]:
                np.testing.assert_array_equal(batch["obs"][0, i], self._last[slot])
            self._last[slot] = batch.last_obs[i].copy()


def collect_for_ever(env: farstep.ClusterEnv, agent: TableAgent) -> None:
    while True:
        assert_sound(env.collect(agent, steps=4))
        time.sleep(PAUSE_S)


def kill(node: dict[str, Any]) -> None:
    os.kill(node["pid"], signal.SIGKILL)


@contextlib.contextmanager
def without_ray() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        yield


def living(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes()]


def tagged(tag: str) -> list[str]:
    """Living processes with the tag in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"{TAG}={tag}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


def commands() -> dict[int, str]:
    """Command lines of all processes."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
    return found


@pytest.mark.timeout(600)
def test_the_contract(ray_cluster: RayCluster) -> None:
    make = functools.partial(farstep.RayConfig, address=ray_cluster.address)
    scarce = functools.partial(make, nodes=3, cpus_per_worker=3)  # two nodes have four cores each
    check_launcher(make, kill_node=kill, scarce=scarce, missing=without_ray)


@pytest.mark.timeout(240)
def test_the_process_that_talks_to_ray_is_replaced(ray_cluster: RayCluster) -> None:
    """With `relay=True`, which is the same with every engine: `tests/cluster/test_ssh.py` has its contract."""
    with cluster(config=farstep.RayConfig(workers_per_node=1, relay=True)) as env:
        agent = TableAgent()
        env.collect(agent, steps=4)
        (before,) = env.stats()["nodes"]
        (driver,) = [pid for pid, line in commands().items() if f"ray.driver import main; main() {os.getpid()}" in line]
        os.kill(driver, signal.SIGKILL)

        def until_replaced() -> None:
            while [node["pid"] for node in env.stats()["nodes"]] in ([], [before["pid"]]):
                assert_sound(env.collect(agent, steps=4))
                time.sleep(PAUSE_S)

        within(until_replaced, 120)
        assert_sound(env.collect(agent, steps=4))
        assert not living([before["pid"]])
        assert_balanced(env.stats())


@pytest.mark.timeout(240)
def test_a_private_cluster_refuses_others_and_ends_with_its_head(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without an address, where no cluster runs; the head is killed."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))  # where Ray notes which cluster runs
    monkeypatch.setenv(TAG, tag := uuid.uuid4().hex)
    with killed_head() as daemons:
        processes = "\n".join(tagged(tag))
        (folder,) = set(re.findall(r"/tmp/farstep-ray-\w+", processes))
        assert stat.S_IMODE(Path(folder).stat().st_mode) == 0o700
        found = re.search(rf"{folder}/.*gcs-address=([\d.:]+)", processes)
        assert found
        stranger = cluster(config=farstep.RayConfig(address=found[1], workers_per_node=1))
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv(TAG)
            patch.setenv("RAY_AUTH_MODE", "token")
            patch.setenv("RAY_AUTH_TOKEN", "0" * 64)
            patch.setenv("RAY_NUM_REDIS_GET_RETRIES", "1")  # 20 by default, one a second
            with pytest.raises(farstep.LaunchError, match=r"cannot be joined.*InvalidAuthToken"):
                within(stranger.launch, 120)
    eventually(lambda: not living(daemons), LEASE_S)
    eventually(lambda: not tagged(tag), LEASE_S)
    assert not Path(folder).exists()


@contextlib.contextmanager
def killed_head() -> Iterator[list[int]]:
    """Start a head, yield the pids of its two node daemons, then kill the head."""
    with subprocess.Popen([sys.executable, "-c", HEAD], stdout=subprocess.PIPE, text=True) as head:
        assert head.stdout is not None
        try:
            nodes = json.loads(within(head.stdout.readline, 120))
            assert len(nodes) == 2
            yield [int(node["pid"]) for node in nodes]
        finally:
            head.kill()


@pytest.mark.timeout(240)
def test_a_program_that_has_joined_ray_itself_stays_joined(ray_cluster: RayCluster) -> None:
    done = subprocess.run(
        [sys.executable, "-c", JOINED, ray_cluster.address], capture_output=True, text=True, timeout=200
    )
    assert done.stdout == "still mine\n", done.stderr


@pytest.mark.timeout(240)
def test_without_an_address_the_cluster_that_runs_is_joined(
    ray_cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS")
    with contextlib.closing(RayEngine(farstep.RayConfig(workers_per_node=1), 1)) as engine:
        assert engine.listen_on()[0] == ray_cluster.address.rpartition(":")[0]


@pytest.mark.timeout(240)
def test_a_learner_of_farstep_trains_on_ray(ray_cluster: RayCluster, tmp_path: Path) -> None:
    options = "--env CartPole-v1 --launcher ray --workers-per-node 1 --num-envs 4 --num-steps 32 --total-steps 512"
    assert main(["train", "ppo", *options.split(), "--name", "first", "--folder", str(tmp_path)]) == 0
    metrics = (tmp_path / "first" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(metrics[-1])["step"] == 512


@pytest.mark.timeout(240)
def test_example_of_the_page_prints_the_shown_output(ray_cluster: RayCluster, tmp_path: Path) -> None:
    """On the shared cluster, not on one that the example starts."""
    code, printed = example("docs/ray.md")
    assert code.count('address="local"') == 1
    script = tmp_path / "example.py"
    script.write_text(code.replace('"local"', repr(ray_cluster.address)))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=200, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == printed


@pytest.mark.timeout(120)
def test_launch_without_resources_names_what_is_missing(ray_cluster: RayCluster) -> None:
    config = farstep.RayConfig(workers_per_node=8, nodes=2, resources_per_node={"camera": 1}, queue_s=12.0)
    with pytest.raises(farstep.LaunchError) as caught, cluster(envs=8, config=config) as env:
        within(env.launch, 60)
    assert "2 node daemons wait for resources of Ray's cluster" in str(caught.value)
    assert "each needs 8 CPU and 1 camera; the cluster has 2 machines with 8 CPU and 0 camera" in str(caught.value)
    assert "no machine is large enough" in str(caught.value)


@pytest.mark.timeout(120)
def test_keys_are_in_no_command_environment_or_log(ray_cluster: RayCluster) -> None:
    with cluster(config=farstep.RayConfig(nodes=2, workers_per_node=1)) as env:
        env.collect(TableAgent(), steps=4)
        places = [
            Path(f"/proc/{node['pid']}/{what}") for node in env.stats()["nodes"] for what in ("cmdline", "environ")
        ]
        places += [path for path in ray_cluster.folder.rglob("*") if path.is_file()]
        assert len(places) > 10
        for path in places:
            assert b"server_key" not in path.read_bytes(), path


@pytest.mark.timeout(150)
def test_an_address_without_a_ray_cluster_is_an_error() -> None:
    env = cluster(config=farstep.RayConfig(address="127.0.0.1:9", workers_per_node=1))
    with pytest.raises(farstep.LaunchError, match=r"Ray cluster at '127.0.0.1:9' cannot be joined.*ray start --head"):
        within(env.launch, 140)


@pytest.mark.timeout(300)
def test_a_lost_node_costs_only_its_chunks_in_flight(ray_cluster: RayCluster) -> None:
    """Only the test below follows on the shared cluster, since this one leaves only the first of its two nodes."""
    config = farstep.RayConfig(nodes=2, min_nodes=1, workers_per_node=2, cpus_per_worker=2, lease_s=5.0)
    with cluster(envs=4, config=config) as env:
        agent, follows = TableAgent(), Continuity()

        def batches_of(columns: int) -> None:
            for batch in env.stream(agent, steps=16, max_staleness=1):
                assert_sound(batch)
                follows(batch)
                env.publish(agent)
                time.sleep(PAUSE_S)
                if batch["obs"].shape[1] == columns:
                    return

        within(lambda: batches_of(8), 120)
        assert len({node["place"] for node in env.stats()["nodes"]}) == 2, "two daemons, on two nodes"
        ray_cluster.kill_node(1)
        within(lambda: batches_of(4), 60)
        ray_cluster.start_node(2)  # as an autoscaler would
        within(lambda: batches_of(8), 120)
        stats = env.stats()
        assert_balanced(stats)
        assert len(stats["nodes"]) == 2
    ray_cluster.kill_node(2)  # started here, so that it has to end here


@pytest.mark.timeout(300)
def test_batches_continue_without_rays_first_node_until_ray_ends_the_others(
    ray_cluster: RayCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Then a call raises, also with a large restart budget, whose growing pauses add up to minutes.

    Ends the shared cluster.
    """
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "8")
    monkeypatch.setattr("farstep.launch.engines.ray.engine.GONE_S", 10.0)
    ray_cluster.start_node(3)
    config = farstep.RayConfig(workers_per_node=1, resources_per_node={"node3": 1}, restart_budget=100)
    with cluster(config=config) as env:
        agent = TableAgent()
        env.collect(agent, steps=4)
        ray_cluster.kill_node(0)
        while "Ray's head node" not in caplog.text:  # logged while batches continue
            assert_sound(within(lambda: env.collect(agent, steps=4)))
            time.sleep(PAUSE_S)
        assert env.stats()["workers"]["restarts"] == 0
        with pytest.raises(farstep.LaunchError, match=r"Ray's head node, .*, has not answered for 10 s"):
            within(lambda: collect_for_ever(env, agent), 120)
    ray_cluster.kill_node(3)  # started here, so that it has to end here
