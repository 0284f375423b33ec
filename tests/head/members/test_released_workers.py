"""Released workers, and the slots that workers hold, as membership sees them, without processes."""

from __future__ import annotations

from farstep.head.members.membership import (
    Acquire,
    Ended,
    Hello,
    Idle,
    Lost,
    Observed,
    Park,
    Ready,
    Release,
    ResumeReleased,
    Retire,
    Start,
    State,
    SuspendParked,
    SuspendReleased,
    Unpark,
)
from tests.head.members.test_parked_workers import alive


def test_released_worker_continues_when_it_is_needed_and_has_no_time_limit_before() -> None:
    membership = alive()
    membership.handle(Observed(0, "idle", (1,)), 1.0)
    assert membership.handle(Release(0), 2.0) == [SuspendReleased(0)]
    assert membership.handle(Release(0), 3.0) == []
    membership.handle(Observed(0, "idle", (2,)), 4.0)  # a heartbeat from before the suspension
    assert list(membership.tick(500.0)) == []
    assert membership.handle(Acquire(0), 502.0) == [ResumeReleased(0, 500.0)]
    assert list(membership.tick(503.0)) == []  # the limit applies from now on
    assert membership.handle(Acquire(0), 504.0) == []


def test_released_worker_that_is_to_be_parked_is_made_idle_first() -> None:
    membership = alive()
    membership.handle(Release(0), 1.0)
    assert membership.handle(Park(0), 2.0) == [Retire(0)]
    assert membership.handle(Acquire(0), 2.0) == [ResumeReleased(0, 1.0)]  # it must answer ReturnTickets
    assert membership.handle(Release(0), 2.0) == []
    assert membership.handle(Idle(0), 3.0) == [SuspendParked(0)]


def test_released_worker_that_ends_is_restarted_at_once() -> None:
    membership = alive()
    membership.handle(Release(0), 1.0)
    assert membership.handle(Ended(0), 2.0) == [Lost(0)]
    assert list(membership.tick(2.0)) == [Start(0, 1)]


def test_slot_is_held_while_the_process_runs() -> None:
    membership = alive(workers=2)
    slots = membership.slots
    assert slots.held == 2
    membership.handle(Release(0), 10.0)
    membership.handle(Park(1), 10.0)
    membership.handle(Idle(1), 14.0)
    assert slots.held == 0 and slots.held_seconds(20.0) == 10.0 + 14.0
    membership.handle(Acquire(0), 20.0)
    membership.handle(Unpark(1), 20.0)
    assert slots.held == 2
    membership.handle(Ended(1), 21.0)
    assert slots.held == 1 and slots.held_seconds(22.0) == 12.0 + 15.0


def test_worker_that_waits_for_a_node_holds_no_slot() -> None:
    membership = alive()
    membership.handle(Ended(0, blameless=True), 1.0)
    membership.tick(1.0)
    membership.handle(Observed(0, "queued", ()), 1.0)
    assert membership.members[0].state is State.STARTING and membership.slots.held == 0
    membership.handle(Observed(0, "connect", ()), 5.0)
    membership.handle(Hello(0), 6.0)
    membership.handle(Ready(0), 7.0)
    assert membership.slots.held_seconds(8.0) == 1.0 + 3.0
