"""Which rows are sampled, how often and with which weights; and which are removed."""

from __future__ import annotations

import heapq
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farstep import Buffer, ConfigError
from farstep.buffer import (
    DPER,
    FIFO,
    LIFO,
    FullBatch,
    MaxHeap,
    MinHeap,
    MinSize,
    NStep,
    Prioritized,
    Sampler,
    Sequence,
    Uniform,
    trajectory_priority,
)
from farstep.buffer.selectors import HeapSelector, OrderSelector
from farstep.buffer.sums import SumTree
from farstep.buffer.table import Table
from farstep.errors import BufferTimeout


def rows(first: int, n: int) -> dict[str, np.ndarray]:
    return {"number": np.arange(first, first + n)}


def assert_frequencies(observed: np.ndarray, expected: np.ndarray) -> None:
    """A chi-square test at about one in ten thousand; what has no probability never happens."""
    expected = expected / expected.sum() * observed.sum()
    assert not observed[expected == 0].any()
    observed, expected = observed[expected > 0], expected[expected > 0]
    assert expected.min() > 5, "too few draws for the test"
    statistic, freedom = float(((observed - expected) ** 2 / expected).sum()), len(expected) - 1
    # Wilson and Hilferty: the cube root of chi-square / freedom is nearly normal.
    spread = 2 / (9 * freedom)
    assert ((statistic / freedom) ** (1 / 3) - (1 - spread)) / np.sqrt(spread) < 3.7, (statistic, freedom)


def frequencies(buffer: Buffer, size: int, draws: int = 400, batch_size: int = 97) -> np.ndarray:
    counts = np.zeros(size, np.int64)
    for _ in range(draws):
        counts += np.bincount(buffer.sample(batch_size)[0]["number"], minlength=size)
    return counts


# ---- uniform ----


def test_uniform() -> None:
    with Buffer(40, Uniform(), seed=1) as buffer:
        buffer.insert(rows(0, 30))
        assert_frequencies(frequencies(buffer, 30), np.ones(30))
        buffer.insert(rows(30, 30))  # the first 20 are overwritten
        assert_frequencies(frequencies(buffer, 60), np.arange(60) >= 20)


def test_uniform_over_columns_of_unequal_length() -> None:
    table, rng = Table(8, 4), np.random.default_rng(2)
    for column, count in enumerate((8, 1, 0, 5)):
        if count:
            table.put(slice(0, count), slice(column, column + 1))
    there = table.keys >= 0
    assert_frequencies(np.bincount(table.draw(20_000, rng), minlength=32), there)
    table.remove(np.flatnonzero(there)[[0, 3, 5]])
    assert_frequencies(np.bincount(table.draw(20_000, rng), minlength=32), table.keys >= 0)


@pytest.mark.parametrize("left", [25, 3])
def test_uniform_after_deletions(left: int) -> None:
    with Buffer(50, Uniform(), seed=3) as buffer:
        keys = buffer.insert(rows(0, 50))
        kept = np.random.default_rng(3).permutation(50)[:left]
        buffer.delete(np.delete(keys, kept))
        probabilities = buffer.sample(10)[1].probabilities
        np.testing.assert_allclose(probabilities, 1 / left)
        assert_frequencies(frequencies(buffer, 50), np.isin(np.arange(50), kept))


# ---- prioritised ----


@pytest.mark.parametrize("alpha", [0, 0.6, 1])
@pytest.mark.parametrize("capacity", [60, 5000])
def test_prioritised(alpha: float, capacity: int) -> None:
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


def test_prioritised_with_nothing_but_zeros_is_uniform() -> None:
    with Buffer(30, Prioritized(), seed=5) as buffer:
        keys = buffer.insert(rows(0, 30))
        buffer.update_priorities(keys, np.zeros(30))
        buffer.delete(keys[:10])
        assert_frequencies(frequencies(buffer, 30), np.arange(30) >= 10)
        info = buffer.sample(8)[1]
        np.testing.assert_allclose(info.probabilities, 1 / 20)
        np.testing.assert_array_equal(info.weights, 1)


def test_prioritised_after_updates_evictions_and_deletions() -> None:
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
        buffer.insert(rows(55, 1))  # takes the place of row 15
        weights = np.r_[weights, 9.0]
        weights[15] = 0
        assert_frequencies(frequencies(buffer, 56), weights)


