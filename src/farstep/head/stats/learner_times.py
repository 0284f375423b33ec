"""Splits the learner's time into waiting for batches, preparing them, updating and publishing.

farstep measures only its own calls. `update` is the rest: the time of the collecting thread between these calls, or the
time in which consumer threads of a workflow handle messages. The parts do not overlap. Their sum is the time since the
first batch was requested, plus the time that other threads spend in `publish`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

Part = Literal["wait", "prepare", "publish"]


class LearnerTimes:
    """Seconds of the learner, by part; may be used from any thread.

    Args:
        clock: Returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {"wait": 0.0, "prepare": 0.0, "update": 0.0, "publish": 0.0}
        self._thread: int | None = None
        """The thread that collects."""
        self._inside: list[Part] = []
        """The nested calls that the collecting thread is in, innermost last."""
        self._last = self._handled_at_last = 0.0
        """When `_lap` last added the time of the collecting thread, and the value of `_handled_until` at that time."""
        self._handling: set[int] = set()
        """Consumer threads that are handling a message."""
        self._handling_since = self._handled = 0.0

    def measure(self, part: Part) -> _Measured:
        """Context manager: the time inside counts toward `part`, except the time of nested contexts."""
        return _Measured(self, part)

    def enter(self, part: Part) -> float:
        """Begin a part; return the current time."""
        thread = threading.get_ident()
        with self._lock:
            now = self._clock()
            collects = part == "wait" and not self._inside
            if self._thread is not None and (collects or thread == self._thread):
                self._lap(now)  # also if another thread collected before: the time since then is its update
            if collects:
                self._thread, self._last, self._handled_at_last = thread, now, self._handled_until(now)
            if thread == self._thread:
                self._inside.append(part)
            return now

    def leave(self, part: Part, start: float) -> None:
        """End a part that began at `start`."""
        thread = threading.get_ident()
        with self._lock:
            now = self._clock()
            if thread == self._thread and self._inside:  # empty if this thread collects only since the part began
                self._lap(now)
                self._inside.pop()
                return
            self._seconds[part] += now - start
            if thread in self._handling:
                self._seconds["update"] -= now - start  # because `_handled` includes this time

    def _lap(self, now: float) -> None:
        """Add the time since the last lap to the current part of the collecting thread."""
        part = self._inside[-1] if self._inside else "update"
        handled = self._handled_until(now)
        others = handled - self._handled_at_last if part in ("wait", "update") else 0.0
        self._seconds[part] += max(0.0, now - self._last - others)
        self._last, self._handled_at_last = now, handled

    @contextmanager
    def handling(self) -> Iterator[None]:
        """Context manager: a consumer thread handles a message, which counts as `update`."""
        thread = threading.get_ident()
        with self._lock:
            if not self._handling:
                self._handling_since = self._clock()
            self._handling.add(thread)
        try:
            yield
        finally:
            with self._lock:
                now = self._clock()
                self._handled, self._handling_since = self._handled_until(now), now
                self._handling.discard(thread)

    def _handled_until(self, now: float) -> float:
        """Seconds until now in which at least one consumer thread was handling a message."""
        return self._handled + (now - self._handling_since if self._handling else 0.0)

    def end(self) -> None:
        """Ignore the time until the next batch is requested, because a workflow has ended."""
        with self._lock:
            self._thread = None
            self._inside.clear()

    def snapshot(self) -> dict[str, float]:
        """The seconds of each part: until now during a call, otherwise until the end of the last call."""
        with self._lock:
            now = self._clock()
            if self._inside:
                self._lap(now)
            handled = self._handled_until(now)
            return self._seconds | {"update": max(0.0, self._seconds["update"] + handled)}


class _Measured:
    """The context manager of `LearnerTimes.measure`. It is a class for speed: every `ClusterEnv.step` enters three."""

    __slots__ = ("_part", "_start", "_times")

    def __init__(self, times: LearnerTimes, part: Part) -> None:
        self._times, self._part = times, part

    def __enter__(self) -> None:
        self._start = self._times.enter(self._part)

    def __exit__(self, *error: object) -> None:
        self._times.leave(self._part, self._start)
