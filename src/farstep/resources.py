"""Cores and memory available to this process."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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
    limits = cgroup_memory_limits()
    with contextlib.suppress(OSError, ValueError):
        limits.append(_kilobytes(meminfo, "MemAvailable") * 1024)
    return min(limits, default=math.inf)


def usable_cpus() -> int:
    """Return the number of cores that the affinity mask and the cgroup's quota allow; at least 1."""
    cores = float(len(os.sched_getaffinity(0)))
    for quota in cgroup_quotas():
        cores = min(cores, quota)
    return max(1, int(cores))


def parse_cores(text: str) -> set[int]:
    """Parse the kernel's notation of cores, e.g. `0-3,8`."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def core_ranges(cores: Iterable[int]) -> str:
    """Write cores in the kernel's notation, e.g. `0-3,8`."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and core == parts[-1][-1] + 1:
            parts[-1].append(core)
        else:
            parts.append([core])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


@dataclass(frozen=True)
class ProcessUse:
    """What a process has used since its start."""

    runnable_s: float
    """Seconds in which its threads ran or waited for a core, summed over the threads that it has now."""
    queued_s: float
    """Of these, the seconds in which they waited for a core."""
    anonymous_bytes: int
    """Its memory, without files and shared memory."""


@dataclass(frozen=True)
class MachineUse:
    """What processes of this machine have used so far, and what is left."""

    cores: int
    """Cores that they may use."""
    memory_bytes: float
    """Memory of the machine, or the limit of the cgroup; infinite if unknown."""
    memory_left_bytes: float
    """Memory that can still be allocated."""
    processes: Mapping[tuple[str, int], ProcessUse]
    """By name and process id; processes that have ended are left out."""


def machine_use(pids: Mapping[str, int]) -> MachineUse:
    """Read what the processes with these names have used.

    Args:
        pids: Process ids by name, of this machine.

    Returns:
        The numbers; a process that has ended is left out.
    """
    found = {(name, pid): use for name, pid in pids.items() if (use := process_use(pid)) is not None}
    total, left = machine_memory()
    return MachineUse(usable_cpus(), total, left, found)


def process_use(pid: int, proc: Path = Path("/proc")) -> ProcessUse | None:
    """Return what a process has used; None if it has ended, or the kernel does not tell."""
    ran_ns = queued_ns = 0
    try:
        for task in (proc / str(pid) / "task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
                on_core, waiting, _ = (task / "schedstat").read_text().split()
                ran_ns, queued_ns = ran_ns + int(on_core), queued_ns + int(waiting)
        anonymous = _kilobytes(proc / str(pid) / "status", "RssAnon") * 1024
    except (OSError, ValueError):
        return None
    return ProcessUse((ran_ns + queued_ns) / 1e9, queued_ns / 1e9, anonymous)


def machine_memory(
    meminfo: Path = Path("/proc/meminfo"), root: Path | None = None, self_file: Path | None = None
) -> tuple[float, float]:
    """Return the memory of this machine and what is left of it, both at most the limits of the cgroup."""
    total = left = math.inf
    with contextlib.suppress(OSError, ValueError):
        total, left = _kilobytes(meminfo, "MemTotal") * 1024.0, _kilobytes(meminfo, "MemAvailable") * 1024.0
    for folder in _cgroup_folders("memory", root or _CGROUPS, self_file or _MEMBERSHIP):
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            with contextlib.suppress(OSError, ValueError):  # absent, or "max"
                bound, current = int((folder / limit).read_text()), int((folder / used).read_text())
                reclaimable = _cgroup_file_cache(folder / "memory.stat")
                total, left = min(total, bound), min(left, bound - current + reclaimable)
    return total, max(0.0, left)


def _cgroup_file_cache(stat: Path) -> int:
    """Return the bytes of cached files that the kernel frees when a cgroup needs memory."""
    for line in stat.read_text().splitlines():
        if line.startswith("inactive_file "):
            return int(line.split()[1])
    return 0


def _kilobytes(file: Path, name: str) -> int:
    """Return a number of /proc/meminfo or /proc/PID/status; raise `ValueError` if it is absent."""
    for line in file.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise ValueError(f"{file} has no {name}")


_CGROUPS, _MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def cgroup_quotas(root: Path = _CGROUPS, self_file: Path = _MEMBERSHIP) -> list[float]:
    """Return the CPU quotas, in cores, of this process's cgroup (v2 or v1) and its parents."""
    return [quota for folder in _cgroup_folders("cpu", root, self_file) for quota in _quota_of(folder)]


def cgroup_memory_limits(root: Path = _CGROUPS, self_file: Path = _MEMBERSHIP) -> list[float]:
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
