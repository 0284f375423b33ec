"""Warns about a wait that takes long: one event per wait, and further lines in the log."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

from farstep.event import Emit

log = logging.getLogger("farstep")
FIRST_START_S, FIRST_S = 5.0, 10.0
"""Seconds before the event: while nodes or the cluster's answer are missing, and in any other wait."""
WORKERS_START_S = 20.0
"""Seconds of waiting before the event if only processes have to start: on a busy machine, importing torch and building
environments can take 15 s."""
REPEAT_S, MAX_REPEAT_S = 10.0, 300.0
"""Seconds from the event to the first repetition in the log, which double each time, and the longest such interval."""


class WaitWarning:
    """Warns about one wait: first with an event, then in the log only, at intervals that double.

    Args:
        emit: Receives the event.
        began: When the wait began, in `time.monotonic()` seconds, as all times here.
        starting: Whether the wait is for workers to start.
    """

    def __init__(self, emit: Emit, began: float, *, starting: bool = False) -> None:
        self._emit, self._began, self._starting = emit, began, starting
        self._emitted = False
        self._repeat_s = REPEAT_S
        self.due = began + (FIRST_START_S if starting else FIRST_S)
        """When to call `warn` next, if the wait is unusual."""

    def is_unusual(self, now: float, *, nodes_are_missing: bool) -> bool:
        """Return whether to warn: always, except while workers start on connected nodes for less than
        `WORKERS_START_S`."""
        return not self._starting or nodes_are_missing or now >= self._began + WORKERS_START_S

    def warn(self, what: str, now: float) -> None:
        """Warn that the call is still waiting.

        Args:
            what: What follows "waiting 20 s", e.g. `for worker 3, in step`.
            now: The time.
        """
        text = f"waiting {now - self._began:.0f} s{what}"
        if self._emitted:
            log.warning("%s", text)
        else:
            self._emit("warned", text)
        self._emitted = True
        self.due = now + self._repeat_s
        self._repeat_s = min(2 * self._repeat_s, MAX_REPEAT_S)


@contextlib.contextmanager
def warn_while_slow(what: str, emit: Emit) -> Iterator[None]:
    """Warn, from a background thread, that a start is waiting for `what`, until the block ends."""
    done, warning = threading.Event(), WaitWarning(emit, time.monotonic(), starting=True)

    def watch() -> None:
        while not done.wait(warning.due - time.monotonic()):
            warning.warn(f": {what}", time.monotonic())

    thread = threading.Thread(target=watch, daemon=True, name="farstep-slow-start")
    with contextlib.suppress(RuntimeError):  # no more threads: the block will raise a typed error
        thread.start()
    try:
        yield
    finally:
        done.set()
        if thread.ident is not None:
            thread.join()
