"""Workflows: messages of triggers name each row of `collect` exactly once, and no workflow deadlocks.

Most tests run their workers in this process: the code is the same, and the order of events is known.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import farstep
from farstep.batch import side_by_side
from farstep.buffer import MaxHeap, Queue, SampleToInsertRatio, Uniform
from farstep.buffer.storage.cyclic import CyclicBlocks
from farstep.head.collector import Collector
from farstep.testing import CountingEnv, TableAgent
from farstep.workflow.triggers import DataKeyTrigger, ObjectKeyTrigger, TimeTrigger, Trigger
from tests.cluster.checks import assert_balanced, assert_same, assert_sound, cluster, eventually, in_process, within
from tests.cluster.faulty import MortalEnv
from tests.cluster.flows import GatedEnv, everything, full
from tests.cluster.tables import (
    ENDLESS,
    TRANSPORTS,
    Recorder,
    assert_followed,
    assert_in_order,
    fifo,
    gaps_of,
    launch,
    ppo,
)
from tests.cluster.toys import NestedAgent, NestedEnv, RememberingAgent

# ---- the batch ----

KINDS = {
    "counting": (CountingEnv, TableAgent),
    "nested": (NestedEnv, NestedAgent),
    "recurrent": (CountingEnv, RememberingAgent),
}


@TRANSPORTS
@pytest.mark.parametrize("kind", KINDS)
def test_batch_equals_that_of_collect(kind: str, transport: str) -> None:
    factory, make_agent = KINDS[kind]
    agent, rounds = make_agent(), 4
    with cluster(factory, envs=5, config=launch("in_process")) as env:
        expected = []
        for _ in range(rounds):
            expected.append(everything(env.collect(agent, steps=10)))
            env.publish(agent)
    with cluster(factory, envs=5, config=launch(transport)) as env:
        flow, learner = ppo(env, agent, full(5 * 16), 10)  # 16 rows: the second batch wraps around
        flow.run(until=learner.has(rounds))
        assert env.stats()["steps"] == flow.ledger.env_steps == rounds * 50
    for found, wanted in zip(learner.batches, expected, strict=True):
        assert_same(everything(found), wanted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps, size, rows", [(8, 16, 24), (8, 16, 16), (16, 8, 24), (6, 15, 20), (8, 15, 40)])
def test_windows_need_not_be_chunks(kind: str, steps: int, size: int, rows: int) -> None:
    factory, make_agent = KINDS[kind]
    agent, rounds = make_agent(), 8
    with cluster(factory, envs=4, config=in_process(2)) as env:
        expected = [everything(env.collect(agent, steps=size)) for _ in range(rounds)]
    with cluster(factory, envs=4, config=in_process(2)) as env:
        flow, learner = fifo(env, agent, 4 * rows, n=2, size=size, steps=steps)
        flow.run(until=learner.has(rounds))
    for message, batch, wanted in zip(learner.messages, learner.batches, expected, strict=False):
        found = everything(batch)
        if message["start"][0] % steps:  # the state is known only at the start of a chunk
            assert batch.initial_state is None
            wanted = {name: value for name, value in wanted.items() if not name.startswith("state")}
        assert_same(found, wanted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps, rows", [(8, 24), (8, 40), (4, 24)])
def test_windows_of_one_worker_are_side_by_side_in_order(kind: str, steps: int, rows: int) -> None:
    factory, make_agent = KINDS[kind]
    agent, rounds, n = make_agent(), 4, 3
    with cluster(factory, envs=3, config=in_process(1)) as env:
        windows = [env.collect(agent, steps=8).copy() for _ in range(n * rounds)]
    with cluster(factory, envs=3, config=in_process(1)) as env, full(3 * rows) as buffer:
        flow = farstep.Workflow(env, agent, buffer, steps=steps, max_staleness=0)
        learner = Recorder(flow)
        flow.on(DataKeyTrigger(n=n, size=8, of="windows"), learner)
        flow.run(until=learner.has(rounds))
    for k, batch in enumerate(learner.batches):
        assert learner.messages[k]["actor_ids"] == (0, 0, 0)
        assert_same(everything(batch), everything(side_by_side(windows[n * k : n * (k + 1)])))


def test_windows_of_several_workers_are_sound() -> None:
    with cluster(envs=5, config=in_process(2)) as env, full(5 * 24) as buffer:
        flow = farstep.Workflow(env, TableAgent(), buffer, max_staleness=1)
        learner = Recorder(flow, flow.publish)
        flow.on(DataKeyTrigger(n=3, size=8, of="windows"), learner)
        flow.run(until=learner.has(10))
        assert env.stats()["dropped"].keys() <= {"cancelled"}
        assert_balanced(env.stats())
    for version, batch in enumerate(learner.batches):
        assert len(batch.slots) > len(set(batch.slots.tolist())), "three windows of two workers"
        assert version - batch["version"].min() <= 1
    assert sorted(gaps_of(learner.batches)) == [0, 1, 2, 3, 4], "only the first rows of each slot follow none"


@pytest.mark.parametrize("depth", [None, 0, 1])
@pytest.mark.parametrize("steps, size, n", [(8, 16, 2), (8, 15, 1), (8, 15, 3), (16, 8, 3)])
def test_no_ratio_of_windows_to_chunks_deadlocks(steps: int, size: int, n: int, depth: int | None) -> None:
    with cluster(envs=4, config=in_process(4), env_kwargs=ENDLESS) as env:
        flow, learner = fifo(env, TableAgent(), 4 * 64, n=n, size=size, steps=steps, max_staleness=depth)
        flow.run(until=learner.has(20))
        assert all(len(set(message["actor_ids"])) == n for message in learner.messages)
        assert env.stats()["dropped"].keys() <= {"cancelled"}
        assert_balanced(env.stats())


def test_buffer_is_used_by_collect_and_by_two_workflows() -> None:
    agent = TableAgent()
    with cluster(envs=4, config=in_process(2)) as env, full(4 * 20) as buffer:
        buffer.insert(env.collect(agent, steps=7))
        for _ in range(2):
            flow, learner = fifo(env, agent, n=2, size=8)
            flow.buffer.close()
            flow = farstep.Workflow(env, agent, buffer)
            learner = Recorder(flow)
            flow.on(DataKeyTrigger(n=2, size=8), learner)
            flow.run(until=learner.has(4))
            for batch in learner.batches:
                assert_sound(batch)


# ---- every row once ----


@TRANSPORTS
def test_fifo_takes_every_step_of_every_worker_once_and_in_order(transport: str) -> None:
    with cluster(envs=3, config=launch(transport), env_kwargs=ENDLESS) as env:
        flow, learner = fifo(env, TableAgent(), size=8)
        flow.run(until=learner.has(20))
        assert_balanced(env.stats())
    assert_in_order(learner, 8)


def test_fast_workers_do_not_wait_for_a_slow_one(tmp_path: Path) -> None:
    with cluster(GatedEnv, envs=4, workers=4, env_kwargs={"folder": str(tmp_path)}) as env:
        flow, learner = fifo(env, TableAgent(), n=2, size=4)

        def heard() -> set[int]:
            return {a for m in learner.messages for a in m["actor_ids"]}

        def open_gate() -> None:
            if len(learner.batches) >= 6 and len(heard()) >= 3:
                (tmp_path / "gate").touch()
                learner.then = lambda: None
                ahead.update(heard())

        ahead: set[int] = set()
        learner.then = open_gate
        flow.run(until=lambda: len(heard()) == 4)
        assert_balanced(env.stats())
    assert len(ahead) == 3
    windows: dict[int, list[Any]] = defaultdict(list)
    for message, batch in zip(learner.messages, learner.batches, strict=True):
        assert len(set(message["actor_ids"])) == 2
        for slot, counts in zip(batch.slots.tolist(), batch["obs"][:, :, 1].T.tolist(), strict=True):
            windows[slot] += counts
    assert all(counts == list(range(len(counts))) for counts in windows.values())


@pytest.mark.parametrize("transport, workers", [("shm", 1), ("shm", 2), ("tcp", 2)])
def test_killed_worker_is_replaced_and_no_row_is_repeated(transport: str, workers: int, tmp_path: Path) -> None:
    kwargs = {"marker": str(tmp_path / "killed"), "at": 20}
    with cluster(MortalEnv, envs=4, config=launch(transport, workers), env_kwargs=kwargs) as env:
        flow, learner = ppo(env, TableAgent(), full(4 * 16), 8)
        within(lambda: flow.run(until=learner.has(8)))
        stats = env.stats()
        assert stats["dropped"]["worker_lost"] >= 1
        assert stats["workers"]["restarts"] == 1
        assert_balanced(stats)
    assert (tmp_path / "killed").exists()
    assert_followed(learner.batches)


# ---- staleness ----


@pytest.mark.parametrize("thread", [False, True])
def test_rows_that_are_too_old_when_taken_are_dropped_and_counted(thread: bool) -> None:
    with cluster(envs=2, config=in_process(1), env_kwargs=ENDLESS) as env:
        flow = farstep.Workflow(env, TableAgent(), full(2 * 64), steps=16, max_staleness=1)
        seen: list[Any] = []

        def update(message: Any) -> None:
            batch = flow.batch(message)
            lag = env.stats()["versions"]["current"] - batch["version"].min()
            seen.append((lag, int(batch["obs"][0, 0, 1]), bool(batch.continues.all())))
            flow.publish()
            flow.publish()  # twice: the chunk's other half is too old now

        flow.on(DataKeyTrigger(n=1, size=8), update, thread=thread, max_outstanding=2 if thread else 1)
        within(lambda: flow.run(until=lambda: len(seen) >= 5 and flow.ledger.versions["parameters"] >= 10))
        stats = env.stats()
        assert stats["dropped"]["stale"] >= 4
        assert_balanced(stats)
    assert all(lag <= 1 for lag, _, _ in seen)
    before = -8
    for _, row, continues in seen:
        assert row >= before + 8
        assert continues == (row == before + 8 and row > 0)
        before = row


def test_only_the_first_of_two_windows_follows_a_gap() -> None:
    """A chunk has the windows of two messages. The first message makes the second too old."""
    with cluster(envs=2, config=in_process(1), env_kwargs=ENDLESS) as env, full(2 * 64) as buffer:
        flow = farstep.Workflow(env, TableAgent(), buffer, steps=32, max_staleness=1)
        learner = Recorder(flow, lambda: (flow.publish(), flow.publish()))
        flow.on(DataKeyTrigger(n=2, size=8, of="windows"), learner)
        flow.run(until=learner.has(3))
        assert [message["start"] for message in learner.messages] == [(0, 8), (32, 40), (64, 72)]
        assert_balanced(env.stats())
    assert [batch.continues.tolist() for batch in learner.batches] == [[False, False, True, True]] * 3


@TRANSPORTS
def test_a_learner_that_publishes_once_per_batch_never_meets_an_old_row(transport: str) -> None:
    with cluster(envs=4, config=launch(transport), env_kwargs=ENDLESS) as env:
        flow, learner = fifo(env, TableAgent(), n=2, size=8, max_staleness=1)
        lags = []

        def then() -> None:
            lags.append(env.stats()["versions"]["current"] - learner.batches[-1]["version"].min())
            env.publish(flow.agent)  # past the workflow: that counts, too

        learner.then = then
        published: list[Any] = []
        flow.on(ObjectKeyTrigger("parameters"), published.append)
        flow.run(until=learner.has(20))
        assert max(lags) == 1
        assert env.stats()["dropped"].keys() <= {"cancelled"}
        assert [message["version"] for message in published] == list(range(20))


def test_dropped_rows_are_rolled_again_in_synchronous_workflows() -> None:
    with cluster(envs=2, config=in_process(2), env_kwargs=ENDLESS) as env:
        flow, learner = ppo(env, TableAgent(), full(2 * 64), 8, steps=16, max_staleness=0)
        flow.run(until=learner.has(4))
        assert env.stats()["dropped"]["stale"] == 8
        assert all((batch["obs"][0, :, 1] % 16 == 0).all() for batch in learner.batches)


# ---- limiters ----


@pytest.mark.parametrize("transport", ["in_process", "shm"])
def test_limiter_blocks_workers_without_loss(transport: str) -> None:
    limiter = SampleToInsertRatio(1.0, 32, 32.0)
    buffer = farstep.Buffer(256, Uniform(), limiter=limiter)
    with cluster(envs=2, config=launch(transport), env_kwargs=ENDLESS) as env, buffer:
        flow = farstep.Workflow(env, TableAgent(), buffer, steps=8)
        go, diffs = threading.Event(), list[float]()

        def learn(message: Any) -> None:
            assert go.wait(30)
            for _ in range(20):  # rows come while it samples, without its having returned
                buffer.sample(16)
                diffs.append(limiter.diff)
            flow.stop()

        flow.on(DataKeyTrigger(n=1, size=8, consume=False, min_new=8), learn, thread=True)
        running = threading.Thread(target=flow.run)
        running.start()
        try:
            # All lanes are full: workers wait, and the limiter is where it may not go further.
            eventually(lambda: (s := env.stats())["buffered"] == 6 and not s["in_flight"] and limiter.diff > 56)
            assert limiter.diff == limiter.max_diff == 64
            assert env.stats()["dropped"] == {}
        finally:
            go.set()
            running.join(60)
        assert not running.is_alive()
        assert all(0 <= diff <= 64 for diff in diffs)
        stats = env.stats()
        assert stats["dropped"].keys() == {"cancelled"}
        assert_balanced(stats)
        assert limiter.inserts == stats["steps"]


def test_concurrent_inserts_cannot_take_the_space_reserved_for_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = TableAgent()
    with cluster(envs=2, config=in_process(1)) as env, farstep.Buffer(64, Uniform(), limiter=Queue(20)) as buffer:
        mine = env.collect(agent, steps=4).copy()
        flow = farstep.Workflow(env, agent, buffer, steps=8)
        others: list[threading.Thread] = []
        take = Collector.take_chunk

        def taken(*args: Any) -> Any:
            found = take(*args)
            if found is not None and not others:
                others.append(threading.Thread(target=lambda: buffer.insert(mine)))
                others[0].start()
                others[0].join(0.2)  # it would be done by now if it could
            return found

        monkeypatch.setattr(Collector, "take_chunk", taken)
        flow.on(TimeTrigger(16, unit="env_steps"), lambda message: buffer.sample(16))
        within(lambda: flow.run(total_steps=16))
        others[0].join(30)
        assert not others[0].is_alive() and buffer.limiter.inserts == 24


def test_a_consumer_that_samples_is_not_called_before_it_can() -> None:
    buffer = farstep.Buffer(256, Uniform(), limiter=SampleToInsertRatio(0.5, 64, 32.0))
    with cluster(envs=2, config=in_process(1)) as env, buffer:
        flow = farstep.Workflow(env, TableAgent(), buffer, steps=8)
        sizes: list[int] = []

        def learn(message: Any) -> None:
            _, info = buffer.sample(24)
            sizes.append(info.size)

        flow.on(DataKeyTrigger(n=1, size=1, consume=False, min_new=1), learn, samples=24)
        flow.run(total_steps=512)
    assert sizes[0] >= 64
    assert buffer.limiter.min_diff <= buffer.limiter.diff <= buffer.limiter.max_diff


def test_a_buffer_whose_remover_is_not_the_oldest_first() -> None:
    buffer = farstep.Buffer(32, Uniform(), remover=MaxHeap(), seed=1)
    with cluster(envs=2, config=in_process(2), env_kwargs=ENDLESS) as env, buffer:
        flow = farstep.Workflow(env, TableAgent(), buffer, steps=4)
        seen: list[int] = []

        def learn(message: Any) -> None:
            batch, info = buffer.sample(8)
            np.testing.assert_array_equal(batch["next_obs"][:, 1], batch["obs"][:, 1] + 1)
            assert buffer.update_priorities(info.keys, batch["reward"]) == len(info.keys)
            seen.append(info.size)

        flow.on(DataKeyTrigger(n=2, size=8, consume=False, min_new=8), learn)
        flow.run(total_steps=96)
        assert seen[-1] == len(buffer) == 32


# ---- triggers ----


def test_triggers_are_joined() -> None:
    with cluster(envs=2, config=in_process(1), env_kwargs=ENDLESS) as env:
        flow, rows, either = farstep.Workflow(env, TableAgent(), full(2 * 128), steps=8), [], []

        def both(message: Any) -> None:
            data, steps = message["all"]
            rows.append((flow.batch(data)["obs"][0, 0, 1], steps["at"]))
            assert_same(everything(flow.batch(message)), everything(flow.batch(data)))

        flow.on(DataKeyTrigger(n=1, size=8) & TimeTrigger(48, unit="env_steps"), both)
        flow.on(DataKeyTrigger(n=1, size=16) | TimeTrigger(64, unit="env_steps"), lambda m: either.append(m["any"]))
        flow.run(total_steps=192)
    assert rows == [(0, 48), (8, 96), (16, 144), (24, 192)]
    assert either == [0, 1, 0] * 3, "where both are ready, the one whose turn it is"


def test_stages_of_a_window_are_passed_on_one_after_the_other() -> None:
    with cluster(envs=2, config=in_process(1)) as env:
        flow, stages = farstep.Workflow(env, TableAgent(), full(2 * 8)), []

        def learn(message: Any) -> None:
            assert_sound(flow.batch(message))
            stages.append((message["fragment"], message["stage"], message["keys"]))

        flow.on(DataKeyTrigger(n=1, size=8, keys=(("reward",), ("obs", "action"))), learn)
        flow.run(total_steps=48)
    assert stages == [(i, stage, keys) for i in range(3) for stage, keys in enumerate([("reward",), ("obs", "action")])]


class EveryOther(Trigger):
    """A custom trigger with one method: fires when an even number of chunks of 16 steps has arrived."""

    def ready(self, state: Any) -> Any:
        return {"steps": state.env_steps} if state.env_steps and state.env_steps % 32 == 0 else None


def test_custom_trigger() -> None:
    with cluster(envs=2, config=in_process(1)) as env:
        flow, steps = farstep.Workflow(env, TableAgent(), full(64), steps=8), list[int]()
        flow.on(EveryOther(), lambda message: steps.append(message["steps"]))
        flow.run(total_steps=128)
    assert steps == [32, 64, 96, 128]


def test_named_objects_fire_and_are_read() -> None:
    with cluster(envs=2, config=in_process(1)) as env:
        flow, seen = farstep.Workflow(env, TableAgent(), full(64), steps=8), []
        flow.on(TimeTrigger(16, unit="env_steps"), lambda message: flow.put("noise", {"scale": message["at"]}))
        flow.on(ObjectKeyTrigger("noise"), lambda m: seen.append((m["version"], flow.objects.read("noise"))))
        flow.run(total_steps=48)
    assert seen == [(i, (i, {"scale": 16 * (i + 1)})) for i in range(3)]


def test_learner_steps_are_counted() -> None:
    with cluster(envs=2, config=in_process(1)) as env:
        flow, learner = fifo(env, TableAgent(), size=8)
        learner.then = lambda: flow.learned(2)
        at: list[int] = []
        flow.on(TimeTrigger(6, unit="learner_steps"), lambda message: at.append(message["at"]))
        flow.run(until=learner.has(6))
    assert at == [6, 12, 18]


def test_read_cursors_say_how_far_each_consumer_is() -> None:
    """Both here and in the mapped blocks: rows that a consumer is not done with, from its registration on."""
    seen: list[tuple[dict[str, int], list[int]]] = []
    with cluster(CountingEnv, envs=4, config=in_process()) as env:
        flow = farstep.Workflow(env, TableAgent(), full(4 * 64), steps=8)

        def look(message: Any) -> None:
            with contextlib.closing(CyclicBlocks.attach(flow.buffer.path)) as blocks:
                mapped = [int(blocks.backlog(consumer).max()) for consumer in (0, 1)]
            seen.append((flow.backlog(), mapped))

        slots = env.num_workers
        assert flow.backlog() == {}
        flow.on(DataKeyTrigger(n=slots, size=8), look, name="short")
        flow.on(DataKeyTrigger(n=slots, size=24), lambda message: None, name="long")
        flow.run(until=lambda: len(seen) >= 6)
        for here, mapped in seen:
            assert list(here.values()) == mapped and 8 <= here["short"] <= here["long"] + 8 and here["long"] <= 32
        flow.on(DataKeyTrigger(n=slots, size=8), lambda message: None, name="late")
        flow.run(until=lambda: len(seen) >= 9)
    assert seen[-1][0]["late"] <= 16
