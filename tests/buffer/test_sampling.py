"""Which rows are sampled, how often, and from which threads."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import pytest

from farstep import Buffer, ConfigError
from farstep.buffer import (
    DPER,
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
)
from farstep.buffer.storage.table import Table
from farstep.errors import BufferTimeout
from tests.buffer.sampled_rows import assert_frequencies, episodes, frequencies, rows

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


# ---- what cannot be ----


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Prioritized(-0.1), "alpha is -0.1"),
        (lambda: Prioritized(beta=float("nan")), "beta is nan"),
        (lambda: Prioritized("1"), "alpha is '1'"),  # type: ignore[arg-type]
        (lambda: DPER(-1), "alpha is -1"),
        (lambda: DPER(beta=float("inf")), "beta is inf"),
        (lambda: NStep(0), "n is 0"),
        (lambda: NStep(gamma=1.1), "gamma is 1.1; it must be a number from 0 to 1"),
        (lambda: NStep(by=Sequence()), "single rows"),
        (lambda: NStep(by=Uniform), "single rows"),  # type: ignore[arg-type]
        (lambda: Sequence(0), "length is 0"),
        (lambda: Buffer(4, Uniform), r"add \(\)"),  # type: ignore[arg-type]
        (lambda: Buffer(4, "uniform"), "expected a sampler"),  # type: ignore[arg-type]
        (lambda: Buffer(4, Sequence(), remover=Uniform()), "leave out remover"),
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
def test_invalid_options_are_refused(make, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make()


def test_the_first_argument_is_alpha() -> None:
    assert Prioritized(0.7) == Prioritized(alpha=0.7, beta=0.4)
    assert DPER(0.7, 0.1) == DPER(alpha=0.7, beta=0.1)
    assert NStep(5, 0.9) == NStep(n=5, gamma=0.9)
    assert Sequence(7, True) == Sequence(length=7, pad=True)


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
            rows_each = 4 if isinstance(sampler, DPER) else 1  # an episode is removed with all its rows
            assert len(buffer) == 20 - rows_each * sum(n == most for n in times.values())


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
        buffer.update_priorities(keys[[10, 500, 2000]], cast(Any, [1, 2, 5]))
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


def test_sample_of_more_items_than_the_capacity_is_refused() -> None:
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
