"""Requests for replacements of lost nodes: how often, for how long, and when the run gives up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from farstep.config.launch import RESTART_WINDOW_S, SSHConfig
from farstep.errors import LaunchError
from farstep.head.events import EventLog
from farstep.launch import groups as module
from farstep.launch.engines.engine import EngineLost, Group, RequestStatus
from farstep.launch.groups import Groups


class Job(Group):
    def __init__(self, nodes: int) -> None:
        self.stands = RequestStatus(f"job of {nodes}", nodes)
        self.looks = 0
        self.cancelled = False
        self.words = "its last words"

    def status(self) -> RequestStatus:
        self.looks += 1
        return self.stands

    def logs(self) -> str:
        return self.words

    def cancel(self) -> None:
        self.cancelled = True


class Fake:
    """An engine that starts nothing."""

    grace_s = 0.0

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.bootstraps: list[bytes] = []
        self.fails = False

    def listen_on(self) -> Sequence[str]:
        return ()

    def request(self, nodes: int, bootstrap: bytes) -> Job:
        self.bootstraps.append(bootstrap)
        if self.fails:
            raise LaunchError("no answer.")
        self.jobs.append(Job(nodes))
        return self.jobs[-1]

    def close(self) -> None: ...


def eventually(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def engine() -> Fake:
    return Fake()


@pytest.fixture
def make(engine: Fake, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Groups]]:
    """A function that requests `nodes` nodes, of which `here` are connected."""
    monkeypatch.setattr(module, "CHECK_S", 0.001)
    made: list[Groups] = []

    def make(nodes: int = 2, here: int = 2, **options: Any) -> Groups:
        config = SSHConfig(hosts=[f"h{i}" for i in range(nodes)], **{"restart_budget": 3, **options})
        made.append(Groups(engine, config, lambda number: str(number).encode(), EventLog().emit))
        made[-1].request(nodes)
        for _ in range(here):
            made[-1][0].joined("a node")
        if here == nodes:
            made[-1].request_missing(nodes, 0.0)  # as the head does all the time
        return made[-1]

    yield make
    for groups in made:
        groups.end()
    assert all(job.cancelled for job in engine.jobs)


def stands(engine: Fake, job: int, nodes: int, pending: int = 0, ended: Mapping[str, str] | None = None) -> None:
    """Let an engine report this status, and wait until it is read."""
    found = engine.jobs[job]
    found.stands = RequestStatus(found.stands.text, nodes, pending, ended)
    looks = found.looks
    eventually(lambda: found.looks > looks + (1 if nodes else 0))


def attempts(groups: Groups, engine: Fake, wanted: int, seconds: range) -> list[int]:
    """The seconds at which nodes were requested that never joined."""
    found = []
    for now in seconds:
        before = len(groups)
        groups.request_missing(wanted, float(now))
        if len(groups) > before:
            eventually(lambda: len(engine.bootstraps) == len(groups))
            eventually(lambda: engine.fails or len(engine.jobs) == len(groups))
            if not engine.fails:
                stands(engine, -1, 0)
            eventually(lambda: not groups[len(groups) - 1].status.nodes)
            found.append(now)
    return found


def test_complete_group_requests_no_nodes(engine: Fake, make: Callable[..., Groups]) -> None:
    groups = make()
    assert groups.expected() == 2
    assert attempts(groups, engine, 2, range(100)) == []


@pytest.mark.parametrize("fails", [False, True], ids=["engine answers", "engine fails"])
def test_retries_slow_down_until_the_budget_is_used_up_and_the_budget_recovers(
    engine: Fake, make: Callable[..., Groups], fails: bool
) -> None:
    groups = make(min_nodes=1)
    groups[0].left("a node", for_good=True)
    engine.fails = fails
    assert attempts(groups, engine, 2, range(200)) == [0, 1, 3]
    assert engine.bootstraps == [b"0", b"1", b"2", b"3"]
    later = int(RESTART_WINDOW_S)
    assert attempts(groups, engine, 2, range(200, later + 100))[0] == later
    groups.reset_retries()
    assert attempts(groups, engine, 2, range(2000, 2010)) == [2000, 2001, 2003]


def test_rare_losses_do_not_use_up_the_budget(engine: Fake, make: Callable[..., Groups]) -> None:
    groups = make(nodes=1, here=1)
    for hour in range(10):
        groups[len(groups) - 1].left("a node", for_good=True)
        groups.request_missing(1, hour * 3600.0)
        eventually(lambda: len(engine.jobs) == len(groups))
        groups[len(groups) - 1].joined("a node")
        assert len(groups) == hour + 2


def test_too_few_nodes_and_no_budget_end_a_run(engine: Fake, make: Callable[..., Groups]) -> None:
    groups = make(min_nodes=1)
    engine.fails = True
    groups[0].left("a node", for_good=True)
    attempts(groups, engine, 2, range(200))
    groups[0].left("a node", for_good=True)
    with pytest.raises(LaunchError, match=r"2 nodes are missing; restart_budget=3 is used up: .* again 3 times"):
        groups.request_missing(2, 200.0)


@pytest.mark.parametrize("here", [0, 1])
def test_nodes_that_never_joined_are_not_requested_again(engine: Fake, make: Callable[..., Groups], here: int) -> None:
    groups = make(here=here)
    stands(engine, 0, here)
    missing = "1 node is missing" if here else "2 nodes are missing"
    with pytest.raises(LaunchError, match=rf"{missing}\.\nits last words"):
        groups.request_missing(2, 0.0)
    assert len(engine.jobs) == 1


def test_failed_replacement_is_retried(engine: Fake, make: Callable[..., Groups]) -> None:
    """Also where all nodes are needed: a host that is restarting refuses the first connections."""
    groups = make()
    groups[0].left("a node", for_good=True)
    assert attempts(groups, engine, 2, range(4)) == [0, 1, 3]


@pytest.mark.parametrize("noticed", [False, True], ids=["engine has not noticed", "engine has noticed"])
def test_a_lost_node_counts_once(engine: Fake, make: Callable[..., Groups], noticed: bool) -> None:
    groups = make(nodes=4, here=4)
    if noticed:
        stands(engine, 0, 3)
    groups[0].left("a node", for_good=True)
    assert groups.expected() == 3
    groups.request_missing(4, 0.0)
    eventually(lambda: len(engine.jobs) == 2)
    for _ in range(3):  # no node is requested while the replacement is starting
        stands(engine, 1, 1)
        groups.request_missing(4, 100.0)
    assert groups.expected() == 4 and len(groups) == 2


def test_nodes_that_their_engine_restarts_are_not_requested(engine: Fake, make: Callable[..., Groups]) -> None:
    """A SLURM job that is queued again, a pod of a Deployment."""
    groups = make(nodes=4, here=4)
    for _ in range(4):
        groups[0].left("a node", for_good=True)
    assert groups.expected() == 0
    stands(engine, 0, nodes=4, pending=4)
    assert groups.expected() == 4
    stands(engine, 0, nodes=4)  # it runs, and its daemons connect soon
    assert groups.expected() == 4
    for _ in range(4):
        groups[0].joined("a node")
    assert groups.expected() == 4


def test_status_from_before_a_loss_does_not_count_as_its_replacement(engine: Fake, make: Callable[..., Groups]) -> None:
    groups = make(nodes=1, here=0)
    stands(engine, 0, nodes=1, pending=1)
    groups[0].joined("a node")
    groups[0].left("a node", for_good=True)
    engine.jobs[0].stands = RequestStatus("runs", 1)
    stands(engine, 0, nodes=1)
    assert groups.expected() == 0


def test_returned_nodes_are_replaced_like_lost_ones(engine: Fake, make: Callable[..., Groups]) -> None:
    groups = make(nodes=4, here=4)
    for _ in range(2):
        groups[0].left("a node", for_good=True)  # their job continues on the other nodes, and the engine reports 4
    assert groups.expected() == 2
    groups[0].left("a node", for_good=True)
    assert attempts(groups, engine, 2, range(1)) == [0]


def test_groups_that_are_not_needed_any_more_are_cancelled(engine: Fake, make: Callable[..., Groups]) -> None:
    groups = make(nodes=2, here=2)
    groups.request(1)
    groups.request(1)
    groups[2].joined("a node")
    groups.cancel_unneeded(3)
    eventually(lambda: engine.jobs[1].cancelled)
    assert not engine.jobs[0].cancelled and not engine.jobs[2].cancelled
    assert groups.expected() == 3


def test_unusable_engine_raises_at_once(engine: Fake, make: Callable[..., Groups]) -> None:
    engine.fails = True
    with pytest.raises(LaunchError, match="no answer"):
        make()


def test_finished_group_is_removed_and_its_last_output_is_kept(make: Callable[..., Groups], engine: Fake) -> None:
    groups = make(2, here=2)
    stands(engine, 0, 0)
    eventually(lambda: engine.jobs[0].cancelled)
    groups[0].join(time.monotonic() + 60)
    engine.jobs[0].words = "nothing is known of it any more"
    assert groups.logs() == "its last words"


def test_engine_runs_one_command_at_a_time(
    make: Callable[..., Groups], engine: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replacements are requested in threads, and `scale` requests nodes in the caller's."""
    groups = make(2, here=2)
    asking: list[int] = []
    most = 0

    def slow(nodes: int, bootstrap: bytes, really: Callable[..., Job] = engine.request) -> Job:
        nonlocal most
        asking.append(nodes)
        most = max(most, len(asking))
        time.sleep(0.05)
        asking.pop()
        return really(nodes, bootstrap)

    monkeypatch.setattr(engine, "request", slow)
    groups[0].left("a node", for_good=True)
    groups.request_missing(2, 1.0)
    groups.request(1)
    eventually(lambda: len(engine.jobs) == 3)
    assert most == 1


