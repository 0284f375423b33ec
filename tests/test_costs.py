"""The cost per chunk does not depend on the number of actors, and that per inserted row is small.

Costs are counted in executed bytecode instructions, which do not depend on the machine or its load.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from farstep import Buffer
from farstep.buffer import LIFO, MaxHeap, MinHeap, Prioritized, Sampler, Uniform
from farstep.head.tickets.records import FeedPlan
from farstep.head.tickets.tickets import Tickets
from farstep.workflow.triggers import DataKeyTrigger, Dispatcher, Ledger
from tests.work import instructions

FEW, MANY = 8, 64
"""Numbers of actors to compare."""


def trigger_cost(actors: int, **options: Any) -> float:
    """Instructions per chunk from its arrival to the call of the consumer, averaged over one chunk of every actor."""
    ledger, dispatcher, fired = Ledger(["obs", "reward"]), Dispatcher(), list[Any]()
    if options["n"] == "all":
        ledger.members(range(actors))
    dispatcher.add(DataKeyTrigger(size=16, **options), fired.append)

    def round_of_all() -> None:
        for actor in range(actors):
            ledger.wrote(actor, 16, 0)
            dispatcher.check(ledger)

    round_of_all()
    before = len(fired)
    cost = instructions(round_of_all) / actors
    assert len(fired) > before
    return cost


@pytest.mark.parametrize(
    "options", [{"n": 1}, {"n": 8}, {"n": "all"}, {"n": 1, "consume": False, "min_new": 64}], ids=str
)
def test_cost_of_triggers_per_chunk_does_not_depend_on_the_number_of_actors(options: dict[str, Any]) -> None:
    few, many = trigger_cost(FEW, **options), trigger_cost(MANY, **options)
    assert many < 1.3 * few


def ticket_cost(workers: int, max_staleness: int | None, actors: int | None) -> float:
    """Instructions per chunk from one ticket of a worker to its next, averaged over one chunk of every worker."""
    tickets = Tickets(workers, 1)
    tickets.open(max_staleness, (actors or workers), feed=FeedPlan(max_staleness, actors, 1, None))
    present = set(range(workers))
    tickets.grant(present, 0)

    def round_of_all() -> None:
        for order in list(tickets.outstanding):
            assert tickets.accept(order.worker, order.seq, 0, None)
            arrived = tickets.take_one(lambda worker: True, 0)
            assert arrived is not None
            tickets.stored(arrived)
            tickets.consumed(order.worker, 1)
            assert tickets.grant(present, 0)

    round_of_all()
    return instructions(round_of_all) / workers


@pytest.mark.parametrize(("max_staleness", "actors"), [(None, 4), (1, 4), (1, None)])
def test_cost_of_a_ticket_does_not_depend_on_the_number_of_workers(
    max_staleness: int | None, actors: int | None
) -> None:
    few, many = ticket_cost(FEW, max_staleness, actors), ticket_cost(MANY, max_staleness, actors)
    assert many < 1.3 * few


@pytest.mark.parametrize("remover", [LIFO(), Uniform(), Prioritized(), MinHeap(), MaxHeap()], ids=repr)
def test_inserting_many_rows_at_once_costs_under_100_instructions_per_row(remover: Sampler) -> None:
    """Into a full buffer, whose remover chooses a row to remove for each new one."""
    rows: dict[str, Any] = {"obs": np.zeros((500, 4), np.float32), "reward": np.zeros(500)}
    with Buffer(1000, Uniform(), remover=remover, seed=0) as buffer:
        for _ in range(3):
            buffer.insert(rows)
        assert len(buffer) == 1000
        cost = instructions(lambda: buffer.insert(rows)) / 500
        assert cost < 100
