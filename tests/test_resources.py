"""The cores and the memory that a process may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from farstep import resources as machine
from farstep.errors import ConfigError
from farstep.resources import (
    available_memory,
    cgroup_memory_limits,
    cgroup_quotas,
    check_memory,
    machine_memory,
    machine_use,
    process_use,
    usable_cpus,
)

# ---- cores ----


def made_up_cgroup(tmp_path: Path, membership: str, files: dict[str, str]) -> tuple[Path, Path]:
    """Fakes of /sys/fs/cgroup and /proc/self/cgroup."""
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
    assert cgroup_quotas(*made_up_cgroup(tmp_path, membership, files)) == cores


def test_no_cgroups_at_all(tmp_path: Path) -> None:
    assert cgroup_quotas(tmp_path, tmp_path / "absent") == []


@pytest.mark.parametrize(("quotas", "cores"), [([], 8), ([2.5], 2), ([0.5], 1), ([16.0, 3.0], 3), ([100.0], 8)])
def test_affinity_and_quota_limit_the_usable_cores(
    monkeypatch: pytest.MonkeyPatch, quotas: list[float], cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(machine, "cgroup_quotas", lambda: quotas)
    assert usable_cpus() == cores


def test_affinity_is_respected() -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert usable_cpus() == 1
    finally:
        os.sched_setaffinity(0, before)


# ---- memory ----


def test_request_for_more_than_the_available_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_memory", lambda: 3 * 2**30)
    check_memory(3 * 2**30, "steps=3 of 4 environments")
    words = r"steps=7 of 4 environments need 4\.5 GiB; this machine has 3\.0 GiB available\. Lower steps"
    with pytest.raises(ConfigError, match=words):
        check_memory(9 * 2**29, "steps=7 of 4 environments")


def test_available_memory_is_that_of_machine_and_cgroup(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  900 kB\nMemAvailable:     500 kB\n")
    monkeypatch.setattr(machine, "cgroup_memory_limits", list)
    assert available_memory(meminfo) == 500 * 1024
    assert available_memory(tmp_path / "absent") == float("inf")
    monkeypatch.setattr(machine, "cgroup_memory_limits", lambda: [1000.0, 2000.0])
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
    assert cgroup_memory_limits(root, self_file) == limits


# ---- use ----


def test_use_of_a_process_is_that_of_its_threads(tmp_path: Path) -> None:
    for thread, counts in {"7": "3000000000 1000000000 9", "8": "500000000 500000000 2"}.items():
        (tmp_path / "7" / "task" / thread).mkdir(parents=True)
        (tmp_path / "7" / "task" / thread / "schedstat").write_text(f"{counts}\n")
    (tmp_path / "7" / "status").write_text("Name:\tpython\nVmRSS:\t  900 kB\nRssAnon:\t  400 kB\n")
    found = process_use(7, tmp_path)
    assert found == machine.ProcessUse(runnable_s=5.0, queued_s=1.5, anonymous_bytes=400 * 1024)
    assert process_use(8, tmp_path) is None


def test_use_of_this_machine() -> None:
    found = machine_use({"me": os.getpid(), "no process": 2**22 + 1})
    assert list(found.processes) == [("me", os.getpid())]
    assert found.processes["me", os.getpid()].anonymous_bytes > 2**20
    assert found.cores == usable_cpus() and 0 < found.memory_left_bytes <= found.memory_bytes


@pytest.mark.parametrize(
    ("files", "total", "left"),
    [
        ({}, 16_000, 8_000),
        (
            {"job/memory.max": "max\n", "job/memory.current": "900\n", "job/memory.stat": "inactive_file 1\n"},
            16_000,
            8_000,
        ),
        (
            {
                "job/memory.max": "4096000",
                "job/memory.current": "3072000",
                "job/memory.stat": "anon 5\ninactive_file 1024000",
            },
            4_000,
            2_000,
        ),
    ],
)
def test_memory_left_is_that_of_the_machine_or_of_the_cgroup(
    files: dict[str, str], total: float, left: float, tmp_path: Path
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  16000 kB\nMemFree: 100 kB\nMemAvailable: 8000 kB\n")
    root, self_file = made_up_cgroup(tmp_path, "0::/job\n", {**files, "job/cgroup.procs": ""})
    assert machine_memory(meminfo, root, self_file) == (total * 1024, left * 1024)