def test_of_a_key_that_is_named_twice_the_last_priority_counts() -> None:
    with Buffer(4, Prioritized(alpha=1), seed=7) as buffer:
        keys = buffer.insert(rows(0, 2))
        assert buffer.update_priorities([keys[0], keys[1], keys[0]], [7.0, 1.0, 0.0]) == 3
        assert set(buffer.sample(50)[0]["number"]) == {1}


def test_enormous_and_tiny_priorities() -> None:
    with Buffer(8, Prioritized(alpha=3), seed=8) as buffer:
        keys = buffer.insert(rows(0, 4))
        buffer.update_priorities(keys, [1e308, 1e-308, 1e308, 0.0])
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
        buffer.update_priorities(keys, [1, 2, 3, 4])
        batch, info = buffer.sample(100)
        assert set(batch["number"]) == {0, 1, 2, 3}
        expected = np.array([1.0, 0.70710678, 0.57735027, 0.5])  # 1 / sqrt(priority), the largest scaled to 1
        np.testing.assert_allclose(info.weights, expected[batch["number"]], rtol=1e-6)
        np.testing.assert_allclose(info.probabilities, (batch["number"] + 1) / 10)
    with Buffer(4, Prioritized(alpha=0.5, beta=1), seed=9) as buffer:
        keys = buffer.insert(rows(0, 2))
        buffer.update_priorities(keys, [1, 16])  # P is 1/5 and 4/5
        batch, info = buffer.sample(50)
        np.testing.assert_allclose(info.weights, np.array([1, 0.25])[batch["number"]])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Prioritized(-0.1), "alpha is -0.1"),
        (lambda: Prioritized(beta=float("nan")), "beta is nan"),
        (lambda: Prioritized("1"), "alpha is '1'"),
        (lambda: DPER(-1), "alpha is -1"),
        (lambda: DPER(beta=float("inf")), "beta is inf"),
        (lambda: NStep(0), "n is 0"),
        (lambda: NStep(gamma=1.1), "gamma is 1.1; it must be a number from 0 to 1"),
        (lambda: NStep(by=Sequence()), "single rows"),
        (lambda: NStep(by=Uniform), "single rows"),
        (lambda: Sequence(0), "length is 0"),
        (lambda: Buffer(4, Uniform), r"add \(\)"),
        (lambda: Buffer(4, "uniform"), "expected a sampler"),
        (lambda: Buffer(4, Sequence(), remover=Uniform()), "leave remover out"),
        (lambda: Buffer(4, Uniform(), remover=DPER()), "single rows"),
        (lambda: Buffer(0, Uniform()), "capacity is 0"),
        (lambda: Buffer(4, Uniform(), max_times_sampled=-1), "max_times_sampled is -1"),
        (lambda: Buffer(4, NStep(), spec={"obs": 1.0}), "no array 'reward'"),
        (lambda: Buffer(4, DPER(), spec={"obs": 1.0}), "whole episodes"),
        (lambda: Buffer(4, Uniform(), spec={}), "at least one array"),
        (lambda: Buffer(4, Uniform(), spec={"a": (3, "no such dtype")}), r"spec\['a'\]"),
        (lambda: Buffer(4, Uniform(), spec={"a": (3, object)}), r"spec\['a'\]"),
    ],
)
def test_refusals(make, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make()


def test_the_first_argument_is_alpha() -> None:
    assert Prioritized(0.7) == Prioritized(alpha=0.7, beta=0.4)
    assert DPER(0.7, 0.1) == DPER(alpha=0.7, beta=0.1)
    assert NStep(5, 0.9) == NStep(n=5, gamma=0.9)
    assert Sequence(7, True) == Sequence(length=7, pad=True)


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


# ---- whole episodes ----


def episodes(lengths: list[int], first: int = 0) -> dict[str, np.ndarray]:
    ends = np.cumsum(lengths)
    number = np.arange(ends[-1])
    start = np.isin(number, np.r_[0, ends[:-1]])
    return {"number": first + number, "episode_start": start, "terminated": np.isin(number, ends - 1)}


def test_dper() -> None:
    lengths = [3, 1, 4, 2, 6]
    starts = np.r_[0, np.cumsum(lengths)[:-1]]
    with Buffer(50, DPER(alpha=0.5, beta=1.0), seed=11) as buffer:
        keys = buffer.insert(episodes(lengths))
        buffer.update_priorities(keys[starts], [1, 4, 9, 16, 25])
        buffer.update_priorities(keys[[1, 2, 5]], [1e6, 1e6, 1e6])  # no episode begins there
        counts = np.zeros(16, np.int64)
        for _ in range(200):
            batch, info = buffer.sample(30)
            np.testing.assert_array_equal(
                batch["valid"].sum(axis=1), np.array(lengths)[starts.searchsorted(batch["number"][:, 0])]
            )
            counts += np.bincount(batch["number"][:, 0], minlength=16)
        weights = np.zeros(16)
        weights[starts] = [1, 2, 3, 4, 5]
        assert_frequencies(counts, weights)
        expected = weights[batch["number"][:, 0]] / 15
        np.testing.assert_allclose(info.probabilities, expected)
        np.testing.assert_allclose(info.weights, expected.min() / expected)
        np.testing.assert_array_equal(info.keys, keys[batch["number"][:, 0]])


@pytest.mark.parametrize("arrays", [("episode_start", "terminated"), ("terminated",), ("episode_start",)])
@pytest.mark.parametrize("chunk", [1, 2, 5, 100])
def test_dper_counts_whole_episodes_only(arrays: tuple[str, ...], chunk: int) -> None:
    """However the rows come: one under way does not count, nor one whose beginning was overwritten."""
    lengths = [3, 1, 4, 2, 6, 2]
    data = episodes([*lengths, 3])
    data["terminated"][-1] = False  # the last one is under way
    with Buffer(13, DPER(), seed=12) as buffer:
        total = len(data["number"])
        for a in range(0, total, chunk):
            buffer.insert({name: data[name][a : a + chunk] for name in ("number", *arrays)})
        seen = {tuple(row[valid]) for row, valid in _episodes_of(buffer, 100)}
        whole = [tuple(range(a, a + n)) for a, n in zip(np.cumsum([0, *lengths]), lengths, strict=False)]
        assert seen == {episode for episode in whole if episode[0] >= total - 13}


def _episodes_of(buffer: Buffer, n: int) -> list[tuple[np.ndarray, np.ndarray]]:
    batch, _ = buffer.sample(n)
    return list(zip(batch["number"], batch["valid"], strict=True))


def test_dper_leaves_out_an_episode_that_is_longer_than_the_buffer() -> None:
    with Buffer(5, DPER(), seed=13) as buffer:
        for a in range(0, 12, 3):
            data = episodes([12, 2])
            buffer.insert({name: value[a : a + 3] for name, value in data.items()})
        with pytest.raises(BufferTimeout):
            buffer.sample(1, timeout_s=0)
        buffer.insert({name: value[12:] for name, value in episodes([12, 2]).items()})
        assert {tuple(row[valid]) for row, valid in _episodes_of(buffer, 20)} == {(12, 13)}


def test_dper_with_zeros_still_samples_episodes() -> None:
    with Buffer(20, DPER(), seed=14) as buffer:
        keys = buffer.insert(episodes([3, 2, 4]))
        buffer.update_priorities(keys, np.zeros(9))
        assert set(buffer.sample(100)[0]["number"][:, 0]) == {0, 3, 5}


def test_a_trajectory_s_priority() -> None:
    td, ratios, logprobs = np.array([1.0, -3.0]), np.array([0.5, 100.0]), np.array([-1.0, -2.0])
    assert trajectory_priority(td, ratios, logprobs, w1=2, w2=3, w3=4) == pytest.approx(2 * 2 + 3 * 5.25 + 4 * 1.5)
    assert trajectory_priority(td * 0, ratios * 0, logprobs * 0) == 1e-6


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
        buffer.update_priorities(keys, [1, 2, 3, 9])
        assert buffer.sample(4)[0]["number"].tolist() == [0, 1, 2, 3]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.booleans(), st.lists(st.tuples(st.sampled_from("ird"), st.integers(1, 9)), max_size=40))
