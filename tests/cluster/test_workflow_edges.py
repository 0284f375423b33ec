"""Edge cases of workflows: concurrent publishers, late receivers, the time between runs, and wrong triggers."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import farstep
from farstep.testing import TableAgent
from farstep.workflow.delivery import LocalQueue, ZmqReceiver, ZmqSender
from farstep.workflow.triggers import DataKeyTrigger, ObjectKeyTrigger, TimeTrigger, Trigger
from tests.cluster.checks import cluster, in_process, together, within
from tests.cluster.flows import full

ENDLESS = {"length": None}


def idle(env: farstep.ClusterEnv, agent: Any) -> farstep.Workflow:
    """A workflow without triggers that fire by themselves."""
    flow = farstep.Workflow(env, agent, full(64))
    flow.on(ObjectKeyTrigger("never"), flow.next_rollout)
    flow.on(TimeTrigger(3600), lambda message: None)
    return flow


@pytest.mark.parametrize("transport", ["in_process", "shm"])
def test_a_version_that_another_thread_publishes_past_the_workflow_wakes_it(transport: str) -> None:
    config = in_process(2) if transport == "in_process" else farstep.LocalConfig(workers_per_node=2)
    with cluster(envs=2, config=config) as env:
        agent = TableAgent()
        env.collect(agent, steps=1)
        flow, fired, came = idle(env, agent), list[int](), threading.Semaphore(0)

        def note(message: Any) -> None:
            fired.append(message["version"])
            came.release()

        flow.on(ObjectKeyTrigger("parameters"), note)
        published = [0]

        def publish() -> None:
            try:
                assert came.acquire(timeout=30)  # the version that is there when the run begins
                for _ in range(5):
                    published.append(env.publish(agent))
                    assert came.acquire(timeout=30)
            finally:
                flow.stop()

        for outcome in together({"run": flow.run, "publish": publish}).values():
            outcome.get()
    assert fired == published == [0, 1, 2, 3, 4, 5]


def test_consuming_trigger_added_between_two_runs_starts_at_the_current_step() -> None:
    with cluster(envs=4, config=in_process(1), env_kwargs=ENDLESS) as env:
        flow, batches = farstep.Workflow(env, TableAgent(), full(4 * 16)), list[farstep.Batch]()
        flow.on(DataKeyTrigger(n=1, size=8), lambda message: None)
        flow.run(total_steps=64)
        starts: list[tuple[int, ...]] = []

        def late(message: Any) -> None:
            starts.append(message["start"])
            batches.append(flow.batch(message).copy())

        flow.on(DataKeyTrigger(n=1, size=8), late)
        flow.run(total_steps=192)
    assert starts == [(16,), (24,), (32,), (40,)]
    assert [bool(batch.continues.all()) for batch in batches] == [False, True, True, True]


def test_only_the_time_of_runs_counts() -> None:
    with cluster(envs=2, config=in_process(1), env_kwargs=ENDLESS) as env:
        flow = farstep.Workflow(env, TableAgent(), full(64))
        elapsed: list[float] = []
        flow.on(DataKeyTrigger(n=1, size=8), lambda message: None)
        flow.on(TimeTrigger(3600), lambda message: elapsed.append(message["elapsed"]))
        flow.ledger.started -= 10_000  # it was created 10,000 s ago
        flow.ledger.now -= 10_000
        flow.run(total_steps=64)
        flow.ledger.now -= 10_000  # 10,000 s pass between two runs
        flow.run(total_steps=128)
        late: list[int] = []
        flow.on(TimeTrigger(64, unit="env_steps"), lambda message: late.append(message["at"]))
        flow.run(total_steps=256)
    assert elapsed == []
    assert late == [192, 256]


def test_a_missing_receiver_blocks_no_other() -> None:
    with cluster(envs=2, config=in_process(1), env_kwargs=ENDLESS) as env:
        flow, sender = farstep.Workflow(env, TableAgent(), full(64)), ZmqSender(connect_s=3600.0)
        flow.on(DataKeyTrigger(n=1, size=8), sender)
        ticks: list[int] = []

        def tick(message: Any) -> None:
            ticks.append(flow.ledger.env_steps)
            if len(ticks) == 3:
                flow.stop()

        flow.on(TimeTrigger(0.01), tick)
        within(flow.run)
        assert flow.ledger.learner_steps == 0
        sender.close()


def test_unhandled_messages_do_not_count_as_learner_steps() -> None:
    with cluster(envs=2, config=in_process(1), env_kwargs=ENDLESS) as env:
        flow, queue = farstep.Workflow(env, TableAgent(), full(64)), LocalQueue()
        flow.on(DataKeyTrigger(n=1, size=8), queue)

        def work() -> None:
            for number in range(4):
                message = queue.take(30.0)
                assert message is not None
                queue.done(message, None if number < 3 else ZeroDivisionError("the fourth"))

        with pytest.raises(ZeroDivisionError, match="the fourth"):
            for outcome in together({"run": flow.run, "work": work}).values():
                outcome.get()
        assert flow.ledger.learner_steps == 3


class Says(Trigger):
    """Returns a given value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def ready(self, state: Any) -> Any:
        return self.value


