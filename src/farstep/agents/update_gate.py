"""Delays publishing until no update is in progress, so that a published version is never half-updated.

    consumer A   ──begin▒▒▒▒▒▒▒▒▒▒end──────begin▒▒▒▒▒...        ▒ may change the agent
    consumer B   ─────begin▒▒▒▒▒▒▒▒▒▒▒▒end─begin▒▒▒▒▒...
    publisher    ───────────waits─────────█──────────           █ reads the agent

Updates of several threads may overlap. A publisher waits until no update is in progress. Meanwhile it blocks new
updates, so that it does not starve. A consumer may publish in the middle of its own update. While the consumer
publishes or waits for its turn, its update does not block publishers; therefore two consumers that publish cannot
deadlock.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

from farstep.errors import ClosedError, PublishTimeout

log = logging.getLogger("farstep")
WARN_S = 10.0
"""A publisher that has waited this many seconds logs which consumers it waits for."""
POLL_S = 1.0
"""Seconds between two checks whether the thread of an update has died."""


@dataclass(eq=False)
class Turn:
    """A publisher's place in the queue."""

    thread: int
    """The thread that publishes."""
    since: float
    """When the turn was queued (`time.monotonic`)."""
    limit_s: float
    """Seconds after which waiting fails."""
    agent: object
    """The agent to publish; updates of other agents do not block the turn."""
    in_place: bool = True
    """Whether the thread itself waits for the turn. Its own update then does not block the turn."""
    on_grant: Callable[[], None] | None = None
    granted: bool = False
    refused: str = ""
    """The consumers whose errors prevent publishing; "" if there are none."""
    warned: bool = False

    @property
    def next_check(self) -> float:
        """When to call `UpdateGate.check`, which warns or raises if the turn has not been granted."""
        return self.since + (self.limit_s if self.warned else min(WARN_S, self.limit_s))


@dataclass(frozen=True)
class _Update:
    thread: threading.Thread
    consumer: str
    agent: object


