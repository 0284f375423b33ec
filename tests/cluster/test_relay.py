"""Runs whose node daemons relay for their workers. Nodes are processes of this machine, as in contract/test_nodes."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import farstep
from farstep.testing import CountingEnv, TableAgent
from tests.cluster.checks import assert_balanced, cluster, eventually
from tests.cluster.nodes import node_config
from tests.cluster.parking import is_running
from tests.cluster.tables import ENDLESS

pytestmark = pytest.mark.timeout(120)
ESTABLISHED = "01"


class PidEnv(CountingEnv):
    """Names a file in `folder` after its process; raises in the third step if `raises` is a text."""

    def __init__(self, folder: str, raises: str = "", **options: Any) -> None:
        super().__init__(**options)
        Path(folder, str(os.getpid())).touch()
        self._raises = raises

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._raises and self.count == 2:
            raise ValueError(self._raises)
        return super().step(action)


def relayed(folder: Path, nodes: int = 1, workers: int = 2, raises: str = "", **options: Any) -> farstep.ClusterEnv:
    """A cluster with one environment per worker, whose episodes never end."""
    (folder / "pids").mkdir()
    config = node_config(folder, nodes, workers_per_node=workers, relay=True, **{"restart_budget": 100, **options})
    kwargs = {**ENDLESS, "folder": str(folder / "pids"), "raises": raises}
    return cluster(PidEnv, envs=workers, config=config, env_kwargs=kwargs)


def connections() -> int:
    """The number of TCP connections of this process."""
    own = {str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink() and path.exists()}
    lines = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return sum(words[3] == ESTABLISHED and f"socket:[{words[9]}]" in own for words in lines)


def test_head_has_one_control_and_one_bulk_connection_per_node(tmp_path: Path) -> None:
    before = connections()
    with relayed(tmp_path, nodes=2, workers=3) as env:
        env.collect(TableAgent(), steps=1000)
        assert connections() - before == 2 * 2


class Episodes:
    """Checks that the rows of each slot are consecutive, and restart only where a batch is marked so."""

    def __init__(self) -> None:
        self._next: dict[int, float] = {}

    def add(self, batch: farstep.Batch) -> None:
        for column, slot in enumerate(batch.slots.tolist()):
            rows = batch["obs"][:, column, 1].tolist()
            first = self._next.get(slot, 0.0) if batch.continues[column] else 0.0
            assert rows == [first + i for i in range(len(rows))], "a row was lost or repeated"
            self._next[slot] = first + len(rows)


def running(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.iterdir() if is_running(int(path.name))]


def test_killed_workers_are_reported_at_once_and_the_others_continue(tmp_path: Path) -> None:
    """Long before the lease expires: the daemon notices the end of the process."""
    rng, agent, seen = random.Random(1), TableAgent(), Episodes()
    with relayed(tmp_path, workers=3, lease_s=3600) as env:
        stream = env.stream(agent, steps=8, max_staleness=2)
        killed = 0
        for batch in stream:
            seen.add(batch)
            time.sleep(0.01)  # processes start meanwhile, and need the CPU time
            if env.stats()["workers"]["restarts"] == killed and env.stats()["workers"]["alive"] == 3:
                if killed == 5:
                    break
                killed += 1
                os.kill(rng.choice(running(tmp_path / "pids")), signal.SIGKILL)
        stream.close()
        assert_balanced(env.stats())
        assert len(env.events("lost")) == 5


def test_workers_end_with_their_daemon_and_its_replacement_starts_new_ones(tmp_path: Path) -> None:
    with relayed(tmp_path, nodes=2, workers=2, min_nodes=1) as env:
        agent, seen = TableAgent(), Episodes()
        while len((batch := env.collect(agent, steps=4)).slots) < 4:
            seen.add(batch)
            time.sleep(0.02)
        seen.add(batch)
        before = running(tmp_path / "pids")
        daemon = env.stats()["nodes"][1]["pid"]
        os.kill(daemon, signal.SIGKILL)
        eventually(lambda: len(set(before) & set(running(tmp_path / "pids"))) == 2)
        while daemon in [node["pid"] for node in env.stats()["nodes"]] or len(batch.slots) < 4:
            seen.add(batch := env.collect(agent, steps=4))
            time.sleep(0.02)
        stats = env.stats()
        assert not stats["workers"]["restarts"], "the node is to blame"
        assert_balanced(stats)


def test_last_output_of_a_worker_arrives_before_the_report_of_its_end(tmp_path: Path) -> None:
    """Also if they are long, so that they are sent over the bulk connection."""
    env = relayed(tmp_path, workers=1, restart_budget=0, raises="x" * 100_000)
    with env, pytest.raises(farstep.RemoteEnvError, match="x" * 1000):
        env.collect(TableAgent(), steps=4)


def test_workers_have_no_connection_but_the_one_to_their_daemon(tmp_path: Path) -> None:
    with relayed(tmp_path, workers=1) as env:
        env.collect(TableAgent(), steps=4)
        (pid,) = running(tmp_path / "pids")
        links = [str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir()]
        assert sum(link.startswith("socket:") for link in links) == 1, "the link to the daemon"
