"""What this machine lets a process have: cores and memory."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

from farstep.errors import ConfigError


def check_memory(nbytes: int, what: str) -> None:
    """Refuse what needs more memory than there is, before the kernel kills somebody for it."""
    available = available_memory()
    if nbytes > available:
        raise ConfigError(
            f"{what} need {nbytes / 2**30:,.1f} GiB; this machine has {available / 2**30:,.1f} GiB available. Lower "
            "steps or envs_per_node."
        )


def available_memory(meminfo: Path = Path("/proc/meminfo")) -> float:
    """Bytes that can be had: what the machine has left, never more than the cgroup's limit; infinite if unknown."""
    limits = _cgroup_memory_limits()
    with contextlib.suppress(OSError, ValueError):
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                limits.append(int(line.split()[1]) * 1024)
    return min(limits, default=math.inf)


def usable_cpus() -> int:
    """Cores this process may use: the affinity mask cut by the cgroup's quota, never below one."""
    cores = float(len(os.sched_getaffinity(0)))
    for quota in _cgroup_quotas():
        cores = min(cores, quota)
    return max(1, int(cores))


_CGROUPS, _MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def _cgroup_quotas(root: Path = _CGROUPS, self_file: Path = _MEMBERSHIP) -> list[float]:
    """CPU quotas in cores, of this process's cgroup (v2 or v1) and those above it."""
    return [quota for folder in _cgroup_folders("cpu", root, self_file) for quota in _quota_of(folder)]


def _cgroup_memory_limits(root: Path = _CGROUPS, self_file: Path = _MEMBERSHIP) -> list[float]:
    """Memory limits in bytes, likewise."""
    limits: list[float] = []
    for folder in _cgroup_folders("memory", root, self_file):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):  # absent, or "max"
                limits.append(int((folder / name).read_text()))
    return limits


def _cgroup_folders(controller: str, root: Path, self_file: Path) -> list[Path]:
    """Where the controller's files of this process's cgroup (v2 or v1) and those above it are."""
    folders: list[Path] = []
    try:
        lines = self_file.read_text().splitlines()
    except OSError:
        return folders
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / controller if controllers else root
        below = base / path.lstrip("/")
        for folder in (below, *below.parents):
            if base not in (folder, *folder.parents):
                break
            folders.append(folder)
    return folders


def _quota_of(folder: Path) -> list[float]:
    try:
        if (v2 := folder / "cpu.max").exists():
            quota, period = v2.read_text().split()
        elif (v1 := folder / "cpu.cfs_quota_us").exists():
            quota, period = v1.read_text().strip(), (folder / "cpu.cfs_period_us").read_text().strip()
        else:
            return []
    except (OSError, ValueError):
        return []
    return [] if quota in ("max", "-1") else [int(quota) / int(period)]
