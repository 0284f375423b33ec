"""Workers are pinned to cores of their own, on one NUMA node where possible."""

from __future__ import annotations

import functools
import os
import sys
import threading
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import farstep
from farstep.errors import ConfigError, LaunchError
from farstep.launch.daemon import affinity
from farstep.launch.daemon.affinity import assign_cores
from farstep.resources import core_ranges, parse_cores
from tests.contract.test_nodes import config as node_config

pytestmark = pytest.mark.slow  # real processes, or learning


class Machine:
    """A machine with made-up cores and NUMA nodes."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, cores: int, nodes: list[str], current: int
    ) -> None:
        self.system = folder
        for number, cpulist in enumerate(nodes):
            node = folder / "node" / f"node{number}"
            node.mkdir(parents=True)
            (node / "cpulist").write_text(f"{cpulist}\n")
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
        monkeypatch.setattr(os, "sched_setaffinity", lambda pid, mask: None)
        monkeypatch.setattr(affinity, "usable_cpus", lambda: cores)
        monkeypatch.setattr(affinity, "current_core", lambda: current)

    def siblings(self, core: int, text: str) -> None:
        folder = self.system / "cpu" / f"cpu{core}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{text}\n")

    def cores(self, option: Any, per_worker: int, workers: int) -> list[list[int]]:
        found = assign_cores(option, per_worker, workers, self.system)
        assert found is not None
        return [found.cores_of(rank) for rank in range(workers)]


def test_workers_that_fit_on_one_numa_node_are_kept_on_the_node_of_their_starter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path, monkeypatch, 8, ["0-3", "4-7"], current=6)
    assert machine.cores("auto", 1, 4) == [[4], [5], [6], [7]]
    assert machine.cores("auto", 2, 2) == [[4, 5], [6, 7]]


def test_workers_stay_on_a_larger_numa_node_if_the_own_one_is_too_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path, monkeypatch, 6, ["0-1", "2-5"], current=0)
    assert machine.cores("auto", 1, 3) == [[2], [3], [4]]


def test_cores_of_one_worker_are_on_one_numa_node_if_possible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path, monkeypatch, 6, ["0-2", "3-5"], current=0)
    assert machine.cores("auto", 2, 2) == [[0, 1], [3, 4]]
    assert machine.cores("auto", 4, 1) == [[0, 1, 2, 3]], "no node has four cores"


def test_second_hyperthreads_come_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path, monkeypatch, 4, ["0-3"], current=0)
    for core in range(4):
        machine.siblings(core, "0-1" if core < 2 else "2-3")
    assert machine.cores("auto", 1, 4) == [[0], [2], [1], [3]]


def test_more_workers_than_cores_share_them_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path, monkeypatch, 2, [], current=0)
    assert machine.cores("auto", 1, 3) == [[0], [1], [0]]
    assert machine.cores([1], 1, 2) == [[1], [1]]


def test_a_quota_without_reserved_cores_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path, monkeypatch, 8, [], current=0)
    monkeypatch.setattr(affinity, "usable_cpus", lambda: 2)
    with pytest.raises(LaunchError, match="limits its CPU time to that of 2 cores"):
        machine.cores("auto", 1, 2)
    assert machine.cores([3, 4], 1, 2) == [[3], [4]], "the user knows better"


@pytest.mark.parametrize("text", ["0", "0-3", "0-1,4,6-9"])
def test_core_notation_round_trips(text: str) -> None:
    assert core_ranges(parse_cores(text)) == text


@pytest.mark.parametrize("value", ["all", [], [0, 0], [-1], [True], 3])
def test_invalid_affinity_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="expected 'off', 'auto' or a list of different core"):
        farstep.LocalConfig(cpu_affinity=value)


def test_workers_in_the_callers_thread_cannot_be_pinned() -> None:
    with pytest.raises(ConfigError, match="use its cores"):
        farstep.InProcessConfig(cpu_affinity="auto")


class CoresEnv(gymnasium.Env[Any, Any]):
    """Observes the lowest and the highest core of all threads of its process: one of Python, and those of torch.

    Only in workers whose zygote has imported torch, since the import takes 2 s of CPU time.
    """

    observation_space = gymnasium.spaces.Box(-1, 4096, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        if (torch := sys.modules.get("torch")) is not None:
            torch.ones(1 << 20).add(1).sum()  # in parallel, so that torch starts its threads
        seen = threading.Event()
        thread = threading.Thread(target=seen.wait)
        thread.start()
        threads = [int(task.name) for task in Path("/proc/self/task").iterdir()]
        masks = [os.sched_getaffinity(thread) for thread in threads]
        seen.set()
        thread.join()
        return np.array([min(map(min, masks)), max(map(max, masks))], np.float32), {"threads": len(threads)}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.zeros(2, np.float32), 0.0, False, False, {}


def pinned(config: Any) -> tuple[list[list[int]], list[str]]:
    """Return lowest and highest core of each worker, as its environment sees it and as `stats` reports it."""
    source = {"type": "factory", "env_name": CoresEnv, "envs_per_node": config.workers_per_node, "seed": 1}
    with farstep.ClusterEnv(source, config) as env:
        obs, _ = env.reset()
        return obs.astype(int).tolist(), env.stats()["workers"]["cores"]


@pytest.mark.usefixtures("torch_in_workers")
@pytest.mark.parametrize("method", ["zygote", "cold"])
def test_local_workers_and_their_threads_run_on_their_own_cores(method: Any) -> None:
    first, *_, last = sorted(os.sched_getaffinity(0))
    config = farstep.LocalConfig(workers_per_node=2, cpu_affinity=[last, first], start_method=method)
    assert pinned(config) == ([[last, last], [first, first]], [str(last), str(first)])


@pytest.mark.usefixtures("torch_in_workers")
def test_a_worker_gets_as_many_cores_as_threads() -> None:
    first, second = sorted(os.sched_getaffinity(0))[:2]
    config = farstep.LocalConfig(workers_per_node=1, cpus_per_worker=2, cpu_affinity=[first, second])
    assert pinned(config)[0] == [[first, second]]


def test_workers_on_nodes_are_pinned(tmp_path: Path) -> None:
    found, reported = pinned(node_config(tmp_path, workers_per_node=2, cpu_affinity="auto"))
    assert all(low == high for low, high in found)
    assert reported == [str(low) for low, _ in found] and len(set(reported)) == 2


def test_local_launch_is_refused_where_the_kernel_forbids_pinning(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(pid: int, mask: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", forbidden)
    with pytest.raises(LaunchError, match=r"not permitted to set its CPU affinity .*Operation not permitted"):
        pinned(farstep.LocalConfig(workers_per_node=2, cpu_affinity="auto"))


def test_a_node_without_the_listed_cores_is_refused_with_the_reason(tmp_path: Path) -> None:
    make = functools.partial(node_config, tmp_path, workers_per_node=1)
    with pytest.raises(LaunchError, match=r"cpu_affinity=\[4095\] names cores outside this process's affinity mask"):
        pinned(make(cpu_affinity=[4095]))


def test_sharing_cores_is_warned_about() -> None:
    core = min(os.sched_getaffinity(0))
    source = {"type": "factory", "env_name": CoresEnv, "envs_per_node": 2, "seed": 1}
    with farstep.ClusterEnv(source, farstep.LocalConfig(workers_per_node=2, cpu_affinity=[core])) as env:
        env.launch()
        assert "some workers share cores" in env.events("warned")[0].text