def test_order_against_a_plain_list(newest: bool, calls: list[tuple[str, int]]) -> None:
    """Insertions into a cyclic table, removals of what was selected and of random items."""
    table, rng = Table(12, 1), np.random.default_rng(15)
    selector, plain, written = OrderSelector(table, newest), [], 0
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
        buffer.update_priorities(keys, [3, 2, 0.5])
        buffer.insert(rows(3, 1))  # with priority 1: row 2 goes
        assert left_in(buffer) == [0, 1, 3]
        buffer.insert(rows(4, 1))  # both 1: the one that was there before
        assert left_in(buffer) == [0, 1, 4]
        buffer.update_priorities(keys[:2], [0.1, 5])
        buffer.insert(rows(5, 1))
        assert left_in(buffer) == [1, 4, 5]
    with Buffer(3, FullBatch(), remover=MaxHeap(), max_times_sampled=0) as buffer:
        keys = buffer.insert(rows(0, 3))
        buffer.update_priorities(keys, [0.3, 0.2, 0.5])
        buffer.insert(rows(3, 2))  # new rows have priority 1 and are the highest: they go themselves
        assert left_in(buffer) == [0, 1, 2]
        assert buffer.removed == {"evicted": 2, "sampled": 0, "deleted": 0}
        assert (buffer.limiter.inserts, buffer.limiter.deletes) == (5, 2)


