"""Tickets look only at workers whose state changed, and give the same tickets as if they looked at every one."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Container

import pytest

from farstep.head.tickets.records import AcceptedChunk, DropCause, FeedPlan, IssuedTicket
from farstep.head.tickets.session import CollectionSession
from farstep.head.tickets.tickets import Tickets


class NaiveTickets(Tickets):
    """Checks every worker for every ticket, and every chunk for every batch."""

    def grant(self, available: Container[int], version: int) -> list[IssuedTicket]:
        if self._session is not None:
            self._session.due = set(range(self._workers))
        return super().grant(available, version)

    def take(self, version: int) -> list[AcceptedChunk] | None:
        if self._session is not None:
            self._session.missing = None
        return super().take(version)

    def _first_come(
        self, session: CollectionSession, wanted: int, available: Container[int], version: int
    ) -> list[IssuedTicket]:
        orders: list[IssuedTicket] = []
        while True:
            ahead = self.in_flight + self.buffered + session.held.total()
            free = [
                w
                for w in range(self._workers)
                if w in available and session.lanes[w] and self.outstanding.num_of(w) < 2
            ]
            if session.invited is not None:
                free = [w for w in free if session.invited[w]]
            if session.feed is not None:
                free = self._admitted(session, session.feed, free)
            elif ahead >= session.depth * wanted:
                return orders
            if not free:
                return orders
            worker = min(free, key=lambda w: (self.outstanding.num_of(w), session.issued[w]))
            session.issued[worker] += 1
            if session.invited is not None:
                session.invited[worker] -= 1
            lane = session.lanes[worker].pop()
            orders.append(self._issue(session, worker, -1, lane, version + ahead // wanted))

    def _admitted(self, session: CollectionSession, feed: FeedPlan, free: list[int]) -> list[int]:
        if feed.max_staleness is None:
            return free
        chunks = session.held.copy()
        chunks.update(order.worker for order in self.outstanding)
        chunks.update(arrived.ticket.worker for arrived in self.unread)
        begun = sum(-(-count // feed.chunks) for count in chunks.values())
        may_begin = feed.windows is None or begun < session.depth * feed.windows
        depths = {w: max(1, session.depth - (w in session.newcomers)) for w in free}
        most = {w: depth * feed.chunks * feed.per_worker for w, depth in depths.items()}
        return [w for w in free if chunks[w] % feed.chunks or (may_begin and chunks[w] < most[w])]


@pytest.mark.parametrize("seed", range(80))
def test_grants_the_same_tickets_as_checking_every_worker(seed: int) -> None:
    rng = random.Random(seed)
    workers, chunks, staleness = rng.randint(1, 6), rng.randint(1, 3), rng.choice([None, 0, 1, 2])
    actors = rng.choice([None, rng.randint(1, workers)])
    plan = None
    if rng.random() < 0.75:
        invited = {w: rng.randint(0, 2) for w in range(workers)} if rng.random() < 0.5 else None
        plan = FeedPlan(staleness, actors, chunks, invited, rng.choice([1, actors or 1]))
    both = Tickets(workers, 1), NaiveTickets(workers, 1)
    for tickets in both:
        tickets.open(staleness if plan else staleness or 0, (actors or workers) * chunks, feed=plan)
    up, held, version, given = set(range(workers)), Counter[int](), 0, 0
    for _ in range(400):
        granted = [tickets.grant(up, version) for tickets in both]
        assert granted[0] == granted[1]
        given += len(granted[0])
        worker, event = rng.randrange(workers), rng.random()
        open_tickets = list(both[0].outstanding)
        if event < 0.04:
            up.discard(worker)
            for tickets in both:
                tickets.lost(worker)
                if seed % 2:
                    tickets.leave(worker)
        elif event < 0.12:
            up.add(worker)
            for tickets in both:
                tickets.join(worker)
        elif event < 0.5 and open_tickets:
            order = rng.choice(open_tickets)
            for tickets in both:
                assert tickets.accept(order.worker, order.seq, version - (order.seq % 3 == 0), None)
        elif event < 0.55 and open_tickets:
            order = rng.choice(open_tickets)
            for tickets in both:
                tickets.give_back(order.worker, order.seq, "environment_failed")
        elif event < 0.6:
            version += 1
        elif event < 0.65:
            for tickets in both:
                tickets.invite([worker], 1)
        elif plan is None:
            batches = [tickets.take(version) for tickets in both]
            assert batches[0] == batches[1]
            for tickets in both:
                tickets.release()
        elif event < 0.85:
            taken = [tickets.take_one(lambda w, worker=worker: w >= worker, version) for tickets in both]  # type: ignore[misc]
            assert taken[0] == taken[1]
            for tickets, arrived in zip(both, taken, strict=True):
                if arrived is not None:
                    tickets.stored(arrived)
            if taken[0] is not None:
                held[taken[0].ticket.worker] += 1
        elif held[worker]:
            count = rng.randint(1, held[worker])
            cause: DropCause | None = rng.choice([None, "stale"])
            held[worker] -= count
            for tickets in both:
                tickets.consumed(worker, count, cause)
        assert (both[0].dropped, both[0].delivered, both[0].issued) == (
            both[1].dropped,
            both[1].delivered,
            both[1].issued,
        )
    assert given


@pytest.mark.parametrize("seed", range(80))
def test_grants_and_takes_the_same_rounds_as_checking_every_worker(seed: int) -> None:
    rng = random.Random(seed)
    workers, staleness = rng.randint(1, 4), rng.choice([None, 0, 1, 2])
    fewest, rollouts = rng.randint(1, workers), rng.choice([1, 1, 2, 3])
    both = Tickets(workers, fewest), NaiveTickets(workers, fewest)
    for tickets in both:
        tickets.open(staleness, rollouts=rollouts)
    up, version, batches = set(range(workers)), 0, 0
    for _ in range(300):
        granted = [tickets.grant(up, version) for tickets in both]
        assert granted[0] == granted[1]
        worker, event = rng.randrange(workers), rng.random()
        open_tickets = list(both[0].outstanding)
        if event < 0.03:
            up.discard(worker)
            for tickets in both:
                tickets.lost(worker)
                if seed % 2:
                    tickets.leave(worker)
        elif event < 0.2:
            up.add(worker)
            for tickets in both:
                tickets.join(worker)
        elif event < 0.7 and open_tickets:
            order = rng.choice(open_tickets)
            for tickets in both:
                assert tickets.accept(order.worker, order.seq, version, None)
        elif event < 0.75 and open_tickets:
            order = rng.choice(open_tickets)
            for tickets in both:
                tickets.give_back(order.worker, order.seq, "environment_failed")
        elif event < 0.76:
            version += 1
        else:
            taken = [tickets.take(version) for tickets in both]
            assert taken[0] == taken[1]
            batches += taken[0] is not None
            rolled = [(arrived.ticket.worker, arrived.ticket.round) for arrived in taken[0] or ()]
            assert len(set(rolled)) == len(rolled), "a worker rolled the same round twice"
            if rng.random() < 0.7:
                for tickets in both:
                    tickets.release()
    assert batches
