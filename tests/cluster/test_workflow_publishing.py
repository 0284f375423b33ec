"""Workers never act with half-updated weights, whichever thread publishes while a consumer updates."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import farstep
from farstep.agents import update_gate
from farstep.buffer.samplers import Uniform
from farstep.errors import PublishTimeout
from farstep.sync import AAPS
from farstep.workflow.delivery import LocalQueue
from farstep.workflow.triggers import DataKeyTrigger, ObjectKeyTrigger, TimeTrigger
from tests.cluster.checks import cluster, eventually, in_process, together, within
from tests.cluster.flows import full
from tests.cluster.tables import ENDLESS, deliberate
from tests.cluster.torn import ComparedAgent, TornAgent

VERSIONS = 12


@pytest.fixture(autouse=True)
def threads_switch_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


class Learner:
    """A consumer that updates the agent and counts the rows that were rolled in the middle of an update."""

    def __init__(self, flow: farstep.Workflow) -> None:
        self.flow, self.rows, self.torn, self.versions = flow, 0, 0, set[int]()

    def look(self, message: Any) -> None:
        batch = self.flow.batch(message)
        self.rows += batch["torn"].size
        self.torn += int(batch["torn"].sum())
        self.versions |= set(batch["version"].flat)

    def __call__(self, message: Any) -> None:
        self.look(message)
        self.flow.agent.update()  # type: ignore[attr-defined]

    def has_seen_versions(self) -> bool:
        return len(self.versions) >= VERSIONS


def torn_flow(env: farstep.ClusterEnv, agent: Any = None, **options: Any) -> tuple[farstep.Workflow, Learner]:
    flow = farstep.Workflow(env, agent or TornAgent(), full(256), **options)
    return flow, Learner(flow)


def endless(**options: Any) -> farstep.ClusterEnv:
    return cluster(envs=2, config=in_process(1), env_kwargs=ENDLESS, **options)


@pytest.mark.parametrize("publisher", ["time trigger", "third thread", "other consumer", "wrapped", "queue"])
def test_no_row_is_rolled_with_half_updated_weights(publisher: str) -> None:
    with endless() as env:
        flow, learner = torn_flow(env)
        others = {}
        if publisher == "queue":
            queue = LocalQueue()
            flow.on(DataKeyTrigger(n=1, size=2), queue)

            def work() -> None:
                while not learner.has_seen_versions():
                    message = queue.take(30.0)
                    assert message is not None
                    learner(message)
                    queue.done(message)
                flow.stop()

            others["work"] = work
        else:
            flow.on(DataKeyTrigger(n=1, size=2), learner, thread=True)
        if publisher in ("time trigger", "queue"):
            flow.on(TimeTrigger(0.001), flow.publish)
        elif publisher == "wrapped":
            flow.on(TimeTrigger(0.001), lambda message: flow.publish())
        elif publisher == "other consumer":
            flow.on(TimeTrigger(0.001), lambda message: env.publish(flow.agent), thread=True)
        else:

            def publish() -> None:
                while not learner.has_seen_versions():
                    env.publish(flow.agent)

            env.collect(flow.agent, steps=1)
            others["publish"] = publish
        calls = {"run": lambda: flow.run(until=learner.has_seen_versions), **others}
        for outcome in together(calls).values():
            outcome.get()
        if publisher == "queue":
            queue.close(drop=True)
    assert learner.has_seen_versions() and learner.torn == 0, f"{learner.torn} of {learner.rows} rows are torn"


def test_a_consumer_in_the_loop_is_not_interrupted_by_other_publishers() -> None:
    with endless() as env:
        flow, learner = torn_flow(env)
        flow.on(DataKeyTrigger(n=1, size=2), learner)
        flow.on(TimeTrigger(0.001), flow.publish, thread=True)
        within(lambda: flow.run(until=learner.has_seen_versions))
    assert learner.torn == 0


def test_two_consumers_that_publish_do_not_wait_for_each_other() -> None:
    """Each publishes in the middle of its message, when the other one is in its own."""
    with endless() as env:
        flow, _ = torn_flow(env)
        both = threading.Barrier(2, timeout=30)
        done: tuple[list[int], list[int]] = ([], [])

        def publish(mine: list[int], message: Any) -> None:
            if len(mine) < VERSIONS:
                both.wait()
                mine.append(flow.publish())

        for mine in done:
            flow.on(DataKeyTrigger(n=1, size=2), partial(publish, mine), thread=True)
        within(lambda: flow.run(until=lambda: all(len(mine) == VERSIONS for mine in done)))
    assert sorted(done[0] + done[1]) == list(range(1, 2 * VERSIONS + 1))


def test_consumer_can_publish_its_own_unfinished_update() -> None:
    """Its own unfinished update, also while it waits; the updates of other consumers are complete."""
    with endless() as env:
        flow, learner = torn_flow(env)
        half_way = set[int]()

        def update(message: Any) -> None:
            learner.look(message)
            flow.agent.update(slice(12))  # type: ignore[attr-defined]
            half_way.add(flow.publish())
            flow.agent.update(slice(12, None))  # type: ignore[attr-defined]
            flow.publish()

        torn = dict[int, bool]()

        def note(message: Any) -> None:
            batch = flow.batch(message)
            torn.update(zip(batch["version"].flat, batch["torn"].flat, strict=True))

        flow.on(DataKeyTrigger(n=1, size=2), update, thread=True)
        flow.on(DataKeyTrigger(n=1, size=2), note)
        within(lambda: flow.run(until=lambda: len(torn) > VERSIONS and len(half_way & torn.keys()) > 2))
    assert all(was_torn == (version in half_way) for version, was_torn in torn.items())


def test_probes_are_answered_with_the_weights_that_are_published() -> None:
    agent = ComparedAgent()
    with endless(sync=AAPS(0.01, window=1)) as env:
        flow, learner = torn_flow(env, agent)
        flow.on(DataKeyTrigger(n=1, size=2), learner, thread=True)
        flow.on(TimeTrigger(0.001), flow.publish)
        within(lambda: flow.run(until=lambda: len(agent.published) > 2 * VERSIONS))
    assert learner.torn == 0
    assert agent.answered[: len(agent.published)] == agent.published
    assert all(len(set(numbers)) == 1 for numbers in agent.published)


def test_chunks_keep_arriving_while_a_trigger_waits_to_publish() -> None:
    with endless() as env:
        flow, _ = torn_flow(env)
        arrived, asked = list[bool](), threading.Event()

        def update(message: Any) -> None:
            if not arrived:
                flow.put("entered", np.zeros(1))
                assert asked.wait(30)  # the trigger has fired meanwhile
                before = flow.ledger.env_steps
                eventually(lambda: flow.ledger.env_steps > before)
                arrived.append(env.version == 0)

        flow.on(DataKeyTrigger(n=1, size=2), update, thread=True)
        flow.on(ObjectKeyTrigger("entered"), flow.publish)
        flow.on(ObjectKeyTrigger("entered"), lambda message: asked.set())
        within(lambda: flow.run(until=lambda: bool(arrived) and env.version > 0))
    assert arrived == [True]


def test_consumer_waiting_for_rows_does_not_block_publishing() -> None:
    """No row is rolled before the next version is published, and the consumer waits for rows of that version."""
    with endless() as env:
        buffer = farstep.Buffer(256, Uniform(), seed=1, limiter=farstep.buffer.Queue(64))
        flow, sampled = farstep.Workflow(env, TornAgent(), buffer, steps=2), list[float]()

        def learn(message: Any) -> None:
            while not sampled or max(sampled) < 3:
                rows, _ = buffer.sample(1)
                assert not np.asarray(rows["torn"]).any()
                sampled.append(float(np.asarray(rows["number"]).max()))
                flow.agent.update()  # type: ignore[attr-defined]

        flow.on(DataKeyTrigger(n=1, size=2, consume=False, min_new=1000), learn, thread=True)
        flow.on(TimeTrigger(0.001), flow.publish)
        flow.on(ObjectKeyTrigger("parameters"), flow.next_rollout)
        within(lambda: flow.run(until=lambda: bool(sampled) and max(sampled) >= 3))


# ---- every wait ends ----


def test_publishing_names_the_consumer_that_it_waits_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(update_gate, "WARN_S", 0.01)
    with endless() as env:
        flow, _ = torn_flow(env, end_s=0.3)
        entered, leave = threading.Event(), threading.Event()

        def dawdle(message: Any) -> None:
            entered.set()
            leave.wait(30)

        flow.on(DataKeyTrigger(n=1, size=2), dawdle, thread=True, name="slow")

        def publish() -> None:
            assert entered.wait(30)
            try:
                with pytest.raises(PublishTimeout, match=r"dawdle' of trigger 'slow' has .*0\.3 s.*updates=False"):
                    env.publish(flow.agent)
            finally:
                leave.set()
                flow.stop()

        with caplog.at_level(logging.WARNING, "farstep"):
            for outcome in together({"run": flow.run, "publish": publish}).values():
                outcome.get()
    assert "dawdle" in caplog.text and "updates=False" in caplog.text


def test_a_trigger_that_cannot_publish_ends_the_run() -> None:
    with endless() as env:
        flow, _ = torn_flow(env, end_s=0.3)
        leave = threading.Event()
        flow.on(DataKeyTrigger(n=1, size=2), lambda message: leave.wait(30), thread=True, name="slow")
        flow.on(TimeTrigger(0.001), flow.publish)
        try:
            with pytest.raises(PublishTimeout, match="of trigger 'slow' has not finished within"):
                within(flow.run)
        finally:
            leave.set()


def test_publishing_does_not_wait_for_a_consumer_with_updates_false() -> None:
    with endless() as env:
        flow, learner = torn_flow(env)
        leave = threading.Event()
        flow.on(DataKeyTrigger(n=1, size=2), learner)
        flow.on(TimeTrigger(2, unit="env_steps"), lambda m: leave.wait(30), thread=True, updates=False)
        flow.on(TimeTrigger(4, unit="env_steps"), flow.publish)
        within(lambda: flow.run(until=lambda: learner.has_seen_versions() and (leave.set() or True)))  # type: ignore[func-returns-value]


@pytest.mark.parametrize("how", ["stop", "close"])
def test_a_publisher_that_waits_does_not_outlive_the_run(how: str) -> None:
    with endless() as env:
        flow, _ = torn_flow(env)
        entered, leave, published = threading.Event(), threading.Event(), threading.Event()

        def update(message: Any) -> None:
            entered.set()
            assert leave.wait(30)

        flow.on(DataKeyTrigger(n=1, size=2), update, thread=True)

        def publish() -> None:
            assert entered.wait(30)
            published.set()
            env.publish(flow.agent)

        def end() -> None:
            assert published.wait(30)
            if how == "stop":
                flow.stop()
                leave.set()
            else:
                env.close()  # the publisher is notified before the consumer returns
                eventually(lambda: "publisher" in ended)
                leave.set()

        ended = set[str]()

        def publish_and_say() -> None:
            try:
                publish()
            finally:
                ended.add("publisher")

        outcomes = together({"run": flow.run, "publish": publish_and_say, "end": end})
        outcomes["end"].get()
        if how == "stop":
            outcomes["run"].get()
            outcomes["publish"].get()
        else:
            assert isinstance(outcomes["publish"].error, farstep.ClosedError)
            assert isinstance(outcomes["run"].error, farstep.ClosedError)


def test_ctrl_c_reaches_a_loop_that_waits_to_publish(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(update_gate, "WARN_S", 0.01)
    with endless() as env, caplog.at_level(logging.WARNING, "farstep"):
        flow, _ = torn_flow(env)
        heard = list[bool]()

        def update(message: Any) -> None:
            if not heard:
                eventually(lambda: "publishing has waited" in caplog.text)
                os.kill(os.getpid(), signal.SIGINT)
                heard.append(eventually(lambda: flow.buffer.is_halted))

        flow.on(DataKeyTrigger(n=1, size=2), update, thread=True)
        flow.on(TimeTrigger(8, unit="env_steps"), lambda message: flow.publish())
        with pytest.raises(KeyboardInterrupt):
            flow.run()
        assert heard == [True], "while the consumer was at work"
        flow.run(total_steps=flow.ledger.env_steps + 32)


def test_half_updated_agent_of_a_failed_consumer_is_not_published(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(update_gate, "WARN_S", 0.01)
    with endless() as env, caplog.at_level(logging.WARNING, "farstep"):
        flow, _ = torn_flow(env)
        versions, entered = list[int](), threading.Event()

        def update(message: Any) -> None:
            versions.append(env.version)
            flow.agent.update(slice(3))  # type: ignore[attr-defined]
            entered.set()
            eventually(lambda: caplog.text.count("publishing has waited") == 2)  # the trigger and the other thread
            raise ZeroDivisionError("in the middle")

        def publish() -> None:
            assert entered.wait(30)
            env.publish(flow.agent)

        flow.on(TimeTrigger(8, unit="env_steps"), flow.publish)
        flow.on(DataKeyTrigger(n=1, size=2), update, thread=True)
        outcomes = together({"run": flow.run, "publish": publish})
        assert isinstance(outcomes["run"].error, ZeroDivisionError)
        assert [env.version] == versions
        with pytest.raises(farstep.ClosedError, match="raised in the middle of its message"):
            outcomes["publish"].get()
        assert env.publish(flow.agent) == env.version == versions[0] + 1, "the caller may"


def test_requested_version_is_published_before_the_run_returns() -> None:
    with endless() as env:
        flow, _ = torn_flow(env)

        def update(message: Any) -> None:
            flow.put("entered", np.zeros(1))
            eventually(lambda: flow.stopped)
            flow.agent.update()  # type: ignore[attr-defined]

        flow.on(DataKeyTrigger(n=1, size=2), update, thread=True)
        flow.on(ObjectKeyTrigger("entered"), flow.publish)
        flow.on(ObjectKeyTrigger("entered"), lambda message: flow.stop())
        within(flow.run)
        assert env.version == 1
        batch = env.collect(flow.agent, steps=1)
        assert env.version == 1 and set(batch["number"].flat) == {1.0}, "the whole update"


def test_an_exception_in_one_consumer_lets_another_one_publish_and_end() -> None:
    with endless() as env:
        flow, learner = torn_flow(env)
        flow.on(DataKeyTrigger(n=1, size=2), lambda m: (learner(m), flow.publish()), thread=True)  # type: ignore[func-returns-value]
        flow.on(TimeTrigger(16, unit="env_steps"), deliberate)
        with pytest.raises(ZeroDivisionError):
            within(flow.run)
    assert learner.torn == 0
