"""Workflows: what a trigger's message names is what `collect` would have returned, once; and nothing stands still.

Most tests run their workers in this process: the code is the same, and the order of events is known.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flows
import numpy as np
import pytest
from checks import assert_balanced, assert_same, assert_sound, cluster, eventually, inprocess, within
from faulty import MortalEnv
from flows import GatedEnv, everything, full
from toys import NestedAgent, NestedEnv, RememberingAgent

import farstep
from farstep.buffer import MaxHeap, Queue, RateLimiter, SampleToInsertRatio, Uniform
from farstep.buffer.passers import LocalQueue, ZmqPasser
from farstep.buffer.triggers import DataKeyTrigger, ObjectKeyTrigger, TimeTrigger, Trigger
from farstep.errors import BufferTimeout, ClosedError, ConfigError, FarstepError
from farstep.head.collector import Collector
from farstep.testing import CountingEnv, TableAgent

ENDLESS = {"length": None}


def launch(name: str, workers: int = 2) -> farstep.LaunchConfig:
    if name == "inprocess":
        return inprocess(workers)
    return farstep.LocalConfig(workers_per_node=workers, transport=name)


TRANSPORTS = pytest.mark.parametrize("transport", ["inprocess", "shm", "tcp"])


class Recorder:
    """A consumer that keeps what it is given."""

    def __init__(self, flow: farstep.Workflow, then: Callable[[], object] = lambda: None) -> None:
        self.flow, self.then = flow, then
        self.messages: list[Any] = []
        self.batches: list[farstep.Batch] = []
        self.by_actor: dict[int, list[tuple[int, farstep.Batch]]] = defaultdict(list)

    def __call__(self, message: Any) -> None:
        batch = self.flow.batch(message).copy()
        self.messages.append(message)
        self.batches.append(batch)
        if len(message["actor_ids"]) == 1:
            self.by_actor[message["actor_ids"][0]].append((message["start"][0], batch))
        self.then()

    def has(self, count: int) -> Callable[[], bool]:
        return lambda: len(self.batches) >= count


def ppo(env: farstep.ClusterEnv, agent: Any, buffer: farstep.Buffer, size: int, **options: Any) -> Any:
    """The table of an on-policy learner that publishes after every batch."""
    flow = farstep.Workflow(env, agent, buffer, **options)
    learner = Recorder(flow, flow.publish)
    flow.on(DataKeyTrigger(n=env.num_workers, size=size), learner)
    flow.on(ObjectKeyTrigger("parameters"), flow.next_rollout)
    return flow, learner


def fifo(env: farstep.ClusterEnv, agent: Any, rows: int = 256, n: int = 1, size: int = 8, **options: Any) -> Any:
    """The table of a learner that takes what comes."""
    flow = farstep.Workflow(env, agent, full(rows), **options)
    learner = Recorder(flow)
    flow.on(DataKeyTrigger(n=n, size=size), learner)
    return flow, learner


# ---- the batch ----

KINDS = {
    "counting": (CountingEnv, TableAgent),
    "nested": (NestedEnv, NestedAgent),
    "recurrent": (CountingEnv, RememberingAgent),
}


@TRANSPORTS
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_what_collect_returns(kind: str, transport: str) -> None:
    factory, make_agent = KINDS[kind]
    agent, rounds = make_agent(), 4
    with cluster(factory, envs=5, config=launch("inprocess")) as env:
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
    with cluster(factory, envs=4, config=inprocess(2)) as env:
        expected = [everything(env.collect(agent, steps=size)) for _ in range(rounds)]
    with cluster(factory, envs=4, config=inprocess(2)) as env:
        flow, learner = fifo(env, agent, 4 * rows, n=2, size=size, steps=steps)
        flow.run(until=learner.has(rounds))
    for message, batch, wanted in zip(learner.messages, learner.batches, expected, strict=False):
        found = everything(batch)
        if message["start"][0] % steps:  # in the middle of a chunk nobody knows an agent's state
            assert batch.initial_state is None
            wanted = {name: value for name, value in wanted.items() if not name.startswith("state")}
        assert_same(found, wanted)


@pytest.mark.parametrize("depth", [None, 0, 1])
@pytest.mark.parametrize("steps, size, n", [(8, 16, 2), (8, 15, 1), (8, 15, 3), (16, 8, 3)])
def test_no_division_of_windows_into_chunks_stands_still(steps: int, size: int, n: int, depth: int | None) -> None:
    with cluster(envs=4, config=inprocess(4), env_kwargs=ENDLESS) as env:
        flow, learner = fifo(env, TableAgent(), 4 * 64, n=n, size=size, steps=steps, max_staleness=depth)
        flow.run(until=learner.has(20))
        assert all(len(set(message["actor_ids"])) == n for message in learner.messages)
        assert env.stats()["dropped"].keys() <= {"cancelled"}
        assert_balanced(env.stats())


def test_a_buffer_that_others_have_filled_before_and_another_workflow_after() -> None:
    agent = TableAgent()
    with cluster(envs=4, config=inprocess(2)) as env, full(4 * 20) as buffer:
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


def assert_in_order(learner: Recorder, size: int) -> None:
    """Of `CountingEnv`s that never end: each actor's steps from the first on, none missing, none twice."""
    for windows in learner.by_actor.values():
        assert [start for start, _ in windows] == list(range(0, size * len(windows), size))
        counts = np.concatenate([batch["obs"][:, :, 1] for _, batch in windows])
        np.testing.assert_array_equal(counts, np.arange(len(counts))[:, None].repeat(counts.shape[1], axis=1))
        assert [batch.continues.all() for _, batch in windows] == [False] + [True] * (len(windows) - 1)


