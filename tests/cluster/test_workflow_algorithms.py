"""The trigger tables of five algorithms on a fake agent: when each fires, and on which rows.

Workers run in this process, so every number here follows from the table alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import farstep
from farstep.buffer import NStep, Prioritized, SampleToInsertRatio, Uniform
from farstep.testing import TableAgent
from farstep.workflow.triggers import DataKeyTrigger, ObjectKeyTrigger, TimeTrigger
from tests.cluster.checks import assert_balanced, cluster, in_process
from tests.cluster.flows import full

WORKERS, ENVS = 2, 4  # of all workers


class Learner(TableAgent):
    """A fake learner that records its calls."""

    def __init__(self, flow_of: Callable[[Learner], farstep.Workflow]) -> None:
        super().__init__()
        self.log: list[tuple[Any, ...]] = []
        self.flow = flow_of(self)

    def __getstate__(self) -> dict[str, Any]:
        return {"table": self.table}  # workers need no more

    def learn(self) -> None:
        self.table = (self.table + 1) % 3

    def update(self, message: Any) -> None:
        batch = self.flow.batch(message)
        self.log.append(("update", batch.shape, batch.slots.tolist(), np.unique(batch["version"]).tolist()))
        self.learn()

    def update_and_publish(self, message: Any) -> None:
        self.update(message)
        self.flow.publish()

    def replay(self, message: Any) -> None:
        batch, info = self.flow.buffer.sample(8)
        self.log.append(("replay", len(batch["reward"]), info.size))
        assert batch["next_obs"].shape == batch["obs"].shape
        self.learn()

    def prioritize(self, message: Any) -> None:
        batch, info = self.flow.buffer.sample(8)
        assert self.flow.buffer.update_priorities(info.keys, 1.0 + np.abs(batch["reward"])) == 8
        self.log.append(("replay", info.size, bool((info.weights < 1).any())))
        self.learn()

    def sync_target(self, message: Any) -> None:
        self.log.append(("target", message["at"]))

    def publish(self, message: Any) -> None:
        self.log.append(("publish", message["at"], self.flow.publish()))


def ppo(env: farstep.ClusterEnv) -> Learner:
    learner = Learner(lambda agent: farstep.Workflow(env, agent, full(ENVS * 8)))
    flow = learner.flow
    flow.on(DataKeyTrigger(n="all", size=8), learner.update_and_publish)
    flow.on(ObjectKeyTrigger("parameters"), flow.next_rollout)
    return learner


def impala(env: farstep.ClusterEnv) -> Learner:
    learner = Learner(lambda agent: farstep.Workflow(env, agent, full(ENVS * 32), max_staleness=2))
    learner.flow.on(DataKeyTrigger(n=1, size=8), learner.update_and_publish)
    return learner


def dqn(env: farstep.ClusterEnv) -> Learner:
    buffer = farstep.Buffer(ENVS * 16, Uniform(), seed=1)
    learner = Learner(lambda agent: farstep.Workflow(env, agent, buffer, steps=4))
    flow = learner.flow
    flow.on(DataKeyTrigger(n="all", size=8, consume=False, min_new=4), learner.replay)
    flow.on(TimeTrigger(4, unit="learner_steps"), learner.sync_target)
    flow.on(TimeTrigger(32, unit="env_steps"), learner.publish)
    return learner


def apex(env: farstep.ClusterEnv) -> Learner:
    sampler = NStep(n=3, by=Prioritized(alpha=0.6, beta=0.4))
    buffer = farstep.Buffer(ENVS * 16, sampler, limiter=SampleToInsertRatio(0.5, 32, 32.0), seed=1)
    learner = Learner(lambda agent: farstep.Workflow(env, agent, buffer, steps=4))
    flow = learner.flow
    flow.on(DataKeyTrigger(n=1, size=1, consume=False, min_new=8), learner.prioritize, samples=8)
    flow.on(TimeTrigger(32, unit="env_steps"), learner.publish)
    return learner


def sac(env: farstep.ClusterEnv) -> Learner:
    buffer = farstep.Buffer(ENVS * 64, Uniform(), seed=1)
    learner = Learner(lambda agent: farstep.Workflow(env, agent, buffer, steps=1))
    flow = learner.flow
    flow.on(DataKeyTrigger(n=env.num_workers, size=8, consume=False, min_new=env.num_workers), learner.replay)
    flow.on(TimeTrigger(16, unit="env_steps"), learner.publish)
    return learner


class Expected(NamedTuple):
    table: Callable[[farstep.ClusterEnv], Learner]
    total_steps: int
    order: str
    """Of firings, by first letters: update, replay, publish, target."""
    version: int


EXPECTED = {
    "ppo": Expected(ppo, 4 * 32, "uuuu", 4),
    "impala": Expected(impala, 6 * 16, "uuuuuu", 6),
    # Once both workers have 8 steps, an update for each chunk of 4 new ones; a target network for every 4 updates.
    "dqn": Expected(dqn, 96, "prrrrtprrrrtp", 3),
    # Half a sample per row, from 32 rows on: 8 samples for every 16 rows, of which a chunk is 8.
    "apex": Expected(apex, 128, "rprrprrprrp", 4),
    # An update for each step of both workers, from 8 on; weights for every 16 steps of single environments.
    "sac": Expected(sac, 64, "pprrrrprrrrp", 4),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_table_fires_as_it_must(name: str) -> None:
    case = EXPECTED[name]
    with cluster(envs=ENVS, config=in_process(WORKERS)) as env:
        learner = case.table(env)
        learner.flow.run(total_steps=case.total_steps)
        stats = env.stats()
        assert "".join(name[0] for name, *_ in learner.log) == case.order
        assert learner.flow.ledger.env_steps == stats["steps"] == case.total_steps
        assert learner.flow.ledger.learner_steps == case.order.count("u") + case.order.count("r")
        assert stats["versions"]["current"] == learner.flow.ledger.versions["parameters"] == case.version
        assert stats["dropped"].keys() <= {"cancelled"}
        assert_balanced(stats)
        CHECKS[name](learner)
        learner.flow.buffer.close()


def check_ppo(learner: Learner) -> None:
    """All workers' newest rows, each batch of the version that the one before made."""
    assert learner.log == [("update", (8, 4), [0, 1, 2, 3], [version]) for version in range(4)]


