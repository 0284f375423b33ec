"""Watches the groups of nodes that an engine provides, and requests replacements for nodes that have ended."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from farstep.config.launch import RESTART_WINDOW_S, EngineConfig
from farstep.errors import FarstepError, LaunchError, counted
from farstep.event import Emit, traceback_of
from farstep.launch.engines.engine import Engine, EngineLost, Group, RequestStatus

CHECK_S = 2.0
"""Seconds between two status checks of a group."""
_MAX_BACKOFF_S = 60.0
"""Maximum pause in seconds between two requests for replacements; the pause doubles with each retry."""
_END_S = 120.0
"""Maximum seconds by which an unresponsive engine can delay the end of a run."""


class WatchedGroup:
    """A group, and the thread that calls its engine. These calls may block."""

    def __init__(self, nodes: int, request: Callable[[], Group], emit: Emit) -> None:
        self._nodes, self._request, self._emit = nodes, request, emit
        self._group: Group | None = None
        self._checked = (0.0, RequestStatus("requested", nodes))
        """Time of the last status request to the engine, and its answer."""
        self._lost_places: list[str] = []
        """Places of nodes that disconnected and are not expected to return."""
        self._gone_at = 0.0
        self._rejected: dict[str, str] = {}
        """Places of node daemons that connected but were not needed, by the names of the daemons."""
        self._reclaimed = 0
        """Number of nodes that the engine reclaimed. The engine restarts them, or reports that they have ended."""
        self._places: list[str] = []
        """Places of the connected nodes."""
        self._logs: str | None = None
        """The logs of the group; None until all its nodes have ended."""
        self.last_line = ""
        """The last line of the logs at the time when a node ended."""
        self._cancelled = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="farstep-engine")

    def request(self) -> None:
        """Request the nodes in the calling thread, so that errors reach the caller. Without this call, `watch` does
        it."""
        self._group = self._request()

    def watch(self) -> None:
        self._thread.start()

    def note_status(self, status: RequestStatus, asked_at: float) -> None:
        """Record the engine's answer to a status request of the time `asked_at` (`time.monotonic`)."""
        self._checked = (asked_at, status)

    @property
    def status(self) -> RequestStatus:
        return self._checked[1]

    @property
    def connected(self) -> int:
        """Number of connected nodes."""
        return len(self._places)

    def expected(self) -> int:
        """Number of nodes that are connected, or may connect without another request."""
        checked_at, status = self._checked
        if status.engine_lost:
            return self.connected
        if checked_at > self._gone_at:
            self._forget_returning(status)
        return max(self.connected, status.nodes - self._overcounted(status))

    def _forget_returning(self, status: RequestStatus) -> None:
        """Remove from `_lost_places` the nodes that the engine restarts; SLURM requeues a job that lost its nodes."""
        if status.ended is not None:
            jobs = status.restarting
            self._lost_places = [place for place in self._lost_places if place.partition(",")[0] not in jobs]
            self._rejected = {daemon: at for daemon, at in self._rejected.items() if at.partition(",")[0] not in jobs}
        else:
            returning = self._overcounted(status) - max(0, status.nodes - self.connected - status.pending)
            del self._lost_places[: max(0, returning)]

    def _overcounted(self, status: RequestStatus) -> int:
        """Number of nodes in `_lost_places` that the engine still counts."""
        if status.ended is not None:
            return sum(not status.has_ended(place) for place in self._lost_places)
        return max(0, len(self._lost_places) - max(0, self._nodes - status.nodes - self._reclaimed))

    def joined(self, place: str) -> None:
        """Record that a node connected or reconnected."""
        self._places.append(place)
        if place in self._lost_places:
            self._lost_places.remove(place)
        absent = max(0, self._nodes - self.connected)
        self._reclaimed = min(self._reclaimed, absent)
        del self._lost_places[absent:]

    def rejected(self, daemon: str, place: str) -> None:
        """Record that a node daemon was rejected. If it repeats its hello, the repeated call has no effect."""
        if daemon not in self._rejected and len(self._rejected) < self._nodes:
            self._rejected[daemon] = place
            self._lose(place)

    def left(self, place: str, for_good: bool) -> None:
        """Record that a node disconnected. `for_good` is False if the engine reclaimed the node and may restart it."""
        self._places.remove(place)
        if for_good:
            self._lose(place)
        else:
            self._reclaimed += 1

    def _lose(self, place: str) -> None:
        self._lost_places.append(place)
        self._gone_at = time.monotonic()

    def _watch(self) -> None:
        try:
            if self._group is None:
                self.request()
        except Exception as error:  # the engine has worked before, so the failure may be temporary
            text = f"{type(error).__name__}: {error} Continuing without these nodes for now."
            self._emit("warned", text, traceback=traceback_of(error))
            self.note_status(RequestStatus(str(error), 0, engine_lost=isinstance(error, EngineLost)), time.monotonic())
        if self._group is None:
            return
        while self.status.nodes and not self._cancelled.wait(CHECK_S):
            began, before, now = time.monotonic(), self.status, self._check(self._group)
            if now.nodes < before.nodes:
                logs = _logs_of(self._group)
                self.last_line = next(reversed(logs.splitlines()), "")
                self._logs = (
                    None if now.nodes else logs
                )  # set before the status, because other threads read it after they see the status
            self.note_status(now, began)
        self._group.cancel()

    def _check(self, group: Group) -> RequestStatus:
        before = self.status
        try:
            group.set_connected(tuple(self._places))
            return group.status()
        except Exception as error:  # the engine does not answer, but the nodes may still exist
            text = f"the engine does not answer: {error if isinstance(error, FarstepError) else repr(error)}"
            if text != before.text:
                self._emit("warned", text, traceback=traceback_of(error))
            return RequestStatus(text, before.nodes, engine_lost=isinstance(error, EngineLost))

    @property
    def final_logs(self) -> str:
        """The logs of the group if all its nodes have ended, otherwise "". Does not call the engine."""
        return self._logs or ""

    def logs(self) -> str:
        if self._logs is not None:
            return self._logs
        return _logs_of(self._group) if self._group is not None else ""

    def cancel(self) -> None:
        """Make the thread cancel the group. Do not wait for it."""
        self._cancelled.set()

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()

    def join(self, deadline: float) -> None:
        self._thread.join(max(0.0, deadline - time.monotonic()))


