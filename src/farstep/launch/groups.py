"""Nodes that were asked of an engine, group by group: how they stand, and asking again for those that are over."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from farstep.config.launch import RESTART_WINDOW_S, EngineConfig
from farstep.errors import FarstepError, LaunchError, counted
from farstep.launch.engine import Engine, EngineLost, Group, RequestStatus

log = logging.getLogger("farstep")
_LOOK_S = 2.0
_MOST_PAUSE_S = 60.0
"""Between asking for nodes and asking again for those that did not come."""
_END_S = 120.0
"""How long an engine that does not answer may keep the end of a run waiting."""


class Watched:
    """A group. All that its engine is asked, a thread asks: engines take their time to answer."""

    def __init__(self, nodes: int, ask: Callable[[], Group]) -> None:
        self._nodes, self._ask = nodes, ask
        self._group: Group | None = None
        self._look = (0.0, RequestStatus("asked for", nodes))
        """When the engine was last asked how it is, and what it said."""
        self._gone: list[str] = []
        """Places of nodes of it that were there and will not be again, as far as is known."""
        self._gone_at = 0.0
        self._turned_away: set[str] = set()
        """Agents of it that came and were not needed."""
        self._taken = 0
        """Nodes that their engine took back: it brings them again, or says that they are over."""
        self._places: list[str] = []
        """Of nodes of it that are there."""
        self._logs: str | None = None
        """What they said, once it is over."""
        self.last_words = ""
        """The last line of what nodes said, when some of them had ended."""
        self._cancelled = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="farstep-engine")

    def ask(self) -> None:
        """Now, so that the caller learns what is wrong; else the thread does."""
        self._group = self._ask()

    def watch(self) -> None:
        self._thread.start()

    @property
    def standing(self) -> RequestStatus:
        return self._look[1]

    @property
    def here(self) -> int:
        """Nodes of it that are there."""
        return len(self._places)

    def expected(self) -> int:
        """Nodes of it that are there, or may come without being asked for again."""
        looked_at, standing = self._look
        if standing.lost:
            return self.here
        if looked_at > self._gone_at:
            self._forget(standing)
        return max(self.here, standing.nodes - self._unnoticed(standing))

    def _forget(self, standing: RequestStatus) -> None:
        """Nodes that are not gone after all: SLURM starts a job that lost its nodes once more."""
        if standing.over is not None:
            self._gone = [place for place in self._gone if place.partition(",")[0] not in standing.anew]
        else:
            mistaken = self._unnoticed(standing) - max(0, standing.nodes - self.here - standing.coming)
            del self._gone[: max(0, mistaken)]

    def _unnoticed(self, standing: RequestStatus) -> int:
        """Of the nodes that are gone, those that the engine still counts."""
        if standing.over is not None:
            return sum(not standing.is_over(place) for place in self._gone)
        return max(0, len(self._gone) - max(0, self._nodes - standing.nodes - self._taken))

    def welcomed(self, place: str) -> None:
        """An agent of it came, perhaps again."""
        self._places.append(place)
        if place in self._gone:
            self._gone.remove(place)
        absent = max(0, self._nodes - self.here)
        self._taken = min(self._taken, absent)
        del self._gone[absent:]

    def turned_away(self, agent: str, place: str) -> None:
        """An agent of it came and was told to leave; it may say so several times."""
        if agent not in self._turned_away and len(self._turned_away) < self._nodes:
            self._turned_away.add(agent)
            self._lose(place)

    def left(self, place: str, for_good: bool) -> None:
        """A node is not there any more; not for good if its engine said that it takes it back for a while."""
        self._places.remove(place)
        if for_good:
            self._lose(place)
        else:
            self._taken += 1

    def _lose(self, place: str) -> None:
        self._gone.append(place)
        self._gone_at = time.monotonic()

    def _watch(self) -> None:
        try:
            if self._group is None:
                self.ask()
        except Exception as error:  # an engine that was there may be there again soon
            log.warning("%s: %s Going on without for now.", type(error).__name__, error)
            self._look = (time.monotonic(), RequestStatus(str(error), 0, lost=isinstance(error, EngineLost)))
        if self._group is None:
            return
        while self.standing.nodes and not self._cancelled.wait(_LOOK_S):
            began, before, now = time.monotonic(), self.standing, self._how(self._group)
            if now.nodes < before.nodes:
                said = _said_by(self._group)
                self.last_words = next(reversed(said.splitlines()), "")
                self._logs = None if now.nodes else said  # before anybody knows that it is over
            self._look = (began, now)
        self._group.cancel()

    def _how(self, group: Group) -> RequestStatus:
        before = self.standing
        try:
            group.there(tuple(self._places))
            return group.standing()
        except Exception as error:  # an engine that cannot be asked may still have nodes for us
            text = f"the engine does not answer: {error if isinstance(error, FarstepError) else repr(error)}"
            if text != before.text:
                log.warning("%s", text)
            return RequestStatus(text, before.nodes, lost=isinstance(error, EngineLost))

    def logs(self) -> str:
        if self._logs is not None:
            return self._logs
        return _said_by(self._group) if self._group is not None else ""

    def cancel(self) -> None:
        """Soon, without waiting for it."""
        self._cancelled.set()

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()

    def join(self, deadline: float) -> None:
        self._thread.join(max(0.0, deadline - time.monotonic()))


def _said_by(group: Group) -> str:
    try:
        return group.logs()
    except Exception as error:  # whatever happens to a log, a run goes on
        return f"what it said cannot be read: {error!r}"


class Groups:
    """All groups of a run, numbered in the order in which they were asked for."""

    def __init__(self, engine: Engine, config: EngineConfig, bootstrap: Callable[[int], bytes]) -> None:
        """`bootstrap` makes what agents of the group of that number are started with."""
        self._engine, self._config, self._bootstrap = engine, config, bootstrap
        self._asked: list[Watched] = []
        self._asking = threading.Lock()
        """Engines hear one order at a time."""
        self._complete = False
        """Whether there were enough nodes once."""
        self.start_over()

    def start_over(self) -> None:
        """Whatever failed until now is not held against nodes that are asked for from now on."""
        self._retries: deque[float] = deque()
        self._retry_at, self._given_up = 0.0, False

    def __len__(self) -> int:
        return len(self._asked)

    def __getitem__(self, number: int) -> Watched:
        return self._asked[number]

    def ask(self, nodes: int) -> None:
        """Ask for a group of so many nodes; raises `LaunchError` if the engine cannot be used."""
        group = self._new(nodes)
        try:
            group.ask()
        except BaseException:
            self._asked.pop()
            raise
        group.watch()

    def _new(self, nodes: int) -> Watched:
        bootstrap = self._bootstrap(len(self._asked))
        group = Watched(nodes, lambda: self._order(nodes, bootstrap))
        self._asked.append(group)
        return group

    def _order(self, nodes: int, bootstrap: bytes) -> Group:
        with self._asking:
            return self._engine.ask(nodes, bootstrap)

    def ask_again(self, wanted: int, now: float) -> None:
        """Nodes that are over are asked for again; before there were ever enough of them, something is wrong."""
        expected = self.expected()
        self._complete = self._complete or sum(watched.here for watched in self._asked) >= self._config.fewest_nodes
        missing = wanted - expected
        if not self._asked or missing <= 0:
            return
        too_few = expected < self._config.fewest_nodes
        if too_few and (newest := self._asked[-1]).standing.lost:
            raise _missing(missing, newest)
        if now < self._retry_at and not (self._given_up and too_few):
            return
        while self._retries and now - self._retries[0] >= RESTART_WINDOW_S:
            self._retries.popleft()
        over = [watched for watched in self._asked if not watched.standing.nodes]
        last = (over or self._asked)[-1]
        self._retry_at = now + min(_MOST_PAUSE_S, 2.0 ** min(len(self._retries), 10))
        self._given_up = len(self._retries) >= self._config.restart_budget
        if too_few and (self._given_up or not self._complete):
            raise _missing(missing, last, self._budget_used())
        if self._given_up:
            what = f"{last.standing.text}{self._budget_used()}"
            log.warning(
                "%s; continuing with %s, and requesting more in at most %g minutes",
                what,
                counted(expected, "node"),
                RESTART_WINDOW_S / 60,
            )
            self._retry_at = (self._retries[0] if self._retries else now) + RESTART_WINDOW_S
            return
        self._retries.append(now)
        words = f" ({last.last_words})" if last.last_words else ""
        log.warning("%s%s; requesting %s again", last.standing.text, words, counted(missing, "node"))
        self._new(missing).watch()

    def _budget_used(self) -> str:
        """A clause that names the restart budget, if it was used up."""
        budget = self._config.restart_budget
        if not budget or len(self._retries) < budget:
            return ""
        times, minutes = counted(budget, "time"), RESTART_WINDOW_S / 60
        return f"; restart_budget={budget} is used up: nodes were requested again {times} within {minutes:g} minutes"

    def give_back(self, wanted: int) -> None:
        """Cancel groups of which nobody is there and that are not needed for so many nodes."""
        for watched in reversed(self._asked):
            spare = 0 if watched.is_cancelled else watched.expected()
            if spare and not watched.here and self.expected() - spare >= wanted:
                watched.cancel()

    def expected(self) -> int:
        """Nodes of all of them that are there, or may come without being asked for again."""
        return sum(watched.expected() for watched in self._asked if not watched.is_cancelled)

    def standing(self) -> str:
        """What the engine says about those that are not over."""
        there = [watched for watched in self._asked if watched.standing.nodes and not watched.is_cancelled]
        return "; ".join(watched.standing.text for watched in there)

    def logs(self) -> str:
        """Where what nodes said is written, and the end of it."""
        return "\n".join(text for watched in self._asked if (text := watched.logs()))

    def end(self) -> None:
        for watched in self._asked:
            watched.cancel()
        deadline = time.monotonic() + _END_S
        for watched in self._asked:
            watched.join(deadline)


def _missing(nodes: int, group: Watched, budget: str = "") -> LaunchError:
    verb = "is" if nodes == 1 else "are"
    said = f"{group.standing.text}, and {counted(nodes, 'node')} {verb} missing{budget}."
    return LaunchError(f"{said}\n{group.logs()}".rstrip())
