"""Workers that are parked on disk, by the real criu, which `make test-criu` builds. Elsewhere, tests are skipped."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import farstep
from farstep.launch.daemon.criu import PROGRAM
from farstep.testing import CountingEnv, TableAgent, check_start_backend
from tests.cluster import parking, test_parking
from tests.cluster.checks import assert_balanced, cluster, eventually
from tests.cluster.nodes import node_config, shell_in
from tests.cluster.parking import (
    Trajectories,
    collect_while_scaling,
    is_running,
    parking_head,
    state_of,
    stream_while_scaling,
)
from tests.cluster.parking_head import TellingEnv
from tests.cluster.tables import ENDLESS
from tests.engines.ray_nodes import RayCluster

pytestmark = [pytest.mark.usefixtures("criu"), pytest.mark.timeout(180)]


def on_disk(
    folder: Path,
    workers: int = 2,
    env: Any = TellingEnv,
    nodes: int = 1,
    launch: Mapping[str, Any] | None = None,
    **options: Any,
) -> farstep.ClusterEnv:
    more = {"relay": True, "park_method": "criu", **(launch or {})}
    config = node_config(folder, nodes, workers_per_node=workers, lease_s=4, **more)
    return cluster(env, envs=workers, config=config, **{"env_kwargs": ENDLESS, **options})


def settled(env: farstep.ClusterEnv, parked: int) -> dict[str, Any]:
    """The counters once this many workers are on disk, and all others run."""
    parking.settled(env, parked)
    eventually(lambda: env.stats()["workers"]["on_disk"] == parked)
    return env.stats()


def images() -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob("farstep-criu-*"))


def kept_in_memory(env: farstep.ClusterEnv) -> list[farstep.Event]:
    """The events about parked workers that could not be dumped. On a busy machine, calls that wait also warn."""
    return [event for event in env.events("warned") if "stays in memory" in event.text]


def pids_of(env: farstep.ClusterEnv) -> list[int]:
    return [int(pid) for pid in env.step(TableAgent())[4]["pid"]]


# ---- all that holds for suspended workers ----


@pytest.mark.parametrize(
    "check",
    [
        functools.partial(test_parking.test_unparked_worker_pulls_missed_versions_before_it_acts, "relay", {}),
        functools.partial(
            test_parking.test_unparked_worker_pulls_missed_versions_before_it_acts, "relay", {"kl_threshold": 0.05}
        ),
        test_parking.test_staleness_bound_applies_to_the_first_ticket_of_an_unparked_worker,
        functools.partial(
            test_parking.test_unparked_worker_acts_with_the_agent_and_the_layout_that_came_meanwhile, "relay"
        ),
        test_parking.test_recurrent_state_survives_parking,
        functools.partial(test_parking.test_reset_also_concerns_parked_workers, "relay"),
        functools.partial(test_parking.test_unparked_slots_re_enter_at_the_phase_that_is_due, "advance"),
        functools.partial(test_parking.test_unparked_slots_re_enter_at_the_phase_that_is_due, "clock"),
        functools.partial(test_parking.test_saved_run_resumes_with_parked_workers_bit_for_bit, "relay"),
    ],
    ids=["versions", "aaps", "staleness", "agent", "recurrent", "reset", "stagger", "clock", "resume"],
)
def test_suspended_and_dumped_workers_keep_the_same_promises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: Callable[[], None]
) -> None:
    def launch(name: str, workers: int = 2) -> Any:
        return node_config(tmp_path, 1, workers_per_node=workers, relay=True, park_method="criu")

    monkeypatch.setattr(test_parking, "launch", launch)
    monkeypatch.setattr(test_parking, "settled", settled)
    check()


class FallingAgent(TableAgent):
    """Pushes the cart of CartPole towards the side that its pole falls to."""

    def act(self, obs: Any) -> Any:
        return {"action": (obs[:, 2] > 0).astype(np.int64)}


def test_trajectories_are_bit_equal_to_those_of_workers_that_were_never_parked(tmp_path: Path) -> None:
    """Through several episodes, whose seeds come from the same generators."""
    found: dict[bool, list[Any]] = {}
    for parks in (False, True):
        config = node_config(tmp_path, 1, workers_per_node=2, relay=True, park_method="criu")
        source = {"env_name": "CartPole-v1", "envs_per_node": 4, "seed": 3}
        with farstep.ClusterEnv(source, config) as env:
            agent, second = FallingAgent(), []
            for _ in range(4):
                second.append(env.collect(agent, steps=40)["obs"][:, 2:].copy())
                if parks:
                    env.scale(workers=1)
                    settled(env, parked=1)
                    env.collect(agent, steps=7)
                    env.scale(workers=2)
            assert env.stats()["episodes"]["count"] > 4
        found[parks] = second
    np.testing.assert_array_equal(found[True], found[False])


@pytest.mark.parametrize("release_idle", [False, True])
def test_workers_are_written_to_disk_and_restored_without_loss_under_load(tmp_path: Path, release_idle: bool) -> None:
    with on_disk(tmp_path, 3, CountingEnv, release_idle=release_idle) as env:
        agent, seen = TableAgent(), Trajectories()
        seen.add(env.collect(agent, steps=4))
        collect_while_scaling(env, agent, seen, 12)
        env.scale(workers=1)
        settled(env, parked=2)
        stream_while_scaling(env, agent, seen, 12)
        assert not env.events("lost") and not kept_in_memory(env)


# ---- memory, disk and processes ----


def test_parked_worker_holds_no_memory_and_returns_as_the_same_process(tmp_path: Path) -> None:
    with on_disk(tmp_path) as env:
        pids = pids_of(env)
        env.scale(workers=1)
        workers = settled(env, parked=1)["workers"]
        assert not Path(f"/proc/{pids[1]}").exists()
        [folder] = images()
        size = sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())
        assert workers["disk_bytes"] == size > 1 << 20 and folder.stat().st_mode & 0o077 == 0
        env.scale(workers=2)
        assert pids_of(env) == pids
        eventually(lambda: not env.stats()["workers"]["disk_bytes"])
        assert not any(file.is_file() for file in folder.rglob("*"))
    assert not images()


class ParentEnv(CountingEnv):
    """Has a process of its own, which answers each step over a pipe."""

    def __init__(self) -> None:
        super().__init__(length=None)
        pipe = subprocess.PIPE
        self._child = subprocess.Popen(["cat"], stdin=pipe, stdout=pipe)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.write(b"step\n")
        self._child.stdin.flush()
        assert self._child.stdout.readline() == b"step\n"
        *rest, _ = super().step(action)
        return *rest, {"pid": self._child.pid}

    def close(self) -> None:
        self._child.kill()
        self._child.wait()


def test_process_of_an_environment_goes_to_disk_with_its_worker(tmp_path: Path) -> None:
    with on_disk(tmp_path, env=ParentEnv, env_kwargs={}) as env:
        pids = pids_of(env)
        env.scale(workers=1)
        settled(env, parked=1)
        assert not is_running(pids[1])
        env.scale(workers=2)
        assert pids_of(env) == pids
    eventually(lambda: not any(map(is_running, pids)))


IN_PID_NAMESPACE = """#!/bin/sh
shift
exec unshare --pid --fork --kill-child --mount-proc {process_1} sh -c "$*"
"""
WAITS_FOR_ITS_CHILD = f"{sys.executable} -c 'import subprocess, sys; subprocess.call(sys.argv[1:])'"


@pytest.mark.parametrize("process_1", ["", WAITS_FOR_ITS_CHILD], ids=["daemon", "another"])
def test_process_of_an_environment_is_restored_where_process_1_reaps_no_orphans(tmp_path: Path, process_1: str) -> None:
    """As in pods, where the node daemon is process 1, and in other containers."""
    config = node_config(tmp_path, 1, workers_per_node=2, relay=True, park_method="criu")
    Path(config.ssh[0]).write_text(IN_PID_NAMESPACE.format(process_1=process_1))
    with cluster(ParentEnv, envs=2, config=config, env_kwargs={}) as env:
        pids = pids_of(env)
        for _ in range(2):  # the worker is a child of the zygote first, and then of the node daemon
            env.scale(workers=1)
            settled(env, parked=1)
            env.scale(workers=2)
            assert pids_of(env) == pids
        assert (env.stats()["nodes"][0]["pid"] == 1) == (not process_1)


class ConnectedEnv(TellingEnv):
    """Has a TCP connection, which criu does not dump."""

    def __init__(self) -> None:
        super().__init__(length=None)
        with socket.create_server(("127.0.0.1", 0)) as server:
            self._client = socket.create_connection(server.getsockname())
            self._server, _ = server.accept()


def test_worker_that_cannot_be_dumped_stays_in_memory_and_the_reason_is_reported(tmp_path: Path) -> None:
    with on_disk(tmp_path, env=ConnectedEnv, env_kwargs={}) as env:
        pids = pids_of(env)
        env.scale(workers=1)
        [event] = eventually(lambda: kept_in_memory(env))
        assert "worker 1" in event.text and "criu/" in event.text
        assert state_of(pids[1]) == "T"
        env.scale(workers=2)
        assert pids_of(env) == pids and not env.stats()["workers"]["restarts"]


def test_restored_worker_is_pinned_to_the_same_cores(tmp_path: Path) -> None:
    allowed = os.sched_getaffinity(0)
    core = max(allowed)
    if len(allowed) < 2:
        pytest.skip("this process may use only one core")
    with on_disk(tmp_path, launch={"cpu_affinity": [core]}) as env:
        pids = pids_of(env)
        env.scale(workers=1)
        settled(env, parked=1)
        env.scale(workers=2)
        eventually(lambda: len(env.step(TableAgent())[4]["pid"]) == 2)
        assert pids_of(env) == pids
        tasks = Path(f"/proc/{pids[1]}/task").iterdir()
        assert all(os.sched_getaffinity(int(task.name)) == {core} for task in tasks)


def test_worker_whose_images_are_damaged_is_replaced(tmp_path: Path) -> None:
    with on_disk(tmp_path) as env:
        pids = pids_of(env)
        env.scale(workers=1)
        settled(env, parked=1)
        for file in images()[0].rglob("core-*.img"):
            file.unlink()
        env.scale(workers=2)
        [event] = eventually(lambda: env.events("lost"))
        assert "could not be restored from disk" in event.text
        eventually(lambda: len(env.step(TableAgent())[4]["pid"]) == 2)
        assert not env.stats()["workers"]["restarts"], "the worker is not to blame"
        assert pids_of(env)[1] != pids[1]
        assert_balanced(env.stats())


SLOW = """#!/bin/sh
[ "$1" = restore ] && [ -e {flag} ] && sleep 9
exec {program} "$@"
"""


def test_worker_that_waits_for_criu_is_not_stuck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, criu: str) -> None:
    flag, wrapper = tmp_path / "flag", tmp_path / "criu"
    wrapper.write_text(SLOW.format(flag=flag, program=criu))
    wrapper.chmod(0o755)
    monkeypatch.setenv(PROGRAM, str(wrapper))
    with on_disk(tmp_path, launch={"timeouts": farstep.Timeouts(idle_s=3.0)}) as env:
        pids = pids_of(env)
        env.scale(workers=1)
        settled(env, parked=1)
        flag.touch()
        env.scale(workers=2)
        eventually(lambda: len(env.step(TableAgent())[4]["pid"]) == 2, 60)
        assert pids_of(env) == pids and not env.events(["stuck", "lost"])


WRAPPER = """#!/bin/sh
[ "$1" = {phase} ] && [ -e {flag} ] || exec {program} "$@"
(sleep {delay}; kill -9 $$) &
exec {program} "$@"
"""


@pytest.mark.parametrize(("phase", "delay"), list(itertools.product(["dump", "restore"], [0.0, 0.01, 0.02, 0.05, 0.1])))
def test_criu_that_is_killed_at_any_point_costs_at_most_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str, delay: float, criu: str
) -> None:
    flag, wrapper = tmp_path / "flag", tmp_path / "criu"
    wrapper.write_text(WRAPPER.format(phase=phase, flag=flag, program=criu, delay=delay))
    wrapper.chmod(0o755)
    monkeypatch.setenv(PROGRAM, str(wrapper))
    with on_disk(tmp_path) as env:
        pids = pids_of(env)
        if phase == "restore":
            env.scale(workers=1)
            settled(env, parked=1)
        flag.touch()
        if phase == "dump":
            env.scale(workers=1)
            eventually(lambda: env.events("lost") or env.stats()["workers"]["on_disk"])
        flag.touch()
        env.scale(workers=2)
        eventually(lambda: len(env.step(TableAgent())[4]["pid"]) == 2)
        lost = len(env.events("lost"))  # none if criu was faster
        assert lost <= 1 and env.stats()["workers"]["restarts"] == (lost if phase == "dump" else 0)
        found = pids_of(env)
        assert found[0] == pids[0] and (found[1] != pids[1]) == bool(lost)
        assert_balanced(env.stats())
    eventually(lambda: not any(map(is_running, pids)))
    ours = f"--images-dir {tempfile.gettempdir()}"  # other tests may run criu, too
    eventually(lambda: subprocess.run(["pgrep", "--full", "--", ours], stdout=subprocess.DEVNULL).returncode)
    assert not images()


# ---- what is left ----


@pytest.mark.parametrize("killed", ["head", "daemon"])
def test_neither_images_nor_processes_outlive_a_killed_head_or_daemon(killed: str, tmp_path: Path) -> None:
    with parking_head(tmp_path, shell_in(tmp_path), "criu") as pids:
        [folder] = images()
        os.kill(pids["daemons" if killed == "daemon" else "head"][0], signal.SIGKILL)
        eventually(lambda: not folder.exists() and not any(map(is_running, pids["workers"])), 30)
    eventually(lambda: not images(), 30)


def test_node_that_is_lost_with_workers_on_disk_is_replaced(tmp_path: Path) -> None:
    with on_disk(tmp_path, env=TellingEnv, nodes=2, workers=1) as env:
        eventually(lambda: env.stats()["workers"]["alive"] == 2)
        env.scale(workers=1)
        settled(env, parked=1)
        os.kill(env.stats()["nodes"][1]["pid"], signal.SIGKILL)
        eventually(lambda: len(env.stats()["nodes"]) == 1 or env.events("lost"), 30)
        assert env.collect(TableAgent(), steps=2).slots.tolist() == [0]
        env.scale(workers=2)
        eventually(lambda: env.stats()["workers"]["alive"] == 2)
        assert len(pids_of(env)) == 2 and not env.stats()["workers"]["restarts"]


def test_worker_stays_in_memory_if_the_disk_is_full(tmp_path: Path) -> None:
    disk, mounted = tmp_path / "disk", tmp_path / "mounted"
    disk.write_bytes(bytes(8 << 20))
    mounted.mkdir()
    subprocess.run(["mkfs.ext4", "-q", disk], check=True)
    subprocess.run(["mount", "-o", "loop", disk, mounted], check=True)
    try:
        config = node_config(
            *(tmp_path, 1), workers_per_node=2, relay=True, park_method="criu", setup=[f"export TMPDIR={mounted}"]
        )
        with cluster(TellingEnv, envs=2, config=config, env_kwargs=ENDLESS) as env:
            pids = pids_of(env)
            env.scale(workers=1)
            [event] = eventually(lambda: kept_in_memory(env))
            assert "worker 1" in event.text and state_of(pids[1]) == "T"
            env.scale(workers=2)
            assert pids_of(env) == pids and not env.stats()["workers"]["restarts"]
    finally:
        subprocess.run(["umount", mounted], check=True)


# ---- Ray ----


def test_workers_on_ray_are_parked_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    with RayCluster(nodes=0, head_cpus=3) as started:
        for name, value in started.environment.items():
            monkeypatch.setenv(name, value)
        make = functools.partial(farstep.RayConfig, relay=True, park_method="criu")
        check_start_backend(make, keeps_memory=False)
