"""`release_idle` in workflows: workers that are ahead of the learner are suspended, and no row is lost."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import farstep
from farstep.buffer import RateLimiter, Uniform
from farstep.testing import TableAgent
from farstep.workflow.triggers import DataKeyTrigger, TimeTrigger
from farstep.workflow.triggers.messages import Message
from tests.cluster.checks import DEADLINE_S, assert_balanced, eventually, within, worker_pids
from tests.cluster.flows import full
from tests.cluster.parking import Trajectories, changed, settled
from tests.cluster.sharing import SOURCE, held, serving
from tests.cluster.tables import ENDLESS, TRANSPORTS, ppo
from tests.cluster.test_releasing import all_stopped, releasing

STEPS = 2
CHUNK = 2 * STEPS
"""Rows of a chunk: workers have two environments each."""
AHEAD = 4 * CHUNK
"""Rows that the limiter admits before the learner has read them."""


class Replay:
    """A replay workflow in a thread. Its learner reads as many rows as the test requests."""

    def __init__(self, env: farstep.ClusterEnv) -> None:
        self.env, self.agent, self.seen = env, TableAgent(), Trajectories()
        self.buffer = farstep.Buffer(256, Uniform(), limiter=RateLimiter(1.0, 1, 0.0, AHEAD), pooled=True)
        self.flow = farstep.Workflow(env, self.agent, self.buffer, steps=STEPS)
        self.flow.on(TimeTrigger(1, unit="env_steps"), self._learn, thread=True, updates=False)
        self._requested = threading.Semaphore(0)

    def _learn(self, message: Message) -> None:
        while not self.flow.stopped:
            if self._requested.acquire(timeout=0.02):
                self.buffer.sample(1)

    def read(self, rows: int) -> None:
        """Let the learner read this many rows."""
        for _ in range(rows):
            self._requested.release()

    @property
    def inserted(self) -> int:
        return self.buffer.limiter.inserts

    @property
    def held(self) -> int:
        held: int = self.env.stats()["slots"]["held"]
        return held

    def wait_until_idle(self, inserted: int) -> None:
        """Wait until this many rows are inserted, and all workers are suspended."""
        eventually(lambda: self.inserted == inserted and not self.held)


@contextlib.contextmanager
def running(replay: Replay) -> Iterator[None]:
    thread = threading.Thread(target=replay.flow.run)
    thread.start()
    try:
        yield
    finally:
        replay.flow.stop()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
        replay.buffer.close()


@TRANSPORTS
def test_workers_are_suspended_while_the_limiter_admits_no_rows(transport: str) -> None:
    with releasing(2, transport) as env:
        replay = Replay(env)
        replay.flow.on_chunk = replay.seen.add
        with running(replay):
            replay.wait_until_idle(AHEAD)
            if transport != "in_process":
                eventually(all_stopped)
            before = env.stats()
            assert 2 <= before["buffered"] <= 6, "chunks of both workers wait"
            env.publish(changed(replay.agent))
            replay.read(12 * CHUNK)
            replay.wait_until_idle(AHEAD + 12 * CHUNK)
            stats = env.stats()
            assert stats["slots"]["held_seconds"] > before["slots"]["held_seconds"]
            assert stats["workers"]["alive"] == 2 and stats["delivered"] == 4 + 12
            assert_balanced(stats)
        assert sorted(replay.seen.next) == [0, 1, 2, 3]
        assert not env.events(["lost", "stuck", "warned", "restarted"])


def test_released_worker_continues_when_all_its_chunks_have_been_taken() -> None:
    with releasing(1) as env:
        replay, inserted = Replay(env), AHEAD
        with running(replay):
            replay.wait_until_idle(inserted)
            before = env.stats()
            for _ in range(12):
                replay.read(CHUNK)
                replay.wait_until_idle(inserted := inserted + CHUNK)
                after = env.stats()
                if before["buffered"] > 1:
                    assert after["slots"] == before["slots"] and after["buffered"] == before["buffered"] - 1
                else:
                    assert after["slots"]["held_seconds"] > before["slots"]["held_seconds"]
                    assert after["buffered"] == 3
                before = after


def test_rows_after_a_release_are_of_the_newest_version() -> None:
    versions: list[set[int]] = []
    with releasing() as env:
        replay = Replay(env)
        replay.flow.on_chunk = lambda batch: versions.append(set(batch["version"].flat))
        with running(replay):
            replay.wait_until_idle(AHEAD)
            rolled = 4 + env.stats()["buffered"]
            for _ in range(50):  # a suspended worker reads nothing meanwhile
                newest = env.publish(changed(replay.agent))
            replay.read(12 * CHUNK)
            replay.wait_until_idle(AHEAD + 12 * CHUNK)
    assert len(versions) == 16 and all(each == {newest} for each in versions[rolled:])


def test_released_worker_that_is_killed_is_replaced_and_released_again() -> None:
    with releasing() as env:
        replay = Replay(env)
        with running(replay):
            replay.wait_until_idle(AHEAD)
            os.kill(worker_pids()[1], signal.SIGKILL)
            eventually(lambda: env.events("restarted"))
            replay.wait_until_idle(AHEAD)
            replay.read(20 * CHUNK)
            replay.wait_until_idle(AHEAD + 20 * CHUNK)
            stats = env.stats()
            assert stats["workers"]["restarts"] == 1 and not any(stats["dropped"].values())
            assert_balanced(stats)


def test_released_workers_are_parked_and_unparked() -> None:
    with releasing() as env:
        replay = Replay(env)
        replay.flow.on_chunk = replay.seen.add
        with running(replay):
            replay.wait_until_idle(AHEAD)
            env.scale(workers=1)
            settled(env, parked=1)
            replay.read(12 * CHUNK)
            replay.wait_until_idle(AHEAD + 12 * CHUNK)
            frozen = replay.seen.next[2]
            replay.read(12 * CHUNK)
            replay.wait_until_idle(AHEAD + 24 * CHUNK)
            assert replay.seen.next[2] == frozen, "worker 1 is parked"
            env.scale(workers=2)
            eventually(lambda: env.stats()["workers"]["parked"] == 0)
            replay.read(12 * CHUNK)
            replay.wait_until_idle(AHEAD + 36 * CHUNK)
            assert replay.seen.next[2] > frozen
            assert_balanced(env.stats())
        assert not env.events(["lost", "stuck", "warned"])


def test_workers_are_suspended_at_the_staleness_bound() -> None:
    lags: list[int] = []
    with releasing() as env:
        agent = TableAgent()
        flow = farstep.Workflow(env, agent, farstep.Buffer(64, farstep.FullBatch()), max_staleness=1)

        def update(message: Message) -> None:
            eventually(all_stopped)  # this is the thread of `run`, so no chunk is taken meanwhile
            batch = flow.batch(message)
            lags.append(env.version - int(batch["version"].min()))
            env.publish(changed(agent))

        flow.on(DataKeyTrigger(n=2, size=STEPS, of="windows"), update)
        within(lambda: flow.run(until=lambda: len(lags) >= 5))
        assert not env.stats()["dropped"].get("stale")
    assert max(lags) <= 1


def test_workers_are_suspended_during_updates_of_a_workflow_that_requests_rollouts() -> None:
    with releasing() as env:
        agent = TableAgent()
        flow, learner = ppo(env, agent, farstep.Buffer(4 * STEPS, farstep.FullBatch()), STEPS)
        publish = learner.then

        def update() -> None:
            eventually(all_stopped)
            assert env.stats()["slots"]["held"] == 0
            publish()

        learner.then = update
        within(lambda: flow.run(until=learner.has(4)))
        seen = Trajectories()
        for batch in learner.batches:
            seen.add(batch)


def sharing(name: str, workers: int) -> farstep.ClusterEnv:
    source = {**SOURCE, "envs_per_node": 2 * workers, "env_kwargs": ENDLESS, "release_idle": True}
    return farstep.ClusterEnv(source, farstep.LocalConfig(workers_per_node=workers, coordinator=name))


def test_slots_go_to_another_run_while_no_worker_may_roll(tmp_path: Path) -> None:
    with serving(tmp_path / "c", slots=2) as name, sharing(name, 2) as env, sharing(name, 2) as other:
        replay = Replay(env)
        replay.flow.on_chunk = replay.seen.add
        with running(replay):
            for turn in range(3):
                replay.wait_until_idle(AHEAD + 12 * turn * CHUNK)
                eventually(lambda: held(name) == [0, 0])
                assert other.collect(TableAgent(), steps=4).shape == (4, 4)
                replay.read(12 * CHUNK)
            replay.wait_until_idle(AHEAD + 36 * CHUNK)
        assert not env.events(["lost", "stuck"])


def test_run_that_has_returned_its_slot_waits_while_another_run_uses_it(tmp_path: Path) -> None:
    with serving(tmp_path / "c", slots=1, turn_s=1.0) as name, sharing(name, 1) as env, sharing(name, 1) as other:
        replay = Replay(env)
        with running(replay):
            replay.wait_until_idle(AHEAD)
            with contextlib.closing(other.stream(TableAgent(), steps=2)) as stream:
                next(stream)
                before = env.stats()["slots"]["waited_seconds"]
                replay.read(8 * CHUNK)
                eventually(lambda: env.stats()["slots"]["waited_seconds"] > before)
                replay.wait_until_idle(AHEAD + 8 * CHUNK)  # after the turn of the other run


def test_run_that_has_returned_slots_gets_more_when_it_scales_up(tmp_path: Path) -> None:
    with serving(tmp_path / "c", slots=2) as name, sharing(name, 2) as env:
        env.launch()
        env.scale(workers=1)
        replay = Replay(env)
        with running(replay):
            replay.wait_until_idle(AHEAD)
            replay.read(20_000)  # from here on, the worker is never ahead
            eventually(lambda: held(name) == [1])
            env.scale(workers=2)
            eventually(lambda: held(name) == [2])


def test_deadlock_is_reported_while_the_slots_are_returned(tmp_path: Path) -> None:
    with serving(tmp_path / "c", slots=2) as name, sharing(name, 2) as env:
        flow, learner = ppo(env, TableAgent(), full(64), 8)
        learner.then = lambda: None  # publishes nothing
        with pytest.raises(farstep.FarstepError, match="that a consumer publishes"):
            within(flow.run)
