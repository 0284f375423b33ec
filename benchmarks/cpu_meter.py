"""Measures CPU time of this process's descendants, and of all other processes on the same cores, during a run."""

from __future__ import annotations

import os
import resource
import threading
from pathlib import Path
from typing import Self

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
BUSY_FIELDS = (0, 1, 2, 5, 6, 7)
"""Fields user, nice, system, irq, softirq and steal of a line in /proc/stat."""


class CpuMeter:
    """Measures the CPU time during a with-block; all descendants must have ended at its end.

    The kernel adds a process's time to its parent's when the parent waits for it. Ray's daemons do not wait
    for their children, so the meter also samples all descendants once a second, and uses the larger sum.
    """

    own_s = 0.0
    others_s = 0.0

    def __init__(self, interval_s: float = 1.0) -> None:
        self._interval_s = interval_s
        self._seen: dict[tuple[int, int], float] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._busy, self._waited = busy_s(), waited_for_s()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self.own_s = max(waited_for_s() - self._waited, sum(self._seen.values()))
        self.others_s = max(0.0, busy_s() - self._busy - self.own_s)

    def _watch(self) -> None:
        while not self._ended.wait(self._interval_s):
            self._seen.update(descendants_s())


def busy_s() -> float:
    """CPU time of the cores that this process may use, since the machine started."""
    lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
    names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    return sum(int(line[1 + index]) for line in lines if line[0] in names for index in BUSY_FIELDS) / TICKS_PER_S


def waited_for_s() -> float:
    """CPU time of this process and of all descendants that were waited for."""
    usages = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def descendants_s() -> dict[tuple[int, int], float]:
    """CPU time of every living descendant, by process id and time of start."""
    parents: dict[int, int] = {}
    usages: dict[int, tuple[tuple[int, int], float]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text()
        except OSError:  # it has ended
            continue
        # The second field is the program's name in parentheses, which may contain any character.
        fields = text.rpartition(")")[2].split()
        pid = int(path.parent.name)
        parents[pid] = int(fields[1])
        usages[pid] = (pid, int(fields[19])), (int(fields[11]) + int(fields[12])) / TICKS_PER_S
    return dict(usage for pid, usage in usages.items() if is_descendant(pid, parents))


def is_descendant(pid: int, parents: dict[int, int]) -> bool:
    while pid := parents.get(pid, 0):
        if pid == os.getpid():
            return True
    return False
