"""Tickets of batches while some workers have no node."""

from __future__ import annotations

import random
from collections import Counter, deque

import pytest

from farstep.head.tickets.records import IssuedTicket
from farstep.head.tickets.tickets import Tickets


def roll(tickets: Tickets, available: set[int]) -> None:
    """Every available worker gets and completes its tickets."""
    for order in tickets.grant(sorted(available), 0):
        assert tickets.accept(order.worker, order.seq, 0, None)


def workers_of(tickets: Tickets) -> list[int] | None:
    batch = tickets.take(0)
    return None if batch is None else [arrived.ticket.worker for arrived in batch]


def test_batch_continues_without_absent_workers() -> None:
    tickets = Tickets(3, quorum=1)
    tickets.leave(2)
    tickets.open(None, batches=1)
    roll(tickets, {0, 1})
    assert workers_of(tickets) == [0, 1]


def test_batch_does_not_wait_for_a_worker_that_leaves() -> None:
    tickets = Tickets(2, quorum=1)
    tickets.open(None, batches=1)
    orders = tickets.grant([0, 1], 0)
    tickets.accept(0, orders[0].seq, 0, None)
    assert workers_of(tickets) is None
    tickets.lost(1)
    assert workers_of(tickets) is None, "it may be back in a moment"
    tickets.leave(1)
    assert workers_of(tickets) == [0]


def test_worker_that_joins_takes_part_in_the_next_batch() -> None:
    tickets = Tickets(2, quorum=1)
    tickets.leave(1)
    tickets.open(1)
    (*_, last) = tickets.grant([0], 0)
    tickets.join(1)
    assert [order.round for order in tickets.grant([1], 0)] == []
    for seq in (last.seq - 1, last.seq):
        tickets.accept(0, seq, 0, None)
    assert workers_of(tickets) == [0]
    tickets.release()
    roll(tickets, {0, 1})
    assert workers_of(tickets) == [0]
    tickets.release()
    assert workers_of(tickets) == [0, 1]


@pytest.mark.parametrize("fewest", [1, 2, 3])
def test_batch_waits_for_the_minimum_and_has_all_workers_that_joined(fewest: int) -> None:
    tickets = Tickets(3, fewest)
    for worker in range(3):
        tickets.leave(worker)
    tickets.open(None, batches=1)
    there: set[int] = set()
    for worker in range(fewest):
        assert workers_of(tickets) is None
        tickets.join(worker)
        there.add(worker)
        roll(tickets, there)
    assert workers_of(tickets) == list(range(fewest))


@pytest.mark.parametrize("seed", range(30))
def test_batches_continue_while_workers_join_and_leave(seed: int) -> None:
    """Random arrivals, losses and chunks: with enough workers, a batch is complete after all of them did their work."""
    chance = random.Random(seed)
    tickets = Tickets(4, quorum=2)
    tickets.open(chance.choice([None, 0, 1, 2]))
    there = {0, 1, 2, 3}
    taken = 0
    for _ in range(400):
        worker = chance.randrange(4)
        match chance.randrange(6):
            case 0 if worker in there:
                there.discard(worker)
                tickets.lost(worker)
                tickets.leave(worker)
            case 1 if worker not in there:
                there.add(worker)
                tickets.join(worker)
            case 2:
                orders = tickets.grant(sorted(there), 0)
                for order in chance.sample(orders, len(orders)):
                    if chance.random() < 0.8:
                        tickets.accept(order.worker, order.seq, 0, None)
                    else:
                        tickets.give_back(order.worker, order.seq, "environment_failed")
            case _:
                if workers_of(tickets) is not None:
                    taken += 1
                    tickets.release()
    for worker in set(range(4)) - there:
        tickets.join(worker)
    for _ in range(12):
        roll(tickets, {0, 1, 2, 3})
        if workers_of(tickets) is not None:
            taken += 1
            tickets.release()
    roll(tickets, {0, 1, 2, 3})
    assert workers_of(tickets) == [0, 1, 2, 3]
    assert tickets.issued == tickets.delivered + sum(tickets.dropped.values()) + tickets.buffered + tickets.in_flight


def test_a_worker_that_is_back_before_its_node_has_left_counts_as_joined() -> None:
    """Another node has taken the place of the one that was to leave."""
    tickets = Tickets(2, quorum=1)
    tickets.drain(1)
    before = tickets.presence.changes
    assert tickets.presence.present == {0}
    tickets.join(1)
    assert tickets.presence.present == {0, 1} and tickets.presence.changes > before


