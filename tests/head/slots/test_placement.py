"""Which workers run for which slots: the number is kept, and runs that share nodes agree on each node's share."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from farstep.head.slots.placement import workers_left, workers_on


@st.composite
def layouts(draw: st.DrawFn) -> tuple[set[int], int, int]:
    """Slots, nodes, and workers per node, with at least one worker per slot."""
    nodes, per_node = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    return draw(st.sets(st.integers(0, 40), max_size=nodes * per_node)), nodes, per_node


def test_workers_run_on_the_nodes_of_their_slots() -> None:
    assert workers_on([0, 1], nodes=2, per_node=2) == [0, 2]
    assert workers_on([3, 2], nodes=2, per_node=2) == [0, 2]
    assert workers_on([1, 3, 4], nodes=2, per_node=2) == [0, 2, 3]
    assert workers_on([5, 9], nodes=1, per_node=4) == [0, 1]


def test_slots_without_a_worker_on_their_node_use_workers_of_other_nodes() -> None:
    assert workers_on([0, 2, 4], nodes=2, per_node=2) == [0, 1, 2]
    assert workers_on([2, 5], nodes=3, per_node=1) == [0, 2]


@given(layouts())
def test_each_slot_runs_one_worker_and_each_node_its_first_ones(layout: tuple[set[int], int, int]) -> None:
    slots, nodes, per_node = layout
    workers = workers_on(slots, nodes, per_node)
    assert workers == sorted(set(workers)) == workers_on(sorted(slots), nodes, per_node)
    assert len(workers) == len(slots)
    assert all(0 <= worker < nodes * per_node for worker in workers)
    assert all(worker - 1 in workers for worker in workers if worker % per_node)


@given(layouts(), st.integers(0, 40))
def test_one_more_slot_parks_no_worker(layout: tuple[set[int], int, int], slot: int) -> None:
    slots, nodes, per_node = layout
    if len(slots | {slot}) <= nodes * per_node:
        assert set(workers_on(slots, nodes, per_node)) <= set(workers_on(slots | {slot}, nodes, per_node))


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(1, 5))
def test_runs_with_enough_workers_share_each_node_evenly(owners: list[int], nodes: int) -> None:
    """`owners[s]` is the run that holds slot s."""
    share = -(-len(owners) // nodes)
    on_node: Counter[int] = Counter()
    for run in range(4):
        slots = [slot for slot, owner in enumerate(owners) if owner == run]
        on_node.update(worker // max(share, 1) for worker in workers_on(slots, nodes, max(share, 1)))
    assert max(on_node.values(), default=0) <= share


def test_workers_that_are_left_when_nodes_are_lost() -> None:
    assert workers_left([0, 2], nodes=2, per_node=2, min_nodes=1) == 1
    assert workers_left([0, 1, 2], nodes=2, per_node=2, min_nodes=1) == 1
    assert workers_left([0, 1, 2], nodes=2, per_node=2, min_nodes=2) == 3
    assert workers_left([0, 1], nodes=2, per_node=2, min_nodes=1) == 1
    assert workers_left([0, 1], nodes=1, per_node=4, min_nodes=1) == 2