def _logs_of(group: Group) -> str:
    try:
        return group.logs()
    except Exception as error:  # an unreadable log must not end a run
        return f"its logs cannot be read: {error!r}"


class Groups:
    """The groups of one engine, numbered in the order of their requests.

    Args:
        engine: Provides the nodes.
        config: How often to request replacements, and the minimum number of nodes.
        bootstrap: `bootstrap(group)` returns the bootstrap of the node daemons of that group.
        emit: Receives events about requests.
        fewest: Minimum number of nodes. None: that of `config`.
        numbers: The numbers of groups, which differ from those of the run's other engines. None: 0, 1, ...
    """

    def __init__(
        self,
        engine: Engine,
        config: EngineConfig,
        bootstrap: Callable[[int], bytes],
        emit: Emit,
        *,
        fewest: int | None = None,
        numbers: Iterator[int] | None = None,
    ) -> None:
        self._engine, self._config, self._bootstrap, self._emit = engine, config, bootstrap, emit
        self._fewest = config.fewest_nodes if fewest is None else fewest
        self._numbers = itertools.count() if numbers is None else numbers
        self._groups: dict[int, WatchedGroup] = {}
        self._request_lock = threading.Lock()
        """Held during a request, because engines receive one request at a time."""
        self._reported: set[tuple[int, str]] = set()
        """Groups and places whose end an event has reported."""
        self._complete = False
        """Whether the minimum number of nodes has ever been connected."""
        self.reset_retries()

    def reset_retries(self) -> None:
        """Restore the full restart budget."""
        self._retries: deque[float] = deque()
        self._retry_at, self._given_up = 0.0, False

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, number: int) -> bool:
        return number in self._groups

    def __getitem__(self, number: int) -> WatchedGroup:
        return self._groups[number]

    def request(self, nodes: int) -> None:
        """Request a group of `nodes` nodes. Raise `LaunchError` if the engine cannot be used."""
        group = self._new(nodes)
        try:
            group.request()
        except BaseException:
            self._groups.popitem()
            raise
        group.watch()

    def _new(self, nodes: int) -> WatchedGroup:
        number = next(self._numbers)
        bootstrap = self._bootstrap(number)
        group = self._groups[number] = WatchedGroup(nodes, lambda: self._request(nodes, bootstrap), self._emit)
        return group

    def _request(self, nodes: int, bootstrap: bytes) -> Group:
        with self._request_lock:
            return self._engine.request(nodes, bootstrap)

    def request_missing(self, wanted: int, now: float) -> None:
        """Request replacements for nodes that have ended.

        Args:
            wanted: Number of nodes that the run should have.
            now: Time in seconds.

        Raises:
            LaunchError: Fewer than the minimum number of nodes are left, and no replacement is possible: the restart
                budget is used up, the engine is lost, or there have never been enough nodes, or can never be.
        """
        expected = self.expected()
        connected = sum(group.connected for group in self._groups.values())
        self._complete = self._complete or connected >= self._fewest
        hopeless = [group for group in self._groups.values() if group.status.hopeless and not group.is_cancelled]
        never = sum(group.status.hopeless for group in hopeless)
        if hopeless and not self._complete and expected - never < self._fewest:
            raise _missing(never, hopeless[0])
        missing = wanted - expected
        if not self._groups or missing <= 0:
            return
        too_few = expected < self._fewest
        if too_few and (newest := next(reversed(self._groups.values()))).status.engine_lost:
            raise _missing(missing, newest)
        if now < self._retry_at and not (self._given_up and too_few):
            return
        while self._retries and now - self._retries[0] >= RESTART_WINDOW_S:
            self._retries.popleft()
        last, state = self._newly_ended()
        self._retry_at = now + min(_MAX_BACKOFF_S, 2.0 ** min(len(self._retries), 10))
        self._given_up = len(self._retries) >= self._config.restart_budget
        if too_few and (self._given_up or not self._complete):
            raise _missing(missing, last, self._budget_used())
        if self._given_up:
            self._emit(
                "warned",
                f"{state}{self._budget_used()}; continuing with {counted(expected, 'node')}, and requesting "
                f"more in at most {RESTART_WINDOW_S / 60:g} minutes",
                traceback=last.final_logs,
            )
            self._retry_at = (self._retries[0] if self._retries else now) + RESTART_WINDOW_S
            return
        self._retries.append(now)
        detail = f" ({last.last_line})" if last.last_line else ""
        text = f"{state}{detail}; requesting {counted(missing, 'node')} again"
        self._emit("resubmitted", text, traceback=last.final_logs)
        self._new(missing).watch()

    def _newly_ended(self) -> tuple[WatchedGroup, str]:
        """The last group of which a node has ended, and the states of all nodes that ended since the last call."""
        new = {
            (number, place): state
            for number, group in self._groups.items()
            for place, state in (group.status.ended or {}).items()
            if (number, place) not in self._reported
        }
        if new:
            self._reported |= new.keys()
            return self._groups[max(number for number, _ in new)], "; ".join(new.values())
        ended = [group for group in self._groups.values() if not group.status.nodes]
        last = (ended or list(self._groups.values()))[-1]
        return last, last.status.text

    def _budget_used(self) -> str:
        """A clause that names the restart budget if it is used up, otherwise ""."""
        budget = self._config.restart_budget
        if not budget or len(self._retries) < budget:
            return ""
        times, minutes = counted(budget, "time"), RESTART_WINDOW_S / 60
        return f"; restart_budget={budget} is used up: nodes were requested again {times} within {minutes:g} minutes"

    def cancel_unneeded(self, wanted: int) -> None:
        """Cancel groups that have no connected node and are not needed to reach `wanted` nodes."""
        for group in reversed(self._groups.values()):
            spare = 0 if group.is_cancelled else group.expected()
            if spare and not group.connected and self.expected() - spare >= wanted:
                group.cancel()

    def expected(self) -> int:
        """Number of nodes of all groups that are connected or may still connect without another request."""
        return sum(group.expected() for group in self._groups.values() if not group.is_cancelled)

    def status(self) -> str:
        """The status of the groups that have not ended, in words."""
        active = [group for group in self._groups.values() if group.status.nodes and not group.is_cancelled]
        return "; ".join(group.status.text for group in active)

    def logs(self) -> str:
        """The paths of the node daemons' logs, and the last lines of each."""
        return "\n".join(text for group in self._groups.values() if (text := group.logs()))

    def end(self) -> None:
        for group in self._groups.values():
            group.cancel()
        deadline = time.monotonic() + _END_S
        for group in self._groups.values():
            group.join(deadline)


def _missing(nodes: int, group: WatchedGroup, budget: str = "") -> LaunchError:
    verb = "is" if nodes == 1 else "are"
    text = f"{group.status.text}, and {counted(nodes, 'node')} {verb} missing{budget}."
    return LaunchError(f"{text}\n{group.logs()}".rstrip())
