"""Memory for parameters, and capacity of a pooled replay buffer, while workers are parked."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import farstep
from farstep.buffer.samplers import Uniform
from farstep.testing import TableAgent
from farstep.workflow.triggers import TimeTrigger
from tests.cluster.checks import assert_balanced, within
from tests.cluster.parking import settled
from tests.cluster.test_parking import endless


class HeavyAgent(TableAgent):
    """Has 4 MiB of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = np.zeros(1 << 20, np.float32)

    def get_parameters(self) -> dict[str, Any]:
        return {**super().get_parameters(), "weights": self.weights}


def parameter_bytes() -> int:
    """Allocated shared memory of this process that holds parameters."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            if "farstep-parameters" in str(link.readlink()):
                found.append(link.stat())
    return sum({status.st_ino: 512 * status.st_blocks for status in found}.values())


def test_copies_of_parameters_do_not_grow_with_the_number_of_workers() -> None:
    """The running worker may read one copy, one is current, and one is being written. Parked workers read none."""
    agent = HeavyAgent()
    with endless(8) as env:
        env.collect(agent, steps=2)
        env.scale(workers=1)
        settled(env, parked=7)
        for version in range(1, 13):
            agent.weights += 1
            env.publish(agent)
            assert env.collect(agent, steps=2)["version"].max() == version
        assert agent.weights.nbytes < parameter_bytes() < 3.5 * agent.weights.nbytes


def test_running_workers_use_the_pooled_capacity_that_parked_workers_leave() -> None:
    """Rows of parked workers stay until they are the oldest; in the end, one worker's rows fill the buffer."""
    with endless() as env, farstep.Buffer(256, Uniform(), pooled=True, seed=1) as buffer:
        flow = farstep.Workflow(env, TableAgent(), buffer, steps=4)
        flow.on(TimeTrigger(4, unit="env_steps"), lambda message: None)

        def rows() -> dict[int, list[int]]:
            """The steps of the rows of each worker's endless episode."""
            obs = np.asarray(buffer.read(buffer.keys())[0]["obs"]).astype(int)
            return {int(episode): sorted(obs[obs[:, 0] == episode, 1].tolist()) for episode in np.unique(obs[:, 0])}

        def run_until(condition: Callable[[], bool]) -> dict[int, list[int]]:
            within(lambda: flow.run(until=condition))
            assert len(buffer) == 256
            return rows()

        before = run_until(lambda: len(buffer) == 256)
        assert len(before) == 4
        env.scale(workers=1)
        settled(env, parked=3)
        inserted = buffer.limiter.inserts
        found = run_until(lambda: buffer.limiter.inserts >= inserted + 16)
        kept = [before[episode][-len(steps) :] == steps for episode, steps in found.items()]
        assert sorted(kept) == [False, True, True, True]  # the newest rows of parked workers
        (only,) = run_until(lambda: len(rows()) == 1).values()
        assert len(only) == 256
        env.scale(workers=4)
        assert set(run_until(lambda: len(rows()) == 4)) == set(before)
        assert_balanced(env.stats())
