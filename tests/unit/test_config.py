"""Configurations: what is refused, with which words, and how many cores there are."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from farstep import config as config_module
from farstep.config import (
    EnvConfig,
    InProcessConfig,
    LocalConfig,
    Timeouts,
    _cgroup_memory_limits,
    _cgroup_quotas,
    available_memory,
    check_count,
    check_memory,
    check_seed,
    usable_cpus,
)
from farstep.errors import ConfigError
from farstep.sync import Always

ALL = [EnvConfig, LocalConfig, InProcessConfig, Timeouts]


@pytest.mark.parametrize(
    ("kind", "key", "nearest"),
    [
        (EnvConfig, "env_nam", "env_name"),
        (EnvConfig, "envs_per_nodes", "envs_per_node"),
        (LocalConfig, "worker_per_node", "workers_per_node"),
        (Timeouts, "steps_s", "step_s"),
    ],
)
def test_an_unknown_key_names_the_nearest_and_lists_all(kind: Any, key: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"Did you mean '{nearest}'") as caught:
        kind.of({key: 1})
    assert all(field.name in str(caught.value) for field in dataclasses.fields(kind))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: EnvConfig(), "env_name is missing"),
        (lambda: EnvConfig(env_name="CartPole-v1", type="gymnasum"), "Did you mean 'gymnasium'"),  # type: ignore[arg-type]
        (lambda: EnvConfig(env_name="CartPole-v1", inference="eagre"), "Did you mean 'eager'"),  # type: ignore[arg-type]
        (lambda: EnvConfig(env_name=lambda: None), "type='factory'"),
        (lambda: EnvConfig(env_name="CartPole-v1", envs_per_node=0), "at least 1"),
        (lambda: EnvConfig(env_name="CartPole-v1", envs_per_node=2.5), "integer"),  # type: ignore[arg-type]
        (lambda: EnvConfig(env_name="CartPole-v1", seed=-1), "non-negative"),
        (lambda: EnvConfig(env_name="CartPole-v1", seed=1.0), "non-negative int"),  # type: ignore[arg-type]
        (lambda: EnvConfig(env_name="CartPole-v1", seed=True), "non-negative int"),
        (lambda: EnvConfig(env_name="CartPole-v1", seed=2**63), r"below 2\*\*63"),
        (lambda: EnvConfig(env_name="CartPole-v1", type="envpool", wrappers=[str]), "env_kwargs"),
        (lambda: EnvConfig(env_name="CartPole-v1", type="envpool").check_reset(3, masked=True), "reset_mask"),
        (lambda: EnvConfig(env_name="CartPole-v1").check_reset(2**64, masked=False), r"below 2\*\*63"),
        (lambda: EnvConfig(env_name="CartPole-v1", sync=Always), r"Always\(\)"),  # type: ignore[arg-type]
        (lambda: EnvConfig(env_name="CartPole-v1", seed_episodes="no"), "True or False"),  # type: ignore[arg-type]
        (lambda: EnvConfig(env_name="CartPole-v1", sync="always"), "EveryK"),  # type: ignore[arg-type]
        (lambda: EnvConfig(env_name=3), "env_name is 3; expected a name"),  # type: ignore[arg-type]
        (lambda: EnvConfig(env_name="CartPole-v1", wrappers="foo"), "expected a list"),
        (lambda: EnvConfig(env_name="CartPole-v1", wrappers=[3]), "wrappers has 3; expected a callable"),
        (lambda: EnvConfig(env_name="CartPole-v1", wrappers=["foo"]), "a dotted path"),
        (lambda: EnvConfig(env_name="CartPole-v1", wrappers=[(str, 5)]), "a pair of one of these"),
        (lambda: EnvConfig(env_name="CartPole-v1", type="factory"), "'CartPole-v1' with type='factory'"),
        (lambda: EnvConfig(env_name="module:Mine-v0", type="factory"), "package.module:function"),
        (lambda: check_count("num_envs", "4"), "num_envs is '4'; it must be an integer"),
        (lambda: check_count("steps", True), "integer"),
        (lambda: check_count("max_staleness", -1, minimum=0), "at least 0"),
        (lambda: EnvConfig(env_name="A", weights={"only": ""}), "only is ''; expected a pattern"),  # type: ignore[arg-type]
        (lambda: EnvConfig(env_name="A", weights={"only": ["a.*", ""]}), "expected a pattern"),  # type: ignore[arg-type]
        (lambda: LocalConfig(transport="udp"), "Known: ipc, shm, tcp"),  # type: ignore[arg-type]
        (lambda: LocalConfig(nodes=0), "at least 1"),
        (lambda: LocalConfig(nodes=True), "integer"),
        (lambda: LocalConfig(nodes=1.5), "integer"),  # type: ignore[arg-type]
        (lambda: LocalConfig(workers_per_node=0), "at least 1"),
        (lambda: LocalConfig(cpus_per_worker=0), "at least 1"),
        (lambda: LocalConfig(gpus_per_node=-1), "at least 0"),
        (lambda: InProcessConfig(gpus_per_node=1), "InProcessConfig.gpus_per_node is 1"),
        (lambda: LocalConfig(restart_budget=-1), "at least 0"),
        (lambda: LocalConfig(timeouts={"step_s": 0.0}), "at least 0.01"),  # type: ignore[arg-type]
        (lambda: LocalConfig(timeouts={"stop_s": 1.0}), "option of Timeouts 'stop_s'"),  # type: ignore[arg-type]
        (lambda: Timeouts(step_s=float("nan")), "at least"),
        (lambda: Timeouts(step_s="60"), "a number"),  # type: ignore[arg-type]
        (lambda: LocalConfig.of("CartPole-v1"), "expected a LocalConfig or a mapping"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_work_is_refused_at_construction(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


def test_a_mapping_and_a_configuration_are_the_same() -> None:
    made = LocalConfig.of({"nodes": 2, "timeouts": {"step_s": 3.0}, "transport": "tcp"})
    assert made == LocalConfig(nodes=2, timeouts=Timeouts(step_s=3.0), transport="tcp")
    assert LocalConfig.of(made) is made
    assert LocalConfig.of(None) == LocalConfig()


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_configurations_are_frozen_keyword_only_and_documented(kind: Any) -> None:
    with pytest.raises(TypeError):
        kind("CartPole-v1")
    made = kind(env_name="CartPole-v1") if kind is EnvConfig else kind()
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.nodes = 3
    source = Path(config_module.__file__).read_text()
    for field in dataclasses.fields(kind):
        after = source.split(f"\n    {field.name}: ", 1)[1].splitlines()[1]
        assert after.lstrip().startswith('"""'), f"{field.name} has no docstring"


