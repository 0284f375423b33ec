"""`release_idle`: workers are suspended while no rollout is in progress, and every batch stays the same."""

from __future__ import annotations

import functools
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import farstep
from farstep.elastic import monitor
from farstep.learners.loop.checkpoints.journal import Journal
from farstep.testing import CountingEnv, TableAgent
from tests.cluster.checks import arrays_of, assert_same, cluster, eventually, worker_pids
from tests.cluster.nodes import on_nodes
from tests.cluster.parking import Trajectories, changed, settled, state_of
from tests.cluster.tables import ENDLESS, launch
from tests.cluster.test_parking import Closing


def releasing(workers: int = 2, transport: str = "shm", **options: Any) -> farstep.ClusterEnv:
    options = {"env_kwargs": ENDLESS, "release_idle": True, **options}
    return cluster(envs=2 * workers, config=launch(transport, workers), **options)


def all_stopped() -> bool:
    return all(state_of(pid) == "T" for pid in worker_pids())


@pytest.mark.parametrize(
    ("transport", "options"),
    [
        ("in_process", {}),
        ("tcp", {}),
        ("shm", {"kl_threshold": 0.05}),
        ("shm", {"stagger": {"horizon": 12, "groups": 4, "init": "advance"}}),
    ],
)
def test_batches_are_the_same_and_no_slot_is_held_between_them(transport: str, options: dict[str, Any]) -> None:
    kept, found = list[Any](), list[Any]()
    for release, batches in ((False, kept), (True, found)):
        with releasing(2, transport, release_idle=release, env_kwargs={"length": 7}, **options) as env:
            agent = TableAgent()
            for _ in range(5):
                batch = env.collect(changed(agent), steps=4)
                batches.append({**arrays_of(batch), "continues": batch.continues.copy()})
                assert env.stats()["slots"]["held"] == (0 if release else 2)
                if release and transport != "in_process":
                    eventually(all_stopped)
                env.publish(changed(agent))
            assert env.stats()["workers"]["alive"] == 2
    for one, other in zip(kept, found, strict=True):
        assert_same(one, other)


def test_held_seconds_do_not_grow_between_rollouts_and_time_limits_do_not_apply() -> None:
    limits: Any = {"idle_s": 2.0, "step_s": 2.0}
    with cluster(envs=2, workers=2, env_kwargs=ENDLESS, release_idle=True, timeouts=limits) as env:
        agent, seen = TableAgent(), Trajectories()
        seen.add(env.collect(agent, steps=2))
        before = env.stats()
        ends = time.monotonic() + 2.5  # longer than the limits
        eventually(lambda: time.monotonic() > ends)
        after = env.stats()
        assert after["slots"] == before["slots"] and before["slots"]["held_seconds"] > 0
        seen.add(env.collect(agent, steps=2))
        stats = env.stats()
        assert stats["slots"]["held_seconds"] > after["slots"]["held_seconds"]
        assert 0 < stats["slots"]["used_seconds"] < stats["slots"]["held_seconds"]
        assert not env.events(["lost", "stuck"])


def test_released_workers_are_scaled_saved_reset_and_given_another_agent() -> None:
    source = {"type": "factory", "env_name": functools.partial(CountingEnv, length=50), "envs_per_node": 4, "seed": 7}
    agent, journal, launcher = TableAgent(), Journal(), launch("shm", 4)
    with farstep.ClusterEnv({**source, "release_idle": True}, launcher) as env:
        journal.add(env.collect(agent, steps=5))
        saved, actions = env.save(), journal.actions()
        eventually(all_stopped)
        expected = arrays_of(env.collect(agent, steps=5))
        env.scale(workers=2)
        assert env.collect(agent, steps=5).slots.tolist() == [0, 1]
        settled(env, parked=2)
        eventually(all_stopped)
        env.scale(workers=4)
        assert env.collect(TableAgent(), steps=5).slots.tolist() == [0, 1, 2, 3]
        assert env.reset(seed=3)[0].shape == (4, 3)
        eventually(all_stopped)
        assert not env.events(["lost", "stuck", "warned"])
    with farstep.ClusterEnv(source, launcher) as env:  # a run that does not release resumes the one that does
        env.resume(agent, saved, actions)
        assert_same(arrays_of(env.collect(agent, steps=5)), expected)


