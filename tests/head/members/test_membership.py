"""Membership: the life of a worker by hand-worked examples, then by random events on a fake clock."""

from __future__ import annotations

import pytest

from farstep.config.launch import RESTART_WINDOW_S
from farstep.head.members.membership import (
    DEATH_S,
    Disconnected,
    Dismiss,
    Ended,
    Event,
    Failed,
    GiveUp,
    Hello,
    Kill,
    Lost,
    Membership,
    NotStarted,
    Observed,
    Ready,
    RequestStacks,
    Start,
    State,
)
from farstep.head.members.worker_records import expected, split
from farstep.rollout.progress import ROLLED
from farstep.testing import FakeClock
from tests.head.members.member_world import LIMITS_S, MemberWorld

RUNS, EVENTS = 15, 2000  # for each of 4 budgets: 120,000 events


@pytest.mark.parametrize("budget", [0, 3, 20, 10**9])
def test_invariants_hold_after_every_random_event(budget: int) -> None:
    restarts = kills = 0
    for seed in range(RUNS):
        world = MemberWorld(seed, workers=seed % 5 + 1, budget=budget)
        for _ in range(EVENTS):
            world.random_event()
        restarts, kills = restarts + world.restarts, kills + world.kills
    assert kills > 0
    assert budget == 0 or restarts > 0


def ready_worker(budget: int = 10) -> tuple[Membership, FakeClock]:
    clock = FakeClock()
    membership = Membership(1, LIMITS_S, budget)
    assert membership.start(clock()) == [Start(0, 0)]
    membership.handle(Hello(0), clock())
    membership.handle(Ready(0), clock())
    assert membership.members[0].state is State.ALIVE
    return membership, clock


def test_busy_worker_is_never_killed() -> None:
    membership, clock = ready_worker()
    for count in range(1000):
        membership.handle(Observed(0, "step", (count, 0)), clock())
        assert membership.tick(clock.advance(LIMITS_S["step"])) == [RequestStacks(0)]


def test_an_idle_worker_is_never_killed() -> None:
    membership, clock = ready_worker()
    membership.handle(Observed(0, "", (1, 0)), clock())
    assert membership.tick(clock.advance(10**9)) == []


def test_worker_is_not_lost_during_an_episode_of_hours_while_it_steps() -> None:
    clock, membership = FakeClock(), Membership(1, {"step": 60.0, "idle": 60.0}, 10)
    membership.start(clock())
    membership.handle(Hello(0), clock())
    membership.handle(Ready(0), clock())
    for step in range(200):  # each step takes almost as long as is allowed, and no chunk is complete meanwhile
        membership.handle(Observed(0, "step", (1, step)), clock())
        assert not [action for action in membership.tick(clock.advance(59.0)) if isinstance(action, Lost | Kill)]
    assert membership.tick(clock.advance(1.1)) == [Lost(0), Kill(0, stuck_in="step")], "it no longer steps"


def test_worker_whose_chunk_is_sent_for_long_is_not_idle() -> None:
    (record,) = split(1, 2, 1, 0)
    assert (expected(record, None), expected(record, 7)) == ("", "idle")
    record.words[ROLLED] = 7
    assert (expected(record, None), expected(record, 7), expected(record, 8)) == ("", "transfer", "idle")

    clock, membership = FakeClock(), Membership(1, {"idle": 60.0, "transfer": 600.0}, 10)
    membership.start(clock())
    membership.handle(Hello(0), clock())
    membership.handle(Ready(0), clock())
    for heard in range(10):  # each stage that arrives is progress
        membership.handle(Observed(0, expected(record, 7), (1, 0, heard)), clock())
        assert membership.tick(clock.advance(599.0)) == [RequestStacks(0)]
    assert membership.tick(clock.advance(1.1)) == [Lost(0), Kill(0, stuck_in="transfer")]


def test_a_stuck_worker_is_killed_once_and_replaced_only_when_it_has_ended() -> None:
    membership, clock = ready_worker()
    membership.handle(Observed(0, "step", (1, 0)), clock())
    assert membership.tick(clock.advance(1.0)) == []
    assert membership.tick(clock.advance(0.1)) == [RequestStacks(0)]
    assert membership.tick(clock.advance(0.9)) == []  # once is enough
    assert membership.tick(clock.advance(0.1)) == [Lost(0), Kill(0, stuck_in="step")]
    assert membership.tick(clock.advance(DEATH_S)) == []  # it may wake up again: it is not replaced yet
    assert membership.handle(Ended(0), clock()) == []
    assert membership.tick(clock()) == [Start(0, 1)]


def test_a_process_that_cannot_be_ended_ends_the_run() -> None:
    membership, clock = ready_worker()
    membership.handle(Disconnected(0), clock())
    assert membership.tick(clock.advance(DEATH_S)) == []
    assert membership.tick(clock.advance(0.1)) == [GiveUp(0)]
    assert membership.tick(clock.advance(DEATH_S)) == []
    assert membership.handle(Ended(0), clock()) == []


def test_a_phase_that_begins_has_its_whole_limit() -> None:
    membership, clock = ready_worker()
    membership.handle(Observed(0, "", (1, 0)), clock())
    clock.advance(1000.0)
    membership.handle(Observed(0, "step", (2, 0)), clock())
    assert membership.tick(clock.advance(1.9)) == [RequestStacks(0)]


