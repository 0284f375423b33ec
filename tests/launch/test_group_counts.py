"""The number of connected and expected nodes of a group under random events, compared with a model of SLURM."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from farstep.head.events import EventLog
from farstep.launch.engines.engine import Group, RequestStatus
from farstep.launch.groups import WatchedGroup

pytestmark = pytest.mark.slow  # many histories


@dataclass
class Job:
    """Its node daemons are starting (`pending`), connected (`connected`), or gone."""

    number: int
    size: int
    state: str = "PENDING"
    pending: list[str] = field(default_factory=list)
    connected: list[str] = field(default_factory=list)

    @property
    def places(self) -> list[str]:
        return [f"SLURM job {self.number}, node n{i}" for i in range(self.size)]

    @property
    def expected(self) -> int:
        return self.size if self.state == "PENDING" else len(self.connected) + len(self.pending)


def never() -> Group:
    raise AssertionError("not requested in this test")


class Jobs(RuleBasedStateMachine):
    @initialize(sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3))
    def submit(self, sizes: list[int]) -> None:
        self.jobs = [Job(number, size) for number, size in enumerate(sizes)]
        self.watched = WatchedGroup(sum(sizes), never, EventLog().emit)
        self.seen = False
        self.look()

    def of(self, data: st.DataObject, *states: str) -> Job | None:
        found = [job for job in self.jobs if job.state in states]
        return data.draw(st.sampled_from(found)) if found else None

    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        if job := self.of(data, "PENDING"):
            job.state, job.pending, job.connected = "RUNNING", job.places, []
            self.seen = False

    @rule(data=st.data())
    def come(self, data: st.DataObject) -> None:
        if (job := self.of(data, "RUNNING")) and job.pending:
            place = job.pending.pop(data.draw(st.integers(0, len(job.pending) - 1)))
            job.connected.append(place)
            self.watched.joined(place)
            self.seen = False

    @rule(data=st.data())
    def come_and_be_turned_away(self, data: st.DataObject) -> None:
        if (job := self.of(data, "RUNNING")) and job.pending:
            self.watched.rejected(data.draw(st.uuids()).hex[:16], job.pending.pop())
            self._maybe_end(job)

    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        """A node daemon is lost; with the last one, its job ends."""
        if (job := self.of(data, "RUNNING")) and job.connected:
            self.watched.left(job.connected.pop(data.draw(st.integers(0, len(job.connected) - 1))), for_good=True)
            self._maybe_end(job)

    def _maybe_end(self, job: Job) -> None:
        if not job.connected and not job.pending:
            job.state = "ENDED"
        self.seen = False

    @rule(data=st.data(), again=st.booleans())
    def reclaim(self, data: st.DataObject, again: bool) -> None:
        """Preempted and queued again, or cancelled."""
        if job := self.of(data, "RUNNING", "PENDING"):
            for place in job.connected:
                self.watched.left(place, for_good=False)
            job.state, job.pending, job.connected = "PENDING" if again else "ENDED", [], []
            self.look()  # waits for a reclaimed node until the engine reports more

    @rule()
    def look(self) -> None:
        nodes = sum(job.size for job in self.jobs if job.state != "ENDED")
        over = [f"SLURM job {job.number}" for job in self.jobs if job.state == "ENDED"]
        restarting = [f"SLURM job {job.number}" for job in self.jobs if job.state == "PENDING"]
        self.watched.note_status(
            RequestStatus("", nodes, ended=dict.fromkeys(over, "over"), restarting=restarting), time.monotonic()
        )
        self.watched.expected()  # as the head asks all the time
        self.seen = True

    @precondition(lambda self: getattr(self, "seen", False))
    @invariant()
    def counts(self) -> None:
        assert self.watched.expected() == sum(job.expected for job in self.jobs)
        assert self.watched.connected == sum(len(job.connected) for job in self.jobs)


TestJobs = Jobs.TestCase
TestJobs.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