def test_an_engine_that_does_not_answer_is_logged_once(
    make: Callable[..., Groups], engine: Fake, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> RequestStatus:
        engine.jobs[0].looks += 1
        raise KeyError("a mistake")

    make(2, here=2)
    monkeypatch.setattr(engine.jobs[0], "status", fail)
    looks = engine.jobs[0].looks
    eventually(lambda: engine.jobs[0].looks > looks + 3)
    assert caplog.text.count("the engine does not answer: KeyError('a mistake')") == 1


def test_a_node_that_was_reclaimed_for_good_does_not_hide_another_loss(
    make: Callable[..., Groups], engine: Fake
) -> None:
    """A job of two nodes and one of one: the small one is cancelled, then the other loses a node."""
    groups = make(3, here=3, min_nodes=1)
    groups[0].left("a node", for_good=False)
    assert groups.expected() == 3  # it may come again
    stands(engine, 0, 2)
    assert groups.expected() == 2
    groups[0].left("a node", for_good=True)
    assert groups.expected() == 1  # although the engine still reports it
    stands(engine, 0, 1)
    assert groups.expected() == 1


def test_restarting_job_is_waited_for_after_another_was_cancelled(make: Callable[..., Groups], engine: Fake) -> None:
    groups = make(3, here=3, min_nodes=1)
    groups[0].left("a node", for_good=False)
    stands(engine, 0, 2)
    groups[0].left("a node", for_good=True)
    groups[0].left("a node", for_good=False)
    stands(engine, 0, 2, pending=2)
    assert groups.expected() == 2
    stands(engine, 0, 2)  # it runs, and its daemons are starting
    assert groups.expected() == 2
    groups[0].joined("a node")
    assert groups.expected() == 2


def test_node_that_never_joined_does_not_hide_the_loss_of_another(make: Callable[..., Groups], engine: Fake) -> None:
    groups = make(3, here=2, min_nodes=1)  # the third is a job of its own, which fails at once
    stands(engine, 0, 2, ended={"job 2": "job 2 is over"})
    assert groups.expected() == 2
    groups[0].left("a node", for_good=True)
    assert groups.expected() == 1
    stands(engine, 0, 2, ended={"job 2": "job 2 is over"})
    assert groups.expected() == 1


def test_request_names_only_the_jobs_that_ended_since_the_last_one(
    make: Callable[..., Groups], engine: Fake, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "farstep")
    groups = make(3, here=3, min_nodes=1)
    ended: dict[str, str] = {}
    for seconds, job in ((100, "job 1"), (200, "job 2")):
        ended[job] = f"{job} is FAILED"
        stands(engine, 0, 3 - len(ended), ended=dict(ended))
        groups[0].left("a node", for_good=True)
        groups.request_missing(3, float(seconds))
        eventually(lambda: len(engine.jobs) == len(groups))
    requests = [text for text in caplog.messages if "requesting" in text]
    assert requests == [f"job {i} is FAILED (its last words); requesting 1 node again" for i in (1, 2)]


def test_daemons_that_were_not_needed_are_not_waited_for(make: Callable[..., Groups], engine: Fake) -> None:
    groups = make(2, here=1, min_nodes=1)
    assert groups.expected() == 2
    for _ in range(3):  # until it hears that it may go
        groups[0].rejected("daemon", "another node")
    assert groups.expected() == 1
    stands(engine, 0, 2)
    assert groups.expected() == 1


def test_unreadable_logs_do_not_hide_the_error(
    make: Callable[..., Groups], engine: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> str:
        raise OSError("stale file handle")

    groups = make(2, here=2)
    monkeypatch.setattr(engine.jobs[0], "logs", fail)
    stands(engine, 0, 0)
    eventually(lambda: engine.jobs[0].cancelled)
    assert "stale file handle" in groups.logs() and not groups[0].status.nodes


def test_a_lost_engine_ends_a_run_that_needs_more_nodes_although_budget_is_left(
    make: Callable[..., Groups], engine: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> RequestStatus:
        raise EngineLost("its controller is gone")

    groups = make(2, here=2, min_nodes=1)
    monkeypatch.setattr(engine.jobs[0], "status", fail)
    eventually(lambda: groups[0].status.engine_lost)
    groups[0].left("a node", for_good=True)
    groups.request_missing(2, 0.0)  # one node is enough to continue
    groups[0].left("a node", for_good=True)
    eventually(lambda: len(engine.jobs) == 2)
    monkeypatch.setattr(engine.jobs[1], "status", fail)
    eventually(lambda: groups[1].status.engine_lost)
    with pytest.raises(LaunchError, match=r"its controller is gone, and 2 nodes are missing"):
        groups.request_missing(2, 0.1)


def test_nodes_that_can_never_be_provided_end_only_a_launch_that_needs_them(
    engine: Fake, make: Callable[..., Groups]
) -> None:
    groups = make(nodes=4, here=0, min_nodes=2)
    engine.jobs[0].stands = RequestStatus("job", 4, hopeless=2)
    eventually(lambda: groups[0].status.hopeless == 2)
    groups.request_missing(4, 0.0)
    engine.jobs[0].stands = RequestStatus("job of 4 is too large", 4, hopeless=3)
    eventually(lambda: groups[0].status.hopeless == 3)
    with pytest.raises(LaunchError, match="job of 4 is too large, and 3 nodes are missing"):
        groups.request_missing(4, 1.0)
    for number in range(2):
        groups[0].joined(f"node {number}")
    groups.request_missing(4, 2.0)
