"""A sum tree over a fixed number of leaves. It draws thousands of leaves at a time, in proportion to their weights."""

from __future__ import annotations

import functools

import numpy as np

from farstep.core import Array

_TOP = 4096  # maximum number of nodes at the top level, which is searched with one cumulative sum
_FEW = 4  # up to this number, computing sums one by one is faster
_LINE = 64  # bytes of a cache line


class SumTree:
    """The weights of the leaves, and levels of sums above them. Each node is the sum of four nodes of the level below.

    Sums are always recomputed from their four parts, never adjusted, so that rounding errors do not accumulate.
    """

    def __init__(self, leaves: int) -> None:
        depth = 0
        while leaves > _TOP << 2 * depth:
            depth += 1
        top = -(-leaves >> 2 * depth)
        self._levels: list[Array] = _aligned([top << 2 * level for level in reversed(range(depth + 1))])
        """All levels, from the leaves to the top."""
        self._cumulative: Array = np.zeros(top + 1)
        """Sum of all weights before each top node, and the total; outdated if `_changed`."""
        self._changed = False

    @property
    def weights(self) -> Array:
        """The weights of all leaves; read-only."""
        return self._levels[0]

    @property
    def total(self) -> float:
        """Sum of all weights."""
        return float(self._cumulative_sums()[-1])

    def set(self, leaves: Array | slice, weights: Array | float) -> None:
        """Set the weights of leaves, given as indices or a range. If an index repeats, its last weight counts."""
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
        """Draw leaves in proportion to their weights, with replacement; the total must be above 0.

        Args:
            n: Number of draws.
            rng: Source of randomness.
            stratified: Whether to divide the total into n equal parts and draw one leaf from each, in ascending order;
                otherwise draws are independent.

        Returns:
            The leaves and their weights.
        """
        before = self._cumulative_sums()
        rest = rng.random(n)
        if stratified:
            rest += _counted(n)
            rest *= before[-1] / n
        else:
            rest *= before[-1]
        found = before.searchsorted(rest, side="right")
        found -= 1
        if not stratified or found[-1] == len(before) - 1:  # rounding may exceed the total
            np.minimum(found, len(before) - 2, out=found)
        rest -= before.take(found)
        for level in self._levels[-2::-1]:
            found <<= 2
            left = level.take(found)
            left += level[1:].take(found)  # choose one half of the four nodes, then one of the two
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
        if not np.minimum.reduce(weights) > 0:  # rounding led to a leaf of weight 0
            wrong = np.flatnonzero(weights <= 0)
            found[wrong], weights[wrong] = self.draw(len(wrong), rng, stratified)
        return found, weights

    def _cumulative_sums(self) -> Array:
        if self._changed:
            np.add.accumulate(self._levels[-1], out=self._cumulative[1:])
            self._changed = False
        return self._cumulative


def _aligned(sizes: list[int]) -> list[Array]:
    """Return zero arrays aligned to cache lines, in one allocation so that the kernel may use huge pages."""
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
