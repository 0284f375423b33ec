"""Linked rows, which keep their order while cells are reused: room, neighbors and readers in place."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farstep import Batch, Buffer, ConfigError
from farstep.batch import FinalObs
from farstep.buffer import DPER, FIFO, LIFO, MinSize, NStep, Prioritized, Queue, Sampler, Sequence, Stack, Uniform
from farstep.buffer.bound_arrays import internals_of
from farstep.buffer.storage.cyclic import CyclicBlocks
from farstep.errors import BufferTimeout
from tests.buffer.sampled_rows import episodes


def steps(first: int, count: int) -> dict[str, np.ndarray]:
    """Consecutive rows of an episode that does not end."""
    number = np.arange(first, first + count)
    return {"number": number, "obs": number * 1.0, "reward": number * 1.0, "terminated": np.zeros(count, bool)}


# ---- room ----


@pytest.mark.parametrize("sampler", [NStep(n=2, by=LIFO()), Sequence(length=3, by=LIFO())], ids=repr)
@pytest.mark.parametrize("most", [1, 2])
def test_cells_of_rows_that_were_sampled_are_reused(sampler: Sampler, most: int) -> None:
    """The oldest rows stay while newer ones are inserted and sampled."""
    with Buffer(20, sampler, max_times_sampled=most) as buffer:
        oldest = buffer.insert(steps(0, 8))
        for i in range(20):
            buffer.insert(steps(8 + 4 * i, 4))
            for _ in range(4 * most):
                buffer.sample(1, timeout_s=0)
        assert buffer.removed["evicted"] == 0 and len(buffer) == 8
        assert set(oldest[:5]) <= set(buffer.sample(6, timeout_s=0)[1].keys)


@pytest.mark.parametrize("sampler", [Uniform(), Prioritized(), NStep(n=1), Sequence(length=2), FIFO()], ids=repr)
@pytest.mark.filterwarnings("ignore:neither")
def test_cells_of_deleted_rows_are_reused(sampler: Sampler) -> None:
    with Buffer(12, sampler, seed=0) as buffer:
        keys = buffer.insert(steps(0, 12))
        buffer.delete(keys[6:12])
        buffer.insert(steps(12, 4))
        assert len(buffer) == 10 and buffer.removed["evicted"] == 0
        assert buffer.update_priorities(keys[:6], np.ones(6)) == 6


def test_a_deleted_row_stays_in_the_sequences_that_begin_before_it() -> None:
    with Buffer(6, Sequence(length=3), seed=0) as buffer:
        keys = buffer.insert(steps(0, 6))
        buffer.delete(keys[[2, 5]])
        buffer.insert(steps(6, 3))
        found = {tuple(each) for each in buffer.sample(200)[0]["number"].tolist()}
        assert (2, 3, 4) not in found and all(np.diff(each).tolist() == [1, 1] for each in found)
        # Rows 2 and 5 kept their cells: sequences of rows 0 and 1 needed row 2, those of rows 3 and 4 need row 5.
        assert buffer.removed == {"evicted": 2, "sampled": 0, "deleted": 2}
        assert {each[0] for each in found} == {3, 4, 6}


def test_deleted_episode_frees_all_its_rows() -> None:
    with Buffer(12, DPER(), seed=0) as buffer:
        keys = buffer.insert(episodes([3, 5, 4]))
        assert buffer.delete(keys[3:4]) == 1
        assert len(buffer) == 7 and buffer.removed == {"evicted": 0, "sampled": 0, "deleted": 5}
        buffer.insert(episodes([5], first=12))
        assert {row[0] for row in buffer.sample(100)[0]["number"]} == {0, 8, 12}
        assert buffer.removed["evicted"] == 0


def test_episode_sampled_max_times_frees_all_its_rows() -> None:
    with Buffer(12, DPER(), max_times_sampled=2, limiter=MinSize(1), seed=0) as buffer:
        for first in range(0, 120, 12):
            buffer.insert(episodes([3, 5, 4], first), timeout_s=0)
            for _ in range(6):
                buffer.sample(1, timeout_s=0)
            assert len(buffer) == 0
        assert buffer.removed == {"evicted": 0, "sampled": 120, "deleted": 0}


# ---- deadlock ----


@pytest.mark.parametrize(
    ("sampler", "limiter"),
    [
        (NStep(n=2, by=LIFO()), Stack(1)),
        (Sequence(length=2, by=LIFO()), Stack(3)),
        (NStep(n=1), Queue(2)),
        (DPER(), Queue(2)),
    ],
    ids=repr,
)
def test_reader_and_writer_threads_do_not_deadlock(sampler: Sampler, limiter: object) -> None:
    with Buffer(16, sampler, limiter=limiter, seed=0) as buffer, ThreadPoolExecutor() as pool:  # type: ignore[arg-type]
        rows = episodes([5] * 40) | {"reward": np.zeros(200), "obs": np.zeros(200)}
        writing = pool.submit(buffer.insert, rows, timeout_s=60)
        taken = 0
        while not writing.done():
            try:
                taken += len(buffer.sample(1, timeout_s=60 if taken < 20 else 0.01)[1].keys)
            except BufferTimeout:
                assert taken >= 20, "both wait"
        assert len(writing.result(60)) == 200


def test_insert_passes_if_fewer_rows_are_left_than_the_reader_needs() -> None:
    """4 of 64 rows are left; the reader needs 6, and the writer inserts 64."""
    with Buffer(128, FIFO(), limiter=Queue(64)) as buffer:
        buffer.insert(steps(0, 64))
        for _ in range(10):
            buffer.sample(6, timeout_s=0)
        assert not buffer.limiter.can_insert(64)
        with pytest.raises(BufferTimeout):
            buffer.sample(6, timeout_s=0)
        assert buffer.limiter.can_insert(64)
        buffer.insert(steps(64, 60), timeout_s=0)
        assert buffer.sample(6, timeout_s=0)[0]["number"].tolist() == [60, 61, 62, 63, 64, 65]
        assert buffer.removed["evicted"] == 0


def test_items_longer_than_the_limiter_allows_are_refused_at_construction() -> None:
    with pytest.raises(ConfigError, match=r"at least 5 samples, .* never allows more than 3"):
        Buffer(20, Sequence(length=5), limiter=Queue(3))


# ---- batches of several environments ----


class Streams:
    """Steps of two environments; observations count up from 0 in the first and from 1,000 in the second."""

    def __init__(self) -> None:
        self.at = np.array([0.0, 1000.0])

    def batch(self, ends: np.ndarray) -> Batch:
        """The next `len(ends)` steps; `ends` marks truncations, whose final observation is 0.5 higher."""
        obs = self.at + np.arange(len(ends))[:, None]
        self.at = self.at + len(ends)
        row, slot = np.nonzero(ends)
        one = np.ones(len(row), np.int64)
        return Batch(
            {"obs.x": obs, "reward": np.ones_like(obs), "terminated": np.zeros_like(ends), "truncated": ends},
            {"obs": {"x": "obs.x"}},
            {"x": self.at.copy()},
            FinalObs(row, slot, {"x": obs[row, slot] + 0.5}),
            {"slot": slot, "return": one, "length": one},
            np.arange(2),
            np.ones(2, bool),
        )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.sampled_from([Uniform(), FIFO(), NStep(n=3, gamma=1.0), Sequence(length=3), Sequence(length=4, pad=True)]),
    st.sampled_from([0, 1, 2]),
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 2**20), st.sampled_from("sdn")), min_size=1, max_size=12),
)
def test_sampled_rows_never_cross_environments_or_episodes(
    sampler: Sampler, most: int, calls: list[tuple[int, int, str]]
) -> None:
    """For any cells of the rows."""
    streams, ended, deleted = Streams(), set[float](), 0
    with Buffer(16, sampler, max_times_sampled=most, seed=0) as buffer:
        for count, seed, then in calls:
            rng = np.random.default_rng(seed)
            ends = rng.random((count, 2)) < 0.2
            batch = streams.batch(ends)
            ended.update(batch.arrays["obs.x"][ends].tolist())
            before, free = buffer.removed["evicted"], buffer.capacity - len(buffer)
            keys = buffer.insert(batch, timeout_s=0)
            if type(sampler) in (Uniform, FIFO) and not most and then == "n":
                # A deleted row keeps its cell while the row before it needs its observation.
                assert buffer.removed["evicted"] - before <= max(0, len(keys) - free + deleted + 1)
            if then == "d":
                deleted += buffer.delete(rng.choice(keys, size=3))
            elif then == "s":
                try:
                    check_batch(buffer.sample(2, timeout_s=0)[0], ended)
                except BufferTimeout:
                    continue


def check_batch(batch: dict[str, np.ndarray], ended: set[float]) -> None:
    """Check that each next observation is 1 higher, or 0.5 higher where an episode ended."""
    obs, after = batch["obs.x"], batch["next_obs.x"]
    if "steps" in batch:
        last = obs + batch["steps"] - 1
        assert not (set().union(*(range(int(a), int(b)) for a, b in zip(obs, last, strict=True))) & ended)
        obs = last
    expected = np.where(np.isin(obs, list(ended)), obs + 0.5, obs + 1)
    np.testing.assert_array_equal(after, expected)
    if obs.ndim == 2:
        np.testing.assert_array_equal(np.diff(obs, axis=1), batch["valid"][:, 1:])
        within = obs[:, :-1][batch["valid"][:, 1:]]
        assert not np.isin(within, list(ended)).any()


# ---- readers in place ----


def test_attached_reader_gets_no_rows_after_some_were_deleted() -> None:
    with Buffer(8, Uniform(), seed=0) as buffer:
        keys = buffer.insert(steps(0, 6))
        blocks = CyclicBlocks.attach(buffer.path)
        found = blocks.read(0, 0, 6, ["number"])
        assert found is not None and found["number"].tolist() == list(range(6))
        buffer.delete(keys[1:2])
        buffer.insert(steps(6, 1))
        assert blocks.read(0, 0, 6) is None
        blocks.close()


def test_rows_that_are_kept_in_place_do_not_move() -> None:
    with Buffer(8, Uniform(), seed=0) as buffer:
        keys = buffer.insert(steps(0, 6))
        buffer.keep_in_place()
        buffer.delete(keys[1:2])
        buffer.insert(steps(6, 2))
        assert internals_of(buffer).store.blocks.arrays["number"][:, 0].tolist() == list(range(8))
    with Buffer(8, Uniform(), seed=0) as buffer:
        buffer.delete(buffer.insert(steps(0, 6))[1:2])
        with pytest.raises(ConfigError, match=r"removed by delete\(\) .* consume=False"):
            buffer.keep_in_place()


def test_checkpoint_of_a_ring_with_deleted_rows_is_restored(tmp_path: Path) -> None:
    """Earlier versions of farstep wrote such checkpoints, and so does a buffer whose rows are kept in place."""
    with Buffer(8, NStep(n=1), seed=0) as buffer:
        keys = buffer.insert(steps(0, 8))
        buffer.keep_in_place()
        buffer.delete(keys[4:6])
        buffer.checkpoint(tmp_path)
    with Buffer.restore(tmp_path) as again:
        again.delete(keys[3:4])
        again.insert(steps(8, 2), timeout_s=0)
        assert len(again) == 7 and again.removed == {"evicted": 0, "sampled": 0, "deleted": 3}


def test_rows_follow_a_reset_that_left_no_row(tmp_path: Path) -> None:
    """The row of a reset (`valid` is False) is not stored, and the cell that it would have had goes to the next row."""

    def batch(obs: list[float], last: float, *, starts: bool = True, ends_before_reset: bool = False) -> Batch:
        x = np.array(obs)[:, None]
        ended, valid, start = np.zeros(x.shape, bool), np.ones(x.shape, bool), np.zeros(x.shape, bool)
        start[0] = starts
        row = np.array([len(obs) - 2] if ends_before_reset else [], int)
        ended[row], valid[row + 1] = True, False
        return Batch(
            {"obs.x": x, "reward": x * 0, "terminated": ended, "valid": valid, "episode_start": start},
            {"obs": {"x": "obs.x"}},
            {"x": np.array([last])},
            FinalObs(row, row * 0, {"x": x[row, 0] + 0.5}),
            {"slot": row * 0, "return": row, "length": row},
            np.arange(1),
            np.ones(1, bool),
        )

    with Buffer(8, Uniform(), seed=0) as buffer:
        keys = buffer.insert(batch([0.0, 1.0, 2.0, 3.0], last=4.0))
        buffer.delete(keys[:1])  # from now on rows have links
        buffer.insert(batch([4.0, 5.0, 5.5], last=100.0, starts=False, ends_before_reset=True))
        buffer.checkpoint(tmp_path)
        buffer.insert(batch([100.0, 101.0, 102.0], last=103.0))
        sampled, _ = buffer.sample(200)
        assert set(zip(sampled["obs.x"].tolist(), sampled["next_obs.x"].tolist(), strict=True)) == {
            (1, 2), (2, 3), (3, 4), (4, 5), (5, 5.5), (100, 101), (101, 102), (102, 103)
        }  # fmt: skip
    Buffer.restore(tmp_path).close()