def test_who_is_removed_by_chance() -> None:
    """One of four goes, the new row included, each as often; or in proportion to its priority."""
    counts: dict[str, Counter[int]] = {"uniform": Counter(), "prioritised": Counter()}
    for seed in range(250):
        for name, remover in (("uniform", Uniform()), ("prioritised", Prioritized(alpha=1))):
            with Buffer(3, FullBatch(), remover=remover, seed=seed) as buffer:
                keys = buffer.insert(rows(0, 3))
                buffer.update_priorities(keys, [1, 2, 4])
                buffer.insert(rows(3, 1))  # with the highest so far, 4
                counts[name].update({0, 1, 2, 3} - set(left_in(buffer)))
    assert_frequencies(np.array([counts["uniform"][i] for i in range(4)]), np.ones(4))
    assert_frequencies(np.array([counts["prioritised"][i] for i in range(4)]), np.array([1, 2, 4, 4]))


# ---- no more often than allowed ----


@pytest.mark.parametrize(
    "sampler", [Uniform(), Prioritized(), Prioritized(alpha=5), NStep(n=2), Sequence(length=2), DPER()], ids=repr
)
def test_max_times_sampled(sampler: Sampler) -> None:
    starts = {"Sequence": 15, "DPER": 5}.get(type(sampler).__name__, 20)
    data = episodes([4] * 5) | {"reward": np.zeros(20, np.float32), "obs": np.zeros(20, np.float32)}
    for most, batch_size in ((1, 1), (1, 5), (1, 20), (2, 7), (5, 1), (5, 20)):
        with Buffer(20, sampler, max_times_sampled=most, seed=16) as buffer:
            keys = buffer.insert(data)
            if not isinstance(sampler, DPER):
                buffer.update_priorities(keys, np.arange(20) % 3)  # of 0, too
            times: Counter[int] = Counter()
            with pytest.raises(BufferTimeout):
                while True:
                    info = buffer.sample(batch_size, timeout_s=0)[1]
                    times.update(info.keys.tolist())
                    assert [times[key] for key in info.keys.tolist()] == info.times_sampled.tolist()
            assert max(times.values(), default=0) <= most
            assert times.total() == starts * most // batch_size * batch_size
            assert len(buffer) == 20 - sum(n == most for n in times.values())


def test_rows_that_are_hard_to_find_are_found() -> None:
    """One sequence in 2000 rows: no draw finds it, and then all rows are looked at."""
    start = np.ones(2000, bool)
    start[1501:1504] = False
    for sampler in (Sequence(length=4), Sequence(length=4, by=Prioritized()), Sequence(length=4, by=MinHeap())):
        with Buffer(2000, sampler, seed=17) as buffer:
            buffer.insert({"number": np.arange(2000), "episode_start": start})
            n = 1 if sampler.by == MinHeap() else 3
            assert buffer.sample(n, timeout_s=0)[0]["number"].tolist() == [[1500, 1501, 1502, 1503]] * n


def test_rare_sequences_are_found_in_proportion() -> None:
    start = np.ones(3000, bool)
    start[[11, 501, 2001]] = False
    with Buffer(3000, Sequence(length=2, by=Prioritized(alpha=1)), seed=18) as buffer:
        keys = buffer.insert({"number": np.arange(3000), "episode_start": start})
        buffer.update_priorities(keys[[10, 500, 2000]], [1, 2, 5])
        counts = np.zeros(3000, np.int64)
        for _ in range(20):
            counts += np.bincount(buffer.sample(50)[0]["number"][:, 0], minlength=3000)
        assert_frequencies(counts[[10, 500, 2000]], np.array([1, 2, 5]))


