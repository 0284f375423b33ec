"""Chooses the observations of a probe: rows of recent chunks, which head and worker both have.

Both sides compute the same rows from a chunk's index and size. The worker copies the rows when it sends the chunk, the
head when it receives the chunk. So a probe only names chunks, and no observations are sent.
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
"""A probe takes its rows from this many of the latest chunks, or from more if the chunks are too short."""
# The R2 sequence: any consecutive part of it covers the unit square evenly, so successive chunks complement each other.
_R2 = (0.7548776662466927, 0.5698402909980532)


def row_positions(index: int, steps: int, num_envs: int, rows: int) -> tuple[Array, Array]:
    """The time steps and columns of the rows to copy from chunk `index` of a worker, for probes of `rows` rows."""
    per_chunk = -(-rows // _CHUNKS)
    k = np.arange(min(per_chunk, steps * num_envs)) + index * per_chunk
    time = np.floor(np.modf(k * _R2[0])[0] * steps).astype(np.int64)
    column = np.floor(np.modf(k * _R2[1])[0] * num_envs).astype(np.int64)
    return time, column


@dataclass(frozen=True)
class ProbeRows:
    """The rows of one chunk that a probe may use; head and worker keep the same."""

    index: int
    version: int
    """The version that acted."""
    arrays: Mapping[str, Array]
    """Copies of the arrays that the comparison needs, such as `obs`, by name, `[rows, ...]`."""

    @property
    def rows(self) -> int:
        return len(next(iter(self.arrays.values())))


class RecentProbeRows:
    """The rows of the latest chunks: at most `limit` rows, but always at least one chunk."""

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
        """The chunks with these indices; empty if one of them is no longer kept."""
        known = {rows_of_chunk.index: rows_of_chunk for rows_of_chunk in self._recent}
        return [known[index] for index in indices] if known.keys() >= set(indices) else []


def joined(probed: Sequence[ProbeRows]) -> dict[str, Array]:
    """The rows of several chunks, concatenated."""
    return {name: np.concatenate([rows_of_chunk.arrays[name] for rows_of_chunk in probed]) for name in probed[0].arrays}


def probe_rows_of(comparison: Comparison, index: int, version: int, rows: Rows, steps: int, count: int) -> ProbeRows:
    """The rows of a chunk that a probe of `count` rows may use; head and worker compute the same."""
    time, column = row_positions(index, 1 if comparison.first_row_only else steps, rows.num_envs, count)
    return ProbeRows(index, version, rows.at(comparison.names, time, column))
