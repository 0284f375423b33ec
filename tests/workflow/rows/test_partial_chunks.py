"""Parts that arrive before their chunk: the steps in the ledger, and the rest of chunks that are lost."""

from __future__ import annotations

import random

import numpy as np
import pytest

from farstep.batch import EPISODE_KEYS, Batch, FinalObs, side_by_side
from farstep.workflow.rows.partial_chunks import PartialChunks
from farstep.workflow.triggers import DataKeyTrigger, Ledger

KEYS = ("reward", "value", "obs")


def rows(*names: str, value: float = 0.0, slots: tuple[int, ...] = (0, 1), continues: bool = False) -> Batch:
    """Four rows of some arrays."""
    nothing = np.zeros(0, np.int64)
    return Batch(
        {name: np.full((4, len(slots)), value) for name in names},
        {name: name for name in names},
        None,
        FinalObs(nothing, nothing, None),
        dict.fromkeys(EPISODE_KEYS, nothing),
        np.array(slots),
        np.full(len(slots), continues),
    )


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(KEYS)


@pytest.fixture
def ahead(ledger: Ledger) -> PartialChunks:
    return PartialChunks(ledger, [DataKeyTrigger(n=1, size=4, keys=(("reward",), ("obs",)))])


def written(ledger: Ledger, actor: int = 0) -> list[int]:
    return [ledger.written(actor, [name]) for name in KEYS]


def test_keys_are_reported_on_arrival_and_the_last_with_the_chunk(ledger: Ledger, ahead: PartialChunks) -> None:
    ahead.add(0, 7, 70, 3, rows("reward"))
    assert written(ledger) == [4, 0, 0]
    ahead.add(0, 7, 70, 3, rows("reward", "value"))
    assert written(ledger) == [4, 4, 0]
    assert set(ahead.batch(0, 0)) == {"reward", "value"}
    ahead.add(0, 8, 71, 3, rows("reward"))  # the next one, while the chunk before waits for room
    assert written(ledger) == [8, 4, 0]
    assert ahead.stored(0, 7) == ["obs"]
    ledger.wrote(0, 4, 3, ["obs"])
    assert written(ledger) == [8, 4, 4]
    assert ahead.batch(0, 4).continues.all(), "it follows what was here and not handed out then"
    assert ahead.stored(0, 8) == ["value", "obs"]
    assert ahead.stored(0, 9) is None


def test_steps_are_not_reported_as_complete_before_their_chunk(ledger: Ledger, ahead: PartialChunks) -> None:
    ahead.add(0, 7, 70, 3, rows(*KEYS))
    assert written(ledger) == [0, 0, 0]
    assert ahead.stored(0, 7) == list(KEYS)


def test_parts_of_a_repeated_ticket_replace_earlier_ones(ledger: Ledger, ahead: PartialChunks) -> None:
    ahead.add(0, 7, 70, 3, rows("reward", "value", value=1.0))
    ahead.add(0, 7, 72, 4, rows("reward", value=2.0))
    assert written(ledger) == [4, 0, 0]
    assert ahead.batch(0, 0)["reward"].max() == 2.0
    assert ledger.span(0, 0, 4, ["reward"]) == (4, 4)


def test_parts_move_up_when_an_earlier_chunk_is_lost(ledger: Ledger, ahead: PartialChunks) -> None:
    ahead.add(0, 7, 70, 3, rows("reward", "value", value=1.0))
    ahead.add(1, 8, 10, 3, rows("reward"))
    ahead.add(0, 9, 71, 5, rows("reward", value=2.0))
    ahead.void([(0, 7)])
    assert (written(ledger), written(ledger, 1)) == ([4, 0, 0], [4, 0, 0])
    assert ahead.batch(0, 0)["reward"].max() == 2.0
    assert ledger.span(0, 0, 4, ["reward"]) == (5, 5)
    ahead.void_all()
    assert (written(ledger), written(ledger, 1)) == ([0, 0, 0], [0, 0, 0])


def test_joined_batches_have_the_arrays_that_all_have() -> None:
    late, early = rows("reward", "obs", value=2.0, slots=(2, 3, 4)), rows("reward", value=1.0, continues=True)
    both = side_by_side([late, early])
    assert set(both) == {"reward"} == set(both.structures)
    assert both["reward"][0].tolist() == [1, 1, 2, 2, 2]
    assert (both.slots.tolist(), both.continues.tolist()) == ([0, 1, 2, 3, 4], [True] * 2 + [False] * 3)


@pytest.mark.parametrize("seed", range(30))
def test_voiding_tickets_discards_exactly_their_parts(seed: int) -> None:
    """The result is as if only the parts of the other tickets had arrived."""
    rng = random.Random(seed)
    stages = [KEYS[:1], KEYS[:2]]
    ledger, tickets, stored = Ledger(KEYS), dict[int, list[int]](), dict[int, int]()
    trigger = DataKeyTrigger(n=1, size=4, keys=(("reward",), ("obs",)))
    ahead = PartialChunks(ledger, [trigger])
    here: dict[int, int] = {}
    for ticket in range(150):
        actor, event = rng.randrange(4), rng.random()
        queue = tickets.setdefault(actor, [])
        if event < 0.5:
            queue.append(ticket)
            here[ticket] = rng.randint(1, 2)
            for names in stages[: here[ticket]]:
                ahead.add(actor, ticket, ticket, 0, rows(*names, value=ticket))
        elif event < 0.75 and queue:
            ledger.wrote(actor, 4, 0, ahead.stored(actor, queue.pop(0)))
            stored[actor] = stored.get(actor, 0) + 4
        else:
            void = [(a, t) for a, its in tickets.items() for t in its if rng.random() < 0.3]
            ahead.void([*void, (3, 10**6)])
            for a, t in void:
                tickets[a].remove(t)
        while (message := trigger.ready(ledger)) is not None:
            trigger.consume(ledger, message)
        for a, its in tickets.items():
            whole = stored.get(a, 0)
            assert written(ledger, a) == [whole + 4 * len(its), whole + 4 * sum(here[t] == 2 for t in its), whole]
            assert [ahead.batch(a, whole + 4 * i)["reward"].max() for i in range(len(its))] == its