def test_nobody_waits_for_a_slow_worker(tmp_path: Path) -> None:
    with cluster(GatedEnv, envs=4, workers=4, env_kwargs={"folder": str(tmp_path)}) as env:
        flow, learner = fifo(env, TableAgent(), n=2, size=4)

        def open_gate() -> None:
            if len(learner.batches) == 6:
                (tmp_path / "gate").touch()

        learner.then = open_gate
        flow.run(until=lambda: len({a for m in learner.messages for a in m["actor_ids"]}) == 4)
        assert_balanced(env.stats())
    assert len({a for m in learner.messages[:6] for a in m["actor_ids"]}) == 3
    windows = defaultdict(list)
    for message, batch in zip(learner.messages, learner.batches, strict=True):
        assert len(set(message["actor_ids"])) == 2
        for slot, counts in zip(batch.slots.tolist(), batch["obs"][:, :, 1].T.tolist(), strict=True):
            windows[slot] += counts
    assert all(counts == list(range(len(counts))) for counts in windows.values())


@pytest.mark.parametrize("transport, workers", [("shm", 1), ("shm", 2), ("tcp", 2)])
def test_a_worker_that_is_killed_is_replaced_and_nothing_comes_twice(
    transport: str, workers: int, tmp_path: Path
) -> None:
    kwargs = {"marker": str(tmp_path / "killed"), "at": 20}
    with cluster(MortalEnv, envs=4, config=launch(transport, workers), env_kwargs=kwargs) as env:
        flow, learner = ppo(env, TableAgent(), full(4 * 16), 8)
        within(lambda: flow.run(until=learner.has(8)))
        stats = env.stats()
        assert stats["dropped"]["worker lost"] >= 1
        assert stats["workers"]["restarts"] == 1
        assert_balanced(stats)
    assert (tmp_path / "killed").exists()
    assert_followed(learner.batches)


def assert_followed(batches: list[farstep.Batch]) -> None:
    """Each row follows from the one before, in a batch and from batch to batch, or begins an episode."""
    last = None
    for batch in batches:
        assert_sound(batch)
        if last is not None:
            same = (batch["obs"][0] == last).all(axis=1)
            assert (same | ~batch.continues).all()
            assert (batch["episode_start"][0] | batch.continues).all()
        last = batch.last_obs


# ---- staleness ----


@pytest.mark.parametrize("thread", [False, True])
def test_what_is_too_old_when_it_is_its_turn_is_dropped_and_counted(thread: bool) -> None:
    with cluster(envs=2, config=inprocess(1), env_kwargs=ENDLESS) as env:
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


