"""What the tests of parked workers share: an agent whose parameters change, and a check that no step is lost."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import farstep
from farstep.testing import TableAgent
from tests.cluster.checks import eventually


class Trajectories:
    """Checks that each slot of an endless `CountingEnv` continues exactly where its last batch ended."""

    def __init__(self) -> None:
        self.next: dict[int, int] = {}
        self.batches = 0
        self.columns: list[int] = []
        self.progress = threading.Semaphore(0)

    def add(self, batch: farstep.Batch) -> None:
        self.batches += 1
        self.columns.append(len(set(batch.slots.tolist())))
        counts = batch["obs"][:, :, 1]
        for column, slot in enumerate(batch.slots.tolist()):
            first = self.next.get(slot, 0)
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


def changed(agent: TableAgent) -> TableAgent:
    agent.table = (agent.table + 1) % 3
    return agent
