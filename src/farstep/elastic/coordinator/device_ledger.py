"""Accounts for the time in which a run's learner holds a device, or waits for one."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager


class DeviceLedger:
    """Sums the seconds in which devices are held and waited for, over all threads of a run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._uses = self._holding = 0
        self._held_s = self._waited_s = 0.0
        self._counted_to = time.monotonic()

    @contextmanager
    def held(self, token: AbstractContextManager[int]) -> Iterator[int]:
        """Context manager: take a token, which may wait, yield its device, and account for both times.

        Args:
            token: Waits for a device and yields its number.
        """
        began = time.monotonic()
        with token as device:
            with self._lock:
                self._waited_s += time.monotonic() - began
                self._uses += 1
                self._change(1)
            try:
                yield device
            finally:
                with self._lock:
                    self._change(-1)

    def _change(self, holding: int) -> None:
        now = time.monotonic()
        self._held_s += self._holding * (now - self._counted_to)
        self._counted_to = now
        self._holding += holding

    def snapshot(self) -> dict[str, float]:
        """Return the sums up to now, as in `ClusterEnv.stats`."""
        with self._lock:
            self._change(0)
            return {"uses": self._uses, "held_seconds": self._held_s, "waited_seconds": self._waited_s}