@pytest.mark.parametrize("stale", [False, True])
def test_worker_that_rejoins_does_not_repeat_a_round_that_it_delivered(stale: bool) -> None:
    """Both workers are required, so the one that rejoins is part of the batch that was in progress when it left."""
    tickets = Tickets(2, quorum=2)
    tickets.open(0)
    first = {order.worker: order for order in tickets.grant([0, 1], 0)}
    assert tickets.accept(1, first[1].seq, 0, None)
    tickets.lost(1)
    tickets.leave(1)
    version = int(stale)
    assert tickets.take(version) is None  # if the version is newer, the chunk of worker 1 is dropped here
    tickets.join(1)
    again = tickets.grant([0, 1], version)
    assert [order.worker for order in again] == [1] * stale
    for order in [first[0], *again]:
        assert tickets.accept(order.worker, order.seq, version, None)
    assert [arrived.ticket.worker for arrived in tickets.take(version) or ()] == [0, 1]


def test_chunk_that_becomes_stale_after_its_worker_rejoined_is_not_rolled_again() -> None:
    """The worker takes part from the next batch on, so no batch waits for the round of the stale chunk."""
    tickets = Tickets(2, quorum=1)
    tickets.open(1)
    first = {(order.worker, order.round): order for order in tickets.grant([0, 1], 0)}
    for number in (0, 1):
        assert tickets.accept(1, first[1, number].seq, 0, None)
    tickets.lost(1)
    tickets.leave(1)
    tickets.join(1)
    assert tickets.take(2) is None  # both chunks of worker 1 are too old for version 2
    assert tickets.grant([0, 1], 2) == []
    assert tickets.accept(0, first[0, 0].seq, 2, None)
    assert [(a.ticket.worker, a.ticket.round) for a in tickets.take(2) or ()] == [(0, 0)]


def test_workers_that_rejoin_take_part_in_whole_batches_of_several_rounds() -> None:
    tickets = Tickets(2, quorum=1)
    tickets.open(0, rollouts=2)
    first = {(order.worker, order.round): order for order in tickets.grant([0, 1], 0)}
    for worker in (0, 1):
        assert tickets.accept(worker, first[worker, 0].seq, 0, None)
        tickets.lost(worker)
        tickets.leave(worker)
    tickets.join(0)
    tickets.join(1)
    assert {(order.worker, order.round) for order in tickets.grant([0, 1], 0)} == {(0, 1)}


@pytest.mark.parametrize("seed", range(150))
def test_batches_have_their_own_rounds_while_workers_leave_rejoin_or_become_stale(seed: int) -> None:
    """A chunk of an earlier round would be read from the wrong lane; a lane in use must not get another ticket."""
    rng = random.Random(seed)
    workers, rollouts = rng.randint(1, 4), rng.randint(1, 3)
    tickets = Tickets(workers, rng.randint(1, workers))
    tickets.open(rng.choice([None, 0, 1, 2]), rollouts=rollouts)
    up, version, taken, batches = set(range(workers)), 0, 0, 0
    waiting: dict[int, deque[IssuedTicket]] = {worker: deque() for worker in range(workers)}
    issued: list[IssuedTicket] = []

    def grant() -> None:
        for order in tickets.grant(up, version):
            used = [other.lane for other in issued if other.worker == order.worker and tickets.is_live(other.seq)]
            assert order.lane not in used
            waiting[order.worker].append(order)
            issued.append(order)

    def deliver(worker: int) -> None:
        order = waiting[worker].popleft()
        assert tickets.accept(
            worker, order.seq, max(version - rng.randint(0, 1), min(order.min_version, version)), None
        )

    def take() -> bool:
        nonlocal taken, batches
        tickets.release()
        batch = tickets.take(version)
        if batch is None:
            return False
        numbers = Counter(arrived.ticket.worker for arrived in batch)
        assert max(numbers.values()) <= rollouts
        assert all(taken <= arrived.ticket.round < taken + rollouts for arrived in batch)
        taken, batches = taken + rollouts, batches + 1
        return True

    for _ in range(80):
        grant()
        event, worker = rng.random(), rng.randrange(workers)
        if event < 0.5 and worker in up and waiting[worker]:
            deliver(worker)
        elif event < 0.75:
            take()
        elif event < 0.83:
            version += 1
        elif event < 0.9 and worker in up:
            up.discard(worker)
            waiting[worker].clear()
            tickets.lost(worker)
            if rng.random() < 0.6:
                tickets.leave(worker)
        elif worker not in up:
            tickets.join(worker)
            up.add(worker)
    for worker in set(range(workers)) - up:
        tickets.join(worker)
        up.add(worker)
    grant()
    for worker in range(workers):  # all that is granted is delivered, so a batch must follow
        while waiting[worker]:
            deliver(worker)
    before = batches
    while take() or batches == before:
        grant()
        if not any(waiting.values()):
            break
        for worker in range(workers):
            while waiting[worker]:
                deliver(worker)
        if batches > before + 3:
            break
    assert batches > before
