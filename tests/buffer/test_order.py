"""Samplers that return rows in order of time or priority, and the rows that a full buffer evicts."""

from __future__ import annotations

import heapq
from collections import Counter
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farstep import Buffer
from farstep.buffer import (
    FIFO,
    LIFO,
    FullBatch,
    MaxHeap,
    MinHeap,
    Prioritized,
    Sampler,
    Uniform,
)
from farstep.buffer.selectors import HeapSelector, OrderSelector
from farstep.buffer.storage.table import Table
from farstep.errors import BufferTimeout
from tests.buffer.sampled_rows import assert_frequencies, rows

# ---- in order ----


def test_fifo_lifo_and_full_batch() -> None:
    with Buffer(10, FIFO()) as buffer:
        buffer.insert(rows(0, 14))
        assert buffer.sample(3)[0]["number"].tolist() == [4, 5, 6]
        buffer.insert(rows(14, 2))
        assert buffer.sample(4)[0]["number"].tolist() == [7, 8, 9, 10]
        assert len(buffer) == 5
    with Buffer(10, LIFO()) as buffer:
        buffer.insert(rows(0, 14))
        assert buffer.sample(3)[0]["number"].tolist() == [13, 12, 11]
        buffer.insert(rows(14, 2))
        assert buffer.sample(4)[0]["number"].tolist() == [15, 14, 10, 9]
    with Buffer(10, FullBatch()) as buffer:
        buffer.insert(rows(0, 6))
        with pytest.raises(BufferTimeout):
            buffer.sample(7, timeout_s=0)
        buffer.insert(rows(6, 2))
        assert buffer.sample(7)[0]["number"].tolist() == list(range(8))
        assert len(buffer) == 0


def test_priorities_do_not_count_for_fifo() -> None:
    with Buffer(10, FIFO(), remover=MinHeap()) as buffer:
        keys = buffer.insert(rows(0, 4))
        buffer.update_priorities(keys, cast(Any, [1, 2, 3, 9]))
        assert buffer.sample(4)[0]["number"].tolist() == [0, 1, 2, 3]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.booleans(), st.lists(st.tuples(st.sampled_from("ird"), st.integers(1, 9)), max_size=40))
def test_order_against_a_plain_list(newest: bool, calls: list[tuple[str, int]]) -> None:
    """Insertions into a cyclic table, and removals of selected and of random items."""
    table, rng = Table(12, 1), np.random.default_rng(15)
    selector, written = OrderSelector(table, newest), 0
    plain: list[Any] = []
    for call, n in calls:
        if call == "i":
            for _ in range(n):
                row = written % 12
                keys, _ = table.put(slice(row, row + 1), slice(0, 1))
                plain = [key for key in plain if key % 12 != row] + [int(keys[0, 0])]
                selector.inserted(np.array([row]), keys.reshape(-1))
                written += 1
        elif call == "d" and plain:
            gone = {plain[int(i)] for i in rng.integers(len(plain), size=n)}
            table.remove(np.array(sorted(gone)) % 12)
            plain = [key for key in plain if key not in gone]
        else:
            cells, _ = selector.select(n, rng)
            expected = plain[::-1][:n] if newest else plain[:n]
            assert table.keys[cells].tolist() == expected
            table.remove(cells)
            plain = [key for key in plain if key not in expected]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.booleans(), st.lists(st.tuples(st.sampled_from("iuds"), st.integers(0, 2**31)), max_size=40))
