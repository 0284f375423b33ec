"""The counters of `env.stats()`."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from farstep.head.members.membership import Membership, State
from farstep.head.stats.counters import members_snapshot
from farstep.head.stats.worker_times import WorkerTimes
from farstep.testing import TableAgent
from tests.cluster.checks import cluster, within


@pytest.mark.slow  # real processes
def test_a_server_without_workers_has_no_pulls_and_the_user_is_warned() -> None:
    with cluster(envs=2, workers=1, inference={"copies": 3}) as env:
        within(lambda: env.collect(TableAgent(), 4))
        stats = env.stats()
        assert stats["pulls"] == {"total": 1, "per_worker": [1]}
        assert sorted(server["rows"] > 0 for server in stats["acting"]) == [False, False, True]
        assert env.diagnose()
        assert [event.text for event in env.events("warned") if "acting server" in event.text] == [
            "2 of 3 acting servers have no worker to act for; lower copies in inference, name fewer nodes in where, or "
            "start more workers"
        ]


class SlowAgent(TableAgent):
    """Takes 5 ms to act."""

    def act(self, obs: Any, *rest: Any) -> Any:
        time.sleep(0.005)
        return super().act(obs, *rest)


@pytest.mark.slow  # real processes
def test_wait_for_an_acting_server_is_that_of_the_workers_per_request() -> None:
    with cluster(envs=1, workers=1, inference="served") as env:  # one group of environments: one request per row
        within(lambda: env.collect(SlowAgent(), 16))
        stats = env.stats()
        (server,) = stats["acting"]
        assert server["wait_ms"] == pytest.approx(1000 * stats["time"]["workers"]["inference"] / 16, rel=0.1)
        assert server["wait_ms"] > 0


@pytest.mark.slow  # real processes
def test_rows_per_second_of_acting_servers_are_those_of_their_workers() -> None:
    agent = TableAgent()
    with cluster(envs=4, workers=2, inference="served") as env:
        for _ in range(2):
            within(lambda: env.collect(agent, 16))
        stats = env.stats()
        (server,) = stats["acting"]
        assert server["rows_per_second"] == pytest.approx(sum(stats["workers"]["steps_per_second"]), rel=0.01)
        assert server["rows_per_second"] > 0


@pytest.mark.parametrize(
    ("states", "starting", "queued"),
    [
        ((State.ALIVE, State.STARTING, State.STARTING), 1, 1),
        ((State.ALIVE, State.STARTING, State.PARKED), 1, 0),
        ((State.STOPPED, State.STOPPED, State.STOPPED), 0, 0),
        ((State.ALIVE, State.STARTING, State.DYING), 1, 0),
    ],
)
def test_absent_worker_is_queued_only_while_it_is_to_start(
    states: tuple[State, ...], starting: int, queued: int
) -> None:
    membership = Membership(3, {}, restart_budget=0)
    for member, state in zip(membership.members, states, strict=True):
        member.state = state
    launcher = SimpleNamespace(on_disk=dict, spare=lambda: 0, nodes=list)
    server: Any = SimpleNamespace(
        supervisor=SimpleNamespace(membership=membership, launcher=launcher),
        tickets=SimpleNamespace(presence=SimpleNamespace(absent={2})),
        records=[SimpleNamespace(worker=worker, host="", cores=()) for worker in range(3)],
        gpus_per_worker=0,
    )
    found = members_snapshot(server, WorkerTimes(3), now=1.0)["workers"]
    assert (found["starting"], found["queued"]) == (starting, queued)
    assert found["states"].count("starting") == starting and found["states"].count("queued") == queued
