"""A workflow with a scaling rule: windows have the columns of the workers that the rule chose."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import farstep
from farstep.elastic import Fill, NoiseScale, Rule, Schedule, Signals
from farstep.testing import TableAgent
from farstep.workflow.triggers import DataKeyTrigger, ObjectKeyTrigger
from farstep.workflow.triggers.messages import Message
from tests.cluster.checks import cluster, in_process, within
from tests.cluster.tables import ENDLESS

SIZE, ENVS, WORKERS = 4, 8, 4
ROWS = SIZE * ENVS // WORKERS
"""Rows of one worker per update."""


def columns_of_updates(rule: Rule, updates: int, noise_scale: Callable[[int], float] | None = None) -> list[int]:
    """The number of environments in each update of a synchronous workflow."""
    columns: list[int] = []
    with cluster(envs=ENVS, config=in_process(WORKERS), env_kwargs=ENDLESS) as env:
        flow = farstep.Workflow(env, TableAgent(), farstep.Buffer(ENVS * SIZE, farstep.FullBatch()), scaling=rule)

        def update(message: Message) -> None:
            columns.append(len(flow.batch(message).slots))
            if noise_scale is not None:
                flow.put("noise_scale", noise_scale(len(columns)))
            flow.publish()

        flow.on(DataKeyTrigger(n="all", size=SIZE), update)
        flow.on(ObjectKeyTrigger("parameters"), flow.next_rollout)
        within(lambda: flow.run(until=lambda: len(columns) >= updates))
    return columns


def test_schedule_sets_the_columns_of_each_update() -> None:
    assert columns_of_updates(Schedule(1, 4, 1, 2), 8) == [2, 2, 4, 4, 6, 6, 8, 8]


def test_function_sets_the_columns_of_each_update() -> None:
    assert columns_of_updates(lambda signals: 4 - signals.update % 3, 5) == [8, 6, 4, 8, 6]


def test_noise_scale_is_read_from_the_model_block() -> None:
    noise = [2.0 * ROWS, 2.0 * ROWS, 100.0 * ROWS, 1.0 * ROWS]
    assert columns_of_updates(NoiseScale(), 5, lambda update: noise[min(update, 4) - 1]) == [8, 4, 4, 8, 4]


def test_fill_parks_workers_while_a_consumer_is_behind() -> None:
    """One consumer reads every window at once; the other waits for eight, so unread rows accumulate."""
    chosen: list[int] = []

    def rule(signals: Signals) -> int:
        chosen.append(Fill(0.3, 0.5)(signals))
        return chosen[-1]

    with cluster(envs=ENVS, config=in_process(WORKERS), env_kwargs=ENDLESS) as env:
        buffer = farstep.Buffer(ENVS * 10 * SIZE, farstep.FullBatch())
        flow = farstep.Workflow(env, TableAgent(), buffer, steps=SIZE, scaling=rule)
        flow.on(DataKeyTrigger(n="all", size=SIZE), lambda message: None)
        flow.on(DataKeyTrigger(n="all", size=8 * SIZE), lambda message: None)
        within(lambda: flow.run(until=lambda: len(chosen) >= 12))
    assert chosen[0] == 5, "an empty buffer asks for one more worker than there is"
    assert min(chosen) < WORKERS


def test_fill_of_a_replay_workflow_is_that_of_its_limiter() -> None:
    chosen: list[int] = []

    def rule(signals: Signals) -> int:
        chosen.append(Fill()(signals))
        return chosen[-1]

    with cluster(envs=ENVS, config=in_process(WORKERS), env_kwargs=ENDLESS) as env:
        limiter = farstep.buffer.RateLimiter(1.0, ROWS, 0.0, 16.0 * ROWS)
        buffer = farstep.Buffer(64 * ROWS, farstep.buffer.Uniform(), limiter=limiter)
        flow = farstep.Workflow(env, TableAgent(), buffer, steps=SIZE, scaling=rule)

        def learn(message: Message) -> None:
            while (limiter.fill or 0) > 0.9:
                buffer.sample(ROWS)

        flow.on(DataKeyTrigger(n=1, size=SIZE, consume=False, min_new=1), learn)
        within(lambda: flow.run(until=lambda: min(chosen) == 1))
        buffer.close()
    assert chosen[0] == WORKERS + 1, "an empty buffer asks for one more worker than there is"


def test_rule_never_parks_workers_that_a_trigger_needs() -> None:
    columns: list[int] = []
    with cluster(envs=ENVS, config=in_process(WORKERS), env_kwargs=ENDLESS) as env:
        buffer = farstep.Buffer(ENVS * SIZE * 4, farstep.FullBatch())
        flow = farstep.Workflow(env, TableAgent(), buffer, scaling=lambda signals: 1)
        flow.on(DataKeyTrigger(n=3, size=SIZE), lambda message: columns.append(len(flow.batch(message).slots)))
        within(lambda: flow.run(until=lambda: len(columns) >= 3))
        assert [event.text for event in env.events("scaled")] == ["scaled from 4 to 3 workers"]
    assert columns[:3] == [6, 6, 6]


def test_fill_without_unread_rows_and_other_objects_are_refused() -> None:
    with cluster(envs=ENVS, config=in_process(WORKERS), env_kwargs=ENDLESS) as env:
        flow = farstep.Workflow(env, TableAgent(), farstep.Buffer(512, farstep.buffer.Uniform()), scaling=Fill())
        flow.on(DataKeyTrigger(n=1, size=SIZE, consume=False, min_new=1), lambda message: None)
        with pytest.raises(farstep.ConfigError, match="Fill needs a bound on how far workers can be ahead"):
            flow.run(total_steps=64)
        flow.put("noise_scale", [1.0, 2.0])
        with pytest.raises(farstep.ConfigError, match=r"'noise_scale' has the value .* expected a number"):
            flow.objects.number("noise_scale")