def test_dropped_rows_are_rolled_again_when_workers_wait_to_be_asked() -> None:
    with cluster(envs=2, config=inprocess(2), env_kwargs=ENDLESS) as env:
        flow, learner = ppo(env, TableAgent(), full(2 * 64), 8, steps=16, max_staleness=0)
        flow.run(until=learner.has(4))
        assert env.stats()["dropped"]["stale"] == 8
        assert all((batch["obs"][0, :, 1] % 16 == 0).all() for batch in learner.batches)


# ---- limiters ----


@pytest.mark.parametrize("transport", ["inprocess", "shm"])
def test_a_limiter_holds_workers_back_and_loses_nothing(transport: str) -> None:
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


def test_a_consumer_that_samples_is_not_called_before_it_can() -> None:
    buffer = farstep.Buffer(256, Uniform(), limiter=SampleToInsertRatio(0.5, 64, 32.0))
    with cluster(envs=2, config=inprocess(1)) as env, buffer:
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
    with cluster(envs=2, config=inprocess(2), env_kwargs=ENDLESS) as env, buffer:
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


# ---- ends ----


def deliberate(message: Any) -> None:
    raise ZeroDivisionError("deliberate")


@pytest.mark.parametrize("thread", [False, True])
@TRANSPORTS
def test_what_a_consumer_raises_ends_the_run_and_is_raised(transport: str, thread: bool) -> None:
    agent = TableAgent()
    with cluster(envs=4, config=launch(transport)) as env:
        flow, learner = fifo(env, agent, size=8)
        flow.on(DataKeyTrigger(n=1, size=16), deliberate, thread=thread, name="mine")
        with pytest.raises(ZeroDivisionError) as caught:
            within(flow.run)
        assert any(entry.name == "deliberate" for entry in traceback.extract_tb(caught.value.__traceback__))
        assert "'mine'" in caught.value.__notes__[0]
        assert env.stats()["in_flight"] == env.stats()["buffered"] == 0
        assert_balanced(env.stats())
        assert_sound(env.collect(agent, steps=8))
        with pytest.raises(ZeroDivisionError):  # again, for rows of the second run
            within(flow.run)
        for batch in learner.batches:
            assert_sound(batch)


def test_what_a_thread_raises_last_of_all_is_raised() -> None:
    with cluster(envs=2, config=inprocess(1)) as env:
        flow = farstep.Workflow(env, TableAgent(), full(64), steps=8)
        left = threading.Event()

        def consumer(message: Any) -> None:
            left.wait(30)
            raise ZeroDivisionError

        def until() -> bool:
            if flow.ledger.env_steps >= 32:
                left.set()
            return left.is_set()

        flow.on(DataKeyTrigger(n=1, size=8), consumer, thread=True)
        with pytest.raises(ZeroDivisionError):
            within(lambda: flow.run(until=until))


def test_ctrl_c_in_a_consumer() -> None:
    agent = TableAgent()
    with cluster(envs=2) as env:
        flow, learner = ppo(env, agent, full(2 * 8), 8)

        def interrupt() -> None:
            flow.publish()
            if len(learner.batches) == 2:
                os.kill(os.getpid(), signal.SIGINT)

        learner.then = interrupt
        with pytest.raises(KeyboardInterrupt):
            flow.run()
        flow.run(until=learner.has(5))
        assert_followed(learner.batches)
        assert_balanced(env.stats())


def test_ctrl_c_while_it_waits() -> None:
    agent = TableAgent()
    with cluster(envs=2) as env:
        flow = farstep.Workflow(env, agent, full(64))
        waits = threading.Event()
        flow.on(TimeTrigger(3600), flow.next_rollout)
        flow.on(ObjectKeyTrigger("parameters"), lambda message: waits.set())

        def press() -> None:
            assert waits.wait(30)
            os.kill(os.getpid(), signal.SIGINT)

        with helper(press), pytest.raises(KeyboardInterrupt):
            flow.run()
        assert_sound(env.collect(agent, steps=8))
        assert env.stats()["dropped"] == {}


@contextlib.contextmanager
def helper(call: Callable[[], object]) -> Iterator[None]:
    thread = threading.Thread(target=call)
    thread.start()
    try:
        yield
    finally:
        thread.join(30)


