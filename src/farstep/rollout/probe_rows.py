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

_CHUNKS = 4
"""A probe's rows come from so many of the latest chunks, if these are long enough."""
# Steps of the R2 sequence: any stretch of it covers the unit square evenly, and so do several chunks in a row.
_R2 = (0.7548776662466927, 0.5698402909980532)


def places(order: int, steps: int, num_envs: int, rows: int) -> tuple[Array, Array]:
    """Time and column of what to look at in a worker's chunk of that number, for probes of so many rows."""
    per_chunk = -(-rows // _CHUNKS)
    k = np.arange(min(per_chunk, steps * num_envs)) + order * per_chunk
    time = np.floor(np.modf(k * _R2[0])[0] * steps).astype(np.int64)
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

    def __init__(self, limit: int) -> None:
        self._limit, self._rows = limit, 0
        self._picks: deque[Pick] = deque()

    def add(self, pick: Pick) -> None:
        self._picks.append(pick)
        self._rows += pick.rows
        while len(self._picks) > 1 and self._rows > self._limit:
            self._rows -= self._picks.popleft().rows

    def clear(self) -> None:
        self._picks.clear()
        self._rows = 0

    def all(self) -> tuple[Pick, ...]:
        return tuple(self._picks)

    def find(self, orders: Sequence[int]) -> list[Pick]:
        """The chunks of these numbers; none at all if one of them is forgotten."""
        known = {pick.order: pick for pick in self._picks}
        return [known[order] for order in orders] if known.keys() >= set(orders) else []


def joined(picks: Sequence[Pick]) -> dict[str, Array]:
    """All rows of several chunks, one after the other."""
    return {name: np.concatenate([pick.arrays[name] for pick in picks]) for name in picks[0].arrays}