def test_a_worker_that_never_says_hello_is_stuck_in_connect() -> None:
    membership, clock = Membership(1, LIMITS_S, 10), FakeClock()
    membership.start(clock())
    assert membership.tick(clock.advance(60.0)) == []
    assert membership.tick(clock.advance(0.1)) == [Lost(0), Kill(0, stuck_in="connect")]


def test_a_closed_connection_ends_the_worker() -> None:
    membership, clock = ready_worker()
    assert membership.handle(Disconnected(0), clock()) == [Lost(0), Kill(0)]
    assert membership.handle(Disconnected(0), clock()) == []
    membership.handle(Ended(0), clock())
    assert membership.tick(clock()) == [Start(0, 1)]


def test_failures_in_a_row_wait_longer_and_a_ready_worker_starts_afresh() -> None:
    membership, clock = ready_worker(budget=100)
    waits = []
    for _ in range(8):
        membership.handle(Ended(0), clock())
        began = clock()
        while not membership.tick(clock()):
            clock.advance(1 / 16)
        waits.append(round(clock() - began, 6))
    assert waits[0] == 0.0 and waits == sorted(waits) and waits[-1] == waits[-2]
    assert len(set(waits)) >= 4, "the wait grows"
    membership.handle(Hello(0), clock())
    membership.handle(Ready(0), clock())
    membership.handle(Ended(0), clock())
    assert membership.tick(clock()) == [Start(0, membership.members[0].incarnation)]


def test_the_budget_is_spent_by_ends_and_by_environments_that_raise() -> None:
    membership, clock = ready_worker(budget=2)
    assert membership.handle(Failed(0), clock()) == []
    assert membership.handle(Ended(0), clock()) == [Lost(0)]
    assert membership.tick(clock()) == [Start(0, 1)]
    assert membership.restarts == 1
    assert membership.handle(Ended(0), clock()) == [Lost(0), GiveUp(0, failures=3)]
    assert membership.handle(Failed(0), clock()) == []  # once is enough
    assert membership.tick(clock.advance(10**6)) == []


def test_rare_faults_do_not_use_up_the_budget() -> None:
    membership, clock = ready_worker(budget=1)
    for _ in range(50):
        clock.advance(RESTART_WINDOW_S + 1)
        assert membership.handle(Failed(0), clock()) == []


def test_ends_are_expected_once_stopping() -> None:
    membership, clock = ready_worker(budget=0)
    membership.stop()
    assert GiveUp not in map(type, membership.handle(Ended(0), clock()))
    assert membership.tick(clock.advance(10**6)) == []
    assert membership.members[0].state is State.STOPPED


def test_start_without_resources_is_retried_for_connect_s() -> None:
    membership = Membership(1, {"connect": 10.0}, restart_budget=0)
    clock = FakeClock()
    membership.start(clock.now)
    membership.handle(Hello(0), clock.now)
    membership.handle(Ready(0), clock.now)
    membership.restart_budget = 1
    membership.handle(Ended(0), clock.now)
    attempts = 0
    while not (actions := membership.tick(clock.now)) or isinstance(actions[0], Start):
        if actions:
            assert actions == [Start(0, 1)], "the same incarnation each time"
            attempts += 1
            if actions := membership.handle(NotStarted(0), clock.now):
                break
            assert membership.restarts == 0
        clock.advance(0.1)
    assert actions == [GiveUp(0)]
    assert 10.0 < clock.now <= 16.0 and 5 <= attempts <= 12


def test_missing_resources_do_not_use_the_restart_budget() -> None:
    membership = Membership(1, {"connect": 10.0}, restart_budget=1)
    membership.start(0.0)
    membership.handle(Ended(0), 1.0)
    for now in (1.0, 1.2, 2.0):
        assert membership.tick(now) == [Start(0, 1)]
        assert membership.handle(NotStarted(0), now) == []
    assert membership.tick(4.0) == [Start(0, 1)]
    membership.handle(Hello(0), 4.1)
    membership.handle(Ready(0), 4.2)
    assert membership.restarts == 1 and membership.count(State.ALIVE) == 1


def test_first_failure_is_restarted_without_waiting_for_the_next_check() -> None:
    membership = Membership(1, {"connect": 10.0}, restart_budget=3)
    membership.start(0.0)
    membership.handle(Ended(0), 1.0)
    assert membership.restart_is_due
    assert membership.tick(1.0) == [Start(0, 1)] and not membership.restart_is_due
    membership.handle(Ended(0), 2.0)
    assert not membership.restart_is_due  # the second failure waits


@pytest.mark.parametrize("events", [[], [Hello(0)], [Hello(0), Ready(0)], [Disconnected(0)], [Ended(0)]])
def test_a_dismissed_server_ends_and_is_not_restarted(events: list[Event]) -> None:
    membership = Membership(0, LIMITS_S, restart_budget=1, servers=1)
    membership.start(0.0)
    for event in events:
        membership.handle(event, 1.0)
    ends = membership.is_running(0)
    assert membership.handle(Dismiss(0), 2.0) == ([Lost(0), Kill(0)] if ends else [])
    assert membership.tick(3.0) == []
    membership.handle(Ended(0), 4.0)
    assert membership.members[0].state is State.STOPPED
    assert membership.tick(100.0) == [] and membership.restarts == 0


def test_a_dismissed_server_that_does_not_end_fails_the_run() -> None:
    membership = Membership(0, LIMITS_S, restart_budget=1, servers=1)
    membership.start(0.0)
    membership.handle(Dismiss(0), 1.0)
    assert membership.tick(2.0 + DEATH_S) == [GiveUp(0)]
