"""How workflows end and which error they raise; workflows that would deadlock are refused."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from functools import partial
from typing import Any

import pytest

import farstep
from farstep.buffer import LIFO, MaxHeap, Queue, RateLimiter, Uniform
from farstep.errors import BufferTimeout, ClosedError, ConfigError, FarstepError
from farstep.testing import TableAgent
from farstep.workflow.delivery import LocalQueue
from farstep.workflow.triggers import DataKeyTrigger, ObjectKeyTrigger, TimeTrigger, Trigger
from tests.cluster.checks import assert_balanced, assert_sound, cluster, eventually, in_process, within
from tests.cluster.flows import full
from tests.cluster.tables import (
    ENDLESS,
    TRANSPORTS,
    Recorder,
    assert_followed,
    deliberate,
    fifo,
    helper,
    launch,
    ppo,
)

# ---- ends ----


@pytest.mark.parametrize("thread", [False, True])
@TRANSPORTS
def test_exception_of_a_consumer_ends_the_run_and_is_raised(transport: str, thread: bool) -> None:
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


def test_exception_of_a_thread_after_the_last_step_is_raised() -> None:
    with cluster(envs=2, config=in_process(1)) as env:
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


def test_failed_messages_of_threads_belong_to_their_run_and_count_as_no_update() -> None:
    with cluster(envs=2, config=in_process(1)) as env:
        flow = farstep.Workflow(env, TableAgent(), full(64), steps=8)
        both, fails = threading.Barrier(2, timeout=30), [True]

        def consumer(message: Any) -> None:
            if fails[0]:
                both.wait()
                deliberate(message)

        flow.on(DataKeyTrigger(n=1, size=8), consumer, thread=True, name="one")
        flow.on(DataKeyTrigger(n=1, size=8), consumer, thread=True, name="other")
        with pytest.raises(ZeroDivisionError) as caught:
            within(flow.run)
        assert "A consumer also failed: ZeroDivisionError" in caught.value.__notes__[-1]
        assert flow.ledger.learner_steps == 0
        fails[0] = False
        within(lambda: flow.run(until=lambda: flow.ledger.learner_steps >= 4))


def test_failed_message_of_a_user_thread_counts_as_no_update() -> None:
    with cluster(envs=2, config=in_process(1), env_kwargs=ENDLESS) as env:
        flow, queue = farstep.Workflow(env, TableAgent(), full(64)), LocalQueue(2)
        flow.on(DataKeyTrigger(n=1, size=8), queue, max_outstanding=2)

        def work() -> None:
            for error in (None, ZeroDivisionError()):
                message = queue.take(30.0)
                assert message is not None
                queue.done(message, error)

        with helper(work), pytest.raises(ZeroDivisionError):
            within(flow.run)
        queue.close(drop=True)
        flow.stop()
        assert flow.ledger.learner_steps == 1


def test_a_consumer_that_does_not_return_is_named_and_waited_for_a_bounded_time() -> None:
    with cluster(envs=2, config=in_process(1)) as env:
        flow = farstep.Workflow(env, TableAgent(), full(64), steps=8, end_s=0.2)
        began, go = threading.Event(), threading.Event()

        def dawdle(message: Any) -> None:
            began.set()
            go.wait(60)

        flow.on(DataKeyTrigger(n=1, size=8), dawdle, thread=True, name="slow")
        with pytest.raises(FarstepError, match=r"dawdle.*'slow'.*0\.2 s.*end_s"):
            within(lambda: flow.run(until=began.is_set))
        assert_sound(env.collect(flow.agent, steps=4))
        with pytest.raises(ClosedError, match=r"dawdle.*'slow'.*earlier run"):
            flow.run()
        go.set()
        eventually(lambda: not any(thread.name == "farstep-consumer" for thread in threading.enumerate()))
        before = flow.ledger.learner_steps
        within(lambda: flow.run(until=lambda: flow.ledger.learner_steps >= before + 3))
        assert_balanced(env.stats())


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
    with cluster(envs=2, config=in_process(1)) as env:
        flow, learner = fifo(env, TableAgent(), size=1, steps=16)
        learner.then = lambda: len(learner.batches) == 3 and flow.stop()
        flow.run()
        assert len(learner.batches) == 3
        flow.run(until=learner.has(5))
        assert learner.messages[3]["start"] == (16,), "what no trigger took was dropped with the run"
        assert not learner.batches[3].continues.any()


@TRANSPORTS
def test_second_run_continues_the_counters(transport: str) -> None:
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
    with cluster(envs=2, config=in_process(2)) as env:
        flow = farstep.Workflow(env, TableAgent(), full(2 * 32), steps=8)
        learner = Recorder(flow)
        flow.on(DataKeyTrigger(n=2, size=8), learner, thread=True)
        for _ in range(3):
            before = len(learner.batches)
            within(partial(flow.run, until=learner.has(before + 3)))
        for batch in learner.batches:
            assert_sound(batch)


def test_another_call_or_close_ends_the_run() -> None:
    with cluster(envs=2, config=in_process(1)) as env:
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


def too_many_windows(env: farstep.ClusterEnv) -> farstep.Workflow:
    flow = table(env, taking(n=3, of="windows"))
    flow.on(ObjectKeyTrigger("parameters"), flow.next_rollout)
    return flow


def limited(limiter: RateLimiter) -> farstep.Buffer:
    return farstep.Buffer(64, Uniform(), limiter=limiter)


DEADLOCKS: dict[str, Any] = {
    "no consumer publishes": (not_publishing, FarstepError, "that a consumer publishes"),
    "a window does not fit": (lambda env: table(env, taking(size=33)), ConfigError, "capacity to at least 80"),
    "windows of one worker do not fit": (
        lambda env: table(env, taking(n=5, of="windows")),
        ConfigError,
        "capacity to at least 80",
    ),
    "more windows than a request brings": (too_many_windows, ConfigError, "requests one window of each of 2 workers"),
    "more actors than workers": (lambda env: table(env, taking(n=3)), ConfigError, "Lower n"),
    "a chunk never fits": (lambda env: table(env, taking(), buffer=limited(Queue(4))), ConfigError, "never fits"),
    "no consumer samples": (
        lambda env: table(env, taking(), buffer=limited(Queue(24))),
        FarstepError,
        "Widen the limiter",
    ),
    "more samples than the limiter allows": (
        lambda env: table(env, TimeTrigger(9), samples=25, buffer=limited(Queue(24))),
        ConfigError,
        "sample fewer",
    ),
    "sampling in the loop": (sampling, BufferTimeout, "would deadlock"),
    "unknown key": (lambda env: table(env, taking(keys=["rewards"])), ConfigError, "rewards"),
    "rows without order": (
        lambda env: table(env, taking(), buffer=farstep.Buffer(64, Uniform(), remover=MaxHeap())),
        ConfigError,
        r"remover=MaxHeap\(\) removes rows in any order",
    ),
    "rows that leave in any order": (
        lambda env: table(env, taking(), buffer=farstep.Buffer(64, LIFO())),
        ConfigError,
        r"LIFO\(\) with max_times_sampled=1 removes rows in any order",
    ),
    "a buffer with another layout": (
        lambda env: table(env, taking(), buffer=farstep.Buffer(64, Uniform(), spec={"obs": ((3,), "f4")})),
        ConfigError,
        "1 columns",
    ),
}


@pytest.mark.parametrize("case", DEADLOCKS)
def test_workflow_that_would_deadlock_is_refused(case: str) -> None:
    make, error, says = DEADLOCKS[case]
    with cluster(envs=2, config=in_process(2)) as env:
        flow = make(env)
        with pytest.raises(error, match=says):
            within(flow.run)
        env.collect(TableAgent(), steps=2)
        assert_balanced(env.stats())
        flow.buffer.close()


def test_mistakes_in_the_table_are_refused() -> None:
    with cluster(envs=2, config=in_process(1)) as env:
        flow = farstep.Workflow(env, TableAgent(), full(64))
        with pytest.raises(ConfigError, match="expected a function"):
            flow.on(TimeTrigger(1), None)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="leave out thread"):
            flow.on(TimeTrigger(1), LocalQueue(), thread=True)
        with pytest.raises(ConfigError, match="if it is a consumer"):
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
