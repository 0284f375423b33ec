"""Decides which requests form the next batch, without I/O or clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar


class Waiting(Protocol):
    """A request that waits for actions."""

    @property
    def arrived(self) -> float:
        """When it arrived, in seconds."""

    @property
    def num_envs(self) -> int: ...


T = TypeVar("T", bound=Waiting)


def next_batch(
    pending: Sequence[T], num_possible: int, now: float, max_batch: int, window_s: float
) -> tuple[list[T], float]:
    """Choose the requests of the next batch, oldest first.

    Args:
        pending: All requests that wait.
        num_possible: Number of requests that could be pending at the same time.
        now: Current time in seconds.
        max_batch: Largest number of rows; a single larger request is still a batch.
        window_s: How long the oldest request may wait for others.

    Returns:
        The batch, and 0; or an empty list, and the seconds after which to try again.
    """
    if not pending:
        return [], window_s
    oldest_first = sorted(pending, key=lambda request: request.arrived)
    batch: list[T] = []
    rows = 0
    for request in oldest_first:
        if batch and rows + request.num_envs > max_batch:
            return batch, 0.0
        batch.append(request)
        rows += request.num_envs
    left = oldest_first[0].arrived + window_s - now
    if left > 0 and rows < max_batch and len(pending) < num_possible:
        return [], left
    return batch, 0.0
