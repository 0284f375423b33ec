"""Edge cases of buffers: forks, rare starts, and the errors for wrong use."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farstep import Buffer, BufferTimeout, ConfigError
from farstep.buffer import (
    DPER,
    FIFO,
    FullBatch,
    MinHeap,
    MinSize,
    NStep,
    Prioritized,
    RateLimiter,
    Sampler,
    SampleToInsertRatio,
    Sequence,
    Uniform,
)
from farstep.buffer.bound_arrays import internals_of
from farstep.errors import CheckpointError, ClosedError
from farstep.schema import ArraySpec
from farstep.workflow.objects import ModelBlock


def test_a_fork_cannot_write_over_rows() -> None:
    buffer = Buffer(100, Uniform(), seed=0)
    buffer.insert({"a": np.full(10, 1)})
    objects = ModelBlock()
    objects.publish("scale", 1.0)
    held, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with internals_of(buffer).gate.lock:
            held.set()
            let_go.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(30)
    pid = os.fork()
    if not pid:
        refused = 0
        try:
            for call in (
                lambda: buffer.insert({"a": np.full(10, -7)}),
                lambda: buffer.sample(1),
                lambda: buffer.update_priorities(np.arange(1), np.ones(1)),
                lambda: buffer.delete(np.arange(1)),
                lambda: buffer.checkpoint("/nonexistent"),
                lambda: objects.publish("scale", 2.0),
            ):
                try:
                    call()
                except ClosedError as error:
                    refused += "its fork" in str(error)
            buffer.close()
            with Buffer(10, Uniform()) as own:
                own.insert({"a": np.zeros(3)})
                own.sample(2)
        finally:
            os._exit(refused)
    let_go.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 6
    assert objects.read("scale") == (0, 1.0)
    objects.close()
    buffer.insert({"a": np.full(10, 2)})
    assert set(buffer.sample(400)[0]["a"]) == {1, 2}
    buffer.close()


# ---- starts ----


@settings(deadline=None)
@given(
    st.sampled_from([Sequence(length=1), Sequence(length=2), Sequence(length=5), NStep(n=1), NStep(n=3), NStep(n=9)]),
    st.sampled_from([None, "terminated", "truncated", "done"]),
    st.lists(st.tuples(st.integers(1, 9), st.floats(0, 1)), min_size=1, max_size=8),
)
def test_all_usable_starts_are_found_at_once(
    sampler: Sampler, ending: str | None, inserts: list[tuple[int, float]]
) -> None:
    rng = np.random.default_rng(len(inserts))
    with Buffer(16, sampler, seed=0) as buffer:
        for count, often in inserts:
            rows = {"reward": np.ones(count), "episode_start": rng.random(count) < often / 2}
            if ending is not None:
                rows[ending] = rng.random(count) < often
            buffer.insert(rows)
        every, store = np.arange(16), internals_of(buffer).store
        found, one_by_one = sampler.all_usable(store), sampler.usable(store, every)
        assert found is not None and one_by_one is not None
        assert found.tolist() == one_by_one.tolist()


@pytest.mark.parametrize("share", [2, 20, 200, 2000])
def test_probabilities_are_consistent_for_rare_starts(share: int) -> None:
    """A row that nothing begins at has `share` times the priority of all others together."""
    terminated = np.arange(1000) % 10 == 9
    for seed in range(20):
        with Buffer(1000, Sequence(length=5, by=Prioritized(alpha=1, beta=1)), seed=seed) as buffer:
            keys = buffer.insert({"number": np.arange(1000), "terminated": terminated})
            priorities = np.where(np.arange(1000) % 2, 1.0, 2.0)
            priorities[9] = 1500 * share
            buffer.update_priorities(keys, priorities)
            batch, info = buffer.sample(32)
            first = batch["number"][:, 0]
            assert (first % 10 <= 5).all()
            np.testing.assert_allclose(info.probabilities, priorities[first] / priorities.sum())
            np.testing.assert_allclose(info.weights, priorities[first].min() / priorities[first])


@pytest.mark.parametrize("by", [Uniform(), Prioritized(alpha=1, beta=0)])
@pytest.mark.parametrize("episode", [5, 6, 12])
def test_starts_are_drawn_in_proportion(by: Sampler, episode: int) -> None:
    with Buffer(4000, Sequence(length=5, by=by), seed=3) as buffer:
        buffer.insert({"number": np.arange(4000), "terminated": np.arange(4000) % episode == episode - 1})
        counts = np.zeros(8, np.int64)
        for _ in range(100):
            counts += np.bincount(buffer.sample(40)[0]["number"][:, 0] // 500, minlength=8)
    assert abs(counts - 500).max() < 5 * np.sqrt(500), counts


def test_search_for_rare_starts_is_bounded() -> None:
    """However rare starts are, each row is checked a bounded number of times, and never along a whole sequence."""
    looked = 0

    class Watched(Sequence):
        def usable(self, store, cells):
            nonlocal looked
            looked += len(cells)
            return super().usable(store, cells)

    for every in (50, 101, 150):
        with Buffer(20_000, Watched(length=100), seed=0) as buffer:
            ended = np.arange(20_000) % every == every - 1
            ended[10_000:10_100] = False
            buffer.insert({"number": np.arange(20_000), "terminated": ended})
            looked = 0
            buffer.sample(64)
            assert looked < 20_000 / 4


def test_a_sequence_longer_than_the_buffer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"needs 5 consecutive rows, .* room for only 4 .* Raise capacity"):
        Buffer(4, Sequence(length=5))
    Buffer(4, Sequence(length=5, pad=True)).close()
    with pytest.raises(ConfigError, match="room for only 4 per environment"):
        Buffer(8, Sequence(length=5)).bind({"a": ArraySpec((), "<f8")}, columns=2)


def test_timeout_says_why_no_item_can_be_sampled() -> None:
    with Buffer(20, Sequence(length=5), seed=0) as buffer:
        buffer.insert({"obs": np.arange(20.0), "terminated": np.arange(20) % 4 == 3})
        with pytest.raises(BufferTimeout, match=r"0 of the 20 items .* can be sampled: .* end of an episode"):
            buffer.sample(1, timeout_s=0)
        internals_of(buffer).gate.inserting_thread = threading.get_ident()
        with pytest.raises(BufferTimeout, match=r"0 of the 20 items .* would deadlock"):
            buffer.sample(1)
    with Buffer(20, FIFO(), limiter=SampleToInsertRatio(1.0, 4, 8.0)) as buffer:
        internals_of(buffer).gate.inserting_thread = threading.get_ident()
        with pytest.raises(BufferTimeout, match=r"samples=3\)"):
            buffer.sample(3)


def test_a_limiter_counts_for_one_buffer() -> None:
    limiter = MinSize(2)
    with pytest.raises(ConfigError):
        Buffer(1, Uniform(), limiter=limiter)  # refused: it is free for the next one
    with (
        Buffer(4, Uniform(), limiter=limiter),
        pytest.raises(ConfigError, match=r"another buffer, .* make one limiter for each"),
    ):
        Buffer(4, Uniform(), limiter=limiter)


# ---- options that change ----


@pytest.mark.parametrize("make", [lambda by: by, lambda by: NStep(n=1, by=by)], ids=["plain", "composed"])
def test_beta_changes_while_it_is_in_use(make: Callable[[Sampler], Sampler], tmp_path: Path) -> None:
    with Buffer(4, make(Prioritized(alpha=1, beta=0.4)), seed=0) as buffer:
        keys = buffer.insert({"reward": np.zeros(4), "terminated": np.ones(4, bool)})
        buffer.update_priorities(keys, cast(Any, [1, 1, 1, 7]))
        for beta in (0.4, 0.7, 1.0):
            buffer.set_beta(beta)
            _, info = buffer.sample(50)
            np.testing.assert_allclose(np.unique(info.weights), [7**-beta, 1.0])
        with pytest.raises(ConfigError, match="beta is -1"):
            buffer.set_beta(-1)
        assert buffer.sampler.beta == 1.0
        buffer.checkpoint(tmp_path)
    with Buffer.restore(tmp_path) as again:
        assert again.sampler.beta == 1.0
    with Buffer(4, Uniform()) as buffer, pytest.raises(ConfigError, match=r"Uniform\(\) has no beta"):
        buffer.set_beta(0.5)


# ---- mistakes ----


def filled(sampler: Sampler) -> Buffer:
    buffer = Buffer(4, sampler, seed=0)
    buffer.insert({"a": np.zeros(2)})
    return buffer


class Mine(Uniform):
    pass


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "a limiter's class": (lambda: Buffer(4, Uniform(), limiter=MinSize), r"limiter is .*MinSize\(1000\); make one"),  # type: ignore[arg-type]
    "a number as limiter": (lambda: Buffer(4, Uniform(), limiter=3), r"limiter is 3; expected"),  # type: ignore[arg-type]
    "a number as spec": (lambda: Buffer(4, Uniform(), spec=3), r"spec is 3; expected a mapping"),  # type: ignore[arg-type]
    "text as timeout": (lambda: filled(Uniform()).sample(1, timeout_s="x"), r"timeout_s is 'x'"),  # type: ignore[arg-type]
    "nested rows": (lambda: filled(Uniform()).insert({"obs": {"x": np.zeros(2)}}), r"'obs' as a mapping; .*obs\.x"),  # type: ignore[dict-item]
    "all rows as remover": (lambda: Buffer(4, Uniform(), remover=FullBatch()), "leave out remover"),
    "an object of no numbers": (lambda: ModelBlock().publish("x", object()), "cannot be published; expected a number"),
    "a missing object": (lambda: ModelBlock().path("x"), "no object 'x'; published objects: none"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named(mistake: str) -> None:
    make, said = MISTAKES[mistake]
    with pytest.raises(ConfigError, match=said):
        make()


@pytest.mark.parametrize("method", ["can_insert", "can_sample", "insert", "sample", "delete"])
@pytest.mark.parametrize("n", ["a", -1, None, 1.5])
def test_a_limiter_counts_in_whole_numbers(method: str, n: Any) -> None:
    limiter = RateLimiter(1.0, 1, -1.0, 5.0)
    with pytest.raises(ConfigError, match=r"n is .* at least 0"):
        getattr(limiter, method)(n)
    getattr(limiter, method)(np.int64(1))


def test_custom_samplers_are_named_without_internals(tmp_path: Path) -> None:
    with filled(Mine()) as buffer:
        buffer.checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="unknown sampler 'Mine'") as caught:
        Buffer.restore(tmp_path)
    assert "_Composed" not in str(caught.value) and " Sampler," not in str(caught.value)
    Buffer.restore(tmp_path, sampler=Mine()).close()


def test_unused_priorities_warn_once() -> None:
    with filled(Uniform()) as buffer:
        with pytest.warns(UserWarning, match=r"neither Uniform\(\) nor remover=FIFO\(\) uses priorities"):
            assert buffer.update_priorities(np.array([4]), np.ones(1)) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            buffer.update_priorities(np.array([4]), np.ones(1))
    for sampler in (Prioritized(), MinHeap(), Sequence(length=2, by=Prioritized())):
        with filled(sampler) as buffer, warnings.catch_warnings():
            warnings.simplefilter("error")
            buffer.update_priorities(np.array([4]), np.ones(1))
    assert DPER().uses_priorities
    with Buffer(4, Uniform(), remover=MinHeap()) as buffer, warnings.catch_warnings():
        warnings.simplefilter("error")
        buffer.update_priorities(buffer.insert({"a": np.zeros(2)}), np.ones(2))