def test_too_few_sequences_are_waited_for() -> None:
    with Buffer(100, Sequence(length=3), limiter=MinSize(1)) as buffer:
        buffer.insert({"number": np.arange(2)})
        with pytest.raises(BufferTimeout, match="Sequence"):
            buffer.sample(1, timeout_s=0)
        buffer.insert({"number": np.arange(2, 3)})
        assert buffer.sample(1, timeout_s=0)[0]["number"].tolist() == [[0, 1, 2]]


def test_more_than_there_can_ever_be_is_refused() -> None:
    for sampler in (MinHeap(), LIFO(), FullBatch()):
        with Buffer(4, sampler, max_times_sampled=0) as buffer:
            buffer.insert(rows(0, 4))
            with pytest.raises(ConfigError, match="can never be sampled"):
                buffer.sample(5)


# ---- several threads ----


@pytest.mark.parametrize("sampler", [Uniform(), Prioritized(), MaxHeap()], ids=repr)
def test_threads_that_insert_sample_and_update(sampler: Sampler) -> None:
    """Rows stay whole, and in the end the counters agree with what was done."""
    with Buffer(64, sampler, limiter=MinSize(8), seed=19) as buffer, ThreadPoolExecutor(4) as pool:

        def insert(first: int) -> int:
            for a in range(first, first + 300, 5):
                number = np.arange(a, a + 5)
                buffer.insert({"number": number, "obs": np.repeat(number[:, None], 50, axis=1)}, timeout_s=30)
            return 300

        def sample(n: int) -> int:
            for _ in range(100):
                batch, info = buffer.sample(n, timeout_s=30)
                assert (batch["obs"] == batch["number"][:, None]).all()
                buffer.update_priorities(info.keys, np.ones(n))
            return 100 * n

        inserting = [pool.submit(insert, first) for first in (0, 1000)]
        sampling = [pool.submit(sample, n) for n in (3, 8)]
        assert sum(future.result(60) for future in inserting) == buffer.limiter.inserts
        assert sum(future.result(60) for future in sampling) == buffer.limiter.samples
        assert len(buffer) == buffer.capacity == buffer.limiter.size


# ---- reproducible, and bounded ----


@pytest.mark.parametrize("sampler", [Uniform(), Prioritized()], ids=repr)
def test_a_seed_gives_the_same_samples(sampler: Sampler) -> None:
    drawn = []
    for _ in range(2):
        with Buffer(50, sampler, seed=20) as buffer:
            buffer.insert(rows(0, 70))
            drawn.append([buffer.sample(5)[0]["number"].tolist() for _ in range(5)])
    assert drawn[0] == drawn[1]


def test_bytes_limit_the_capacity() -> None:
    with Buffer(1000, Uniform(), max_bytes=4096 * 8) as buffer:
        buffer.insert({"a": np.zeros((2, 100), np.float32), "b": np.zeros(2, np.float64)})  # 408 bytes a row
        assert buffer.capacity == 4096 * 8 // 408
        buffer.insert({"a": np.zeros((500, 100), np.float32), "b": np.zeros(500)})
        assert len(buffer) == buffer.capacity
    with Buffer(1000, Uniform(), remover=LIFO(), max_bytes=80) as buffer:
        buffer.insert(rows(0, 100))
        assert len(buffer) == buffer.capacity == 9  # and a place for the row that competes
    with Buffer(1000, Uniform(), max_bytes=7) as buffer, pytest.raises(ConfigError, match="max_bytes"):
        buffer.insert(rows(0, 1))
    with pytest.raises(ConfigError, match="GiB available"):
        Buffer(10**12, Uniform(), spec={"a": ((1000,), "f4")})
    with pytest.raises(ConfigError, match="max_bytes is 0"):
        Buffer(10, Uniform(), max_bytes=0)


def test_closing_gives_the_memory_back() -> None:
    def mapped() -> int:
        with open("/proc/self/maps") as maps:  # noqa: PTH123
            return sum("farstep-buffer" in line for line in maps)

    before = mapped()
    buffer = Buffer(1000, Uniform(), spec={"a": ((100,), "f4")})
    buffer.insert({"a": np.ones((10, 100), np.float32)})
    batch, _ = buffer.sample(4)
    assert mapped() == before + 1
    buffer.close()
    assert mapped() == before
    assert (batch["a"] == 1).all()  # copies
    assert len(buffer) == 0
    repr(buffer)
