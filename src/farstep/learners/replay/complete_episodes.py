"""Complete episodes in the replay buffer of a learner that samples whole episodes."""

from __future__ import annotations

import math
from collections.abc import Callable

from farstep.buffer.bound_arrays import internals_of
from farstep.buffer.replay import Buffer


class CompleteEpisodes:
    """Counts the complete episodes of a buffer, and lets workers roll while there is none.

    The limiter makes workers wait until the learner has sampled enough. Without a complete episode the learner cannot
    sample, so both sides would wait; meanwhile the limiter does not bound inserts.

    Args:
        buffer: A buffer whose items are episodes.
        warn: Called once, with a text, if the buffer evicts rows and still has no complete episode.
    """

    def __init__(self, buffer: Buffer, warn: Callable[[str], None]) -> None:
        self._buffer, self._warn = buffer, warn
        self._max_diff = buffer.limiter.max_diff
        self._are_present = False
        self._has_warned = False
        buffer.limit(max_diff=math.inf)

    @property
    def count(self) -> int:
        """Number of complete episodes."""
        return len(self._buffer.keys())

    @property
    def are_present(self) -> bool:
        """Whether the buffer has a complete episode."""
        are_present = self.count > 0
        if are_present != self._are_present:
            self._are_present = are_present
            self._buffer.limit(max_diff=self._max_diff if are_present else math.inf)
        if not are_present and self._buffer.removed["evicted"] and not self._has_warned:
            self._has_warned = True
            rows = self._buffer.capacity // internals_of(self._buffer).store.columns
            self._warn(
                f"the replay buffer is full and has no complete episode, so nothing can be learned: it holds {rows:,} "
                "rows of each environment. Raise --buffer-size, lower --num-envs, or limit the length of episodes."
            )
        return are_present
