"""Which observations a probe is about: rows of chunks that both sides have seen, chosen alike without a word.

Chunk number and size give the rows; the head copies them when a chunk arrives, the worker when it hands one over. So a
probe names chunks only, and no observation travels for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from farstep.agents.divergence import Comparison
from farstep.core import Array
from farstep.rollout.rows import Rows

_CHUNKS = 4
"""A probe's rows come from so many of the latest chunks, if these are long enough."""
# Steps of the R2 sequence: any stretch of it covers the unit square evenly, and so do several chunks in a row.
_R2 = (0.7548776662466927, 0.5698402909980532)


def row_positions(index: int, steps: int, num_envs: int, rows: int) -> tuple[Array, Array]:
    """Time and column of what to look at in a worker's chunk of that number, for probes of so many rows."""
    per_chunk = -(-rows // _CHUNKS)
    k = np.arange(min(per_chunk, steps * num_envs)) + index * per_chunk
    time = np.floor(np.modf(k * _R2[0])[0] * steps).astype(np.int64)
    column = np.floor(np.modf(k * _R2[1])[0] * num_envs).astype(np.int64)
    return time, column


@dataclass(frozen=True)
class ProbeRows:
    """What one side remembers of a chunk."""

    index: int
    version: int
    arrays: Mapping[str, Array]
    """Copies, by name: `obs...` and what else the comparison needs, `[rows, ...]`."""

    @property
    def rows(self) -> int:
        return len(next(iter(self.arrays.values())))


class RecentProbeRows:
    """The latest chunks' rows, never more than `limit` of them if one chunk has fewer."""

    def __init__(self, limit: int) -> None:
        self._limit, self._rows = limit, 0
        self._recent: deque[ProbeRows] = deque()

    def add(self, rows_of_chunk: ProbeRows) -> None:
        self._recent.append(rows_of_chunk)
        self._rows += rows_of_chunk.rows
        while len(self._recent) > 1 and self._rows > self._limit:
            self._rows -= self._recent.popleft().rows

    def clear(self) -> None:
        self._recent.clear()
        self._rows = 0

    def all(self) -> tuple[ProbeRows, ...]:
        return tuple(self._recent)

    def find(self, indices: Sequence[int]) -> list[ProbeRows]:
        """The chunks of these numbers; none at all if one of them is forgotten."""
        known = {rows_of_chunk.index: rows_of_chunk for rows_of_chunk in self._recent}
        return [known[index] for index in indices] if known.keys() >= set(indices) else []


def joined(probed: Sequence[ProbeRows]) -> dict[str, Array]:
    """All rows of several chunks, one after the other."""
    return {name: np.concatenate([rows_of_chunk.arrays[name] for rows_of_chunk in probed]) for name in probed[0].arrays}


def probe_rows_of(comparison: Comparison, index: int, version: int, rows: Rows, steps: int, count: int) -> ProbeRows:
    """The rows of a chunk that a probe of `count` rows may ask about; head and worker take the same."""
    time, column = row_positions(index, 1 if comparison.first_row_only else steps, rows.num_envs, count)
    return ProbeRows(index, version, rows.at(comparison.names, time, column))
