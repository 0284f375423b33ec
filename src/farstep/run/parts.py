"""The parts of a rollout, as `ClusterEnv.parts` yields them."""

from __future__ import annotations

from collections.abc import Generator, Iterator

from farstep.batch import Batch, Part
from farstep.errors import ClosedError


class Parts(Iterator[Part]):
    """Iterator over the parts of one rollout, returned by `ClusterEnv.parts`.

    The rollout starts when the first part is requested. `close`, or another call that collects, cancels the rest.
    """

    def __init__(self, parts: Generator[Part, None, Batch]) -> None:
        self._parts = parts
        self._batch: Batch | None = None

    def __next__(self) -> Part:
        try:
            return next(self._parts)
        except StopIteration as end:
            self._batch = self._batch or end.value
            raise

    @property
    def batch(self) -> Batch:
        """The whole rollout, as `collect` returns it; consumes the remaining parts.

        Raises:
            ClosedError: The parts were closed, or the rollout failed.
        """
        for _ in self:
            pass
        if self._batch is None:
            raise ClosedError("these parts were closed, or failed, before the rollout was complete.")
        return self._batch

    def close(self) -> None:
        """Cancel the rest of the rollout."""
        self._parts.close()
