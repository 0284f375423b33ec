"""Decides which requests form the next batch, and when it starts, without I/O or clock."""

from __future__ import annotations

import functools
import math

import numpy as np

from farstep.agents.gpu.graph_policy import padded_size
from farstep.core import Array

_LATE_FACTOR, _IN_TIME_FACTOR = 1.05, 0.98
"""How the lead changes after a late start and after one in time: about three of ten starts are late."""


def next_batch(
    arrived: Array, num_envs: Array, num_possible: int, now: float, max_batch: int, window_s: float
) -> tuple[Array, float]:
    """Choose the requests of the next batch, oldest first.

    Args:
        arrived: When each request that waits arrived, in seconds; at least one.
        num_envs: Number of rows of each request.
        num_possible: Number of requests that could be pending at the same time.
        now: Current time in seconds.
        max_batch: Largest number of rows; a single larger request is still a batch.
        window_s: How long the oldest request may wait for others.

    Returns:
        Whether each request is in the batch, and 0; or, if there is no batch yet, the seconds after which to try again.
    """
    chosen = np.ones(len(arrived), bool)
    count = int(num_envs.sum())
    if count > max_batch:
        oldest_first = np.argsort(arrived, kind="stable")
        too_many = np.cumsum(num_envs[oldest_first]) > max_batch
        chosen[oldest_first[1:][too_many[1:]]] = False
        return chosen, 0.0
    left = float(arrived.min()) + window_s - now
    if left > 0 and count < max_batch and len(arrived) < num_possible:
        return ~chosen, left
    return chosen, 0.0


@functools.cache
def most_rows(num_envs: int, max_batch: int) -> int:
    """The largest number of rows of a batch that may overlap with another: half of the environments.

    So the two halves alternate while the GPU is the bottleneck: one is on the GPU, and the other steps or waits.
    Otherwise, a few rows might alternate with all others, and each batch might have another size.

    Args:
        num_envs: Number of environments of all workers.
        max_batch: Largest number of rows of any batch.
    """
    return min(max_batch, padded_size(-(-num_envs // 2)))


class StartTimes:
    """Decides when to start the next batch, so that it is on the GPU just before the running one ends.

    A later start leaves the GPU idle, and an earlier one makes the batch smaller. The lead, which is the time between
    the start and the expected end, grows after each late start, and shrinks slowly otherwise.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        """For each padded size, a running mean of the time of a batch."""
        self._lead_s = 1e-4

    def next_start(self, num_rows: int, began: float) -> float:
        """When to start the next batch, in seconds. Infinite if no batch of this size has ended yet.

        Args:
            num_rows: Number of rows of the running batch.
            began: When it began, in seconds.
        """
        return began + self._seconds.get(padded_size(num_rows), math.inf) - self._lead_s

    def note_end(self, num_rows: int, seconds: float) -> None:
        """Take the time of a batch into account."""
        size = padded_size(num_rows)
        mean = self._seconds.get(size, math.inf)
        if seconds < mean / 2:  # the mean includes a batch during which the server was busy, for example with a capture
            self._seconds[size] = seconds
        else:
            self._seconds[size] = mean + 0.1 * (min(seconds, 2 * mean) - mean)

    def note_start(self, is_late: bool) -> None:
        """Take into account whether the running batch had ended before the next one was on the GPU."""
        self._lead_s *= _LATE_FACTOR if is_late else _IN_TIME_FACTOR
