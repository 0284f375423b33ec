"""The rate limiter: Reverb's test vectors, presets, refused values, and invariants."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from farstep import Buffer, BufferTimeout, ConfigError
from farstep.buffer import (
    DPER,
    FIFO,
    FullBatch,
    MinSize,
    NStep,
    Prioritized,
    Queue,
    RateLimiter,
    Sampler,
    SampleToInsertRatio,
    Sequence,
    Stack,
    Uniform,
)

inf = math.inf


# ---- Reverb's vectors ----


def test_sampling_waits_for_rows_and_inserting_for_samples() -> None:
    limiter = RateLimiter(1.5, 2, -1, 3)
    assert not limiter.can_sample(1)
    limiter.insert(1)
    assert not limiter.can_sample(1)
    limiter.insert(1)
    assert limiter.can_sample(1)
    limiter.sample(1)
    assert not limiter.can_insert(1)
    assert limiter.can_sample(1)
    limiter.sample(1)
    assert limiter.can_insert(1)


def test_fill_is_the_place_of_diff_between_its_bounds() -> None:
    limiter = RateLimiter(2.0, 4, 8, 24)
    fills = [limiter.fill]
    for _ in range(3):
        limiter.insert(4)
        fills.append(limiter.fill)
    limiter.sample(12)
    assert [*fills, limiter.fill] == [0, 0, 0.5, 1, 0.25]
    assert MinSize(4).fill is None


def test_inserts_of_several_rows_are_checked_as_a_whole() -> None:
    limiter = RateLimiter(1.5, 2, 0, 5)
    assert [limiter.can_insert(n) for n in (1, 2, 3, 4)] == [True, True, True, False]
    limiter.insert(3)
    assert not limiter.can_insert(1)
    limiter.sample(2)
    assert limiter.can_insert(1)
    assert not limiter.can_insert(2)


def test_deletions_change_the_size_and_not_the_difference() -> None:
    with pytest.warns(UserWarning, match="after the first 2 rows, inserting waits"):
        limiter = RateLimiter(5, 2, 0, 5)
    limiter.insert(1)
    limiter.insert(1)
    assert not limiter.can_insert(1)
    limiter.sample(1)
    assert not limiter.can_insert(1)
    limiter.delete(1)
    assert (limiter.diff, limiter.size) == (9, 1)
    assert limiter.can_insert(1)
    assert not limiter.can_sample(1)
    limiter.insert(1)
    assert limiter.can_sample(1)


# ---- presets ----


@pytest.mark.parametrize(
    ("limiter", "options"),
    [
        (MinSize(7), (1, 7, -inf, inf)),
        (SampleToInsertRatio(4, 10, 8), (4, 10, 32, 48)),
        (SampleToInsertRatio(0.5, 100, 5.0), (0.5, 100, 45, 55)),
        (SampleToInsertRatio(2, 10, (-3, 30)), (2, 10, -3, 30)),
        (Queue(9), (1, 1, 0, 9)),
        (Stack(9), (1, 1, 0, 9)),
    ],
    ids=str,
)
def test_presets(limiter: RateLimiter, options: tuple[float, int, float, float]) -> None:
    got = (limiter.samples_per_insert, limiter.min_size, limiter.min_diff, limiter.max_diff)
    assert got == options
    assert (limiter.inserts, limiter.samples, limiter.deletes, limiter.size, limiter.diff) == (0, 0, 0, 0, 0)


def test_min_size_never_blocks_inserts() -> None:
    limiter = MinSize(3)
    assert limiter.can_insert(10**12)
    limiter.insert(2)
    assert not limiter.can_sample(1)
    limiter.insert(1)
    assert limiter.can_sample(10**12)


def test_a_queue_takes_as_many_rows_as_it_has_places() -> None:
    limiter = Queue(3)
    assert limiter.can_insert(3) and not limiter.can_insert(4) and not limiter.can_sample(1)
    limiter.insert(3)
    assert not limiter.can_insert(1) and limiter.can_sample(3) and not limiter.can_sample(4)
    limiter.sample(3)
    limiter.delete(3)
    assert limiter.can_insert(3) and not limiter.can_sample(1)


# ---- refusals ----


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: RateLimiter(0, 1, 0, 5), "samples_per_insert is 0"),
        (lambda: RateLimiter(-1, 1, 0, 5), "samples_per_insert is -1"),
        (lambda: RateLimiter(inf, 1, 0, 5), "samples_per_insert is inf"),
        (lambda: RateLimiter(math.nan, 1, 0, 5), "samples_per_insert is nan"),
        (lambda: RateLimiter("1", 1, 0, 5), "samples_per_insert is '1'"),  # type: ignore[arg-type]
        (lambda: RateLimiter(True, 1, 0, 5), "samples_per_insert is True"),
        (lambda: RateLimiter(1, 0, 0, 5), "min_size is 0"),
        (lambda: RateLimiter(1, 1.5, 0, 5), "min_size is 1.5"),  # type: ignore[arg-type]
        (lambda: RateLimiter(1, 1, math.nan, 5), "min_diff is nan"),
        (lambda: RateLimiter(1, 1, 0, None), "max_diff is None"),  # type: ignore[arg-type]
        (lambda: RateLimiter(2, 3, 7, 50), "min_diff=7 is more than"),
        (lambda: RateLimiter(1, 1, inf, inf), "min_diff=inf is more than"),
        (lambda: RateLimiter(1, 2, 2, 2), "would deadlock"),
        (lambda: RateLimiter(1, 1, 0.5, 1), "would deadlock"),
        # One sample is taken, one row cannot follow: 1.5, 0.5, and both 2 and -0.5 are out of bounds.
        (lambda: RateLimiter(1.5, 1, 0, 1.9), "at diff=0.5 .* would deadlock"),
        (lambda: RateLimiter(0.3, 4, 0, 1), "would deadlock"),
        (lambda: SampleToInsertRatio(1, 10, 0.9), "leaves 1.8 samples between the bounds; .* at least 2 are needed"),
        (lambda: SampleToInsertRatio(8, 10, (70, 85)), "at least 16 are needed"),
        (lambda: SampleToInsertRatio(1, 10, (11, 20)), "min_diff=11 is more than"),
        (lambda: SampleToInsertRatio(1, 10, (1, 2, 3)), "error_buffer is"),  # type: ignore[arg-type]
        (lambda: SampleToInsertRatio(1, 10, ("a", 3)), "error_buffer is"),  # type: ignore[arg-type]
        (lambda: SampleToInsertRatio(1, 10, None), "error_buffer is None"),  # type: ignore[arg-type]
        (lambda: SampleToInsertRatio(None, 10, 5), "samples_per_insert is None"),  # type: ignore[arg-type]
        (lambda: SampleToInsertRatio(0, 10, 5), "samples_per_insert is 0"),
        (lambda: SampleToInsertRatio(1, 0, 5), "min_size is 0"),
        (lambda: Queue(0), "size is 0"),
        (lambda: MinSize(-1), "min_size is -1"),
    ],
)
def test_invalid_options_are_refused(make: Callable[[], RateLimiter], said: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ConfigError, match=said):
            make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Queue(1),
        lambda: RateLimiter(1.5, 1, 0, 2),  # 1.5, 0.5, 2, 1, 0, 1.5, ...: narrow, and it works
        lambda: RateLimiter(*cast(Any, (np.float32(0.5), np.int64(4), np.float64(0), np.int32(2)))),
        lambda: RateLimiter(1, 1, -inf, inf),
        lambda: SampleToInsertRatio(256, 1000, 0.1 * 256 * 1000),
    ],
)
def test_valid_limiters_are_accepted_without_a_warning(make: Callable[[], RateLimiter]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Buffer(10, Uniform(), limiter=MinSize(11)),
        lambda: Buffer(100, Uniform(), limiter=MinSize(11), spec={"a": ((2,), "f4")}, max_bytes=80),
        lambda: Buffer(10, Uniform(), limiter=SampleToInsertRatio(1, 20, 5)),
    ],
)
def test_a_size_that_is_never_reached_is_refused(make: Callable[[], Buffer]) -> None:
    with pytest.raises(ConfigError, match="min_size="):
        make()


def test_batches_that_can_never_be_sampled_are_refused() -> None:
    with Buffer(10, FIFO(), limiter=Queue(4)) as buffer, pytest.raises(ConfigError, match="can never be sampled"):
        buffer.sample(5)
    with Buffer(10, FullBatch()) as buffer, pytest.raises(ConfigError, match="can never be sampled"):
        buffer.sample(11)


# ---- while running ----


def rows(n: int) -> dict[str, np.ndarray]:
    return {"a": np.arange(n, dtype=np.float32)}


def test_changed_limit_wakes_waiting_threads() -> None:
    with Buffer(100, FIFO(), limiter=Queue(4)) as buffer, ThreadPoolExecutor() as pool:
        buffer.insert(rows(4))
        inserting = pool.submit(buffer.insert, rows(50), timeout_s=30)
        buffer.limit(max_diff=inf)
        assert len(inserting.result(30)) == 50
        assert len(buffer) == 54


def test_smaller_min_size_wakes_sampling_threads() -> None:
    with Buffer(100, Uniform(), limiter=MinSize(90)) as buffer, ThreadPoolExecutor() as pool:
        buffer.insert(rows(4))
        sampling = pool.submit(buffer.sample, 3, timeout_s=30)
        buffer.limit(min_size=4)
        assert len(sampling.result(30)[0]["a"]) == 3


def test_rows_are_inserted_while_others_are_sampled() -> None:
    """A queue of 4 places: 200 rows pass, all of them once and in order."""
    with Buffer(8, FIFO(), limiter=Queue(4)) as buffer, ThreadPoolExecutor() as pool:
        inserting = pool.submit(buffer.insert, rows(200), timeout_s=30)
        taken = [x for _ in range(100) for x in buffer.sample(2, timeout_s=30)[0]["a"].tolist()]
        assert taken == list(range(200))
        assert len(inserting.result(30)) == 200
        assert len(buffer) == 0
        assert buffer.waited_s["insert"] + buffer.waited_s["sample"] > 0


def test_a_limit_that_would_deadlock_changes_nothing() -> None:
    with Buffer(100, Uniform(), limiter=Queue(4)) as buffer:
        for changes in ({"max_diff": 0.5}, {"min_diff": 3.0, "max_diff": 50.0}, {"min_size": 101}, {"no_such": 1}):
            with pytest.raises(ConfigError), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                buffer.limit(**changes)
            limiter = buffer.limiter
            assert (limiter.samples_per_insert, limiter.min_size, limiter.min_diff, limiter.max_diff) == (1, 1, 0, 4)


# ---- rows on both sides ----


@pytest.mark.parametrize(
    "sampler",
    [
        Uniform(),
        Prioritized(),
        NStep(n=3),
        Sequence(length=4),
        Sequence(length=4, by=Prioritized()),
        Sequence(length=4, pad=True),
        DPER(),
    ],
    ids=repr,
)
@pytest.mark.parametrize("ratio", [0.5, 3.0])
def test_ratio_counts_rows_for_every_sampler(sampler: Sampler, ratio: float) -> None:
    """A writer and a reader that both run up to their limits: episodes of 5 to 7 steps."""
    inserted = returned = 0
    slack = 40.0
    with Buffer(200, sampler, limiter=SampleToInsertRatio(ratio, 20, slack), seed=0) as buffer:
        for length in [5, 6, 7] * 40:
            ended = np.arange(length) == length - 1
            buffer.insert({"reward": np.ones(length), "terminated": ended}, timeout_s=0)
            inserted += length
            while True:
                try:
                    batch, info = buffer.sample(2, timeout_s=0)
                except BufferTimeout:
                    break
                returned += int(batch["valid"].sum()) if "valid" in batch else len(info.keys)
        assert (buffer.limiter.inserts, buffer.limiter.samples) == (inserted, returned)
    # Sampling began after 20 rows, `slack` samples may be ahead, and 2 items of up to 7 rows wait for their turn.
    assert ratio * (inserted - 20) - slack <= returned <= ratio * (inserted - 20) + slack + 2 * 7


def test_items_of_more_rows_than_a_limiter_ever_gives_are_refused() -> None:
    with Buffer(100, Sequence(length=10), limiter=SampleToInsertRatio(1.0, 10, 20.0)) as buffer:
        buffer.insert({"a": np.zeros(30)})
        with pytest.raises(ConfigError, match="5 items with 50 rows can never be sampled at once"):
            buffer.sample(5)
        buffer.sample(3)
        with pytest.raises(BufferTimeout, match=r"2 items .*20 rows in total"):
            buffer.sample(2, timeout_s=0)
        buffer.insert({"a": np.zeros(20)}, timeout_s=0)
        buffer.sample(2, timeout_s=0)
        assert buffer.limiter.samples == 50


# ---- what always holds ----

RATIOS = st.sampled_from([0.1, 0.25, 0.3, 0.5, 1.0, 1.5, 2.0, 3.0, 7.0])


@st.composite
def limiters(draw: st.DrawFn) -> RateLimiter:
    low = draw(st.integers(-10, 10))
    high = low + draw(st.integers(0, 20)) / 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return RateLimiter(draw(RATIOS), draw(st.integers(1, 8)), low, high)
        except ConfigError:
            assume(False)
            raise


@settings(max_examples=120, deadline=None, derandomize=True)
@given(limiters(), st.lists(st.tuples(st.booleans(), st.integers(1, 5)), max_size=60))
def test_the_difference_stays_within_its_bounds(limiter: RateLimiter, wishes: list[tuple[bool, int]]) -> None:
    spi = limiter.samples_per_insert
    for is_insert, n in wishes:
        before = limiter.diff
        if is_insert and limiter.can_insert(n):
            assert all(limiter.can_insert(k) for k in range(1, n))
            limiter.insert(n)
            assert limiter.diff <= max(limiter.max_diff, spi * limiter.min_size) + 1e-9
        elif not is_insert and limiter.can_sample(n):
            assert limiter.size >= limiter.min_size
            assert n <= limiter.most_samples() + 1e-9
            limiter.sample(n)
            assert limiter.diff >= limiter.min_diff
        else:
            assert limiter.diff == before
        room = limiter.room(7)
        assert room == max((k for k in range(8) if k == 0 or limiter.can_insert(k)), default=0)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(RATIOS, st.integers(1, 6), st.integers(-6, 6), st.integers(0, 16), st.randoms(use_true_random=False))
def test_accepted_limiters_never_deadlock(spi: float, first: int, low: int, halves: int, rnd) -> None:
    """With single rows, an insert or a sample is always possible; limiters refused for this reason do deadlock."""
    high = low + halves / 2
    assume(low <= spi * first)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            limiter = RateLimiter(spi, first, low, high)
        except ConfigError:
            limiter = None
    if limiter is not None:
        for _ in range(150):
            able = [
                do for do, can in ((limiter.insert, limiter.can_insert), (limiter.sample, limiter.can_sample)) if can(1)
            ]
            assert able, limiter
            rnd.choice(able)(1)
        return
    exact, inserts, samples, seen = Fraction(str(spi)), first, 0, set()
    while (diff := inserts * exact - samples) not in seen:
        seen.add(diff)
        if diff - 1 >= low:
            samples += 1
        elif diff + exact <= high:
            inserts += 1
        else:
            return
    # Exact arithmetic does not deadlock: a bound is met exactly, where rounding decides otherwise.
    assert any(abs(diff - bound) < Fraction(1, 10**9) for diff in seen for bound in (low + 1, high - exact))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(["insert", "sample", "delete"]), st.integers(0, 9)), max_size=50))
def test_counters_are_exact(calls: list[tuple[str, int]]) -> None:
    limiter = MinSize(1)
    for name, n in calls:
        getattr(limiter, name)(n)
    totals = {kind: sum(n for name, n in calls if name == kind) for kind in ("insert", "sample", "delete")}
    assert (limiter.inserts, limiter.samples, limiter.deletes) == tuple(totals.values())
    assert limiter.size == totals["insert"] - totals["delete"]
    assert limiter.diff == totals["insert"] - totals["sample"]
