"""Cores and memory available to this process."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

from farstep.errors import ConfigError


def check_memory(nbytes: int, what: str) -> None:
    """Raise `ConfigError` if `nbytes` exceed the available memory, instead of letting the OOM killer act.

    Args:
        nbytes: Bytes needed.
        what: What needs them, in the plural, as the start of the message.
    """
    available = available_memory()
    if nbytes > available:
        raise ConfigError(
            f"{what} need {nbytes / 2**30:,.1f} GiB; this machine has {available / 2**30:,.1f} GiB available. Lower "
            "steps or envs_per_node."
        )


def available_memory(meminfo: Path = Path("/proc/meminfo")) -> float:
    """Return the available memory in bytes, bounded by the limits of the cgroup; infinite if unknown."""
    limits = _cgroup_memory_limits()
    with contextlib.suppress(OSError, ValueError):
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                limits.append(int(line.split()[1]) * 1024)
    return min(limits, default=math.inf)


def usable_cpus() -> int:
    """Return the number of cores that the affinity mask and the cgroup's quota allow; at least 1."""
    cores = float(len(os.sched_getaffinity(0)))
    for quota in _cgroup_quotas():
        cores = min(cores, quota)
    return max(1, int(cores))


_CGROUPS, _MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def _cgroup_quotas(root: Path = _CGROUPS, self_file: Path = _MEMBERSHIP) -> list[float]:
    """Return the CPU quotas, in cores, of this process's cgroup (v2 or v1) and its parents."""
    return [quota for folder in _cgroup_folders("cpu", root, self_file) for quota in _quota_of(folder)]


def _cgroup_memory_limits(root: Path = _CGROUPS, self_file: Path = _MEMBERSHIP) -> list[float]:
    """Return the memory limits, in bytes, of this process's cgroup and its parents."""
    limits: list[float] = []
    for folder in _cgroup_folders("memory", root, self_file):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):  # absent, or "max"
                limits.append(int((folder / name).read_text()))
    return limits


def _cgroup_folders(controller: str, root: Path, self_file: Path) -> list[Path]:
    """Return the folders with a controller's files for this process's cgroup (v2 or v1) and its parents."""
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