def test_another_thread_stops_it_and_one_that_waits_for_rows_ends_with_it() -> None:
    with cluster(envs=2) as env, farstep.Buffer(64, Uniform(), limiter=Queue(16)) as buffer:
        flow = farstep.Workflow(env, TableAgent(), buffer, steps=4)
        waits = threading.Event()

        def learn(message: Any) -> None:
            waits.set()
            buffer.sample(17 - 1)
            buffer.sample(16, timeout_s=600)
            raise AssertionError("there were rows for it")

        flow.on(ObjectKeyTrigger("parameters"), learn, thread=True)
        flow.on(TimeTrigger(16, unit="env_steps"), lambda message: flow.stop())

        within(flow.run)
        assert waits.is_set()
        waits.clear()
        forever = farstep.Workflow(env, flow.agent, full(64))
        forever.on(ObjectKeyTrigger("parameters"), lambda message: waits.set())
        forever.on(TimeTrigger(3600), forever.next_rollout)

        def stop() -> None:
            assert waits.wait(30)
            forever.stop()

        with helper(stop):
            within(forever.run)


def test_stop_in_a_consumer_is_the_last_firing() -> None:
    with cluster(envs=2, config=inprocess(1)) as env:
        flow, learner = fifo(env, TableAgent(), size=1, steps=16)
        learner.then = lambda: len(learner.batches) == 3 and flow.stop()
        flow.run()
        assert len(learner.batches) == 3
        flow.run(until=learner.has(5))
        assert learner.messages[3]["start"] == (16,), "what no trigger took was dropped with the run"
        assert not learner.batches[3].continues.any()


@TRANSPORTS
def test_a_second_run_goes_on_counting(transport: str) -> None:
    agent = TableAgent()
    with cluster(envs=4, config=launch(transport)) as env:
        flow, learner = ppo(env, agent, full(4 * 8), 8)
        flow.run(total_steps=3 * 32)
        assert flow.ledger.env_steps == 3 * 32
        assert flow.ledger.learner_steps == len(learner.batches) == 3
        env.collect(agent, steps=3)
        flow.run(total_steps=6 * 32)
        assert flow.ledger.learner_steps == len(learner.batches) == 6
        assert [message["start"] for message in learner.messages] == [(8 * i, 8 * i) for i in range(6)]
        assert not learner.batches[3].continues.any()
        flow.run(total_steps=6 * 32)
        assert len(learner.batches) == 6
        assert_balanced(env.stats())


def test_a_second_run_with_consumers_in_threads() -> None:
    with cluster(envs=2, config=inprocess(2)) as env:
        flow = farstep.Workflow(env, TableAgent(), full(2 * 32), steps=8)
        learner = Recorder(flow)
        flow.on(DataKeyTrigger(n=2, size=8), learner, thread=True)
        for _ in range(3):
            before = len(learner.batches)
            within(lambda wanted=before + 3: flow.run(until=learner.has(wanted)))
        for batch in learner.batches:
            assert_sound(batch)


def test_another_call_ends_it_and_so_does_close() -> None:
    with cluster(envs=2, config=inprocess(1)) as env:
        flow, learner = fifo(env, TableAgent(), size=8)
        learner.then = lambda: env.collect(flow.agent, steps=1)
        with pytest.raises(ClosedError, match="another call"):
            flow.run()
        learner.then = env.close
        with pytest.raises(ClosedError):
            flow.run()


# ---- standing still ----


def not_publishing(env: farstep.ClusterEnv) -> farstep.Workflow:
    flow, learner = ppo(env, TableAgent(), full(64), 8)
    learner.then = lambda: None
    return flow


def table(env: farstep.ClusterEnv, trigger: Trigger, consumer: Any = None, **options: Any) -> farstep.Workflow:
    buffer, samples = options.pop("buffer", None), options.pop("samples", None)
    flow = farstep.Workflow(env, TableAgent(), full(64) if buffer is None else buffer, steps=8, **options)
    flow.on(trigger, consumer or (lambda message: None), samples=samples)
    return flow


def taking(**options: Any) -> DataKeyTrigger:
    return DataKeyTrigger(**{"n": 1, "size": 8, **options})