def test_released_worker_that_is_killed_is_replaced_before_the_next_rollout() -> None:
    with releasing() as env:
        agent = TableAgent()
        env.collect(agent, steps=2)
        os.kill(worker_pids()[1], signal.SIGKILL)
        eventually(lambda: env.events("restarted"))
        assert env.collect(agent, steps=2).slots.tolist() == [0, 1, 2, 3]
        assert env.stats()["workers"]["restarts"] == 1
        eventually(all_stopped)


def test_stream_releases_its_workers_when_it_ends() -> None:
    with releasing() as env:
        stream = env.stream(TableAgent(), steps=2)
        next(stream)
        assert env.stats()["slots"]["held"] == 2
        stream.close()
        eventually(all_stopped)
        assert env.collect(TableAgent(), steps=2).shape == (2, 4)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_close_ends_released_workers_by_themselves(transport: str, tmp_path: Path) -> None:
    with releasing(transport=transport, env=Closing, env_kwargs={"folder": str(tmp_path)}) as env:
        env.collect(TableAgent(), steps=2)
        eventually(all_stopped)
        pids = worker_pids()
    assert len(list(tmp_path.iterdir())) == 2  # all environments were closed
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.timeout(120)
def test_workers_on_nodes_are_released_for_longer_than_their_connections_last(tmp_path: Path) -> None:
    with on_nodes(tmp_path, 1, 1, lease_s=4, release_idle=True) as env:
        agent, seen = TableAgent(), Trajectories()
        seen.add(env.collect(agent, steps=2))
        ends = time.monotonic() + 2.0  # the head closes silent connections after 0.4 of the lease
        eventually(lambda: time.monotonic() > ends)
        assert env.stats()["slots"]["held"] == 0
        env.publish(changed(agent))
        batch = env.collect(agent, steps=2)
        seen.add(batch)
        assert set(batch["version"].flat) == {env.version}
        assert not env.events(["lost", "stuck", "restarted"])


@pytest.mark.timeout(120)
def test_released_workers_end_by_themselves_with_the_node_that_they_are_on(tmp_path: Path) -> None:
    with on_nodes(tmp_path, 2, 2, workers=1, release_idle=True) as env:
        agent = TableAgent()
        eventually(lambda: env.stats()["workers"]["alive"] == 2)
        env.collect(agent, steps=2)
        env.scale(nodes=1)
        eventually(lambda: len(env.stats()["nodes"]) == 1)
        assert env.collect(agent, steps=2).slots.tolist() == [0]
        assert env.stats()["slots"]["held"] == 0
        assert not env.events(["lost", "stuck", "restarted"])


def test_workers_are_resumed_before_the_next_rollout_is_expected_and_suspended_if_it_does_not_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(monitor, "STABLE", math.inf)  # on a busy machine, updates take unequally long
    with releasing(prewarm=True) as env:
        agent = TableAgent()
        for _ in range(monitor.WINDOW):
            env.collect(changed(agent), steps=2)
            time.sleep(0.1)  # an update
        env.collect(changed(agent), steps=2)
        held_s = env.stats()["slots"]["held_seconds"]
        eventually(lambda: env.stats()["slots"]["held_seconds"] > held_s)
        eventually(lambda: env.stats()["slots"]["held"] == 0 and all_stopped())
        assert env.collect(changed(agent), steps=2).continues.all()
        assert not env.events(["lost", "stuck", "warned"])


def test_prewarming_needs_released_workers() -> None:
    with pytest.raises(farstep.ConfigError, match="release_idle=True"):
        releasing(release_idle=False, prewarm=True)