def test_heaps_against_a_sorted_list(highest: bool, calls: list[tuple[str, int]]) -> None:
    """Of equal priorities, the item that was inserted or updated longest ago comes first."""
    table = Table(12, 1)
    selector = HeapSelector(table, highest)
    plain: dict[int, tuple[float, int]] = {}
    stamp = written = 0
    for call, seed in calls:
        rng = np.random.default_rng(seed)
        if call == "i":
            row = written % 12
            keys, _ = table.put(slice(row, row + 1), slice(0, 1))
            selector.inserted(np.array([row]), keys.reshape(-1))
            plain[row] = (1.0, stamp)
            stamp, written = stamp + 1, written + 1
        elif call == "u" and plain:
            cells = rng.choice(list(plain), size=4)
            priorities = rng.integers(0, 3, 4).astype(float)
            selector.updated(cells, priorities)
            for cell, priority in zip(cells.tolist(), priorities.tolist(), strict=True):
                plain[cell], stamp = (priority, stamp), stamp + 1
        elif call == "d" and plain:
            cells = np.unique(rng.choice(list(plain), size=2))
            table.remove(cells)
            selector.removed(cells)
            plain = {cell: entry for cell, entry in plain.items() if cell not in cells}
        n = int(rng.integers(1, 6))
        sign = -1 if highest else 1
        expected = heapq.nsmallest(n, plain, key=lambda cell: (sign * plain[cell][0], plain[cell][1]))
        assert selector.select(n, rng)[0].tolist() == expected


# ---- removers ----


def left_in(buffer: Buffer) -> list[int]:
    return sorted(buffer.sample(len(buffer))[0]["number"].tolist())


def test_removing_the_newest_keeps_the_oldest() -> None:
    with Buffer(3, FullBatch(), remover=LIFO(), max_times_sampled=0) as buffer:
        keys = buffer.insert(rows(0, 6))
        assert left_in(buffer) == [0, 1, 2]
        assert len(set(keys.tolist())) == 6
        buffer.delete(keys[:1])
        buffer.insert(rows(6, 2))
        assert left_in(buffer) == [1, 2, 6]


def test_removing_by_priority() -> None:
    with Buffer(3, FullBatch(), remover=MinHeap(), max_times_sampled=0) as buffer:
        keys = buffer.insert(rows(0, 3))
        buffer.update_priorities(keys, cast(Any, [3, 2, 0.5]))
        buffer.insert(rows(3, 1))  # with priority 1: row 2 goes
        assert left_in(buffer) == [0, 1, 3]
        buffer.insert(rows(4, 1))  # both 1: the one that was there before
        assert left_in(buffer) == [0, 1, 4]
        buffer.update_priorities(keys[:2], cast(Any, [0.1, 5]))
        buffer.insert(rows(5, 1))
        assert left_in(buffer) == [1, 4, 5]
    with Buffer(3, FullBatch(), remover=MaxHeap(), max_times_sampled=0) as buffer:
        keys = buffer.insert(rows(0, 3))
        buffer.update_priorities(keys, cast(Any, [0.3, 0.2, 0.5]))
        buffer.insert(rows(3, 2))  # new rows have priority 1 and are the highest: they go themselves
        assert left_in(buffer) == [0, 1, 2]
        assert buffer.removed == {"evicted": 2, "sampled": 0, "deleted": 0}
        assert (buffer.limiter.inserts, buffer.limiter.deletes) == (5, 2)


def test_random_removers_remove_in_proportion() -> None:
    """One of four rows, maybe the new one, is removed: each equally often, or in proportion to its priority."""
    counts: dict[str, Counter[int]] = {"uniform": Counter(), "prioritized": Counter()}
    for seed in range(250):
        for name, remover in (("uniform", Uniform()), ("prioritized", Prioritized(alpha=1))):
            with Buffer(3, FullBatch(), remover=remover, seed=seed) as buffer:
                keys = buffer.insert(rows(0, 3))
                buffer.update_priorities(keys, cast(Any, [1, 2, 4]))
                buffer.insert(rows(3, 1))  # with the highest so far, 4
                counts[name].update({0, 1, 2, 3} - set(left_in(buffer)))
    assert_frequencies(np.array([counts["uniform"][i] for i in range(4)]), np.ones(4))
    assert_frequencies(np.array([counts["prioritized"][i] for i in range(4)]), np.array([1, 2, 4, 4]))


