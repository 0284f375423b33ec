"""Trigger tables and consumers for tests of workflows, and the invariants of their messages."""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest

import farstep
from farstep.config.launch import LaunchConfig
from farstep.workflow.triggers import DataKeyTrigger, ObjectKeyTrigger
from tests.cluster.checks import assert_sound, in_process
from tests.cluster.flows import full

ENDLESS = {"length": None}


def launch(name: str, workers: int = 2) -> LaunchConfig:
    if name == "in_process":
        return in_process(workers)
    return farstep.LocalConfig(workers_per_node=workers, transport=cast(Any, name))


TRANSPORTS = pytest.mark.parametrize("transport", ["in_process", "shm", "tcp"])


class Recorder:
    """A consumer that keeps its messages and batches."""

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
    flow.on(DataKeyTrigger(n="all", size=size), learner)
    flow.on(ObjectKeyTrigger("parameters"), flow.next_rollout)
    return flow, learner


def fifo(env: farstep.ClusterEnv, agent: Any, rows: int = 256, n: int = 1, size: int = 8, **options: Any) -> Any:
    """The table of a learner that takes windows in order of arrival."""
    flow = farstep.Workflow(env, agent, full(rows), **options)
    learner = Recorder(flow)
    flow.on(DataKeyTrigger(n=n, size=size), learner)
    return flow, learner


def assert_in_order(learner: Recorder, size: int) -> None:
    """Of `CountingEnv`s that never end: each actor's steps are consecutive from the first on."""
    for windows in learner.by_actor.values():
        assert [start for start, _ in windows] == list(range(0, size * len(windows), size))
        counts = np.concatenate([batch["obs"][:, :, 1] for _, batch in windows])
        np.testing.assert_array_equal(counts, np.arange(len(counts))[:, None].repeat(counts.shape[1], axis=1))
        assert [batch.continues.all() for _, batch in windows] == [False] + [True] * (len(windows) - 1)


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


def gaps_of(batches: list[farstep.Batch]) -> list[int]:
    """The slots of columns that do not continue the rows before; all others must follow them, also in one batch."""
    gaps: list[int] = []
    last: dict[int, Any] = {}
    for batch in batches:
        assert_sound(batch)
        for column, slot in enumerate(batch.slots.tolist()):
            if batch.continues[column]:
                np.testing.assert_array_equal(batch["obs"][0, column], last[slot])
            else:
                gaps.append(slot)
            last[slot] = batch.last_obs[column]
    return gaps


def deliberate(message: Any) -> None:
    raise ZeroDivisionError("deliberate")


@contextlib.contextmanager
def helper(call: Callable[[], object]) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=call)
    thread.start()
    try:
        yield thread
    finally:
        thread.join(30)
