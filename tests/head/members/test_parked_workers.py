"""Parked workers, as tickets and membership see them, without processes."""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque

import pytest

from farstep.config.launch import RESTART_WINDOW_S
from farstep.head.members.membership import (
    Disconnected,
    Ended,
    GiveUp,
    Hello,
    Idle,
    Lost,
    Membership,
    Observed,
    Park,
    Ready,
    ResumeParked,
    Retire,
    Start,
    State,
    SuspendParked,
    Unpark,
)
from farstep.head.tickets.records import AcceptedChunk, FeedPlan, IssuedTicket
from farstep.head.tickets.tickets import Tickets

# ---- tickets ----


class World:
    """Workers that are parked and unparked at random; each chunk carries how many its worker rolled before."""

    def __init__(self, seed: int, workers: int, max_staleness: int | None, num_chunks: int | None) -> None:
        self.rng = random.Random(seed)
        self.workers, self.max_staleness, self.num_chunks = workers, max_staleness, num_chunks
        self.tickets = Tickets(workers)
        self.tickets.open(max_staleness, num_chunks)
        self.version = 0
        self.queues: dict[int, deque[IssuedTicket]] = defaultdict(deque)
        self.rolled: Counter[int] = Counter()
        self.delivered: Counter[int] = Counter()
        self.batches = 0
        self.wanted = set(range(workers))

    def available(self) -> list[int]:
        presence = self.tickets.presence
        return [w for w in range(self.workers) if w not in presence.parked | presence.retiring]

    def step(self) -> None:
        events = {self.grant: 20, self.finish: 40, self.learn: 20, self.scale: 3, self.idle: 10}
        self.rng.choices(list(events), list(events.values()))[0]()
        self.check()

    def grant(self) -> None:
        for ticket in self.tickets.grant(self.available(), self.version):
            self.queues[ticket.worker].append(ticket)

    def finish(self) -> None:
        worker = self.rng.randrange(self.workers)
        if self.queues[worker]:
            ticket = self.queues[worker].popleft()
            assert ticket.min_version <= self.version
            assert self.tickets.accept(worker, ticket.seq, self.version, self.rolled[worker])
            self.rolled[worker] += 1

    def scale(self) -> None:
        count = self.rng.randint(1, self.workers)
        for worker in range(self.workers):
            if worker < count:
                self.tickets.join(worker)
            else:
                self.tickets.presence.retire(worker)

    def idle(self) -> None:
        """A retiring worker has finished its chunk, and returns the tickets that it has not started."""
        for worker in list(self.tickets.presence.retiring):
            self.queues[worker].clear()
            self.tickets.returned(worker)
            self.tickets.park(worker)

    def learn(self) -> None:
        self.tickets.release()
        batch = self.tickets.take(self.version)
        if batch is None:
            for accepted in self.tickets.chunks_to_copy():
                self.tickets.copied(accepted, accepted.info)
            return
        self.batches += 1
        self.version += self.max_staleness is not None
        for accepted in batch:
            self.deliver(accepted)

    def deliver(self, accepted: AcceptedChunk) -> None:
        worker = accepted.ticket.worker
        assert accepted.info == self.delivered[worker], "a chunk is missing, or out of order"
        self.delivered[worker] += 1

    def check(self) -> None:
        tickets = self.tickets
        in_flight = sum(map(len, self.queues.values()))
        assert tickets.in_flight == in_flight
        assert tickets.issued == tickets.delivered + tickets.buffered + in_flight, "a returned ticket was never issued"
        assert not +tickets.dropped

    def starves(self) -> bool:
        """Whether there is no batch although all workers that are not parked roll all their tickets."""
        self.idle()
        before = self.batches
        for _ in range(3 * (self.num_chunks or 1) + 3):
            self.learn()
            if self.batches > before:
                return False
            self.grant()
            for worker in range(self.workers):
                while self.queues[worker]:
                    ticket = self.queues[worker].popleft()
                    assert self.tickets.accept(worker, ticket.seq, self.version, self.rolled[worker])
                    self.rolled[worker] += 1
            self.check()
        return True


