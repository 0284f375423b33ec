"""Tickets: the rule by hand-worked examples, then by random events."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from farstep.head.tickets.records import FeedPlan, IssuedTicket
from farstep.head.tickets.tickets import Tickets
from tests.head.tickets.ticket_world import TicketWorld

RUNS, EVENTS = 13, 600  # for each of 24 kinds of session: 187,200 events
MODES = pytest.mark.parametrize("mode", ["rounds", "several rounds", "first-come"])
STALENESS = pytest.mark.parametrize("max_staleness", [0, 1, 2, 3])


def worlds(max_staleness: int, mode: str, eager: bool) -> list[TicketWorld]:
    found = []
    for seed in range(RUNS):
        workers = seed % 4 + 1
        num_chunks = seed % 6 + 1 if mode == "first-come" else None
        rollouts = seed % 3 + 2 if mode == "several rounds" else 1
        found.append(TicketWorld(seed, workers, max_staleness, num_chunks, eager, rollouts))
    return found


@STALENESS
@MODES
@pytest.mark.parametrize("eager", [False, True], ids=["publishes-once-per-batch", "publishes-often"])
def test_invariants_hold_after_every_random_event(max_staleness: int, mode: str, eager: bool) -> None:
    for world in worlds(max_staleness, mode, eager):
        for event in range(EVENTS):
            world.random_event()
            if event % 97 == 0:
                world.next_batch()
        world.next_batch()
        world.check_exactly_once()
        assert world.delivered, "the run never got anywhere"
        if mode != "first-come" and not eager:
            assert not world.tickets.dropped["stale"], "one version per batch must never make a row too old"


@STALENESS
@MODES
def test_a_learner_that_never_publishes_is_never_starved(max_staleness: int, mode: str) -> None:
    for world in worlds(max_staleness, mode, eager=False):
        for _ in range(30):
            world.next_batch()
        assert not world.tickets.dropped


def granted(tickets: Tickets, version: int = 0, workers: int = 2) -> list[IssuedTicket]:
    return list(tickets.grant(range(workers), version))


def hand_over(tickets: Tickets, orders: list[IssuedTicket], version: int) -> None:
    for order in orders:
        assert tickets.accept(order.worker, order.seq, version, None)


def test_synchronous_collection_is_one_ticket_each() -> None:
    tickets = Tickets(2)
    tickets.open(None, None, batches=1)
    orders = granted(tickets)
    assert [(order.worker, order.round, order.lane) for order in orders] == [(0, 0, 0), (1, 0, 0)]
    hand_over(tickets, orders[:1], 0)
    assert tickets.take(0) is None  # it waits for all
    hand_over(tickets, orders[1:], 0)
    assert [arrived.ticket.worker for arrived in tickets.take(0) or ()] == [0, 1]
    tickets.release()
    assert granted(tickets) == []  # and there is no second batch


def test_staleness_zero_grants_no_ticket_during_an_update() -> None:
    tickets = Tickets(2)
    tickets.open(0)
    hand_over(tickets, granted(tickets), 0)
    assert tickets.take(0) is not None
    assert granted(tickets) == []  # what was rolled now would be old after the next publish
    tickets.release()
    assert [order.min_version for order in granted(tickets, version=1)] == [1, 1]


def test_staleness_one_rolls_one_batch_ahead() -> None:
    tickets = Tickets(1)
    tickets.open(1)
    first, second = granted(tickets, workers=1)
    assert (first.lane, second.lane) == (0, 1)
    hand_over(tickets, [first, second], 0)
    assert tickets.take(0) is not None
    assert granted(tickets, workers=1) == []  # one is held, one unread
    tickets.release()
    third = granted(tickets, version=1, workers=1)
    assert [(order.lane, order.min_version) for order in third] == [(0, 1)]  # into the lane just let go
    assert [arrived.version for arrived in tickets.take(1) or ()] == [0]  # a lag of one is allowed


def test_staleness_one_collects_all_rollouts_of_one_batch_ahead() -> None:
    tickets = Tickets(1)
    tickets.open(1, rollouts=2)
    assert tickets.lanes_needed(1, None, rollouts=2) == 4
    orders = granted(tickets, workers=1)
    assert [order.lane for order in orders] == [0, 1, 2, 3]
    hand_over(tickets, orders[:1], 0)
    assert tickets.take(0) is None  # a batch is two of them
    hand_over(tickets, orders[1:3], 0)
    assert [arrived.ticket.round for arrived in tickets.take(0) or ()] == [0, 1]
    assert granted(tickets, workers=1) == []
    tickets.release()
    following = granted(tickets, version=1, workers=1)
    assert [(order.lane, order.min_version) for order in following] == [(0, 1), (1, 1)]  # of the batch after the next
    hand_over(tickets, orders[3:], 0)
    assert [arrived.version for arrived in tickets.take(1) or ()] == [0, 0]  # a lag of one version, not of one rollout


def test_joining_worker_takes_part_in_whole_batches_only() -> None:
    tickets = Tickets(2, quorum=1)
    tickets.leave(1)
    tickets.open(1, rollouts=2)
    first = tickets.grant([0], 0)
    hand_over(tickets, first[:3], 0)
    tickets.join(1)
    assert len(tickets.take(0) or ()) == 2
    tickets.release()
    hand_over(tickets, [*first[3:], *granted(tickets, version=1)], 1)
    assert [len(tickets.take(1) or ()) for _ in "ab"] == [2, 4]


def test_publishing_twice_per_batch_makes_rows_too_old() -> None:
    tickets = Tickets(1)
    tickets.open(1)
    hand_over(tickets, granted(tickets, workers=1), 0)
    assert tickets.take(0) is not None
    tickets.release()
    assert tickets.take(2) is None
    assert tickets.dropped == {"stale": 1}
    again = [order for order in granted(tickets, version=2, workers=1) if order.round == 1]
    assert [(order.lane, order.min_version) for order in again] == [(1, 1)]  # the same batch, rolled again


def test_a_lost_worker_is_asked_for_the_same_batch_again() -> None:
    tickets = Tickets(2)
    tickets.open(0)
    zero, one = granted(tickets)
    hand_over(tickets, [zero], 0)
    tickets.lost(1)
    assert not tickets.accept(1, one.seq, 0, None)  # a stopped process that wakes up
    assert tickets.grant([0], 0) == []
    (again,) = tickets.grant([0, 1], 0)
    assert (again.worker, again.round, again.lane) == (1, one.round, one.lane) and again.seq > one.seq
    hand_over(tickets, [again], 0)
    assert len(tickets.take(0) or ()) == 2
    assert tickets.dropped == {"worker_lost": 1}


def test_delivered_chunks_of_a_lost_worker_count() -> None:
    tickets = Tickets(1)
    tickets.open(0)
    hand_over(tickets, granted(tickets, workers=1), 0)
    tickets.lost(0)
    assert len(tickets.take(0) or ()) == 1 and not tickets.dropped


def test_first_come_does_not_wait_for_a_straggler() -> None:
    tickets = Tickets(3)
    tickets.open(1, num_chunks=2)
    orders = granted(tickets, workers=3)
    assert len(orders) == 4  # two batches of two
    fast = [order for order in orders if order.worker != 2]
    hand_over(tickets, fast, 0)
    batch = tickets.take(0) or []
    assert {arrived.ticket.worker for arrived in batch} == {0, 1}
    assert len(granted(tickets, workers=3)) == 0  # two held, one unread, one in flight
    tickets.release()
    assert len(granted(tickets, workers=3)) == 2


@pytest.mark.parametrize("num_chunks", [3, 7])
def test_a_batch_may_have_more_chunks_than_there_are_workers(num_chunks: int) -> None:
    tickets = Tickets(1)
    tickets.open(0, num_chunks=num_chunks)
    for _ in range(num_chunks):
        hand_over(tickets, granted(tickets, workers=1), 0)
    assert len(tickets.take(0) or ()) == num_chunks


def test_cancel_counts_discarded_rows() -> None:
    tickets = Tickets(2)
    tickets.open(1)
    orders = granted(tickets)
    hand_over(tickets, orders[:1], 0)
    assert tickets.cancel() == orders[-1].seq
    assert tickets.dropped == {"cancelled": 4}
    assert not tickets.accept(orders[1].worker, orders[1].seq, 0, None)
    tickets.open(0)
    assert min(order.seq for order in granted(tickets)) > orders[-1].seq


@pytest.mark.parametrize("of", ["actors", "windows"])
@pytest.mark.parametrize("seed", range(40))
def test_feed_neither_deadlocks_nor_runs_too_far_ahead(seed: int, of: str) -> None:
    """Random workers, deaths and windows: whenever every granted chunk is rolled, enough workers have a whole window,
    or there are enough windows."""
    rng = random.Random(seed)
    workers, chunks, depth = rng.randint(1, 5), rng.randint(1, 4), rng.randint(1, 3)
    actors = rng.randint(1, workers if of == "actors" else 2 * workers)
    per_worker = 1 if of == "actors" else actors
    tickets, held = Tickets(workers), Counter[int]()
    tickets.open(depth - 1, actors * chunks, feed=FeedPlan(depth - 1, actors, chunks, None, per_worker))
    up, fired = set(range(workers)), 0
    for _ in range(600):
        tickets.grant(sorted(up), 0)
        open_tickets = list(tickets.outstanding)
        event = rng.random()
        if event < 0.05 and len(up) > 1:
            worker = rng.choice(sorted(up))
            up.remove(worker)
            tickets.lost(worker)
        elif event < 0.2:
            back = rng.randrange(workers)
            up.add(back)
            tickets.join(back)
        elif open_tickets:
            order = rng.choice(open_tickets)
            tickets.accept(order.worker, order.seq, 0, None)
            arrived = tickets.take_one(lambda worker: True, 0)
            assert arrived is not None
            tickets.stored(arrived)
            held[arrived.ticket.worker] += 1
        else:
            most = {worker: min(per_worker, held[worker] // chunks) for worker in range(workers)}
            whole = [worker for worker, windows in most.items() for _ in range(windows)]
            if len(whole) < actors:
                incomplete = any(held[worker] % chunks for worker in set(range(workers)) - up)
                enough = incomplete if of == "windows" else len(up) < workers
                assert enough, "nothing is rolled and no trigger can fire"
                continue
            fired += 1
            for worker in rng.sample(whole, actors):
                held[worker] -= chunks
                tickets.consumed(worker, chunks)
        assert tickets.in_flight + held.total() <= depth * actors * chunks
        assert tickets.issued == tickets.delivered + sum(tickets.dropped.values()) + tickets.in_flight
    assert fired
