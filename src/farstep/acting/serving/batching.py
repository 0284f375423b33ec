"""Decides which requests form the next batch, without I/O or clock."""

from __future__ import annotations

import numpy as np

from farstep.core import Array


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