class Silent(Trigger):
    """Lacks the method `ready`."""


def test_mistakes_are_named() -> None:
    agent = TableAgent()
    with cluster(envs=2, config=in_process(1), env_kwargs=ENDLESS) as env:

        def flow() -> farstep.Workflow:
            made = farstep.Workflow(env, agent, full(64))
            made.on(DataKeyTrigger(n=1, size=8), lambda message: None)
            return made

        def running(trigger: Any) -> None:
            made = flow()
            made.on(trigger, lambda message: None)
            made.run(total_steps=16)

        transfer = farstep.TransferTrigger.dual()
        belongs = 'belongs in .*"transfer": .*DataKeyTrigger'
        mistakes: list[tuple[Any, str]] = [
            (lambda: farstep.Workflow(3, agent, full(64)), "env is 3; expected a farstep.ClusterEnv"),  # type: ignore[arg-type]
            (lambda: farstep.Workflow(env, agent, []), r"buffer is \[\]; expected a farstep.Buffer"),  # type: ignore[arg-type]
            (lambda: flow().run(until=True), "until is True; expected a function"),  # type: ignore[arg-type]
            (lambda: flow().batch(None), "batch got None; expected the message"),  # type: ignore[arg-type]
            (lambda: flow().batch({}), "names 0 windows"),
            (lambda: flow().put("x", object()), "cannot be published; expected a number"),
            (lambda: flow().put(3, 1.0), "the name 3; expected a string"),  # type: ignore[arg-type]
            (lambda: flow().learned("x"), "steps is 'x'"),  # type: ignore[arg-type]
            (lambda: running(Says(7)), "Says.ready returned 7; expected the message, a mapping"),
            (lambda: running(Says(True)), "Says.ready returned True"),
            (lambda: running(Silent()), r"Silent has no ready\(self, state\)"),
            (lambda: running(transfer), belongs),
            (lambda: transfer & TimeTrigger(1), belongs),
            (lambda: transfer | TimeTrigger(1), belongs),
            (lambda: TimeTrigger(1) & transfer, belongs),
            (lambda: TimeTrigger(1) | transfer, belongs),
            (lambda: ZmqReceiver({}), "expected a sender's invitation, with address"),
            (lambda: ZmqReceiver(3), "got 3; expected a sender's invitation"),  # type: ignore[arg-type]
        ]
        for make, said in mistakes:
            with pytest.raises(farstep.ConfigError, match=said):
                make()


def test_an_error_that_is_raised_again_has_its_note_once() -> None:
    error = ValueError("the same")

    def fail(message: Any) -> None:
        raise error

    with cluster(envs=2, config=in_process(1), env_kwargs=ENDLESS) as env:
        flow = farstep.Workflow(env, TableAgent(), full(64))
        flow.on(DataKeyTrigger(n=1, size=8), fail, name="learn")
        for _ in range(2):
            with pytest.raises(ValueError, match="the same"):
                flow.run(total_steps=flow.ledger.env_steps + 32)
    assert len(error.__notes__) == 1 and "learn" in error.__notes__[0]
