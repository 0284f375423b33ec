"""Resumes released workers shortly before the learner's update is predicted to end."""

from __future__ import annotations

import threading
from collections.abc import Callable

from farstep.elastic.monitor import WorkloadMonitor

_PATIENCE = 2.0
"""Workers that were resumed early are suspended again after this multiple of the longest recent update."""


class Prewarming:
    """Predicts the end of each update, and resumes workers before it. The caller holds the run's lock in all calls.

    Args:
        resume: Resumes workers. Called in a thread of this object, without the lock.
        suspend: Suspends them again, because no rollout has begun. Called in the same way.
    """

    def __init__(self, resume: Callable[[], None], suspend: Callable[[], None]) -> None:
        self._resume, self._suspend = resume, suspend
        self._monitor = WorkloadMonitor()
        self._timer: threading.Timer | None = None
        self._update_began: float | None = None
        self._tickets_at: float | None = None
        """When the rollout issued its first tickets."""
        self._update_s: float | None = None
        """Duration of the last update, before the rollout in progress."""
        self._start_s = 0.0
        """Longest start of a worker in this rollout, or in the last one without prewarming."""
        self.is_early = False
        """Whether workers were resumed for a rollout that has not begun."""
        self._was_early = False
        """Whether workers were resumed early for the rollout in progress."""

    def rollout_ended(self, now: float, workers: int) -> None:
        """A rollout has ended, and the learner's update begins."""
        if self._update_s is not None:
            self._monitor.add(self._start_s, self._update_s, workers)
        self._update_began, self._tickets_at, self._update_s = now, None, None
        if (after_s := self.resume_after()) is not None:
            self._set_timer(after_s, self._resume)

    def resume_after(self) -> float | None:
        """Return how many seconds after the end of a rollout workers are resumed; None: not before the next one."""
        return self._monitor.start_after()

    def resumed(self) -> None:
        """Workers were resumed early."""
        self.is_early = True
        self._set_timer(_PATIENCE * self._monitor.longest_update(), self._suspend)

    def rollout_begins(self, now: float) -> bool:
        """The update has ended, and the next rollout begins. Return whether workers were resumed early for it."""
        self._stop_timer()
        self._update_s = None if self._update_began is None else now - self._update_began
        self._was_early, self.is_early = self.is_early, False
        if not self._was_early:
            self._start_s = 0.0
        return self._was_early

    def issued(self, now: float) -> None:
        """The rollout issues tickets."""
        if self._tickets_at is None:
            self._tickets_at = now

    def chunk_arrived(self, now: float, busy_s: float) -> None:
        """The first chunk of a worker has arrived; its worker was busy with it for `busy_s` seconds."""
        if self._tickets_at is not None and not self._was_early:
            self._start_s = max(self._start_s, now - self._tickets_at - busy_s)

    def close(self) -> None:
        """Stop the timer without joining its thread, which may be waiting for the lock."""
        self._stop_timer()

    def _set_timer(self, after_s: float, call: Callable[[], None]) -> None:
        self._stop_timer()
        self._timer = threading.Timer(after_s, call)
        self._timer.daemon = True
        self._timer.start()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
