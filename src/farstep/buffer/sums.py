"""A tree of sums over a fixed number of leaves: draw leaves in proportion to their weights, thousands at a time."""

from __future__ import annotations

import functools

import numpy as np

from farstep.core import Array

_TOP = 4096  # sums at the top, which one cumulative sum and one binary search go through


class SumTree:
    """Weights of `leaves` leaves. Sums are made of their parts, never adjusted, so that no error builds up."""

    def __init__(self, leaves: int) -> None:
        width = 1
        while width * _TOP < leaves:
            width *= 2
        self._levels: list[Array] = []  # the leaves first
        while width >= 1:
            self._levels.append(np.zeros(_TOP * width))
            width //= 2
        self._cumulative: Array | None = None
        """What is before each node at the top, and the total; until something changes."""

    @property
    def weights(self) -> Array:
        """Of all leaves; read only."""
        return self._levels[0]

    @property
    def total(self) -> float:
        return float(self._before()[-1])

    def set(self, leaves: Array, weights: Array | float) -> None:
        """Give leaves new weights; of a leaf that is named twice the last one counts."""
        self._levels[0][leaves] = weights
        for below, above in zip(self._levels, self._levels[1:], strict=False):
            leaves = leaves >> 1
            pairs = leaves << 1
            above[leaves] = below[pairs] + below[pairs + 1]
        self._cumulative = None

    def draw(self, n: int, rng: np.random.Generator) -> tuple[Array, Array]:
        """`n` leaves in proportion to their weights, and these; with replacement, one from each n-th part of the total,
        in order. There must be a weight above 0."""
        before = self._before()
        rest = rng.random(n)
        rest += _counted(n)
        rest *= before[-1] / n
        found = before.searchsorted(rest, side="right")
        found -= 1
        if found[-1] == len(before) - 1:  # rounding went beyond the total
            np.minimum(found, len(before) - 2, out=found)
        rest -= before.take(found)
        for level in self._levels[-2::-1]:
            found <<= 1
            left = level.take(found)
            right = rest >= left
            left *= right
            rest -= left
            found += right
        weights = self.weights.take(found)
        if not weights.min() > 0:  # rounding led to a leaf without any
            wrong = np.flatnonzero(weights <= 0)
            found[wrong], weights[wrong] = self.draw(len(wrong), rng)
        return found, weights

    def _before(self) -> Array:
        if self._cumulative is None:
            self._cumulative = np.concatenate([[0.0], np.cumsum(self._levels[-1])])
        return self._cumulative


@functools.lru_cache(8)
def _counted(n: int) -> Array:
    return np.arange(n, dtype=np.float64)