def sampling(env: farstep.ClusterEnv) -> farstep.Workflow:
    buffer = farstep.Buffer(64, farstep.FullBatch())
    return table(env, ObjectKeyTrigger("parameters"), lambda m: buffer.sample(16, timeout_s=600), buffer=buffer)


def limited(limiter: RateLimiter) -> farstep.Buffer:
    return farstep.Buffer(64, Uniform(), limiter=limiter)


STANDSTILLS: dict[str, Any] = {
    "nobody publishes": (not_publishing, FarstepError, "nobody publish"),
    "a window does not fit": (lambda env: table(env, taking(size=33)), ConfigError, "capacity to at least 80"),
    "more actors than workers": (lambda env: table(env, taking(n=3)), ConfigError, "Lower n"),
    "a chunk never fits": (lambda env: table(env, taking(), buffer=limited(Queue(4))), ConfigError, "never fits"),
    "nobody samples": (
        lambda env: table(env, taking(), buffer=limited(Queue(24))),
        FarstepError,
        "Widen the limiter",
    ),
    "nobody can sample so many": (
        lambda env: table(env, TimeTrigger(9), samples=25, buffer=limited(Queue(24))),
        ConfigError,
        "sample fewer",
    ),
    "sampling in the loop": (sampling, BufferTimeout, "for ever"),
    "unknown key": (lambda env: table(env, taking(keys=["rewards"])), ConfigError, "rewards"),
    "rows without order": (
        lambda env: table(env, taking(), buffer=farstep.Buffer(64, Uniform(), remover=MaxHeap())),
        ConfigError,
        "no order",
    ),
    "a buffer for others": (
        lambda env: table(env, taking(), buffer=farstep.Buffer(64, Uniform(), spec={"obs": ((3,), "f4")})),
        ConfigError,
        "1 columns",
    ),
}


@pytest.mark.parametrize("case", STANDSTILLS)
def test_what_could_only_stand_still_is_refused(case: str) -> None:
    make, error, says = STANDSTILLS[case]
    with cluster(envs=2, config=inprocess(2)) as env:
        flow = make(env)
        with pytest.raises(error, match=says):
            within(flow.run)
        env.collect(TableAgent(), steps=2)
        assert_balanced(env.stats())
        flow.buffer.close()


def test_mistakes_in_the_table_are_refused() -> None:
    with cluster(envs=2, config=inprocess(1)) as env:
        flow = farstep.Workflow(env, TableAgent(), full(64))
        with pytest.raises(ConfigError, match="expected a function"):
            flow.on(TimeTrigger(1), None)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="leave out thread"):
            flow.on(TimeTrigger(1), LocalQueue(), thread=True)
        with pytest.raises(ConfigError, match="has it as a consumer"):
            flow.next_rollout()
        with pytest.raises(ConfigError, match="publish"):
            flow.put("parameters", 1.0)
        taken: list[Any] = []
        flow.on(DataKeyTrigger(n=1, size=8), taken.append)
        flow.on(DataKeyTrigger(n=1, size=8, consume=False, min_new=8), lambda m: flow.batch(m), name="replay")
        with pytest.raises(FarstepError, match=r"buffer\.sample"):
            flow.run(total_steps=16)
        with pytest.raises(FarstepError, match="has returned"):
            flow.batch(taken[0])
        flow = farstep.Workflow(env, TableAgent(), full(64))
        flow.on(TimeTrigger(8, unit="env_steps"), lambda m: flow.on(TimeTrigger(1), print))
        with pytest.raises(ConfigError, match="is running"):
            flow.run()
        flow = farstep.Workflow(env, TableAgent(), full(64))
        flow.on(TimeTrigger(8, unit="env_steps"), lambda m: flow.run())
        with pytest.raises(ClosedError, match="already"):
            flow.run()


# ---- time ----


@pytest.mark.parametrize("transport", ["inprocess", "shm"])
def test_time_passes_while_nothing_happens_and_costs_nothing(transport: str) -> None:
    with cluster(envs=2, config=launch(transport)) as env:
        flow = farstep.Workflow(env, TableAgent(), full(64))
        flow.on(DataKeyTrigger(n=1, size=8), deliberate)
        flow.on(ObjectKeyTrigger("never"), flow.next_rollout)
        clocks: list[tuple[float, float]] = []
        flow.on(TimeTrigger(0.5), lambda message: clocks.append((time.monotonic(), time.process_time())))
        within(lambda: flow.run(until=lambda: len(clocks) == 3))
        assert env.stats()["rolled"] == 0
    (began, cpu_began), _, (ended, cpu_ended) = clocks
    assert cpu_ended - cpu_began < 0.25 * (ended - began), "it polls"


