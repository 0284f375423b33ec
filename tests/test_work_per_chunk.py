"""The head's work per chunk does not grow with the number of actors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import pytest

from farstep.head.chunks.send_queue import SendQueue
from farstep.head.tickets.records import IssuedTicket
from farstep.head.tickets.tickets import Tickets
from farstep.workflow.rows.partial_chunks import PartialChunks
from farstep.workflow.triggers import DataKeyTrigger, Dispatcher, Ledger
from tests.work import instructions, peak_bytes
from tests.workflow.rows.test_partial_chunks import rows

FEW, MANY = 8, 64


def replay(actors: int) -> Iterator[Callable[[], object]]:
    """A replay trigger fires for each chunk of each actor."""
    ledger, dispatcher = Ledger(), Dispatcher()
    dispatcher.add(DataKeyTrigger(n=1, size=4, consume=False, min_new=4), lambda message: None)

    def chunk(actor: int) -> None:
        ledger.wrote(actor, 4, 0)
        assert len(dispatcher.check(ledger)) == 1

    while True:
        yield from (lambda actor=actor: chunk(actor) for actor in range(actors))


def parts(actors: int, n: Any) -> Iterator[Callable[[], object]]:
    """Each actor's chunk arrives in two parts; the first parts of all actors arrive before the second ones."""
    ledger, dispatcher = Ledger(("reward", "obs")), Dispatcher()
    ledger.members(range(actors))
    trigger = DataKeyTrigger(n, size=4, keys=(("reward",), ("obs",)))
    dispatcher.add(trigger, lambda message: None)
    ahead, part = PartialChunks(ledger, [trigger]), rows("reward")

    def first(actor: int, ticket: int) -> None:
        ahead.void([])
        ahead.add(actor, ticket, ticket, 0, part)
        dispatcher.check(ledger)

    def second(actor: int, ticket: int) -> None:
        ahead.void([])
        ledger.wrote(actor, 4, 0, ahead.stored(actor, ticket))
        dispatcher.check(ledger)

    ticket = 0
    while True:
        for half in (first, second):
            yield from (lambda a=actor, h=half: h(a, ticket + a) for actor in range(actors))
        ticket += actors


def rounds(workers: int, max_staleness: int | None) -> Iterator[Callable[[], object]]:
    """Batches of one chunk of every worker; worker 0 is `max_staleness` rounds late."""
    tickets, given, batches = Tickets(workers), list[IssuedTicket](), list[object]()
    tickets.open(max_staleness)

    def arrive(order: IssuedTicket) -> None:
        assert tickets.accept(order.worker, order.seq, 0, None)
        if batch := tickets.take(0):
            batches.append(batch)
            assert len(batch) == workers
            tickets.release()
        given.extend(tickets.grant(range(workers), 0))

    given.extend(tickets.grant(range(workers), 0))
    while True:
        now = sorted(given, key=lambda order: (order.worker == 0, order.seq))
        given.clear()
        yield from (lambda order=order: arrive(order) for order in now)
        assert batches


def turns(workers: int) -> Iterator[Callable[[], object]]:
    """All workers wait for their turn to send."""
    queue = SendQueue(1)
    for worker in range(workers):
        queue.request(worker, 0, 0)
    ((sending, _),) = queue.next(lambda worker: 0)

    def sent() -> None:
        nonlocal sending
        assert queue.done(sending)
        queue.request(sending, 0, 0)
        ((sending, _),) = queue.next(lambda worker: 0)

    while True:
        yield sent


@pytest.mark.parametrize(
    "chunks",
    [
        replay,
        lambda actors: parts(actors, 1),
        lambda actors: parts(actors, "all"),
        lambda workers: rounds(workers, None),
        lambda workers: rounds(workers, 2),
        turns,
    ],
    ids=["replay", "parts-n=1", "parts-n=all", "rounds", "rounds-one-late", "turns"],
)
def test_work_per_chunk_does_not_grow_with_the_number_of_actors(
    chunks: Callable[[int], Iterator[Callable[[], object]]],
) -> None:
    def work(actors: int) -> float:
        """Averaged over many chunks, since some of them complete a round of all actors."""
        calls, count = chunks(actors), 4 * actors
        for _ in range(count):
            next(calls)()
        return instructions(lambda: [next(calls)() for _ in range(count)]) / count

    assert work(MANY) < 1.3 * work(FEW)


def test_a_firing_does_not_allocate_a_list_of_all_actors() -> None:
    def allocated(actors: int) -> float:
        calls = replay(actors)
        for _ in range(4 * actors):
            next(calls)()
        return median(peak_bytes(next(calls)) for _ in range(25))

    assert allocated(2048) < allocated(16) + 1024
