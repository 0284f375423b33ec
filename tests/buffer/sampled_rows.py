"""Rows that are known again when they are sampled, and how often each was."""

from __future__ import annotations

import numpy as np

from farstep import Buffer


def rows(first: int, n: int) -> dict[str, np.ndarray]:
    return {"number": np.arange(first, first + n)}


def assert_frequencies(observed: np.ndarray, expected: np.ndarray) -> None:
    """A chi-square test at about one in ten thousand; outcomes without probability must not occur."""
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


def episodes(lengths: list[int], first: int = 0) -> dict[str, np.ndarray]:
    ends = np.cumsum(lengths)
    number = np.arange(ends[-1])
    start = np.isin(number, np.r_[0, ends[:-1]])
    return {"number": first + number, "episode_start": start, "terminated": np.isin(number, ends - 1)}
