"""Workers are parked and unparked at random, while processes of the run are killed at random moments."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import farstep
from farstep.testing import CountingEnv, TableAgent
from tests.cluster.checks import assert_balanced, cluster, eventually, together, within
from tests.cluster.nodes import node_config
from tests.cluster.parking import Trajectories, settled, state_of

WORKERS = 4
KILLS = {
    "local": {"parked": 5, "active": 5, "zygote": 5},
    "node": {"parked": 3, "active": 3, "zygote": 1, "daemon": 1},  # new daemons and their zygotes import for seconds
}


class RegisteredEnv(CountingEnv):
    """An endless environment that writes the id of its process to a folder."""

    def __init__(self, folder: str) -> None:
        super().__init__(None)
        Path(folder, str(os.getpid())).touch()


class Killer:
    """Scales at random, and kills processes of the run at random moments.

    Args:
        env: The run.
        seen: What it has collected.
        folder: The folder that its environments write process ids to.
        seed: Decides on numbers of workers, processes and moments.
    """

    def __init__(self, env: farstep.ClusterEnv, seen: Trajectories, folder: Path, seed: int) -> None:
        self._env, self._seen, self._folder, self._rng = env, seen, folder, random.Random(seed)
        self.killed: list[str] = []

    def run(self, kills: Mapping[str, int]) -> None:
        """Kill processes of each kind this many times. Every wait for the next batch has a deadline."""
        processes = {"parked": self.parked, "active": self.active, "zygote": self.zygotes, "daemon": self.daemons}
        order = [kind for kind, times in kills.items() for _ in range(times)]
        self._rng.shuffle(order)
        for kind in order:
            for _ in range(self._rng.randint(1, 4)):
                self._env.scale(workers=self._rng.randint(1, WORKERS))
                self._wait(self._rng.randint(0, 3))
            if kind == "parked":
                self._env.scale(workers=self._rng.randint(1, WORKERS - 1))
            # Later there may be none, such as a zygote before the next worker starts.
            if found := processes[kind]() if kind in self.killed else eventually(processes[kind]):
                with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
                    os.kill(self._rng.choice(found), signal.SIGKILL)
                    self.killed.append(kind)
            self._wait(self._rng.randint(0, 3))

    def _wait(self, batches: int) -> None:
        for _ in range(batches):
            assert self._seen.progress.acquire(timeout=60)

    def parked(self) -> list[int]:
        return [pid for pid, state in self._states().items() if state == "T"]

    def active(self) -> list[int]:
        return [pid for pid, state in self._states().items() if state not in "TZ"]

    def zygotes(self) -> list[int]:
        found = set()
        for pid in self._states():
            with contextlib.suppress(OSError):
                parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
                words = Path(f"/proc/{parent}/cmdline").read_bytes().split(b"\0")
                if b"farstep.worker" in words:  # otherwise its zygote has ended, or it started without one
                    found.add(parent)
        return sorted(found)

    def daemons(self) -> list[int]:
        return [int(str(node["pid"])) for node in self._env.stats()["nodes"]]

    def _states(self) -> dict[int, str]:
        """The states of the workers that run or are parked, by their process ids."""
        found = {}
        for pid in sorted(int(path.name) for path in self._folder.iterdir()):
            with contextlib.suppress(OSError):
                found[pid] = state_of(pid)
        return found


@pytest.mark.timeout(180)
@pytest.mark.parametrize("where", [pytest.param("local", marks=pytest.mark.long), "node"])
def test_run_continues_while_processes_are_killed_and_workers_are_parked_at_random(where: str, tmp_path: Path) -> None:
    folder = tmp_path / "pids"
    folder.mkdir()
    options: Any = {"workers_per_node": WORKERS, "restart_budget": 100}
    config = farstep.LocalConfig(**options) if where == "local" else node_config(tmp_path, 1, lease_s=4, **options)
    with cluster(RegisteredEnv, envs=WORKERS, config=config, env_kwargs={"folder": str(folder)}) as env:
        agent, seen = TableAgent(), Trajectories(may_restart=True)
        seen.add(env.collect(agent, steps=4))
        killer = Killer(env, seen, folder, seed=1)
        is_over = False

        def kill() -> None:
            nonlocal is_over
            try:
                killer.run(KILLS[where])
            finally:
                is_over = True

        def collect() -> None:
            while not is_over:
                seen.add(env.collect(agent, steps=4))

        for outcome in together({"kill": kill, "collect": collect}, 120).values():
            outcome.get()
        env.scale(workers=WORKERS)
        stats = settled(env, parked=0)
        within(lambda: seen.add(env.collect(agent, steps=4)))
        assert seen.columns[-1] == WORKERS and set(killer.killed) == set(KILLS[where])
        assert_balanced(env.stats())
        assert 0 < seen.restarts <= WORKERS * len(killer.killed)
        assert stats["workers"]["restarts"] <= len(killer.killed) or where == "node"
