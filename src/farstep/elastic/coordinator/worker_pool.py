"""The interfaces between the workers of a run and the client of its coordinator."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from typing import Protocol

from farstep.errors import FarstepError


class WorkerPool(Protocol):
    """The workers of a run."""

    def scale_workers(self, workers: int) -> None:
        """Run this number of workers, at least 1: those with the lowest numbers."""
        ...

    def use_slots(self, slots: Collection[int], *, quiet: bool = False) -> None:
        """Run one worker for each of these slots of the coordinator, at least one, and end a `pause`. The numbers of
        the slots decide how many workers run on each node. `quiet`: emit no events."""
        ...

    def pause(self) -> None:
        """Let all workers become idle, until `use_slots` is called."""
        ...

    @property
    def state(self) -> str:
        """`running`, `failed` or `closed`."""
        ...

    def num_running(self) -> int:
        """Return the number of workers that may be using a core, now or when their node joins, also of a run that has
        failed or is closed."""
        ...

    def use_slots_per_session(self, slots: SessionSlots) -> None:
        """Call `slots.begin` when a session opens and `slots.end` when it ends. A session issues no tickets until
        `use_slots` is called."""
        ...

    def fail(self, error: FarstepError) -> None:
        """End the run with an error."""
        ...

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Hold the lock of the pool, under which it also calls `SessionSlots`."""
        ...


class SessionSlots(Protocol):
    """The slots of a run that needs them only while a session of tickets is open. Both methods return at once."""

    def begin(self, *, for_rollout: bool) -> None:
        """Request slots for a session: for one rollout, or for an unlimited number. A second call changes which."""
        ...

    def end(self) -> None:
        """Return the slots: all workers are idle."""
        ...
