"""A restored buffer continues like the saved one."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from farstep import Buffer
from farstep.buffer import (
    DPER,
    FIFO,
    LIFO,
    FullBatch,
    MaxHeap,
    MinHeap,
    NStep,
    Prioritized,
    SampleToInsertRatio,
    Sequence,
    Uniform,
)
from farstep.errors import CheckpointError, ConfigError

CASES: dict[str, dict[str, Any]] = {
    "uniform": {"sampler": Uniform()},
    "prioritized": {"sampler": Prioritized(0.7, 0.3)},
    "fifo": {"sampler": FIFO()},
    "lifo": {"sampler": LIFO()},
    "full-batch": {"sampler": FullBatch()},
    "n-step": {"sampler": NStep(3, 0.9, by=Prioritized())},
    "sequence": {"sampler": Sequence(4)},
    "dper": {"sampler": DPER()},
    "heaps": {"sampler": MaxHeap(), "remover": MinHeap()},
    "often": {"sampler": Uniform(), "remover": LIFO(), "max_times_sampled": 3},
    "ratio": {"sampler": Uniform(), "limiter": SampleToInsertRatio(4.0, 8, 4000.0)},
}


class Rows:
    """Rows that depend on a seed only."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def __call__(self, count: int) -> dict[str, np.ndarray]:
        rng = self._rng
        return {"obs": rng.random((count, 3)), "reward": rng.random(count), "terminated": rng.random(count) < 0.2}


def filled(options: dict[str, Any]) -> Buffer:
    """A buffer that has wrapped around, with priorities and samples taken."""
    buffer, rows = Buffer(64, seed=1, **copy.deepcopy(options)), Rows(0)  # each needs its own limiter
    for _ in range(4):
        keys = buffer.insert(rows(20))
        buffer.update_priorities(keys[:5], np.arange(5.0))
        buffer.sample(3)
    return buffer


def assert_equal_from_now_on(one: Buffer, other: Buffer) -> None:
    rows = Rows(7)
    for _ in range(4):
        new = rows(9)
        np.testing.assert_array_equal(one.insert(new), other.insert(new))
        (mine, said), (theirs, told) = one.sample(4), other.sample(4)
        assert mine.keys() == theirs.keys()
        for name in mine:
            np.testing.assert_array_equal(mine[name], theirs[name], name)
        for name in ("keys", "probabilities", "weights", "times_sampled", "versions"):
            np.testing.assert_array_equal(getattr(said, name), getattr(told, name), name)
        one.update_priorities(said.keys[:1], cast(Any, [2.5]))
        other.update_priorities(told.keys[:1], cast(Any, [2.5]))
    assert (one.limiter, one.removed, len(one)) == (other.limiter, other.removed, len(other))


@pytest.mark.parametrize("case", CASES)
def test_restored_buffer_continues_like_the_saved_one(case: str, tmp_path: Path) -> None:
    with filled(CASES[case]) as buffer:
        buffer.checkpoint(tmp_path)
        with Buffer.restore(tmp_path) as restored:
            assert restored.sampler == buffer.sampler and restored.remover == buffer.remover
            assert restored.capacity == buffer.capacity and restored.schema == buffer.schema
            assert_equal_from_now_on(buffer, restored)


def test_keys_name_the_same_rows_after_a_restore(tmp_path: Path) -> None:
    with filled({"sampler": Prioritized()}) as buffer:
        _, info = buffer.sample(5)
        buffer.checkpoint(tmp_path)
    with Buffer.restore(tmp_path) as restored:
        assert restored.update_priorities(info.keys, np.ones(5)) == len(info.keys)


def test_a_corrupt_checkpoint_is_refused_by_name_and_the_previous_one_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with filled({"sampler": Uniform()}) as buffer:
        buffer.checkpoint(tmp_path)
        before = len(buffer), buffer.limiter.samples
        buffer.sample(7)
        newest = buffer.checkpoint(tmp_path)
    largest = max(newest.glob("*.npy"), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-3])
    with caplog.at_level(logging.WARNING, "farstep"), Buffer.restore(tmp_path) as restored:
        assert (len(restored), restored.limiter.samples) == before
    assert newest.name in caplog.text and largest.name in caplog.text


def test_missing_checkpoint_and_empty_buffer_are_errors(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        Buffer.restore(tmp_path / "nowhere")
    with Buffer(4, Uniform()) as empty, pytest.raises(ConfigError, match="no arrays yet"):
        empty.checkpoint(tmp_path)


def test_custom_sampler_must_be_passed_to_restore(tmp_path: Path) -> None:
    class Mine(Uniform):
        pass

    with Buffer(8, Mine(), seed=3) as buffer:
        buffer.insert({"x": np.arange(5)})
        buffer.checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"unknown sampler 'Mine'.*sampler=\.\.\."):
        Buffer.restore(tmp_path)
    with Buffer.restore(tmp_path, sampler=Mine()) as restored:
        assert len(restored) == 5 and isinstance(restored.sampler, Mine)