@pytest.mark.parametrize("num_chunks", [None, 1, 5, 9])
@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_no_chunk_is_lost_or_out_of_order_whenever_workers_are_parked(max_staleness: int, num_chunks: int) -> None:
    for seed in range(4):
        world = World(seed, seed % 4 + 2, max_staleness, num_chunks)
        for event in range(400):
            world.step()
            if event % 50 == 0:
                assert not world.starves()
        assert not world.starves()
        assert world.batches > 5


def test_quorum_is_at_most_the_number_of_workers_that_are_not_parked() -> None:
    tickets = Tickets(4, quorum=3)
    quorums = []
    for worker in (3, 2, 1):
        tickets.park(worker)
        quorums.append(tickets.presence.quorum)
    tickets.join(1)
    assert [*quorums, tickets.presence.quorum] == [3, 2, 1, 2]


def test_batches_that_others_have_begun_do_not_wait_for_an_unparked_worker() -> None:
    tickets = Tickets(2)
    tickets.open(2)
    tickets.park(1)
    for ticket in tickets.grant([0], 0):
        assert tickets.accept(0, ticket.seq, 0, None)
    tickets.join(1)
    assert tickets.grant([0, 1], 0) == []  # it is included from round 3 on, when a batch is released
    for _ in range(3):
        assert [accepted.ticket.worker for accepted in tickets.take(0) or ()] == [0]
        tickets.release()
    both = tickets.grant([0, 1], 0)
    assert {(ticket.worker, ticket.round) for ticket in both} >= {(0, 3), (1, 3)}
    assert tickets.take(0) is None  # now it waits for both


def test_worker_completes_the_window_that_it_has_begun_before_it_is_parked() -> None:
    tickets = Tickets(2)
    tickets.open(1, 4, feed=FeedPlan(max_staleness=1, windows=None, chunks=2))
    first = next(ticket for ticket in tickets.grant(range(2), 0) if ticket.worker == 1)
    assert not tickets.must_finish(1)  # two tickets are a whole window
    assert tickets.accept(1, first.seq, 0, None)
    tickets.presence.retire(1)
    tickets.returned(1)
    assert tickets.must_finish(1)
    (second,) = tickets.grant(Retiring(tickets), 0)
    assert tickets.accept(1, second.seq, 0, None) and not tickets.must_finish(1)


def test_worker_that_is_unparked_during_an_update_rolls_no_rows_that_would_become_stale() -> None:
    """Batch A, with worker 0 only, is in the learner's hands at version 0; then B and C have both workers."""
    tickets = Tickets(2)
    tickets.open(1, 2, feed=FeedPlan(max_staleness=1, windows=None, chunks=1))
    tickets.park(1)

    def roll(version: int, *workers: int) -> list[int]:
        """Let workers roll all their tickets."""
        rolled = tickets.grant(workers, version)
        for ticket in rolled:
            assert tickets.accept(ticket.worker, ticket.seq, version, None)
        return sorted(ticket.worker for ticket in rolled)

    assert roll(0, 0) == [0, 0]
    a = tickets.take_one(lambda worker: True, 0)
    assert a is not None
    tickets.stored(a)
    tickets.join(1)
    assert roll(0, 0, 1) == [1]  # a second one would be consumed two versions later
    tickets.consumed(0, 1)
    roll(1, 0, 1)
    for version in (1, 2, 3, 4):
        for worker in (0, 1):
            accepted = tickets.take_one(worker.__eq__, version)
            assert accepted is not None and version - accepted.version <= 1
            tickets.stored(accepted)
        for worker in (0, 1):
            tickets.consumed(worker, 1)
        roll(version + 1, 0, 1)
    assert not tickets.dropped


class Retiring:
    """Contains worker 1 while it must finish a window, as `Server` does."""

    def __init__(self, tickets: Tickets) -> None:
        self._tickets = tickets

    def __contains__(self, worker: object) -> bool:
        return worker == 1 and self._tickets.must_finish(1)


def test_worker_rolls_its_requested_chunks_before_it_is_parked() -> None:
    tickets = Tickets(2)
    tickets.open(None, 4, feed=FeedPlan(windows=None, chunks=2, invited={0: 2, 1: 2}))
    tickets.grant(range(2), 0)
    assert not tickets.must_finish(1)
    tickets.returned(1)
    assert tickets.must_finish(1)


