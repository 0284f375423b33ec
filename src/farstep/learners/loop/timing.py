"""Where the time of an update goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Timer:
    """Seconds by name: `with timer("train"): ...`."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - began

    def take(self) -> dict[str, float]:
        """All since the last call, as metrics."""
        found, self._seconds = self._seconds, {}
        return {f"time/{name}": seconds for name, seconds in found.items()}