def check_impala(learner: Learner) -> None:
    """One worker's rows at a time, at most two versions old, of either worker."""
    assert all(shape == (8, 2) for _, shape, _, _ in learner.log)
    assert all(0 <= current - version <= 2 for current, (*_, (version,)) in enumerate(learner.log))
    assert {tuple(slots) for _, _, slots, _ in learner.log} == {(0, 1), (2, 3)}


def check_published(learner: Learner, period: int) -> None:
    found = [entry for entry in learner.log if entry[0] == "publish"]
    assert found == [("publish", period * (i + 1), i + 1) for i in range(len(found))]


def check_dqn(learner: Learner) -> None:
    check_published(learner, 32)
    assert [at for name, at, *_ in learner.log if name == "target"] == [4, 8]
    sizes = [size for name, _, *size in learner.log if name == "replay"]
    assert sizes[-1] == [ENVS * 16], "it is full, and the oldest rows go"


def check_apex(learner: Learner) -> None:
    check_published(learner, 32)
    limiter = learner.flow.buffer.limiter
    assert limiter.min_diff <= limiter.diff <= limiter.max_diff
    changed = [weighted for name, _, weighted in learner.log if name == "replay"]
    assert changed == [False, *[True] * (len(changed) - 1)], "all priorities are alike until some were changed"


def check_sac(learner: Learner) -> None:
    check_published(learner, 16)
    sizes = [size for name, _, size in learner.log if name == "replay"]
    assert np.diff(sizes).tolist() == [ENVS] * (len(sizes) - 1)
    assert min(sizes) >= 8 * ENVS


CHECKS: dict[str, Callable[[Learner], None]] = {
    "ppo": check_ppo,
    "impala": check_impala,
    "dqn": check_dqn,
    "apex": check_apex,
    "sac": check_sac,
}
