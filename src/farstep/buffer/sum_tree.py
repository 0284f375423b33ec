"""A tree of sums over a fixed number of leaves: draw leaves in proportion to their weights, thousands at a time."""

from __future__ import annotations

import functools

import numpy as np

from farstep.core import Array

_TOP = 4096  # sums at the top, at most, which one cumulative sum and one binary search go through
_FEW = 4  # so many sums are made faster one by one
_LINE = 64  # bytes of a cache line


class SumTree:
    """Weights of `leaves` leaves. Sums are made of their parts, never adjusted, so that no error builds up.

    Each sum below the top is one of four that make the next.
    """

    def __init__(self, leaves: int) -> None:
        depth = 0
        while leaves > _TOP << 2 * depth:
            depth += 1
        top = -(-leaves >> 2 * depth)
        self._levels: list[Array] = _aligned([top << 2 * level for level in reversed(range(depth + 1))])
        """The leaves first."""
        self._cumulative: Array = np.zeros(top + 1)
        """What is before each node at the top, and the total; behind the times when something has changed."""
        self._changed = False

    @property
    def weights(self) -> Array:
        """Of all leaves; read only."""
        return self._levels[0]

    @property
    def total(self) -> float:
        return float(self._before()[-1])

    def set(self, leaves: Array | slice, weights: Array | float) -> None:
        """Give leaves, or all from a start to a stop, new weights; of one that is named twice the last one counts."""
        self._levels[0][leaves] = weights
        for below, above in zip(self._levels, self._levels[1:], strict=False):
            if isinstance(leaves, slice):
                start, stop = leaves.start >> 2, -(-leaves.stop >> 2)
                leaves = slice(start, stop)
                if stop - start > _FEW:
                    np.add.reduce(below.reshape(-1, 4)[leaves], axis=1, out=above[leaves])
                else:
                    for node in range(start, stop):
                        above[node] = sum(below[4 * node : 4 * node + 4].tolist())
            else:
                leaves = leaves >> 2
                first = leaves << 2
                sums = below.take(first)
                for part in (1, 2, 3):
                    sums += below[part:].take(first)
                above[leaves] = sums
        self._changed = True

    def draw(self, n: int, rng: np.random.Generator, stratified: bool = True) -> tuple[Array, Array]:
        """`n` leaves in proportion to their weights, and these; with replacement. There must be a weight above 0.

        Stratified: one from each n-th part of the total, in order. Otherwise draws are independent of each other.
        """
        before = self._before()
        rest = rng.random(n)
        if stratified:
            rest += _counted(n)
            rest *= before[-1] / n
        else:
            rest *= before[-1]
        found = before.searchsorted(rest, side="right")
        found -= 1
        if not stratified or found[-1] == len(before) - 1:  # rounding went beyond the total
            np.minimum(found, len(before) - 2, out=found)
        rest -= before.take(found)
        for level in self._levels[-2::-1]:
            found <<= 2
            left = level.take(found)
            left += level[1:].take(found)  # one half of the four, then one of the two
            right = rest >= left
            left *= right
            rest -= left
            found += right
            found += right
            left = level.take(found)
            right = rest >= left
            left *= right
            rest -= left
            found += right
        weights = self.weights.take(found)
        if not np.minimum.reduce(weights) > 0:  # rounding led to a leaf without any
            wrong = np.flatnonzero(weights <= 0)
            found[wrong], weights[wrong] = self.draw(len(wrong), rng, stratified)
        return found, weights

    def _before(self) -> Array:
        if self._changed:
            np.add.accumulate(self._levels[-1], out=self._cumulative[1:])
            self._changed = False
        return self._cumulative


def _aligned(sizes: list[int]) -> list[Array]:
    """Arrays of zeros in one piece of memory (large pages, where there are any, make draws faster), on cache lines."""
    step = _LINE // 8
    held = np.zeros(sum(sizes) + step * (len(sizes) + 1))
    first = -held.ctypes.data % _LINE // 8
    arrays = []
    for size in sizes:
        arrays.append(held[first : first + size])
        first += -(-size // step) * step
    return arrays


@functools.lru_cache(8)
def _counted(n: int) -> Array:
    return np.arange(n, dtype=np.float64)