def test_numbers_of_numpy_are_numbers() -> None:
    made = EnvConfig(env_name="CartPole-v1", envs_per_node=np.int64(4), seed=np.int32(7))  # type: ignore[arg-type]
    assert (type(made.envs_per_node), made.envs_per_node) == (int, 4)
    assert (type(made.seed), made.seed) == (int, 7)


def test_every_seed_that_travels_is_accepted() -> None:
    config = EnvConfig(env_name="CartPole-v1", seed=2**63 - 1)
    assert config.check_reset(config.seed, masked=True) == config.seed
    assert config.check_reset(None, masked=True) is None
    assert check_seed(np.uint64(7)) == 7


def test_never_more_workers_than_environments() -> None:
    assert LocalConfig(nodes=2, workers_per_node=8).num_workers(envs_per_node=3) == 6
    assert LocalConfig(workers_per_node=2).num_workers(envs_per_node=64) == 2


def test_workers_share_the_usable_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "usable_cpus", lambda: 8)
    assert LocalConfig().num_workers(64) == 8
    assert LocalConfig(cpus_per_worker=3).num_workers(64) == 2
    assert LocalConfig(cpus_per_worker=16).num_workers(64) == 1
    # All nodes are this machine, and each has a worker of its own.
    assert LocalConfig(nodes=4).num_workers(64) == InProcessConfig(nodes=4).num_workers(64) == 8
    assert LocalConfig(nodes=3).num_workers(64) == 6
    assert LocalConfig(nodes=16).num_workers(64) == 16
    assert LocalConfig(nodes=2, cpus_per_worker=2).num_workers(64) == 4


# ---- cores ----


