"""The life cycle of each worker, as a state machine without I/O.

    starting ─hello─► constructing ─ready─► alive ─idle─► parked ─unpark─► alive
                                            alive ─release─► released ─acquire─► alive
        └───────────────┴────── stuck, gone ──┴─► dying ─ended─► waiting ─back-off over─► starting (incarnation + 1)
        └───────────────┴──────── dismissed ──┴─► dying ─ended─► stopped

The supervisor reports events with `handle`, calls `tick` periodically, and performs the actions that both return. A
worker is restarted only after its process has certainly ended, so that two of its processes never write to the same
columns. A parked worker has no time limits. If its process ends, it is restarted when it is unparked. A released worker
is suspended because it has nothing to do; unlike a parked one, it takes part in the next rollout. It has no time limits
either.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from farstep.config.launch import RESTART_WINDOW_S
from farstep.elastic.slot_ledger import SlotLedger

STACKS_S = 2.0
"""Maximum seconds from the request for a stuck worker's stack traces to its kill; a remote worker needs this time to
send them."""
DEATH_S = 60.0
"""Seconds for a killed process to end. If the kernel cannot end it in time (hung file system), the run fails."""
_BACKOFF_S = (0.0, 0.1, 0.5, 1.0, 2.0, 5.0)
"""Seconds before a restart, by number of consecutive failures."""


class State(Enum):
    STARTING = "starting"
    CONSTRUCTING = "constructing"
    ALIVE = "alive"
    RELEASED = "released"
    PARKED = "parked"
    DYING = "dying"
    WAITING = "waiting"
    STOPPED = "stopped"


RUNNING = (State.STARTING, State.CONSTRUCTING, State.ALIVE, State.RELEASED)
_HOLDING = (State.STARTING, State.CONSTRUCTING, State.ALIVE, State.DYING)
"""States in which a worker holds its slot; a worker that waits for a node (phase `queued`) does not."""

# ---- events ----


@dataclass(frozen=True)
class Hello:
    worker: int


@dataclass(frozen=True)
class Ready:
    worker: int


@dataclass(frozen=True)
class Disconnected:
    """The worker's connection closed; its process may still run."""

    worker: int


@dataclass(frozen=True)
class Ended:
    """The worker's process has certainly ended."""

    worker: int
    blameless: bool = False
    """Whether the process ended because its node did; this uses no restart budget."""


@dataclass(frozen=True)
class NotStarted:
    """The worker could not be started for lack of file descriptors, processes or memory; a retry may succeed."""

    worker: int


@dataclass(frozen=True)
class Failed:
    """An environment of the worker raised; the worker continued with other episodes."""

    worker: int


@dataclass(frozen=True)
class Observed:
    """A worker's progress words: its phase (empty if the worker has nothing to do), and counters that change with
    progress."""

    worker: int
    phase: str
    count: tuple[int, ...]


@dataclass(frozen=True)
class Park:
    """The worker is to be parked as soon as it is idle."""

    worker: int


@dataclass(frozen=True)
class Idle:
    """The worker has no ticket and will get none, so that its process may be suspended."""

    worker: int


@dataclass(frozen=True)
class Unpark:
    """The worker is to run again, or is not to be parked after all."""

    worker: int


@dataclass(frozen=True)
class Release:
    """The worker has nothing to do now, so that its process may be suspended."""

    worker: int


@dataclass(frozen=True)
class Acquire:
    """The worker must run, because it has something to do."""

    worker: int


@dataclass(frozen=True)
class Dismiss:
    """The acting server is no longer needed: its process must end, and is not restarted."""

    worker: int


Event = (
    Hello
    | Ready
    | Disconnected
    | Ended
    | NotStarted
    | Failed
    | Observed
    | Park
    | Idle
    | Unpark
    | Release
    | Acquire
    | Dismiss
)

# ---- actions ----


@dataclass(frozen=True)
class Start:
    worker: int
    incarnation: int


@dataclass(frozen=True)
class Kill:
    worker: int
    stuck_in: str = ""
    """The phase in which the worker made no progress; empty if its connection closed."""


@dataclass(frozen=True)
class Lost:
    """The tickets of the worker must be reclaimed."""

    worker: int


@dataclass(frozen=True)
class GiveUp:
    """The run must fail: the restart budget is used up, or a process cannot be killed or cannot be started."""

    worker: int
    failures: int = 0
    """Number of failures if they exceeded the budget; 0 for any other reason."""


@dataclass(frozen=True)
class RequestStacks:
    """Stack traces must be requested: without progress, the worker is declared stuck within `STACKS_S` seconds."""

    worker: int


@dataclass(frozen=True)
class Retire:
    """The worker is to become idle, because it is to be parked."""

    worker: int


@dataclass(frozen=True)
class SuspendParked:
    """The process of the worker, which is now parked, must be suspended."""

    worker: int


@dataclass(frozen=True)
class ResumeParked:
    """The suspended process of the worker must continue."""

    worker: int


@dataclass(frozen=True)
class SuspendReleased:
    """The process of the worker, which is now released, must be suspended."""

    worker: int


