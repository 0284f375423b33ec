"""Rows that are sampled by priority, with which weights; and the tree of sums that draws them."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farstep import Buffer
from farstep.buffer import (
    Prioritized,
)
from farstep.buffer.sum_tree import SumTree
from tests.buffer.sampled_rows import assert_frequencies, frequencies, rows

# ---- prioritized ----


@pytest.mark.parametrize("alpha", [0, 0.6, 1])
@pytest.mark.parametrize("capacity", [60, 5000])
def test_prioritized(alpha: float, capacity: int) -> None:
    """A capacity above 4096 gives the tree of sums more than one level."""
    rng = np.random.default_rng(4)
    with Buffer(capacity, Prioritized(alpha, beta=0), seed=4) as buffer:
        keys = buffer.insert(rows(0, 60))
        priorities = rng.uniform(0.1, 5, 60)
        priorities[::10] = 0
        assert buffer.update_priorities(keys, priorities) == 60
        weights = np.where(priorities > 0, priorities**alpha, 0)
        assert_frequencies(frequencies(buffer, 60), weights)
        info = buffer.sample(64)[1]
        np.testing.assert_allclose(info.probabilities, (weights / weights.sum())[info.keys - keys[0]])
        np.testing.assert_array_equal(info.weights, 1)


def test_prioritized_with_nothing_but_zeros_is_uniform() -> None:
    with Buffer(30, Prioritized(), seed=5) as buffer:
        keys = buffer.insert(rows(0, 30))
        buffer.update_priorities(keys, np.zeros(30))
        buffer.delete(keys[:10])
        assert_frequencies(frequencies(buffer, 30), np.arange(30) >= 10)
        info = buffer.sample(8)[1]
        np.testing.assert_allclose(info.probabilities, 1 / 20)
        np.testing.assert_array_equal(info.weights, 1)


def test_prioritized_after_updates_evictions_and_deletions() -> None:
    """New rows have the highest priority so far."""
    with Buffer(40, Prioritized(alpha=1), seed=6) as buffer:
        keys = buffer.insert(rows(0, 40))
        buffer.update_priorities(keys, np.linspace(0.5, 4, 40))
        more = buffer.insert(rows(40, 15))  # instead of the first 15
        weights = np.r_[np.zeros(15), np.linspace(0.5, 4, 40)[15:], np.full(15, 4.0)]
        assert_frequencies(frequencies(buffer, 55), weights)
        buffer.update_priorities(np.r_[keys, more[:5]], np.r_[np.full(40, 0.5), np.full(5, 9.0)])
        buffer.delete(np.r_[keys[20:25], more[14]])
        weights = np.r_[np.zeros(15), np.full(25, 0.5), np.full(5, 9.0), np.full(10, 4.0)]
        weights[20:25] = weights[54] = 0
        assert_frequencies(frequencies(buffer, 55), weights)
        buffer.insert(rows(55, 6))  # into the cells of the six deleted rows
        weights = np.r_[weights, np.full(6, 9.0)]
        assert_frequencies(frequencies(buffer, 61), weights)
        buffer.insert(rows(61, 1))  # evicts row 15
        weights = np.r_[weights, 9.0]
        weights[15] = 0
        assert_frequencies(frequencies(buffer, 62), weights)


def test_last_priority_of_a_repeated_key_counts() -> None:
    with Buffer(4, Prioritized(alpha=1), seed=7) as buffer:
        keys = buffer.insert(rows(0, 2))
        assert buffer.update_priorities(*cast(Any, ([keys[0], keys[1], keys[0]], [7.0, 1.0, 0.0]))) == 3
        assert set(buffer.sample(50)[0]["number"]) == {1}


def test_enormous_and_tiny_priorities() -> None:
    with Buffer(8, Prioritized(alpha=3), seed=8) as buffer:
        keys = buffer.insert(rows(0, 4))
        buffer.update_priorities(keys, cast(Any, [1e308, 1e-308, 1e308, 0.0]))
        info = buffer.sample(100)[1]
        assert set(info.keys) == {keys[0], keys[2]}
        np.testing.assert_allclose(info.probabilities, 0.5)
        assert np.isfinite(info.weights).all()
        buffer.insert(rows(4, 1))
        buffer.sample(100)


def test_importance_weights() -> None:
    """Priorities 1, 2, 3, 4 with alpha 1: P is a tenth of them, (4 P)^-1/2 is 1.581, 1.118, 0.913, 0.791."""
    with Buffer(4, Prioritized(alpha=1, beta=0.5), seed=9) as buffer:
        keys = buffer.insert(rows(0, 4))
        buffer.update_priorities(keys, cast(Any, [1, 2, 3, 4]))
        batch, info = buffer.sample(100)
        assert set(batch["number"]) == {0, 1, 2, 3}
        expected = np.array([1.0, 0.70710678, 0.57735027, 0.5])  # 1 / sqrt(priority), the largest scaled to 1
        np.testing.assert_allclose(info.weights, expected[batch["number"]], rtol=1e-6)
        np.testing.assert_allclose(info.probabilities, (batch["number"] + 1) / 10)
    with Buffer(4, Prioritized(alpha=0.5, beta=1), seed=9) as buffer:
        keys = buffer.insert(rows(0, 2))
        buffer.update_priorities(keys, cast(Any, [1, 16]))  # P is 1/5 and 4/5
        batch, info = buffer.sample(50)
        np.testing.assert_allclose(info.weights, np.array([1, 0.25])[batch["number"]])


# ---- the tree of sums ----


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.sampled_from([1, 2, 7, 4096, 4097, 9000, 20_000, 70_001]),
    st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(1, 200)), min_size=1, max_size=8),
)
def test_sums_are_those_of_a_plain_implementation(leaves: int, updates: list[tuple[int, int]]) -> None:
    tree, plain = SumTree(leaves), np.zeros(leaves)
    for seed, count in updates:
        rng = np.random.default_rng(seed)
        where = rng.integers(leaves, size=count)
        weights = rng.exponential(size=count) * 10.0 ** rng.integers(-8, 8, count) * (rng.random(count) < 0.8)
        tree.set(where, weights)
        for leaf, weight in zip(where, weights, strict=True):
            plain[leaf] = weight
        start = int(rng.integers(leaves))
        neighbors = slice(start, min(leaves, start + count))
        plain[neighbors] = weights[: neighbors.stop - start]
        tree.set(neighbors, plain[neighbors])
        np.testing.assert_array_equal(tree.weights[:leaves], plain)
        assert not tree.weights[leaves:].any()
        np.testing.assert_allclose(tree.total, plain.sum(), rtol=1e-12)
        if plain.any():
            found, weights = tree.draw(64, rng)
            np.testing.assert_array_equal(weights, plain[found])
            assert (weights > 0).all()
            # One from each 64th part of the total: it lies no further than rounding from its leaf's part.
            ends = np.cumsum(plain)
            low, high = (ends - plain)[found], ends[found]
            part, slack = plain.sum() / 64, 1e-9 * plain.sum()
            assert (high >= np.arange(64) * part - slack).all()
            assert (low <= np.arange(1, 65) * part + slack).all()


def test_draws_of_a_tree_of_several_levels() -> None:
    rng = np.random.default_rng(10)
    tree, weights = SumTree(30_000), np.zeros(30_000)
    where = rng.choice(30_000, 40, replace=False)
    weights[where] = rng.uniform(0.5, 2, 40)
    tree.set(where, weights[where])
    counts = np.zeros(30_000)
    for _ in range(200):
        counts += np.bincount(tree.draw(50, rng)[0], minlength=30_000)
    assert_frequencies(counts, weights)
