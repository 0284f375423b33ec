"""Whole episodes that are sampled by priority."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from farstep import Buffer
from farstep.buffer import (
    DPER,
    trajectory_priority,
)
from farstep.errors import BufferTimeout
from tests.buffer.sampled_rows import assert_frequencies, episodes

# ---- whole episodes ----


def test_dper() -> None:
    lengths = [3, 1, 4, 2, 6]
    starts = np.r_[0, np.cumsum(lengths)[:-1]]
    with Buffer(50, DPER(alpha=0.5, beta=1.0), seed=11) as buffer:
        keys = buffer.insert(episodes(lengths))
        buffer.update_priorities(keys[starts], cast(Any, [1, 4, 9, 16, 25]))
        buffer.update_priorities(keys[[1, 2, 5]], cast(Any, [1e6, 1e6, 1e6]))  # no episode begins there
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
    """Neither an unfinished episode counts nor one whose first rows were overwritten, however rows are inserted."""
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


def test_priority_of_a_trajectory() -> None:
    td, ratios, logprobs = np.array([1.0, -3.0]), np.array([0.5, 100.0]), np.array([-1.0, -2.0])
    assert trajectory_priority(td, ratios, logprobs, w1=2, w2=3, w3=4) == pytest.approx(2 * 2 + 3 * 5.25 + 4 * 1.5)
    assert trajectory_priority(td * 0, ratios * 0, logprobs * 0) == 1e-6
