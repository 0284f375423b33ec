"""Chooses the cores that each worker of a machine is pinned to (`LaunchConfig.cpu_affinity`)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from farstep.config.launch import CpuAffinity
from farstep.errors import LaunchError
from farstep.resources import core_ranges, parse_cores, usable_cpus

_SYSTEM = Path("/sys/devices/system")


class CoreAssignment:
    """The cores of each worker, by the worker's rank on this machine.

    Args:
        groups: Groups of cores, one per worker. If there are more workers than groups, workers share cores.
    """

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self._groups = groups

    def __len__(self) -> int:
        return len(self._groups)

    def cores_of(self, rank: int) -> list[int]:
        """Return the cores of a worker."""
        return list(self._groups[rank % len(self._groups)])


def assign_cores(
    option: CpuAffinity, cores_per_worker: int, workers: int, system: Path = _SYSTEM
) -> CoreAssignment | None:
    """Divide the cores that this process may use among its workers.

    With `"auto"`, all workers get cores of one NUMA node if it has enough of them, preferably of the node that this
    process runs on; the kernel then also allocates the memory that they share with this process there. Otherwise only
    the cores of the same worker are on one node. Different physical cores are used before their second hyperthreads.

    Args:
        option: `LaunchConfig.cpu_affinity`.
        cores_per_worker: Number of cores of each worker.
        workers: Number of workers on this machine.
        system: Folder in which the kernel describes cores and NUMA nodes.

    Returns:
        The assignment; None if workers are not to be pinned.

    Raises:
        LaunchError: Workers cannot be pinned on this machine; the message says why.
    """
    if option == "off":
        return None
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, allowed)
    except OSError as error:
        raise LaunchError(
            f"cpu_affinity={option!r}: this process is not permitted to set its CPU affinity ({error})."
        ) from error
    if option != "auto":
        if not set(option) <= allowed:
            raise LaunchError(
                f"cpu_affinity={list(option)} names cores outside this process's affinity mask; expected some of "
                f"{core_ranges(allowed)}."
            )
        return CoreAssignment(_cut([list(option)], cores_per_worker))
    if (usable := usable_cpus()) < len(allowed):
        raise LaunchError(
            f"cpu_affinity='auto': the cgroup of this process limits its CPU time to that of {usable} cores, but does "
            f"not reserve particular cores, so other containers may use the same ones. Reserve cores (Kubernetes: "
            f"the static CPU manager policy), or list some of {core_ranges(allowed)}."
        )
    nodes = [_physical_first(cores, system) for cores in _numa_nodes(allowed, system)]
    current = current_core()

    def preference(cores: Sequence[int]) -> tuple[bool, bool, int]:
        size = min(cores_per_worker, len(cores))
        return len(cores) // size >= workers, current in cores, len(cores)

    nodes.sort(key=preference, reverse=True)
    return CoreAssignment(_cut(nodes, cores_per_worker))


def _cut(nodes: Sequence[Sequence[int]], size: int) -> list[list[int]]:
    """Cut the cores of each node into groups of `size`; a group spans nodes only if no node has enough cores."""
    largest = max(len(cores) for cores in nodes)
    if size > largest:
        nodes = [[core for cores in nodes for core in cores]]
        size = min(size, len(nodes[0]))
    return [list(cores[first : first + size]) for cores in nodes for first in range(0, len(cores) - size + 1, size)]


def _numa_nodes(allowed: set[int], system: Path) -> list[list[int]]:
    """Return the allowed cores of each NUMA node; all of them as one node if the kernel does not report NUMA
    nodes."""
    found = []
    for folder in sorted((system / "node").glob("node[0-9]*")):
        with contextlib.suppress(OSError, ValueError):
            if cores := sorted(parse_cores((folder / "cpulist").read_text()) & allowed):
                found.append(cores)
    return found if {core for cores in found for core in cores} == allowed else [sorted(allowed)]


def _physical_first(cores: Sequence[int], system: Path) -> list[int]:
    """Sort the first hyperthread of each physical core before the second ones."""

    def hyperthread(core: int) -> int:
        try:
            siblings = parse_cores((system / "cpu" / f"cpu{core}" / "topology" / "thread_siblings_list").read_text())
        except (OSError, ValueError):
            return 0
        return sum(other < core for other in siblings & set(cores))

    return sorted(cores, key=lambda core: (hyperthread(core), core))


def current_core() -> int:
    """Return the core on which this process ran last; -1 if unknown."""
    try:
        return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[36])
    except (OSError, ValueError, IndexError):
        return -1
