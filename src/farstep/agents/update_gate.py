"""Keeps publishing apart from updates, so that a published version is never half of one.

    consumer A   ──begin▒▒▒▒▒▒▒▒▒▒end──────begin▒▒▒▒▒...        ▒ may change the agent
    consumer B   ─────begin▒▒▒▒▒▒▒▒▒▒▒▒end─begin▒▒▒▒▒...
    publisher    ───────────waits─────────█──────────           █ reads the agent

Updates of several threads overlap freely. A publisher waits until none is under way, and updates that would begin
meanwhile wait for it, so that it is not starved. A consumer that publishes in the middle of its own update chose that
point: it does not count as updating while it publishes or waits to, so two consumers that publish cannot deadlock.
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
"""A publisher that has waited this long names the consumers it waits for."""
_POLL_S = 1.0  # how often a waiting publisher looks whether the thread of an update has died


@dataclass(eq=False)
class Turn:
    """A publisher's place in the queue."""

    thread: int
    """The thread that publishes."""
    since: float
    limit_s: float
    in_place: bool = True
    """The thread waits for the turn; else it goes on, and its own updates count."""
    on_grant: Callable[[], None] | None = None
    granted: bool = False
    refused: str = ""
    warned: bool = False

    @property
    def next_check(self) -> float:
        """When `UpdateGate.check` has something to say, if the turn was not granted before."""
        return self.since + (self.limit_s if self.warned else min(WARN_S, self.limit_s))


@dataclass(frozen=True)
class _Update:
    thread: threading.Thread
    consumer: str


class UpdateGate:
    """Which threads may be changing the agent, and whose turn it is to publish it."""

    def __init__(self) -> None:
        self.limit_s = 300.0
        """How long a publisher waits for updates to end."""
        self._changed = threading.Condition()
        self._updates: dict[Hashable, _Update] = {}
        self._failed: dict[Hashable, str] = {}
        """Updates that raised: the agent may be half-updated until the run has ended."""
        self._paused: Counter[int] = Counter()
        """Threads that are between two updates of one message."""
        self._turns: deque[Turn] = deque()
        self._active: Turn | None = None
        self._closed = self._run_ends = False

    # ---- updates ----

    def begin(self, key: Hashable, consumer: str, patient: bool = True) -> None:
        """The calling thread may change the agent from now on; waits while another thread publishes, and if `patient`
        while one waits to."""
        me = threading.get_ident()

        def may_begin() -> bool:
            if self._active is not None and self._active.thread != me:
                return False
            return not (patient and self._turns) or self._updates_in(me)

        with self._changed:
            while not may_begin() and not self._closed:
                self._changed.wait(_POLL_S)
                self._advance()
            self._updates[key] = _Update(threading.current_thread(), consumer)

    def end(self, key: Hashable, raised: bool = False) -> None:
        """The update is complete, or it raised: then publishers wait until the run has ended."""
        with self._changed:
            update = self._updates.pop(key, None)
            if raised and update is not None:
                self._failed[key] = update.consumer
            self._advance()

    @contextlib.contextmanager
    def updating(self, key: Hashable, consumer: str) -> Iterator[None]:
        """One update, in the thread of the loop: it does not wait for publishers that wait, only between two."""
        raised = True
        try:
            self.begin(key, consumer, patient=False)
            yield
            raised = False
        finally:
            self.end(key, raised)

    @contextlib.contextmanager
    def between_updates(self) -> Iterator[None]:
        """The calling thread changes nothing meanwhile, although its message is not done."""
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
                        self._changed.wait(_POLL_S)
                    self._paused[me] -= 1

    def ending_run(self) -> None:
        """The run ends: publishers do not wait for updates that raised, they have a ClosedError."""
        with self._changed:
            self._run_ends = True
            self._changed.notify_all()

    def end_run(self) -> None:
        """Nothing of the run is under way any more: what is half-updated is the caller's to repair and to publish."""
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
    def publishing(self) -> Iterator[None]:
        """No update is under way, other than one of the calling thread itself; raises `PublishTimeout` after `limit_s`
        seconds of waiting for one."""
        turn = Turn(threading.get_ident(), time.monotonic(), self.limit_s)
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
                self._changed.wait(max(0.0, min(_POLL_S, turn.next_check - time.monotonic())))
                self._advance()

    def _holds_turn(self, thread: int) -> bool:
        return self._active is not None and self._active.thread == thread

    def request(self, on_grant: Callable[[], None]) -> Turn:
        """A turn for the calling thread, which does not wait for it; `on_grant` is called, in any thread, when it is
        granted. Whoever has it calls `check` at `turn.next_check`, and `release` in the end."""
        turn = Turn(threading.get_ident(), time.monotonic(), self.limit_s, in_place=False, on_grant=on_grant)
        with self._changed:
            self._turns.append(turn)
            self._advance()
        return turn

    def check(self, turn: Turn) -> None:
        """Warn, or raise, if a turn has waited for too long."""
        with self._changed:
            self._advance()
            if not turn.granted:
                self._check(turn)

    def release(self, turn: Turn) -> None:
        """The turn is over, or not wanted any more."""
        with self._changed:
            if self._active is turn:
                self._active = None
            elif turn in self._turns:
                self._turns.remove(turn)
            self._advance()
            self._changed.notify_all()

    def close(self) -> None:
        """Publishers that wait have a ClosedError, updates that wait begin."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _blockers(self) -> list[str]:
        """The consumers that may be changing the agent now."""
        still = {turn.thread for turn in self._turns if turn.in_place}
        still |= {thread for thread, count in self._paused.items() if count}
        updating = [
            update.consumer
            for update in self._updates.values()
            if update.thread.ident not in still and update.thread.is_alive()
        ]
        return [*updating, *self._failed.values()]

    def _advance(self) -> None:
        """Grant the next turn if nothing is in its way."""
        if self._active is None and self._turns and not self._blockers():
            turn = self._active = self._turns.popleft()
            turn.granted = True
            if turn.on_grant is not None:
                turn.on_grant()
            self._changed.notify_all()  # only now: threads that wait call this, too, and would keep each other awake

    def _check(self, turn: Turn) -> None:
        if self._closed:
            raise ClosedError("this cluster was closed while a publisher waited; make a new one.")
        refused = turn.refused or (self._failures() if self._run_ends else "")
        if refused:
            raise ClosedError(
                f"nothing was published: {refused} raised in the middle of its message and ended the run, so the "
                "agent may be half-updated. Bring it to a state that workers may act with, and publish again."
            )
        waited = time.monotonic() - turn.since
        if waited >= turn.limit_s:
            raise PublishTimeout(
                f"nothing was published: {self._names()} for {turn.limit_s:g} s (end_s). Publish in that consumer, "
                "between its updates, or let it return more often; if it does not change the agent, register it with "
                "flow.on(..., updates=False); if it needs longer, raise Workflow(end_s=...)."
            )
        if waited >= WARN_S and not turn.warned:
            turn.warned = True
            log.warning(
                "publishing has waited for %.0f s: %s. If that consumer does not change the agent, register it with "
                "flow.on(..., updates=False).",
                waited,
                self._names(),
            )

    def _names(self) -> str:
        found = self._blockers() or ["another publisher"]
        return f"{' and '.join(dict.fromkeys(found))} {'has' if len(found) == 1 else 'have'} been at work"
