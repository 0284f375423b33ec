"""Measures the phases of an update."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Timer:
    """Sums seconds by name.

    Example:
        >>> with timer("train"):
        ...     learn()
        >>> timer.take()
        {'time/train': 0.31}
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the seconds spent inside the context to `name`."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - start

    def take(self) -> dict[str, float]:
        """Return the seconds since the last call as metrics `time/<name>`, and start from 0."""
        taken, self._seconds = self._seconds, {}
        return {f"time/{name}": seconds for name, seconds in taken.items()}