def made_up_cgroup(tmp_path: Path, membership: str, files: dict[str, str]) -> tuple[Path, Path]:
    """What stands for /sys/fs/cgroup and /proc/self/cgroup."""
    for name, content in files.items():
        (tmp_path / "sys" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "sys" / name).write_text(content)
    (tmp_path / "self").write_text(membership)
    return tmp_path / "sys", tmp_path / "self"


@pytest.mark.parametrize(
    ("membership", "files", "cores"),
    [
        ("0::/job/step\n", {"job/step/cpu.max": "max 100000\n", "job/cpu.max": "250000 100000\n"}, [2.5]),
        ("0::/job/step\n", {"job/step/cpu.max": "100000 100000", "job/cpu.max": "400000 100000"}, [1.0, 4.0]),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, [0.5]),
        ("0::/not/mounted/here\n", {"cpu.max": "300000 100000\n"}, [3.0]),
        ("0::/../outside\n", {"cpu.max": "300000 100000\n"}, [3.0]),
        (
            "12:memory:/x\n4:cpu,cpuacct:/docker/1\n",
            {"cpu/docker/1/cpu.cfs_quota_us": "150000\n", "cpu/docker/1/cpu.cfs_period_us": "100000\n"},
            [1.5],
        ),
        ("4:cpu:/a\n", {"cpu/a/cpu.cfs_quota_us": "-1\n", "cpu/a/cpu.cfs_period_us": "100000\n"}, []),
        ("12:memory:/x\n", {"cpu.max": "100000 100000\n"}, []),
        ("0::/\n", {"cpu.max": "garbage\n"}, []),
        ("0::/\n", {"other": ""}, []),
    ],
    ids=["v2-parent", "v2-both", "v2-root", "v2-namespace", "v2-dots", "v1", "v1-none", "no-cpu", "garbage", "absent"],
)
def test_cgroup_quotas(tmp_path: Path, membership: str, files: dict[str, str], cores: list[float]) -> None:
    assert _cgroup_quotas(*made_up_cgroup(tmp_path, membership, files)) == cores


def test_no_cgroups_at_all(tmp_path: Path) -> None:
    assert _cgroup_quotas(tmp_path, tmp_path / "absent") == []


@pytest.mark.parametrize(("quotas", "cores"), [([], 8), ([2.5], 2), ([0.5], 1), ([16.0, 3.0], 3), ([100.0], 8)])
def test_usable_cores_are_what_affinity_and_quota_leave(
    monkeypatch: pytest.MonkeyPatch, quotas: list[float], cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(config_module, "_cgroup_quotas", lambda: quotas)
    assert usable_cpus() == cores


def test_affinity_is_respected() -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert usable_cpus() == 1
    finally:
        os.sched_setaffinity(0, before)


# ---- memory ----


def test_what_needs_more_memory_than_there_is_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "available_memory", lambda: 3 * 2**30)
    check_memory(3 * 2**30, "steps=3 of 4 environments")
    words = r"steps=7 of 4 environments need 4\.5 GiB; this machine has 3\.0 GiB available\. Lower steps"
    with pytest.raises(ConfigError, match=words):
        check_memory(9 * 2**29, "steps=7 of 4 environments")


def test_available_memory_is_what_machine_and_cgroup_leave(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  900 kB\nMemAvailable:     500 kB\n")
    monkeypatch.setattr(config_module, "_cgroup_memory_limits", list)
    assert available_memory(meminfo) == 500 * 1024
    assert available_memory(tmp_path / "absent") == float("inf")
    monkeypatch.setattr(config_module, "_cgroup_memory_limits", lambda: [1000.0, 2000.0])
    assert available_memory(meminfo) == 1000.0


@pytest.mark.parametrize(
    ("membership", "files", "limits"),
    [
        ("0::/job/step\n", {"job/step/memory.max": "max\n", "job/memory.max": "4096\n"}, [4096]),
        ("4:cpu:/a\n9:memory:/x\n", {"memory/x/memory.limit_in_bytes": "8192\n"}, [8192]),
        ("4:cpu:/a\n", {"memory.max": "1"}, []),
    ],
    ids=["v2", "v1", "no-memory"],
)
def test_cgroup_memory_limits(tmp_path: Path, membership: str, files: dict[str, str], limits: list[int]) -> None:
    root, self_file = made_up_cgroup(tmp_path, membership, files)
    assert _cgroup_memory_limits(root, self_file) == limits