class UpdateGate:
    """Tracks the threads that may be changing the agent, and grants publishers their turns.

    Args:
        warn: Called with a warning when a publisher has waited for `WARN_S` seconds; default: the logger.
    """

    def __init__(self, warn: Callable[[str], object] = log.warning) -> None:
        self._warn = warn
        self.limit_s = 300.0
        """Maximum time in seconds that a publisher waits for updates to end."""
        self._changed = threading.Condition()
        self._updates: dict[Hashable, _Update] = {}
        self._failed: dict[Hashable, str] = {}
        """Consumers whose updates raised: the agent may be half-updated until the run has ended."""
        self._paused: Counter[int] = Counter()
        """Threads inside `between_updates`."""
        self._turns: deque[Turn] = deque()
        self._active: Turn | None = None
        self._closed = self._run_ends = False

    # ---- updates ----

    def begin(self, key: Hashable, consumer: str, agent: object, patient: bool = True) -> None:
        """Start an update in the calling thread. Wait first while another thread publishes.

        Args:
            key: Identifies the update, for `end`.
            consumer: Name of the consumer, for messages.
            agent: The agent that it may change.
            patient: Whether to wait also for queued publishers, not only for the active one.
        """
        me = threading.get_ident()

        def may_begin() -> bool:
            if self._active is not None and self._active.thread != me:
                return False
            return not (patient and self._turns) or self._updates_in(me)

        with self._changed:
            while not may_begin() and not self._closed:
                self._changed.wait(POLL_S)
                self._advance()
            self._updates[key] = _Update(threading.current_thread(), consumer, agent)

    def end(self, key: Hashable, raised: bool = False) -> None:
        """End an update. If the update raised, publishers wait until the run has ended."""
        with self._changed:
            update = self._updates.pop(key, None)
            if raised and update is not None:
                self._failed[key] = update.consumer
            self._advance()

    @contextlib.contextmanager
    def updating(self, key: Hashable, consumer: str, agent: object) -> Iterator[None]:
        """Context manager: an update in the loop's thread. It waits for an active publisher, but not for queued
        ones."""
        raised = True
        try:
            self.begin(key, consumer, agent, patient=False)
            yield
            raised = False
        finally:
            self.end(key, raised)

    @contextlib.contextmanager
    def between_updates(self) -> Iterator[None]:
        """Context manager: allow publishing, because the calling thread does not change the agent inside it."""
        me = threading.get_ident()
        with self._changed:
            if not self._updates_in(me):
                inside = False
            else:
                inside = True
                self._paused[me] += 1
                self._advance()
        try:
            yield
        finally:
            if inside:
                with self._changed:
                    while self._active is not None and self._active.thread != me and not self._closed:
                        self._changed.wait(POLL_S)
                    self._paused[me] -= 1

    def ending_run(self) -> None:
        """Announce the end of the run. Publishers that wait for an update that raised now raise `ClosedError`."""
        with self._changed:
            self._run_ends = True
            self._changed.notify_all()

    def end_run(self) -> None:
        """End the run, and forget updates that raised. The caller must repair a half-updated agent before
        publishing."""
        with self._changed:
            if self._failed:
                for turn in self._turns:
                    turn.refused = self._failures()
                self._turns.clear()
                self._failed.clear()
            self._run_ends = False
            self._advance()
            self._changed.notify_all()

    def _failures(self) -> str:
        return " and ".join(dict.fromkeys(self._failed.values()))

    def _updates_in(self, thread: int) -> bool:
        return any(update.thread.ident == thread for update in self._updates.values())

    # ---- publishing ----

    @contextlib.contextmanager
    def publishing(self, agent: object) -> Iterator[None]:
        """Context manager: wait until no other thread updates this agent, then block new updates.

        Raises:
            PublishTimeout: An update did not end within `limit_s` seconds.
            ClosedError: The cluster was closed, or the run is ending after an update raised.
        """
        turn = Turn(threading.get_ident(), time.monotonic(), self.limit_s, agent)
        try:
            self._wait(turn)
            yield
        finally:
            self.release(turn)

    def _wait(self, turn: Turn) -> None:
        with self._changed:
            if self._holds_turn(turn.thread):
                return
            self._turns.append(turn)
            self._advance()
            while not self._holds_turn(turn.thread):
                self._check(turn)
                self._changed.wait(max(0.0, min(POLL_S, turn.next_check - time.monotonic())))
                self._advance()

    def _holds_turn(self, thread: int) -> bool:
        return self._active is not None and self._active.thread == thread

    def request(self, on_grant: Callable[[], None], agent: object) -> Turn:
        """Queue a turn without blocking. The caller must call `check` at `turn.next_check`, and finally `release`.

        Args:
            on_grant: Called when the turn is granted, in an arbitrary thread.
            agent: The agent to publish.

        Returns:
            The turn.
        """
        turn = Turn(threading.get_ident(), time.monotonic(), self.limit_s, agent, in_place=False, on_grant=on_grant)
        with self._changed:
            self._turns.append(turn)
            self._advance()
        return turn

    def check(self, turn: Turn) -> None:
        """Warn if a turn has waited for `WARN_S` seconds; raise `PublishTimeout` after `limit_s`."""
        with self._changed:
            self._advance()
            if not turn.granted:
                self._check(turn)

    def release(self, turn: Turn) -> None:
        """End a turn, or leave the queue."""
        with self._changed:
            if self._active is turn:
                self._active = None
            elif turn in self._turns:
                self._turns.remove(turn)
            self._advance()
            self._changed.notify_all()

    def close(self) -> None:
        """Make waiting publishers raise `ClosedError`, and let waiting updates start."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _blockers(self, agent: object) -> list[str]:
        """Return the consumers that may be changing the agent, and those whose update raised."""
        paused = {turn.thread for turn in self._turns if turn.in_place}
        paused |= {thread for thread, count in self._paused.items() if count}
        updating = [
            update.consumer
            for update in self._updates.values()
            if update.agent is agent and update.thread.ident not in paused and update.thread.is_alive()
        ]
        return [*updating, *self._failed.values()]

    def _advance(self) -> None:
        """Grant the next turn if no update blocks it."""
        if self._active is None and self._turns and not self._blockers(self._turns[0].agent):
            turn = self._active = self._turns.popleft()
            turn.granted = True
            if turn.on_grant is not None:
                turn.on_grant()
            self._changed.notify_all()  # only on a change, since waiting threads also call `_advance`

    def _check(self, turn: Turn) -> None:
        """Warn if a turn has waited for long; raise if it cannot be granted or its time is over."""
        if self._closed:
            raise ClosedError("this cluster was closed while a publisher waited; create a new one.")
        refused = turn.refused or (self._failures() if self._run_ends else "")
        if refused:
            raise ClosedError(
                f"nothing was published: {refused} raised in the middle of its message and ended the run, so the "
                "agent may be half-updated. Restore valid parameters, and publish again."
            )
        waited = time.monotonic() - turn.since
        if waited >= turn.limit_s:
            raise PublishTimeout(
                f"nothing was published: {self._names(turn)} within {turn.limit_s:g} s (end_s). Publish in that "
                "consumer, between its updates, or have the consumer return more often. If the consumer does "
                "not change the agent, register it with flow.on(..., updates=False). If it needs more time, "
                "raise Workflow(end_s=...)."
            )
        if waited >= WARN_S and not turn.warned:
            turn.warned = True
            self._warn(
                f"publishing has waited for {waited:.0f} s: {self._names(turn)}. If that consumer does not change the "
                "agent, register it with flow.on(..., updates=False)."
            )

    def _names(self, turn: Turn) -> str:
        found = self._blockers(turn.agent) or ["another publisher"]
        return f"{' and '.join(dict.fromkeys(found))} {'has' if len(found) == 1 else 'have'} not finished"