# ---- membership ----


def alive(workers: int = 1, budget: int = 1) -> Membership:
    membership = Membership(workers, {"idle": 10.0, "connect": 60.0}, budget)
    membership.start(0.0)
    for worker in range(workers):
        membership.handle(Hello(worker), 0.0)
        membership.handle(Ready(worker), 0.0)
    return membership


def parked(workers: int = 1, budget: int = 1) -> Membership:
    membership = alive(workers, budget)
    for worker in range(workers):
        assert membership.handle(Park(worker), 1.0) == [Retire(worker)]
        assert membership.handle(Idle(worker), 1.0) == [SuspendParked(worker)]
    assert membership.count(State.PARKED) == workers
    return membership


def test_worker_is_suspended_only_when_it_is_idle() -> None:
    membership = alive()
    assert membership.handle(Idle(0), 1.0) == []  # it is not to be parked
    assert membership.handle(Park(0), 1.0) == [Retire(0)]
    assert membership.members[0].state is State.ALIVE
    assert membership.handle(Park(0), 1.0) == []  # once is enough
    assert membership.handle(Idle(0), 2.0) == [SuspendParked(0)]
    assert membership.handle(Unpark(0), 3.0) == [ResumeParked(0)]
    assert membership.members[0].state is State.ALIVE


def test_worker_that_is_needed_after_all_is_not_suspended() -> None:
    membership = alive()
    membership.handle(Park(0), 1.0)
    assert membership.handle(Unpark(0), 1.0) == []
    assert membership.handle(Idle(0), 2.0) == []


def test_parked_worker_has_no_time_limit_and_gets_one_again_when_it_is_unparked() -> None:
    membership = alive()
    membership.handle(Observed(0, "idle", (1,)), 0.0)
    membership.handle(Park(0), 1.0)
    membership.handle(Idle(0), 1.0)
    assert membership.tick(1e6) == []
    membership.handle(Unpark(0), 1e6)
    assert Lost(0) not in membership.tick(1e6 + 9)
    assert Lost(0) in membership.tick(1e6 + 11)


def test_closed_connection_of_a_parked_worker_is_ignored() -> None:
    membership = parked()
    assert membership.handle(Disconnected(0), 2.0) == []
    assert membership.members[0].state is State.PARKED


def test_parked_worker_that_ended_is_started_when_it_is_unparked_and_uses_the_budget_then() -> None:
    membership = parked(workers=2, budget=1)
    for worker in range(2):
        assert membership.handle(Ended(worker), 2.0) == [Lost(worker)]
    assert membership.tick(100.0) == []
    assert membership.handle(Unpark(0), 100.0) == [Start(0, 1)], "without waiting for the next check"
    assert membership.restarts == 1
    assert membership.handle(Unpark(1), 100.0) == [GiveUp(1, 2)]


def test_lost_node_of_a_parked_worker_uses_no_budget() -> None:
    membership = parked(budget=0)
    membership.handle(Ended(0, blameless=True), 2.0)
    assert membership.handle(Unpark(0), RESTART_WINDOW_S) == [Start(0, 1)] and not membership.restarts


def test_worker_that_dies_before_it_is_idle_is_restarted_and_parked_then() -> None:
    """It may have begun a window, which its replacement completes."""
    membership = alive()
    membership.handle(Park(0), 1.0)
    assert membership.handle(Ended(0), 2.0) == [Lost(0)]
    assert membership.tick(3.0) == [Start(0, 1)]
    membership.handle(Hello(0), 4.0)
    assert membership.handle(Ready(0), 4.0) == [Retire(0)]
    assert membership.handle(Idle(0), 4.0) == [SuspendParked(0)]


def test_run_that_ends_suspends_no_worker() -> None:
    """It could not stop by itself any more."""
    membership = alive()
    membership.handle(Park(0), 1.0)
    membership.stop()
    assert membership.handle(Idle(0), 2.0) == []


def test_run_that_ends_restarts_no_parked_worker() -> None:
    membership = parked()
    membership.stop()
    assert membership.handle(Ended(0), 2.0) == [Lost(0)]
    assert membership.members[0].state is State.STOPPED
