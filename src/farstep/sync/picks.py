"""Which observations a probe is about: rows of chunks that both sides have seen, chosen alike without a word.

Chunk number and size give the rows; the head copies them when a chunk arrives, the worker when it hands one over. So a
probe names chunks only, and no observation travels for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from farstep.core import Array

PER_PROBE = 64
PER_CHUNK = 16
# Steps of the R2 sequence: any stretch of it covers the unit square evenly, and so do several chunks in a row.
_R2 = (0.7548776662466927, 0.5698402909980532)


def rows_of(order: int, steps: int, num_envs: int, first_row_only: bool = False) -> tuple[Array, Array]:
    """Time and column of the rows to look at in a worker's chunk of that number, spread over both."""
    k = np.arange(min(PER_CHUNK, num_envs * (1 if first_row_only else steps))) + order * PER_CHUNK
    time = np.floor(np.modf(k * _R2[0])[0] * (1 if first_row_only else steps)).astype(np.int64)
    column = np.floor(np.modf(k * _R2[1])[0] * num_envs).astype(np.int64)
    return time, column


@dataclass(frozen=True)
class Pick:
    """What one side remembers of a chunk."""

    order: int
    version: int
    arrays: Mapping[str, Array]
    """Copies, by name: `obs...` and what else the comparison needs, `[rows, ...]`."""

    @property
    def rows(self) -> int:
        return len(next(iter(self.arrays.values())))


class Picks:
    """The latest chunks' rows, never more than `limit` of them if one chunk has fewer."""

    def __init__(self, limit: int = PER_PROBE) -> None:
        self._limit = limit
        self._picks: deque[Pick] = deque()

    def add(self, pick: Pick) -> None:
        self._picks.append(pick)
        while len(self._picks) > 1 and sum(known.rows for known in self._picks) > self._limit:
            self._picks.popleft()

    def clear(self) -> None:
        self._picks.clear()

    def all(self) -> tuple[Pick, ...]:
        return tuple(self._picks)

    def find(self, orders: Sequence[int]) -> list[Pick | None]:
        """The chunks of these numbers, None for those that are forgotten."""
        known = {pick.order: pick for pick in self._picks}
        return [known.get(order) for order in orders]


def joined(picks: Sequence[Pick]) -> dict[str, Array]:
    """All rows of several chunks, one after the other."""
    return {name: np.concatenate([pick.arrays[name] for pick in picks]) for name in picks[0].arrays}
