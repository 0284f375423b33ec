"""Workflows with time triggers, and with consumers in threads and other processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import farstep
from farstep.head.collector import Collector
from farstep.testing import TableAgent
from farstep.workflow.delivery import LocalQueue, ZmqSender
from farstep.workflow.triggers import DataKeyTrigger, ObjectKeyTrigger, TimeTrigger
from tests.cluster import flows
from tests.cluster.checks import assert_same, assert_sound, cluster, eventually, in_process, within
from tests.cluster.flows import everything, full
from tests.cluster.tables import (
    ENDLESS,
    Recorder,
    assert_followed,
    assert_in_order,
    deliberate,
    helper,
    launch,
)

# ---- time ----


@pytest.mark.parametrize("transport", ["in_process", "shm"])
def test_time_triggers_fire_without_rows_and_without_busy_waiting(transport: str) -> None:
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


@pytest.mark.parametrize("transport", ["in_process", "shm"])
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
    with cluster(envs=4, config=in_process(2)) as env:
        flow = farstep.Workflow(env, TableAgent(), full(4 * 16))
        learner = Recorder(flow, flow.publish)
        flow.on(DataKeyTrigger(n=2, size=8), learner, thread=True)
        flow.on(ObjectKeyTrigger("parameters"), flow.next_rollout)
        within(lambda: flow.run(until=learner.has(6)))
        assert [batch["version"].max() for batch in learner.batches[:6]] == list(range(6))
        assert_followed(learner.batches)


def test_queue_to_user_threads() -> None:
    with cluster(envs=2, config=in_process(1), env_kwargs=ENDLESS) as env:
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
    with cluster(envs=2, config=in_process(1), env_kwargs=ENDLESS) as env:
        flow, queue = farstep.Workflow(env, TableAgent(), full(2 * 24)), LocalQueue(2)
        flow.on(DataKeyTrigger(n=1, size=8), queue, max_outstanding=2)
        outcome: list[bool] = []

        def work() -> None:
            first, second = queue.take(30.0), queue.take(30.0)
            assert first is not None and second is not None
            seen = everything(flow.batch(first))
            queue.done(second)
            for _ in range(4):  # the free rows of the buffer are overwritten
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
    with cluster(envs=2, config=in_process(1)) as env:
        flow = farstep.Workflow(env, TableAgent(), full(64))
        learner = Recorder(flow)
        flow.on(DataKeyTrigger(n=1, size=8), learner)
        last_chunks = Collector.last_chunks

        def interrupted(collector: Collector) -> np.ndarray:
            monkeypatch.setattr(Collector, "last_chunks", last_chunks)
            os.kill(os.getpid(), signal.SIGINT)
            return last_chunks(collector)

        monkeypatch.setattr(Collector, "last_chunks", interrupted)
        with pytest.raises(KeyboardInterrupt):
            flow.run(total_steps=64)
        flow.run(total_steps=64)
    assert len(learner.batches) >= 4


def test_another_process_reads_the_rows_in_place(tmp_path: Path) -> None:
    sender = ZmqSender()
    with (
        subprocess.Popen(
            [sys.executable, "-m", flows.__name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        ) as other,
        cluster(envs=4, config=in_process(2)) as env,
    ):
        assert other.stdin is not None and other.stdout is not None
        try:
            print(json.dumps(sender.invitation), file=other.stdin, flush=True)
            flow = farstep.Workflow(env, TableAgent(), full(4 * 20), steps=4)
            flow.on(DataKeyTrigger(n=2, size=8), sender, name="remote")
            here = Recorder(flow)
            flow.on(DataKeyTrigger(n=2, size=8), here)
            flow.run(until=lambda: len(here.batches) >= 6 and flow.ledger.learner_steps >= 12)
        finally:
            sender.close()
        said = [json.loads(line) for line in other.stdout]
        assert other.wait(30) == 0
    assert len(said) >= 6
    for (actors, starts, columns), message, batch in zip(said, here.messages, here.batches, strict=False):
        assert (tuple(actors), tuple(starts)) == (message["actor_ids"], message["start"])
        order = np.argsort([slot for first, stop in message["slots"] for slot in range(first, stop)])
        np.testing.assert_array_equal(np.array(columns)[order].T, batch["reward"])