# ---- threads and processes ----


@pytest.mark.parametrize("transport", ["inprocess", "shm"])
def test_a_batch_in_a_thread_stays_as_it_is_while_rows_come_in(transport: str) -> None:
    with cluster(envs=4, config=launch(transport)) as env:
        flow = farstep.Workflow(env, TableAgent(), full(4 * 20), steps=4)
        seen, grew = list[int](), list[bool]()

        def learn(message: Any) -> None:
            if len(seen) == 5:
                return  # nothing more comes in
            batch = flow.batch(message)
            before, copy = flow.ledger.env_steps, batch.copy()
            start = message["start"][0]
            # Until all the room there is was written: 20 rows, from the first one in use.
            eventually(lambda: min(flow.ledger.written(actor) for actor in (0, 1)) == start + 20)
            grew.append(flow.ledger.env_steps > before)
            assert_sound(batch)
            assert_same(everything(batch), everything(copy))
            assert_same(everything(flow.batch(message)), everything(copy))
            seen.append(start)

        flow.on(DataKeyTrigger(n=2, size=8), learn, thread=True)
        within(lambda: flow.run(until=lambda: len(seen) >= 5))
    assert seen == list(range(0, 8 * len(seen), 8))
    assert any(grew)


def test_publishing_in_a_thread() -> None:
    with cluster(envs=4, config=inprocess(2)) as env:
        flow = farstep.Workflow(env, TableAgent(), full(4 * 16))
        learner = Recorder(flow, flow.publish)
        flow.on(DataKeyTrigger(n=2, size=8), learner, thread=True)
        flow.on(ObjectKeyTrigger("parameters"), flow.next_rollout)
        within(lambda: flow.run(until=learner.has(6)))
        assert [batch["version"].max() for batch in learner.batches[:6]] == list(range(6))
        assert_followed(learner.batches)


def test_a_queue_to_threads_of_ones_own() -> None:
    with cluster(envs=2, config=inprocess(1), env_kwargs=ENDLESS) as env:
        flow, queue = farstep.Workflow(env, TableAgent(), full(64)), LocalQueue(2)
        flow.on(DataKeyTrigger(n=1, size=8), queue, max_outstanding=2)
        learner = Recorder(flow)

        def work() -> None:
            while not learner.has(6)() and (message := queue.take(30.0)) is not None:
                learner(message)
                queue.done(message)
            flow.stop()

        with helper(work):
            within(flow.run)
        queue.close(drop=True)
    assert_in_order(learner, 8)


def test_messages_that_are_done_out_of_order_keep_their_own_rows() -> None:
    with cluster(envs=2, config=inprocess(1), env_kwargs=ENDLESS) as env:
        flow, queue = farstep.Workflow(env, TableAgent(), full(2 * 24)), LocalQueue(2)
        flow.on(DataKeyTrigger(n=1, size=8), queue, max_outstanding=2)
        outcome: list[bool] = []

        def work() -> None:
            first, second = queue.take(30.0), queue.take(30.0)
            assert first is not None and second is not None
            seen = everything(flow.batch(first))
            queue.done(second)
            for _ in range(4):  # whatever of the buffer is free is written over
                later = queue.take(30.0)
                assert later is not None and later["start"] != first["start"]
                queue.done(later)
                if later["start"][0] >= first["start"][0] + 16:
                    break
            now = everything(flow.batch(first))
            outcome.append(all(np.array_equal(seen[name], now[name]) for name in seen))
            queue.done(first)
            flow.stop()

        with helper(work):
            within(flow.run)
        queue.close(drop=True)
    assert outcome == [True]


