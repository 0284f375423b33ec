"""The send queue grants turns in order and up to its limit, and drops dead workers."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from farstep.head.chunks.send_queue import SendQueue


def of(*incarnations: int) -> Callable[[int], int]:
    """A function from worker to its incarnation."""
    return incarnations.__getitem__


def test_turns_are_granted_in_order_of_requests_up_to_the_limit():
    turns = SendQueue(2)
    for worker in (3, 1, 0, 2):
        turns.request(worker, 0, 10 + worker)
    assert turns.next(of(0, 0, 0, 0)) == [(3, 13), (1, 11)]
    assert turns.next(of(0, 0, 0, 0)) == []
    assert turns.done(1) and not turns.done(0)
    assert turns.next(of(0, 0, 0, 0)) == [(0, 10)]


def test_without_a_limit_all_workers_send_at_once():
    turns = SendQueue(None)
    for worker in range(3):
        turns.request(worker, 0, worker)
    assert len(turns.next(of(0, 0, 0))) == 3


def test_turn_of_a_dead_worker_goes_to_the_next_one():
    turns = SendQueue(1)
    turns.request(0, 0, 1)
    turns.request(1, 0, 1)
    assert turns.next(of(0, 0)) == [(0, 1)]
    turns.request(0, 1, 1)  # its replacement
    assert turns.next(of(1, 0)) == [(1, 1)]
    assert turns.done(1) and turns.next(of(1, 0)) == [(0, 1)]
    turns.request(1, 0, 2)
    assert turns.done(0) and turns.next(of(1, 1)) == []  # it died while it waited


def test_removed_worker_has_neither_turn_nor_place_in_the_queue():
    turns = SendQueue(1)
    for worker in (0, 1, 2):
        turns.request(worker, 0, 5)
    assert turns.next(of(0, 0, 0)) == [(0, 5)]
    turns.forget(1)
    turns.forget(0)
    assert turns.next(of(0, 0, 0)) == [(2, 5)]
    turns.request(2, 0, 6)  # it never sent what it was let to
    assert turns.next(of(0, 0, 0)) == [(2, 6)]


@given(st.integers(1, 3), st.lists(st.tuples(st.sampled_from(["ask", "done", "die"]), st.integers(0, 3)), max_size=60))
def test_limit_holds_and_every_worker_gets_a_turn(limit: int, events: list[tuple[str, int]]):
    turns, incarnations, asked, sending = SendQueue(limit), [0] * 4, set[int](), set[int]()
    for what, worker in events:
        if what == "ask" and worker not in asked | sending:
            turns.request(worker, incarnations[worker], 0)
            asked.add(worker)
        elif what == "done" and worker in sending:
            assert turns.done(worker)
            sending.remove(worker)
        elif what == "die":
            incarnations[worker] += 1
            asked.discard(worker)
            sending.discard(worker)
        for going, _ in turns.next(of(*incarnations)):
            assert going in asked
            asked.remove(going)
            sending.add(going)
        assert len(sending) <= limit
        assert not asked or len(sending) == limit