# ---- many rows at once ----


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.sampled_from([FIFO(), LIFO(), MinHeap(), MaxHeap()]),
    st.integers(1, 9),
    st.lists(st.tuples(st.integers(1, 25), st.lists(st.sampled_from([0.5, 1.0, 2.0]), max_size=9)), max_size=8),
)
def test_inserting_many_rows_equals_inserting_them_one_by_one(
    remover: Sampler, capacity: int, calls: list[tuple[int, list[float]]]
) -> None:
    first = 0
    with (
        Buffer(capacity, MinHeap(), remover=remover, max_times_sampled=9) as at_once,
        Buffer(capacity, MinHeap(), remover=remover, max_times_sampled=9) as singly,
    ):
        for count, priorities in calls:
            keys = at_once.insert(rows(first, count))
            single_keys = np.concatenate([singly.insert(rows(first + i, 1)) for i in range(count)])
            first += count
            assert len(set(keys.tolist())) == count
            (one, _), (other, _) = at_once.sample(len(at_once)), singly.sample(len(singly))
            assert one["number"].tolist() == other["number"].tolist()
            at_once.update_priorities(keys[: len(priorities)], cast(Any, priorities[:count]))
            singly.update_priorities(single_keys[: len(priorities)], cast(Any, priorities[:count]))
            assert (len(at_once), at_once.removed) == (len(singly), singly.removed)


def survivors(weights: dict[int, float], new: list[int], weight: float) -> Counter[frozenset[int]]:
    """The exact probability of each set of rows that is left, when one row is removed after each insert."""
    if not new:
        return Counter({frozenset(weights): cast(Any, 1.0)})
    pool = {**weights, new[0]: weight}
    total = sum(pool.values())
    found: Counter[frozenset[int]] = Counter()
    for gone, share in pool.items():
        left = {row: each for row, each in pool.items() if row != gone}
        for rest, chance in survivors(left, new[1:], weight).items():
            found[rest] += cast(Any, chance * share / total)
    return found


@pytest.mark.parametrize("remover", [Uniform(), Prioritized(alpha=1)], ids=repr)
@pytest.mark.slow
def test_random_removal_has_the_same_distribution_for_many_rows_at_once(remover: Sampler) -> None:
    priorities = [1.0, 2.0, 4.0]
    weights = priorities if isinstance(remover, Prioritized) else [1.0] * 3
    expected = survivors(dict(enumerate(weights)), [3, 4, 5], weights[-1])
    counts: Counter[frozenset[int]] = Counter()
    for seed in range(800):
        with Buffer(3, FullBatch(), remover=remover, seed=seed) as buffer:
            keys = buffer.insert(rows(0, 3))
            if buffer.remover.uses_priorities:
                buffer.update_priorities(keys, cast(Any, priorities))
            buffer.insert(rows(3, 3))  # each with the highest priority so far, 4
            counts[frozenset(left_in(buffer))] += 1
    assert counts.keys() <= expected.keys()
    likely = [left for left, chance in expected.items() if chance * 800 > 5]
    rest = [sum(c.values()) - sum(c[left] for left in likely) for c in (counts, expected)]
    observed = np.array([*(counts[left] for left in likely), rest[0]])
    chances = np.array([*(expected[left] for left in likely), rest[1]])
    kept = chances * 800 > 5
    assert_frequencies(observed[kept], chances[kept])


def test_many_rows_at_once_keep_their_own_values_and_keys() -> None:
    for remover in (FIFO(), LIFO(), Uniform(), Prioritized(), MinHeap(), MaxHeap()):
        with Buffer(50, LIFO(), remover=remover, max_times_sampled=2, seed=0) as buffer:
            named: dict[int, int] = {}
            for first in range(0, 1000, 125):
                keys = buffer.insert(rows(first, 125)).tolist()
                assert not named.keys() & set(keys)
                named.update(zip(keys, range(first, first + 125), strict=True))
                batch, info = buffer.sample(30)
                assert batch["number"].tolist() == [named[key] for key in info.keys.tolist()]
                assert (np.diff(batch["number"]) < 0).all()  # the newest first
                assert buffer.delete(info.keys[:7]) in (0, 7)