@dataclass(frozen=True)
class ResumeReleased:
    """The suspended process of a released worker must continue."""

    worker: int
    suspended_s: float


Action = (
    Start
    | Kill
    | Lost
    | GiveUp
    | RequestStacks
    | Retire
    | SuspendParked
    | ResumeParked
    | SuspendReleased
    | ResumeReleased
)


@dataclass
class Member:
    """One worker, through all its processes."""

    state: State = State.WAITING
    incarnation: int = -1
    since: float = 0.0
    """Time of the last change of state or, if later, of the last progress."""
    seen: tuple[str, tuple[int, ...]] = ("", ())
    """Phase and counters of the last `Observed`."""
    restart_at: float = 0.0
    failures: int = 0
    """Consecutive failures, for the back-off; reset to 0 when the worker becomes ready."""
    stacks_requested: bool = False
    """Whether the stacks were requested since the worker last made progress."""
    blameless: bool = False
    """Whether the last process ended because its node did."""
    attempts: int = 0
    """Consecutive starts that failed for lack of resources."""
    short_since: float = 0.0
    """Time of the first of these failed starts."""
    retiring: bool = False
    """Whether the worker is to be parked as soon as it is idle."""
    ended: Ended | None = None
    """How the process of a parked worker ended; None if it has not."""
    dismissed: bool = False
    """Whether the process is not to be restarted."""


