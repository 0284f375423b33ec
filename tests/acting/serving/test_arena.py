"""Mailboxes of several workers in one memory, while workers join and leave."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import numpy as np
import pytest

from farstep.acting.mailbox import HELD, REQUEST, TICKET, Mailbox, MailboxLayout
from farstep.acting.serving.arena import Arena, Requests, arena_with_free_mailbox
from farstep.schema import ArraySpec
from farstep.wire.channels.doorbell import Fence
from farstep.wire.channels.memory import SharedMemory

LAYOUT = MailboxLayout([2, 1], {"obs": ArraySpec((3,), "<f4")}, {"action": ArraySpec((), "<i8")}, {}, num_mailboxes=2)


def allocated(arena: Arena, first_slot: int = 0) -> tuple[int, Mailbox]:
    """The index of a new worker's mailbox, and the mailbox."""
    client: Any = object()
    index = arena.allocate(client, first_slot)
    return index, arena.mailbox(index)


def request(box: Mailbox, number: int, ticket: int) -> None:
    """Write a request of the first group."""
    box.group_words[0][TICKET], box.group_words[0][REQUEST] = ticket, number


def pending_in(arena: Arena) -> Requests:
    found = arena.pending(Fence())
    assert found is not None
    return found


def test_each_worker_writes_to_its_own_rows_and_words() -> None:
    arena = Arena(LAYOUT)
    boxes = [allocated(arena, first_slot)[1] for first_slot in (0, 5)]
    for i, box in enumerate(boxes):
        box.arrays["obs"][:] = i
        box.group_words[1][TICKET], box.group_words[1][REQUEST] = 10 + i, 20 + i
        box.fill(["action"], 1, np.array([30 + i]).tobytes())
        assert box.packed(["action"], 1) == np.array([30 + i]).tobytes()
    assert arena.arrays["obs"][:, 0].tolist() == [0, 0, 0, 1, 1, 1]
    assert arena.arrays["action"].tolist() == [0, 0, 30, 0, 0, 31]
    pending = pending_in(arena)
    assert pending.groups.tolist() == [1, 3] and pending.rows.tolist() == [2, 5]
    assert pending.numbers.tolist() == [20, 21] and pending.tickets.tolist() == [10, 11]
    assert arena.slots[pending.rows].tolist() == [2, 7]
    assert pending.select(np.array([False, True])).rows.tolist() == [5]
    assert [arena.free(index) for index in range(2)] == [False, True]


def test_a_worker_that_leaves_does_not_affect_the_others() -> None:
    arenas: list[Arena] = []
    arena = arena_with_free_mailbox(LAYOUT, arenas)
    (first, leaving), (second, staying) = allocated(arena), allocated(arena)
    request(leaving, number=9, ticket=5)
    leaving.words[HELD] = 5
    requests = pending_in(arena)
    requests.mark_taken()
    requests.begin_chunks()
    requests.note_arrival(now=1.0)
    request(staying, number=4, ticket=6)
    staying.arrays["obs"][:] = 6
    assert arena.holds(cancelled=0)
    arena.free(first)
    assert pending_in(arena).groups.tolist() == [2] and not arena.holds(cancelled=0)
    worker = SharedMemory(os.dup(arena.memory.fd), LAYOUT.nbytes)
    Mailbox(worker, LAYOUT, first).close()
    assert arena_with_free_mailbox(LAYOUT, arenas) is arena
    again, box = allocated(arena, first_slot=3)
    assert again == first and box.words[HELD] == box.group_words[0][REQUEST] == 0
    assert pending_in(arena).groups.tolist() == [2]
    request(box, number=9, ticket=5)
    requests = pending_in(arena)
    assert requests.groups.tolist() == [0, 2] and not requests.have_begun.any()
    assert np.isinf(arena.arrived).all()
    assert (staying.arrays["obs"] == 6).all()
    assert not arena.free(first)
    assert arena.free(second) and arena.memory.fd == -1


@pytest.mark.parametrize("other", [MailboxLayout([1, 2], LAYOUT.obs, LAYOUT.outputs, {}, num_mailboxes=2), LAYOUT])
def test_a_worker_with_another_layout_or_without_a_free_mailbox_gets_another_arena(other: MailboxLayout) -> None:
    arenas: list[Arena] = []
    arena = arena_with_free_mailbox(LAYOUT, arenas)
    for _ in range(2):
        allocated(arena)
    found = arena_with_free_mailbox(other, arenas)
    assert found is not arena and arenas == [arena, found]
    allocated(found)
    for each, index in ((arena, 0), (found, 0), (arena, 1)):
        each.free(index)


@pytest.mark.parametrize("part", ["obs", "outputs", "state"])
def test_a_worker_whose_arrays_have_another_order_gets_another_arena(part: str) -> None:
    specs = {"x": ArraySpec((2,), "<f4"), "y": ArraySpec((5,), "<f4")}
    changes: list[Any] = [{part: specs}, {part: dict(reversed(specs.items()))}]
    layout, reordered = (dataclasses.replace(LAYOUT, **change) for change in changes)
    arenas: list[Arena] = []
    arena = arena_with_free_mailbox(layout, arenas)
    allocated(arena)
    found = arena_with_free_mailbox(reordered, arenas)
    assert found is not arena and arena_with_free_mailbox(layout, arenas) is arena
    allocated(found)
    for each in (arena, found):
        each.free(0)
