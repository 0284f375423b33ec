"""Helpers for tests of parked workers: heads to kill, scaling at random, and a check that no step is lost."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import farstep
from farstep.testing import TableAgent
from tests.cluster.checks import assert_balanced, eventually
from tests.cluster.tables import helper

ROOT = Path(__file__).parents[2]


class Trajectories:
    """Checks that each slot of an endless `CountingEnv` continues exactly where its last batch ended.

    Args:
        may_restart: Whether a slot may start a new episode, because its worker was replaced; the batch must mark it.
        may_skip: Whether chunks may be missing, because they were dropped as stale; the batch must mark it.
    """

    def __init__(self, may_restart: bool = False, may_skip: bool = False) -> None:
        self._may_restart, self.restarts = may_restart, 0
        self._may_skip, self.num_skipped = may_skip, 0
        self.next: dict[int, int] = {}
        self.batches = 0
        self.columns: list[int] = []
        self.progress = threading.Semaphore(0)

    def add(self, batch: farstep.Batch) -> None:
        self.batches += 1
        self.columns.append(len(set(batch.slots.tolist())))
        counts = batch["obs"][:, :, 1]
        for column, slot in enumerate(batch.slots.tolist()):
            if self._may_restart and slot in self.next and not batch.continues[column]:
                del self.next[slot]
                self.restarts += 1
            first = self.next.get(slot, 0)
            if self._may_skip and not batch.continues[column]:
                self.next.pop(slot, None)
                num_skipped, rest = divmod(int(counts[0, column]) - first, len(counts))
                assert num_skipped >= 0 and rest == 0, (slot, first)
                self.num_skipped += num_skipped
                first += num_skipped * len(counts)
            np.testing.assert_array_equal(counts[:, column], np.arange(first, first + len(counts)), err_msg=str(slot))
            assert batch.continues[column] == (slot in self.next), (slot, first)
            self.next[slot] = first + len(counts)
        self.progress.release()


def scaling_at_random(env: farstep.ClusterEnv, seen: Trajectories, times: int, seed: int) -> Callable[[], None]:
    """A function for a thread that calls `scale` this many times, sometimes several times per batch."""

    def scale() -> None:
        rng = random.Random(seed)
        for _ in range(times):
            env.scale(workers=rng.randint(1, env.num_workers))
            if rng.random() < 0.6:
                assert seen.progress.acquire(timeout=60)

    return scale


def collect_while_scaling(env: farstep.ClusterEnv, agent: TableAgent, seen: Trajectories, times: int) -> None:
    with helper(scaling_at_random(env, seen, times, 1)) as scaler:
        while scaler.is_alive():
            seen.add(env.collect(agent, steps=4))


def stream_while_scaling(env: farstep.ClusterEnv, agent: TableAgent, seen: Trajectories, times: int) -> None:
    stream = env.stream(agent, steps=4, max_staleness=2)
    with helper(scaling_at_random(env, seen, times, 2)) as scaler:
        for batch in stream:
            seen.add(batch)
            if not scaler.is_alive():
                break
    stats = env.stats()
    assert_balanced(stats)
    assert not stats["dropped"] and not stats["workers"]["restarts"]
    stream.close()


@contextlib.contextmanager
def parking_head(folder: Path, shell: str, *park_method: str) -> Iterator[dict[str, list[int]]]:
    """The process ids of a head with parked workers, of its workers and of its daemons. All end with this context."""
    file = folder / "pids"
    command = [sys.executable, "-m", "tests.cluster.parking_head", shell, str(file), *park_method]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as head:
        try:
            eventually(lambda: file.exists() or head.poll() is not None)
            assert head.poll() is None, head.communicate()
            pids = json.loads(file.read_text())
            yield {"head": [head.pid], **pids}
        finally:
            head.kill()
    eventually(lambda: not any(map(is_running, pids["daemons"])), 30)


def settled(env: farstep.ClusterEnv, parked: int) -> dict[str, Any]:
    """The counters once this many workers are parked, and all others run."""
    wanted = {"parked": parked, "alive": env.num_workers - parked}

    def found() -> dict[str, Any] | None:
        stats = env.stats()
        return stats if {name: stats["workers"][name] for name in wanted} == wanted else None

    stats: dict[str, Any] = eventually(found)
    return stats


def state_of(pid: int) -> str:
    """The letter of a process's state: T is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def is_running(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return state_of(pid) != "Z"
    except OSError:
        return False


def changed(agent: TableAgent) -> TableAgent:
    agent.table = (agent.table + 1) % 3
    return agent