class Membership:
    """The states of all workers of a run.

    Args:
        workers: Number of workers.
        limits_s: For each phase, seconds without progress after which a worker counts as stuck.
        restart_budget: Number of failures tolerated within `RESTART_WINDOW_S` seconds; one more fails the run.
        servers: Number of acting servers, which are members after the workers. They hold no slots.
    """

    def __init__(self, workers: int, limits_s: dict[str, float], restart_budget: int, servers: int = 0) -> None:
        self.members = [Member() for _ in range(workers + servers)]
        self._num_workers = workers
        self.restarts = 0
        self.slots = SlotLedger()
        """The time in which workers hold their slots: while they run, from the start of each process."""
        self._limits_s, self.restart_budget = limits_s, restart_budget
        self._recent: deque[float] = deque()
        self.stopping = False
        self.restart_is_due = False
        """Whether a worker is to be restarted at once, so that `tick` should be called now."""

    def count(self, *states: State) -> int:
        """The number of workers in these states."""
        return sum(member.state in states for member in self.members[: self._num_workers])

    def is_suspended(self, worker: int) -> bool:
        """Whether the process of a worker is suspended. A parked worker whose process has ended does not count."""
        member = self.members[worker]
        return member.state is State.PARKED and member.ended is None

    def is_running(self, worker: int) -> bool:
        """Whether the worker's process runs and was not declared lost."""
        return self.members[worker].state in RUNNING

    def start(self, now: float) -> Sequence[Action]:
        """Start all workers for the first time."""
        return [self._start(worker, now) for worker in range(len(self.members))]

    def stop(self) -> None:
        """Expect workers to end, and do not restart them."""
        self.stopping = True

    def handle(self, event: Event, now: float) -> Sequence[Action]:
        """Update the worker's state and return what to do."""
        member = self.members[event.worker]
        match event:
            case Hello() if member.state is State.STARTING:
                member.attempts = 0
                self._enter(event.worker, State.CONSTRUCTING, now)
            case Ready() if member.state is State.CONSTRUCTING:
                self._enter(event.worker, State.ALIVE, now)
                member.failures = 0
                return [Retire(event.worker)] if member.retiring else []
            case Park():
                return self._park(event.worker, member)
            case Idle() if member.state is State.ALIVE and member.retiring and not self.stopping:
                member.retiring = False
                self._enter(event.worker, State.PARKED, now)
                return [SuspendParked(event.worker)]
            case Release() if member.state is State.ALIVE and not member.retiring and not self.stopping:
                self._enter(event.worker, State.RELEASED, now)
                return [SuspendReleased(event.worker)]
            case Acquire() if member.state is State.RELEASED:
                suspended_s = now - member.since
                self._enter(event.worker, State.ALIVE, now)
                return [ResumeReleased(event.worker, suspended_s)]
            case Unpark():
                return self._unpark(event.worker, member, now)
            case Ended() if member.state is State.PARKED and not self.stopping:
                member.ended = event
                return [Lost(event.worker)]
            case Dismiss():
                return self._dismiss(event.worker, member, now)
            case Disconnected() if member.state in RUNNING:  # a parked worker does not react; `Ended` reports its end
                self._enter(event.worker, State.DYING, now)
                return [Lost(event.worker), Kill(event.worker)]
            case Ended() if member.state not in (State.WAITING, State.STOPPED):
                lost = [] if member.state is State.DYING else [Lost(event.worker)]
                return [*lost, *self._ended(event, now)]
            case NotStarted() if member.state is State.STARTING:
                return self._not_started(event.worker, now)
            case Failed():
                return self._spend(event.worker, now)
            case Observed() if member.state is not State.RELEASED:
                self._observed(event, now)
        return []

    def tick(self, now: float) -> Sequence[Action]:
        """Return the actions that are due: restarts after a back-off, and kills after a time limit."""
        actions: list[Action] = []
        self.restart_is_due = False
        for worker, member in enumerate(self.members):
            actions += self._restart_if_due(worker, now)
            if member.state is State.DYING and now - member.since > DEATH_S and not self.stopping:
                self.stopping = True
                actions.append(GiveUp(worker))
            phase = member.seen[0]
            if member.state is State.STARTING and phase != "queued":
                phase = "connect"
            limit = self._limits_s.get(phase)
            if member.state not in RUNNING or member.state is State.RELEASED or limit is None:
                continue
            if now - member.since > limit:
                self._enter(worker, State.DYING, now)
                actions += [Lost(worker), Kill(worker, stuck_in=phase)]
            elif now - member.since > max(limit / 2, limit - STACKS_S) and member.state is not State.STARTING:
                actions += [] if member.stacks_requested else [RequestStacks(worker)]
                member.stacks_requested = True
        return actions

    def _park(self, worker: int, member: Member) -> Sequence[Action]:
        if member.state is State.PARKED or member.retiring:
            return []
        member.retiring = True
        return [Retire(worker)] if member.state in (State.ALIVE, State.RELEASED) else []

    def _unpark(self, worker: int, member: Member, now: float) -> Sequence[Action]:
        member.retiring = False
        if member.state is not State.PARKED:
            return []
        if member.ended is None:
            self._enter(worker, State.ALIVE, now)
            return [ResumeParked(worker)]
        ended, member.ended = member.ended, None
        spent = self._ended(ended, now)  # only now does its end use the restart budget
        return [*spent, *self._restart_if_due(worker, now)]

    def _dismiss(self, worker: int, member: Member, now: float) -> Sequence[Action]:
        member.dismissed = True
        if member.state is State.WAITING:
            self._enter(worker, State.STOPPED, now)
        if member.state not in RUNNING:
            return []
        self._enter(worker, State.DYING, now)
        return [Lost(worker), Kill(worker)]

    def _observed(self, event: Observed, now: float) -> None:
        member, seen = self.members[event.worker], (event.phase, event.count)
        if member.state is State.STARTING and event.worker < self._num_workers:
            (self.slots.release if event.phase == "queued" else self.slots.acquire)(event.worker, now)
        if seen != member.seen:
            member.seen, member.since, member.stacks_requested = seen, now, False

    def _enter(self, worker: int, state: State, now: float) -> None:
        member = self.members[worker]
        member.state, member.since, member.stacks_requested = state, now, False
        if worker < self._num_workers:
            (self.slots.acquire if state in _HOLDING else self.slots.release)(worker, now)

    def _start(self, worker: int, now: float) -> Start:
        member = self.members[worker]
        member.incarnation += 1
        member.seen = ("", ())
        self._enter(worker, State.STARTING, now)
        return Start(worker, member.incarnation)

    def _restart_if_due(self, worker: int, now: float) -> Sequence[Action]:
        """Restart a worker that waits for it, unless its back-off has not passed yet."""
        member = self.members[worker]
        if member.state is not State.WAITING or now < member.restart_at or self.stopping:
            return []
        self.restarts += not member.blameless
        return [self._start(worker, now)]

    def _not_started(self, worker: int, now: float) -> Sequence[Action]:
        """Retry until the time limit of a start. This uses no restart budget, because the worker did not fail."""
        member = self.members[worker]
        if self.stopping:
            self._enter(worker, State.STOPPED, now)
            return []
        if not member.attempts:
            member.short_since = now
        self._enter(worker, State.WAITING, now)
        self.restarts -= not member.blameless
        member.incarnation -= 1
        member.restart_at = now + _BACKOFF_S[min(1 + member.attempts, len(_BACKOFF_S) - 1)]
        member.attempts += 1
        if now - member.short_since > self._limits_s["connect"]:
            self.stopping = True
            return [GiveUp(worker)]
        return []

    def _ended(self, event: Ended, now: float) -> Sequence[Action]:
        member = self.members[event.worker]
        if self.stopping or member.dismissed:
            self._enter(event.worker, State.STOPPED, now)
            return []
        self._enter(event.worker, State.WAITING, now)
        member.blameless = event.blameless
        if event.blameless:
            member.restart_at = now
            return []
        member.restart_at = now + _BACKOFF_S[min(member.failures, len(_BACKOFF_S) - 1)]
        self.restart_is_due |= member.restart_at <= now
        member.failures += 1
        return self._spend(event.worker, now)

    def _spend(self, worker: int, now: float) -> Sequence[Action]:
        """Charge a failure to the restart budget. Old failures are forgotten, so that rare failures do not add up."""
        if self.stopping:
            return []
        while self._recent and now - self._recent[0] > RESTART_WINDOW_S:
            self._recent.popleft()
        self._recent.append(now)
        if len(self._recent) > self.restart_budget:
            self.stopping = True
            return [GiveUp(worker, len(self._recent))]
        return []
