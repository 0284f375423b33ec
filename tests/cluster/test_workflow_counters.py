"""While a workflow runs and after it, `stats()` has the counters of its buffer, limiter, triggers and consumers."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import farstep
from farstep.buffer import SampleToInsertRatio, Uniform
from farstep.head.stats import counters as head_stats
from farstep.head.stats.learner_times import LearnerTimes
from farstep.testing import TableAgent
from farstep.workflow.triggers import DataKeyTrigger, TimeTrigger
from tests.cluster.checks import cluster, eventually, in_process, within
from tests.cluster.flows import full
from tests.cluster.tables import ENDLESS


def test_triggers_count_what_they_fired_and_what_they_wait_for() -> None:
    with cluster(envs=2, config=in_process(), env_kwargs=ENDLESS) as env:
        assert not env.stats().keys() & {"buffer", "limiter", "workflow"}
        flow = farstep.Workflow(env, TableAgent(), full(2 * 32), steps=4, max_staleness=4)
        pending: list[int] = []

        def look(message: Any) -> None:
            pending.append(env.stats()["workflow"]["learn"]["pending_rows"])
            if pending[-1]:
                flow.publish()  # between the two chunks of a window

        flow.on(DataKeyTrigger(n=1, size=8), flow.batch, name="learn")
        flow.on(TimeTrigger(8, unit="env_steps"), look, name="look")  # after each chunk: 4 steps of 2 environments
        within(lambda: flow.run(total_steps=64))
        stats = env.stats()
    assert pending == [8, 0] * 4
    learn = {"fired": 4, "pending_rows": 0, "outstanding": 0, "lag": 1}
    assert stats["workflow"]["learn"] == {**learn, "waits_for": "DataKeyTrigger(n=1, size=8, keys=None)"}
    looked = {"fired": 8, "pending_rows": None, "outstanding": 0, "lag": None}
    assert stats["workflow"]["look"] == {**looked, "waits_for": None}, "a TimeTrigger may wait for long"
    assert (stats["buffer"]["fill"], stats["buffer"]["capacity"]) == (64, 64)
    assert stats["buffer"]["bytes"] >= 64 * 3 * 4
    assert farstep.scalars(stats)["farstep/workflow/learn/fired"] == 4


def test_a_limiter_that_holds_workers_back_shows_for_how_long() -> None:
    buffer = farstep.Buffer(256, Uniform(), limiter=SampleToInsertRatio(1.0, 32, 32.0))
    with cluster(envs=2, workers=1, env_kwargs=ENDLESS) as env, buffer:
        flow = farstep.Workflow(env, TableAgent(), buffer, steps=8)
        go = threading.Event()

        def learn(message: Any) -> None:
            assert go.wait(60)
            for _ in range(20):
                buffer.sample(16)
            flow.stop()

        flow.on(DataKeyTrigger(n=1, size=8, consume=False, min_new=8), learn, thread=True)
        running = threading.Thread(target=flow.run)
        running.start()
        try:
            first = eventually(lambda: env.stats().get("limiter", {}).get("blocked", {}).get("insert"))
            eventually(lambda: env.stats()["limiter"]["blocked"]["insert"] > first)  # also while it is blocked
        finally:
            go.set()
            running.join(60)
        assert not running.is_alive()
        limiter = env.stats()["limiter"]
    assert limiter["ratio"] == pytest.approx(buffer.limiter.samples / buffer.limiter.inserts)
    assert limiter["blocked"]["insert"] == buffer.waited_s["insert"] > first


def test_a_buffer_without_room_shows_for_how_long_chunks_waited() -> None:
    with cluster(envs=2, workers=1, env_kwargs=ENDLESS) as env:
        flow = farstep.Workflow(env, TableAgent(), full(2 * 8), steps=4, max_staleness=4)
        go = threading.Event()

        def learn(message: Any) -> None:
            assert go.wait(60)
            flow.stop()

        flow.on(DataKeyTrigger(n=1, size=8), learn, thread=True)
        running = threading.Thread(target=flow.run)
        running.start()
        try:
            first = eventually(lambda: env.stats().get("buffer", {}).get("full_s"))
            eventually(lambda: env.stats()["buffer"]["full_s"] > first)  # also while a chunk waits
        finally:
            go.set()
            running.join(60)
        assert not running.is_alive()
        assert env.stats()["limiter"]["blocked"]["insert"] == 0


class TimedAgent(TableAgent):
    """Reading its parameters takes 2 s of the test's clock."""

    def __init__(self, clock: list[float]) -> None:
        super().__init__()
        self._clock = clock

    def get_parameters(self) -> Any:
        self._clock[0] += 2.0
        return super().get_parameters()


@pytest.mark.parametrize("thread", [False, True])
def test_learner_times_are_those_of_the_consumer(thread: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the consumer and the agent move the clock, so the loop never waits, whichever thread runs the consumer."""
    clock = [0.0]
    monkeypatch.setattr(head_stats, "LearnerTimes", lambda: LearnerTimes(lambda: clock[0]))
    with cluster(envs=2, config=in_process(), env_kwargs=ENDLESS) as env:
        flow = farstep.Workflow(env, TimedAgent(clock), full(2 * 32), steps=8)
        seen: list[dict[str, float]] = []

        def learn(message: Any) -> None:
            seen.append(env.stats()["time"]["learner"])
            clock[0] += 5.0
            seen.append(env.stats()["time"]["learner"])
            flow.publish()
            if len(seen) == 6:
                flow.stop()

        flow.on(DataKeyTrigger(n=1, size=8), learn, thread=thread)
        within(flow.run)
        seen.append(env.stats()["time"]["learner"])
    assert [times["update"] for times in seen] == [0, 5 * thread, 5, 5 + 5 * thread, 10, 10 + 5 * thread, 15]
    published = [times["publish"] - seen[0]["publish"] for times in seen]
    assert published == [0, 0, 2, 2, 4, 4, 6]
    assert all(times["wait"] == times["prepare"] == 0 for times in seen)
