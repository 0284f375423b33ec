"""Membership on a fake clock with random workers, every promise checked after every event."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from farstep.config.launch import RESTART_WINDOW_S
from farstep.head.members.membership import (
    DEATH_S,
    Action,
    Disconnected,
    Ended,
    Failed,
    GiveUp,
    Hello,
    Kill,
    Lost,
    Membership,
    Observed,
    Ready,
    Start,
)
from farstep.testing import FakeClock

LIMITS_S = {"connect": 60.0, "construct": 30.0, "reset": 5.0, "step": 2.0}
PHASES = ["", "construct", "reset", "step", "unlimited"]


@dataclass
class Process:
    """The true state of a process, as opposed to that in `Membership`."""

    running: bool = False
    incarnation: int = -1
    said_hello: bool = False
    said_ready: bool = False
    killed: bool = False
    killed_at: float = 0.0
    lost: bool = True
    phase: str = ""
    count: int = 0
    moved_at: float = 0.0
    ended_at: float = 0.0


class MemberWorld:
    def __init__(self, seed: int, workers: int, budget: int) -> None:
        self.rng = random.Random(seed)
        self.clock = FakeClock(1000.0)
        self.budget = budget
        self.membership = Membership(workers, LIMITS_S, budget)
        self.processes = [Process() for _ in range(workers)]
        self.failures: list[float] = []
        self.gave_up = False
        self.kills = 0
        self.restarts = 0
        self._perform(self.membership.start(self.clock()))

    # ---- events ----

    def random_event(self) -> None:
        events = {
            self.advance: 20,
            self.greet: 15,
            self.progress: 30,
            self.same: 15,
            self.end: 2,
            self.vanish: 1,
            self.fail: 0.5,
            self.nonsense: 5,
        }
        self.rng.choices(list(events), list(events.values()))[0]()

    def advance(self) -> None:
        """Let time pass; sometimes hours, as when the head was suspended. Killed processes end soon."""
        for worker, process in enumerate(self.processes):
            if process.killed and process.running and self.rng.random() < 0.99:
                self._end(worker)
        self.clock.advance(self.rng.choice((0.01, 0.5, 1.5, 3.0, 40.0)))
        self.tick()

    def tick(self) -> None:
        now = self.clock()
        overdue = {w for w, p in enumerate(self.processes) if self._overdue(p)}
        undead = any(p.running and p.killed and now - p.killed_at > DEATH_S for p in self.processes)
        actions = self.membership.tick(now)
        gives_up = any(isinstance(action, GiveUp) for action in actions)
        assert gives_up == (undead and not self.gave_up), "a process that does not die ends the run, once"
        assert {a.worker for a in actions if isinstance(a, Kill)} == overdue, "exactly the stuck workers are killed"
        self._perform(actions)

    def _overdue(self, process: Process) -> bool:
        phase = process.phase if process.said_hello else "connect"
        limit = LIMITS_S.get(phase)
        alive = process.running and not process.killed
        return alive and limit is not None and self.clock() - process.moved_at > limit

    def greet(self) -> None:
        worker, process = self._any()
        if process.running and not process.killed:
            if not process.said_hello:
                process.said_hello, process.moved_at = True, self.clock()
                self._handle(Hello(worker))
            elif not process.said_ready:
                process.said_ready, process.moved_at = True, self.clock()
                self._handle(Ready(worker))

    def progress(self) -> None:
        """A worker does something, or becomes idle."""
        worker, process = self._any()
        if process.running and not process.killed:
            process.phase, process.moved_at = self.rng.choice(PHASES), self.clock()
            process.count += 1
            self._handle(Observed(worker, process.phase, (process.count, 0)))

    def same(self) -> None:
        """The same words are observed again, which is no progress."""
        worker, process = self._any()
        if process.running and process.count:
            self._handle(Observed(worker, process.phase, (process.count, 0)))

    def end(self) -> None:
        worker, process = self._any()
        if process.running:
            self._end(worker)

    def _end(self, worker: int) -> None:
        process = self.processes[worker]
        process.running, process.ended_at = False, self.clock()
        self._fail_of(worker, Ended(worker))

    def vanish(self) -> None:
        """Its connection closes; the process is still there until it is reported as ended."""
        worker, process = self._any()
        if process.running and not process.killed:
            self._handle(Disconnected(worker))
            assert process.killed, "a process without a connection must not write any more"

    def fail(self) -> None:
        worker, process = self._any()
        if process.said_ready and process.running and not process.killed:
            self._fail_of(worker, Failed(worker))

    def nonsense(self) -> None:
        """Late, repeated and unexpected events change nothing."""
        worker, process = self._any()
        if not process.running:
            for event in (Hello(worker), Ready(worker), Disconnected(worker), Ended(worker)):
                assert self.membership.handle(event, self.clock()) == []
        elif process.said_ready:
            for event in (Hello(worker), Ready(worker)):
                assert self.membership.handle(event, self.clock()) == []

    def _any(self) -> tuple[int, Process]:
        worker = self.rng.randrange(len(self.processes))
        return worker, self.processes[worker]

    def _handle(self, event: Hello | Ready | Disconnected | Observed) -> None:
        self._perform(self.membership.handle(event, self.clock()))

    def _fail_of(self, worker: int, event: Ended | Failed) -> None:
        """A failure that costs a restart: within the budget of the last ten minutes, or the run ends."""
        now = self.clock()
        if not self.gave_up:
            self.failures.append(now)
        spent = sum(now - at <= RESTART_WINDOW_S for at in self.failures)
        actions = self.membership.handle(event, now)
        gives_up = any(isinstance(action, GiveUp) for action in actions)
        assert gives_up == (spent > self.budget and not self.gave_up)
        self._perform(actions)

    # ---- actions ----

    def _perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            process = self.processes[action.worker]
            match action:
                case Start():
                    assert not self.gave_up
                    assert not process.running, "two incarnations would write into the same columns"
                    assert process.lost, "its tickets were not reclaimed"
                    assert action.incarnation == process.incarnation + 1
                    self.restarts += action.incarnation > 0
                    started = Process(running=True, incarnation=action.incarnation, lost=False)
                    started.moved_at = self.clock()
                    self.processes[action.worker] = started
                case Kill():
                    assert process.running and not process.killed, "killed twice"
                    process.killed, process.killed_at = True, self.clock()
                    self.kills += 1
                case Lost():
                    assert not process.lost
                    process.lost = True
                case GiveUp():
                    assert not self.gave_up
                    self.gave_up = True