def test_ctrl_c_while_a_run_begins_leaves_a_workflow_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster(envs=2, config=inprocess(1)) as env:
        flow = farstep.Workflow(env, TableAgent(), full(64))
        learner = Recorder(flow)
        flow.on(DataKeyTrigger(n=1, size=8), learner)
        followed = Collector.followed

        def interrupted(collector: Collector) -> np.ndarray:
            monkeypatch.setattr(Collector, "followed", followed)
            os.kill(os.getpid(), signal.SIGINT)
            return followed(collector)

        monkeypatch.setattr(Collector, "followed", interrupted)
        with pytest.raises(KeyboardInterrupt):
            flow.run(total_steps=64)
        flow.run(total_steps=64)
    assert len(learner.batches) >= 4


def test_another_process_reads_the_rows_in_place(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    passer = ZmqPasser()
    with (
        subprocess.Popen(
            [sys.executable, flows.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        ) as other,
        cluster(envs=4, config=inprocess(2)) as env,
    ):
        assert other.stdin is not None and other.stdout is not None
        try:
            print(json.dumps(passer.invitation), file=other.stdin, flush=True)
            flow = farstep.Workflow(env, TableAgent(), full(4 * 20), steps=4)
            flow.on(DataKeyTrigger(n=2, size=8), passer, name="remote")
            here = Recorder(flow)
            flow.on(DataKeyTrigger(n=2, size=8), here)
            flow.run(until=lambda: len(here.batches) >= 6 and flow.ledger.learner_steps >= 12)
        finally:
            passer.close()
        said = [json.loads(line) for line in other.stdout]
        assert other.wait(30) == 0
    assert len(said) >= 6
    for (actors, starts, columns), message, batch in zip(said, here.messages, here.batches, strict=False):
        assert (tuple(actors), tuple(starts)) == (message["actor_ids"], message["start"])
        order = np.argsort([slot for first, stop in message["slots"] for slot in range(first, stop)])
        np.testing.assert_array_equal(np.array(columns)[order].T, batch["reward"])


# ---- triggers ----


def test_triggers_are_joined() -> None:
    with cluster(envs=2, config=inprocess(1), env_kwargs=ENDLESS) as env:
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
    with cluster(envs=2, config=inprocess(1)) as env:
        flow, stages = farstep.Workflow(env, TableAgent(), full(2 * 8)), []

        def learn(message: Any) -> None:
            assert_sound(flow.batch(message))
            stages.append((message["fragment"], message["stage"], message["keys"]))

        flow.on(DataKeyTrigger(n=1, size=8, keys=(("reward",), ("obs", "action"))), learn)
        flow.run(total_steps=48)
    assert stages == [(i, stage, keys) for i in range(3) for stage, keys in enumerate([("reward",), ("obs", "action")])]


class EveryOther(Trigger):
    """A trigger of one's own, by one method: when an even number of chunks of 16 steps is there."""

    def ready(self, state: Any) -> Any:
        return {"steps": state.env_steps} if state.env_steps and state.env_steps % 32 == 0 else None


def test_a_trigger_of_ones_own() -> None:
    with cluster(envs=2, config=inprocess(1)) as env:
        flow, steps = farstep.Workflow(env, TableAgent(), full(64), steps=8), list[int]()
        flow.on(EveryOther(), lambda message: steps.append(message["steps"]))
        flow.run(total_steps=128)
    assert steps == [32, 64, 96, 128]


def test_named_objects_fire_and_are_read() -> None:
    with cluster(envs=2, config=inprocess(1)) as env:
        flow, seen = farstep.Workflow(env, TableAgent(), full(64), steps=8), []
        flow.on(TimeTrigger(16, unit="env_steps"), lambda message: flow.put("noise", {"scale": message["at"]}))
        flow.on(ObjectKeyTrigger("noise"), lambda m: seen.append((m["version"], flow.objects.read("noise"))))
        flow.run(total_steps=48)
    assert seen == [(i, (i, {"scale": 16 * (i + 1)})) for i in range(3)]


def test_learner_steps_are_counted() -> None:
    with cluster(envs=2, config=inprocess(1)) as env:
        flow, learner = fifo(env, TableAgent(), size=8)
        learner.then = lambda: flow.learned(2)
        at: list[int] = []
        flow.on(TimeTrigger(6, unit="learner_steps"), lambda message: at.append(message["at"]))
        flow.run(until=learner.has(6))
    assert at == [6, 12, 18]
