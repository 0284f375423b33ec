"""Stages in a workflow: consumers learn from the first parts of a chunk while the others are sent."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import farstep
from farstep import DataKeyTrigger, TransferTrigger
from farstep.testing import TableAgent
from farstep.workflow.delivery import LocalQueue
from tests.cluster.checks import (
    assert_balanced,
    assert_same,
    assert_sound,
    cluster,
    eventually,
    in_process,
    together,
    within,
)
from tests.cluster.faulty import HeldBackEnv, StageCutOffEnv
from tests.cluster.flows import everything, full
from tests.cluster.toys import RememberingAgent

STAGES = (("reward", "terminated"), ("obs", "action"))


class Staged:
    """A consumer of stages that keeps its messages."""

    def __init__(self, flow: farstep.Workflow) -> None:
        self.flow = flow
        self.found: list[tuple[int, int, farstep.Batch]] = []
        self.ahead: list[bool] = []

    def __call__(self, message: Any) -> None:
        self.found.append((message["fragment"], message["stage"], self.flow.batch(message).copy()))
        self.ahead.append("ahead" in message)

    def of(self, stage: int) -> list[farstep.Batch]:
        return [batch for _, each, batch in self.found if each == stage]

    def has(self, count: int) -> Any:
        return lambda: len(self.of(1)) >= count


@pytest.fixture
def fifos(tmp_path: Path) -> Any:
    """Named pipes for two workers to wait on, and the descriptors to write to."""
    paths = [str(tmp_path / name) for name in ("one", "other")]
    for path in paths:
        os.mkfifo(path)
    fds = [os.open(path, os.O_RDWR) for path in paths]  # read and write, so that opening does not block
    yield paths, fds
    for fd in fds:
        os.close(fd)


def go_on(fds: list[int], chunks: int = 1) -> None:
    for fd in fds:
        os.write(fd, b"!" * chunks)


@pytest.mark.parametrize("thread", [False, True])
@pytest.mark.parametrize("transport", ["tcp", "ipc"])
def test_the_first_stage_is_consumed_before_the_rest_is_sent(transport: Any, thread: bool, fifos: Any) -> None:
    paths, fds = fifos
    options: Any = {"transport": transport, "transfer": TransferTrigger.dual()}
    with cluster(HeldBackEnv, envs=3, workers=2, env_kwargs={"fifos": paths}, **options) as env:
        flow = farstep.Workflow(env, TableAgent(), full(3 * 16))
        learner = Staged(flow)

        def learn(message: Any) -> None:
            learner(message)
            if message["stage"] == 0:
                stats = env.stats()
                assert stats["delivered"] + stats["buffered"] <= 2 * message["fragment"]
                go_on(fds)  # both workers wait for it, with observations and actions in hand

        flow.on(DataKeyTrigger(n=2, size=8, keys=STAGES), learn, thread=thread)
        within(lambda: flow.run(until=learner.has(4)))
        go_on(fds, 64)
        assert_balanced(env.stats())
    assert learner.ahead == [stage == 0 for _, stage, _ in learner.found]
    for i in (0, 1):
        assert [fragment for fragment, stage, _ in learner.found if stage == i][:4] == [0, 1, 2, 3]
    for early, whole in zip(learner.of(0), learner.of(1), strict=False):
        assert_sound(whole)
        assert set(whole) - set(early) == {"obs", "action"}
        for name, array in early.items():
            np.testing.assert_array_equal(array, whole[name])
        np.testing.assert_array_equal(early.last_obs, whole.last_obs)  # what a value after the last row needs
        np.testing.assert_array_equal(early.final_obs.obs, whole.final_obs.obs)
        for name in ("slots", "continues"):
            np.testing.assert_array_equal(getattr(early, name), getattr(whole, name))


TRANSFERS: dict[str, Any] = {
    "dual": TransferTrigger.dual(),
    "dual-rows": TransferTrigger.dual(size=2, max_senders=1),
    "three": TransferTrigger(keys=(("reward", "terminated"), ("*",), ("obs",))),
    "rest-without-rows": TransferTrigger(keys=(("*",), ("final_obs",))),
    "other-way-round": TransferTrigger(keys=(("obs", "action"), ("*",))),
}


@pytest.mark.parametrize("agent", [TableAgent, RememberingAgent])
@pytest.mark.parametrize("transfer", TRANSFERS.values(), ids=TRANSFERS)
def test_stages_are_of_the_batches_that_collect_returns(transfer: TransferTrigger, agent: Any) -> None:
    with cluster(envs=5, config=in_process(2)) as env:
        acting = agent()
        expected = [everything(env.collect(acting, steps=10)) for _ in range(3)]
    with cluster(envs=5, workers=2, transport="tcp", transfer=transfer) as env:
        flow = farstep.Workflow(env, agent(), full(5 * 16))
        learner = Staged(flow)
        flow.on(DataKeyTrigger(n=2, size=10, keys=STAGES), learner)
        within(lambda: flow.run(until=learner.has(3)))
        assert_balanced(env.stats())
    for early, whole, wanted in zip(learner.of(0), learner.of(1), expected, strict=False):
        assert_same(everything(whole), wanted)
        assert set(STAGES[0]) <= set(early)
        for name, array in early.items():
            np.testing.assert_array_equal(array, whole[name])


@pytest.mark.parametrize("in_queue", [False, True])
def test_stages_of_a_lost_worker_are_repeated(in_queue: bool, tmp_path: Path, fifos: Any) -> None:
    (path, _), (fd, _) = fifos
    kwargs = {"marker": str(tmp_path / "once"), "fifo": path}
    options: Any = {"transport": "tcp", "transfer": TransferTrigger.dual()}
    with cluster(StageCutOffEnv, envs=2, env_kwargs=kwargs, **options) as env:
        flow = farstep.Workflow(env, TableAgent(), full(2 * 16))
        learner = Staged(flow)

        awaited = {(0, 1), (1, 0)}

        def learn(message: Any) -> None:
            if awaited:
                awaited.discard((message["fragment"], message["stage"]))
                if not awaited:
                    os.write(fd, b"!")  # its worker dies of it instead of sending the rest
                    if in_queue:  # later rows do not change a message in the queue
                        eventually(lambda: env.stats()["workers"]["restarts"])
            learner(message)

        flow.on(DataKeyTrigger(n=1, size=6, keys=STAGES), learn, thread=in_queue)
        within(lambda: flow.run(until=learner.has(3)))
        stats = env.stats()
        assert_balanced(stats)
        assert stats["dropped"]["worker_lost"] >= 1 and stats["workers"]["restarts"] == 1
    stages = [[fragment for fragment, stage, _ in learner.found if stage == i][:3] for i in (0, 1)]
    assert stages == [[0, 1, 1], [0, 1, 2]]
    (_, lost, again, *_), (_, whole, *_) = learner.of(0), learner.of(1)
    assert lost.continues.all() and not again.continues.any() and not whole.continues.any()
    assert (lost["reward"] != whole["reward"]).any()
    np.testing.assert_array_equal(again["reward"], whole["reward"])
    for batch in learner.of(1):
        assert_sound(batch)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("keys", [STAGES, ["reward"]], ids=["stages", "one"])
@pytest.mark.parametrize("max_staleness", [None, 0, 1])
def test_stages_neither_deadlock_nor_repeat_rows(keys: Any, max_staleness: int | None, transport: str) -> None:
    options: Any = {"transport": transport, "transfer": TransferTrigger.dual(), "env_kwargs": {"length": None}}
    with cluster(envs=3, workers=2, **options) as env:
        flow = farstep.Workflow(env, TableAgent(), full(3 * 64), max_staleness=max_staleness)
        fired: list[tuple[int, int, int]] = []

        def learn(message: Any) -> None:
            assert set(message["keys"]) <= set(flow.batch(message))
            (actor,), (start,) = message["actor_ids"], message["start"]
            fired.append((message.get("stage", 0), actor, start))
            if message.get("stage", 1):
                flow.publish()

        flow.on(DataKeyTrigger(n=1, size=8, keys=keys), learn)
        flow.on(DataKeyTrigger(n=2, size=8), lambda message: assert_sound(flow.batch(message)), name="whole")
        within(lambda: flow.run(until=lambda: len(fired) >= 40))
        assert_balanced(env.stats())
        assert env.stats()["workers"]["restarts"] == 0
    if max_staleness is None:
        assert max(Counter(fired).values()) == 1


def test_queue_to_user_threads_gets_stages_early(fifos: Any) -> None:
    paths, fds = fifos
    options: Any = {"transport": "tcp", "transfer": TransferTrigger.dual(), "env_kwargs": {"fifos": paths}}
    with cluster(HeldBackEnv, envs=2, workers=1, **options) as env:
        flow, queue = farstep.Workflow(env, TableAgent(), full(2 * 16)), LocalQueue()
        flow.on(DataKeyTrigger(n=1, size=8, keys=STAGES), queue)
        learner = Staged(flow)

        def work() -> None:
            while not learner.has(3)():
                message = queue.take(30.0)
                assert message is not None
                learner(message)
                go_on(fds, int("ahead" in message))
                queue.done(message)
            flow.stop()
            go_on(fds, 64)

        together({"work": work, "run": flow.run})
        queue.close(drop=True)
    assert learner.ahead == [stage == 0 for _, stage, _ in learner.found]


@pytest.mark.parametrize("size, steps", [(8, 4), (4, 8)])
def test_windows_that_are_not_chunks_fire_when_complete(size: int, steps: int) -> None:
    with cluster(envs=3, workers=2, transport="tcp", transfer=TransferTrigger.dual()) as env:
        flow = farstep.Workflow(env, TableAgent(), full(3 * 64), steps=steps)
        learner = Staged(flow)
        flow.on(DataKeyTrigger(n=2, size=size, keys=STAGES), learner)
        within(lambda: flow.run(until=learner.has(4)))
    assert not any(learner.ahead)
    for _, _, batch in learner.found:
        assert_sound(batch)
