"""The coordinator on a fake clock: fair shares, leases, devices, random histories with late messages and crashes."""

from __future__ import annotations

import random
from collections import deque

import msgspec
import pytest

from farstep.elastic.coordinator.coordinator import SHARE_S, TURN_S, Coordinator
from farstep.elastic.coordinator.messages import (
    Answer,
    GrantDevice,
    GrantSlots,
    Heartbeat,
    Leave,
    Message,
    NotRegistered,
    Refused,
    Register,
    Released,
    RequestDevice,
    RequestSlots,
    ReturnDevice,
    ReturnSlots,
)
from farstep.errors import ConfigError

LEASE_S = 10.0


class World:
    """Runs whose messages, and the answers to them, wait in queues until they are delivered."""

    def __init__(self, slots: int, devices: int = 0) -> None:
        self.slots, self.devices, self.now = slots, devices, 0.0
        self.coordinator = Coordinator(slots, devices, LEASE_S)
        self.runs: dict[str, Run] = {}

    def join(self, name: str, *, priority: int = 1, minimum: int = 1, wanted: int = 1) -> Run:
        run = self.runs[name] = Run(Register(name, name, priority, minimum, wanted))
        return run

    def deliver(self, run: Run) -> None:
        self.post(self.coordinator.handle(run.sent.popleft(), self.now))

    def post(self, answers: list[Answer]) -> None:
        for answer in answers:
            if (run := self.runs.get(answer.workload.partition("/")[0])) is not None:
                run.received.append(answer)

    def settle(self) -> None:
        """Deliver all messages and answers, until none is left. Every run sends a heartbeat first."""
        for run in self.runs.values():
            run.sent.append(Heartbeat(run.id))
        self.post(self.coordinator.tick(self.now))
        while any(run.sent or run.received for run in self.runs.values()):
            for run in self.runs.values():
                while run.sent:
                    self.deliver(run)
                while run.received:
                    run.receive()
        self.check()

    def wait(self, seconds: float) -> None:
        """Let time pass, with heartbeats."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + LEASE_S / 2)
            self.settle()

    def restart(self) -> None:
        saved = self.coordinator.save()
        self.coordinator = Coordinator.load(saved, self.slots, self.devices, LEASE_S)
        assert self.coordinator.save() == saved

    def check(self) -> None:
        """The coordinator and the runs whose lease has not ended use no more slots and devices than exist."""
        registered = {workload.id: workload for workload in self.coordinator.workloads}
        numbers = [number for workload in registered.values() for number in workload.held]
        assert len(set(numbers)) == len(numbers) <= self.slots
        used = [run for run in self.runs.values() if run.id in registered]
        assert all(set(run.slots) <= set(registered[run.id].held) for run in used)
        assert all(number < self.slots for run in used for number in run.slots)
        held = [run.device for run in used if run.device is not None]
        assert len(set(held)) == len(held)

    @property
    def used(self) -> dict[str, int]:
        return {name: run.used for name, run in self.runs.items()}


class Run:
    """A run that follows the coordinator's answers when it reads them."""

    def __init__(self, register: Register) -> None:
        self.register, self.name = register, register.name
        self.slots: tuple[int, ...] = ()
        """The slots that its workers use."""
        self.device: int | None = None
        self.requests, self.request = False, 0
        self.rollout, self.has_returned = 0, False
        self.sent: deque[Message] = deque([register])
        self.received: deque[Answer] = deque()

    @property
    def id(self) -> str:
        return self.register.workload

    @property
    def used(self) -> int:
        return len(self.slots)

    def request_device(self) -> None:
        self.requests, self.request = True, self.request + 1
        self.sent.append(RequestDevice(self.id, self.request))

    def return_device(self) -> None:
        self.requests, self.device = False, None
        self.sent.append(ReturnDevice(self.id))

    def roll(self, wanted: int) -> None:
        """Request slots for the next rollout."""
        self.rollout, self.has_returned = self.rollout + 1, False
        self.sent.append(RequestSlots(self.id, wanted, self.rollout, for_rollout=True))

    def return_slots(self) -> None:
        self.slots, self.has_returned = (), True
        self.sent.append(ReturnSlots(self.id, self.rollout))

    def receive(self) -> None:
        answer = self.received.popleft()
        if answer.workload != self.id:
            return
        if isinstance(answer, GrantSlots):
            if answer.request != self.rollout or self.has_returned:
                return
            self.slots = answer.numbers
            self.sent.append(Released(self.id, answer.round))
        elif isinstance(answer, GrantDevice):
            if self.requests and answer.request == self.request:
                self.device = answer.device
        elif isinstance(answer, NotRegistered):
            self.slots, self.device, self.requests = (), None, False
            self.register = msgspec.structs.replace(
                self.register,
                workload=f"{self.id}/again",
                request=self.rollout,
                wanted=0 if self.has_returned else self.register.wanted,
                for_rollout=self.rollout > 0,
            )
            self.sent.append(self.register)


def test_slots_are_shared_equally_and_the_rest_goes_to_runs_that_want_more() -> None:
    world = World(slots=10)
    world.join("a", wanted=10)
    world.settle()
    assert world.used == {"a": 10}
    world.join("b", wanted=2)
    world.join("c", wanted=10)
    world.settle()
    assert world.used == {"a": 4, "b": 2, "c": 4}


def test_shares_are_proportional_to_priorities() -> None:
    world = World(slots=9)
    world.join("a", wanted=9)
    world.join("b", wanted=9, priority=2)
    world.settle()
    assert world.used == {"a": 3, "b": 6}


def test_minimum_is_granted_before_the_rest_is_shared() -> None:
    world = World(slots=6)
    world.join("a", wanted=6, priority=10)
    world.join("b", wanted=6, minimum=4)
    world.settle()
    assert world.used == {"a": 2, "b": 4}


def test_revoked_slots_are_granted_only_after_the_acknowledgement() -> None:
    world = World(slots=4)
    a = world.join("a", wanted=4)
    world.settle()
    b = world.join("b", wanted=4)
    world.deliver(b)
    assert [len(answer.numbers) for answer in b.received if isinstance(answer, GrantSlots)] == [0]
    a.receive()
    world.deliver(a)
    assert [len(answer.numbers) for answer in b.received if isinstance(answer, GrantSlots)] == [0, 2]


def test_late_acknowledgement_does_not_free_slots_that_were_granted_again() -> None:
    world = World(slots=2)
    a = world.join("a", wanted=2)
    world.settle()
    b = world.join("b")
    world.deliver(b)
    a.receive()
    assert a.used == 1
    b.sent.append(Leave("b"))
    world.deliver(b)  # now `a` may use both slots again, and its acknowledgement is still under way
    world.deliver(a)
    world.join("c")
    world.settle()
    assert world.used["a"] + world.used["c"] == 2


def test_fewer_wanted_slots_are_given_to_others() -> None:
    world = World(slots=4)
    a = world.join("a", wanted=4)
    world.join("b", wanted=4)
    world.settle()
    a.sent.append(RequestSlots("a", 1))
    world.settle()
    assert world.used == {"a": 1, "b": 3}
    a.return_slots()
    world.settle()
    assert world.used == {"a": 0, "b": 4}


def test_slots_and_device_of_a_crashed_run_are_reclaimed_when_its_lease_ends() -> None:
    world = World(slots=2, devices=1)
    a = world.join("a", wanted=2)
    a.request_device()
    world.settle()
    del world.runs["a"]
    b = world.join("b", minimum=2)
    b.request_device()
    world.wait(LEASE_S - 1)
    assert (b.used, b.device) == (0, None)
    world.wait(1)
    assert (b.used, b.device) == (2, 0)


def test_runs_take_turns_if_their_minimums_do_not_fit_together() -> None:
    world = World(slots=1)
    runs = [world.join(name) for name in "abc"]
    seconds = dict.fromkeys("abc", 0)
    for _ in range(int(9 * TURN_S)):
        world.wait(1)
        assert sum(run.used for run in runs) == 1
        for run in runs:
            seconds[run.id] += run.used
    assert max(seconds.values()) - min(seconds.values()) <= TURN_S


def test_turns_last_longer_with_a_higher_priority() -> None:
    world = World(slots=1)
    world.join("a")
    world.join("b", priority=3)
    world.settle()
    world.wait(20 * TURN_S)
    held = {workload.id: workload.slot_s for workload in world.coordinator.workloads}
    assert held["a"] + held["b"] == pytest.approx(20 * TURN_S)
    assert held["b"] == pytest.approx(3 * held["a"], rel=0.15)


def test_large_minimum_is_not_overtaken() -> None:
    world = World(slots=4)
    world.join("a", minimum=2, wanted=2)
    world.settle()
    large = world.join("large", minimum=4)
    small = world.join("small", minimum=1)
    world.settle()
    assert (large.used, small.used) == (0, 0)
    world.wait(TURN_S + LEASE_S)
    assert large.used == 4


def rolling_and_learning() -> tuple[World, Run, Run]:
    """Two runs: one rolls with all slots, and the other has returned its own."""
    world = World(slots=4)
    a, b = world.join("a", wanted=4), world.join("b", wanted=4)
    world.settle()
    a.return_slots()
    b.return_slots()
    a.roll(4)
    world.settle()
    return world, a, b


def test_rollouts_of_two_runs_alternate_and_each_uses_all_slots() -> None:
    world, a, b = rolling_and_learning()
    for rolling, learning in [(a, b), (b, a)] * 3:
        assert world.used == {rolling.id: 4, learning.id: 0}
        learning.roll(4)
        world.wait(TURN_S / 2)
        assert world.used == {rolling.id: 4, learning.id: 0}  # a rollout keeps its slots for a turn
        rolling.return_slots()
        world.settle()


def test_returned_slots_are_lent_to_a_run_that_never_returns_its_own() -> None:
    world = World(slots=4)
    a, b = world.join("a", wanted=4), world.join("b", wanted=4)
    world.settle()
    for _ in range(3):
        a.return_slots()
        world.settle()
        assert world.used == {"a": 0, "b": 4}
        a.roll(4)
        world.settle()
        assert world.used == {"a": 2, "b": 2}
    assert b.rollout == 0


def test_rollout_that_takes_longer_than_a_turn_shares_its_slots() -> None:
    world, _, b = rolling_and_learning()
    b.roll(4)
    world.wait(TURN_S + LEASE_S)
    assert world.used == {"a": 2, "b": 2}
    b.return_slots()
    world.wait(LEASE_S)
    assert world.used == {"a": 2, "b": 0}  # workers that join a rollout late would only make it longer


def test_rollout_waits_for_its_share_for_a_bounded_time() -> None:
    world = World(slots=4)
    a, b = world.join("a"), world.join("b", wanted=3)
    world.settle()
    a.return_slots()
    world.settle()
    a.roll(4)
    world.deliver(a)  # its share is two, and `b` has not released one of its three slots yet
    world.post(world.coordinator.tick(world.now + SHARE_S / 2))
    assert not a.received and b.used == 3
    world.post(world.coordinator.tick(world.now + SHARE_S))
    assert [len(answer.numbers) for answer in a.received if isinstance(answer, GrantSlots)] == [1]


def test_large_minimum_is_not_overtaken_by_rollouts() -> None:
    world = World(slots=4)
    large, small = world.join("large", minimum=3, wanted=3), [world.join(name) for name in "ab"]
    world.settle()
    large.return_slots()
    for run in small:
        run.return_slots()
        run.roll(1)
    world.settle()
    large.roll(3)
    world.settle()
    for index in range(6):  # they never return both slots at the same time
        small[index % 2].return_slots()
        small[index % 2].roll(1)
        world.settle()
    assert large.used == 3


@pytest.mark.parametrize("received_first", [False, True])
def test_grant_of_a_rollout_that_was_interrupted_is_not_used(received_first: bool) -> None:
    world = World(slots=2)
    a = world.join("a", wanted=2)
    world.settle()
    a.return_slots()
    a.roll(2)
    while a.sent:
        world.deliver(a)
    if received_first:
        while a.received:
            a.receive()
    a.return_slots()
    b = world.join("b", wanted=2)
    world.settle()
    assert world.used == {"a": 0, "b": 2}
    a.sent.append(RequestSlots(a.id, 2, a.rollout, for_rollout=True))  # sent late: `a` has returned it
    world.settle()
    assert world.used == {"a": 0, "b": 2} and b.used == 2


def test_slots_that_a_run_returned_while_the_coordinator_was_down_are_free() -> None:
    world = World(slots=2)
    a, b = world.join("a", wanted=2), world.join("b", wanted=2)
    world.settle()
    a.return_slots()
    b.return_slots()
    a.roll(2)
    world.settle()
    world.restart()
    b.roll(2)
    a.return_slots()
    a.sent.clear()  # lost
    a.sent.append(msgspec.structs.replace(a.register, wanted=0, request=a.rollout))
    world.settle()
    assert world.used == {"a": 0, "b": 2}
    world.restart()
    a.roll(2)
    a.sent.clear()
    a.sent.append(msgspec.structs.replace(a.register, wanted=2, request=a.rollout, for_rollout=True))
    world.settle()
    assert world.used == {"a": 0, "b": 2}
    b.return_slots()
    world.settle()
    assert world.used == {"a": 2, "b": 0}


def test_devices_are_handed_out_in_the_order_of_the_requests() -> None:
    world = World(slots=4, devices=1)
    runs = [world.join(name) for name in "abc"]
    world.settle()
    order = []
    for run in runs:
        run.request_device()
    for _ in range(9):
        world.settle()
        (holder,) = (run for run in runs if run.device is not None)
        order.append(holder.id)
        world.wait(2)
        holder.return_device()
        holder.request_device()
    assert "".join(order) == "abcabcabc"
    assert [workload.device_s for workload in world.coordinator.workloads] == pytest.approx([6, 6, 6])
    assert [workload.device_uses for workload in world.coordinator.workloads] == [3, 3, 3]
    assert sum(workload.device_wait_s for workload in world.coordinator.workloads) == pytest.approx(2 * 18)


def test_impossible_requests_are_refused_with_the_reason() -> None:
    coordinator = Coordinator(2)
    (refused,) = coordinator.handle(Register("a", "a", 1, 3, 3), 0.0)
    assert isinstance(refused, Refused) and "at least 3 slots" in refused.reason
    coordinator.handle(Register("b", "b", 1, 1, 1), 0.0)
    (refused,) = coordinator.handle(RequestDevice("b", 1), 0.0)
    assert isinstance(refused, Refused) and "--devices" in refused.reason


def test_coordinator_that_is_restarted_with_fewer_slots_revokes_the_others() -> None:
    world = World(slots=4, devices=2)
    world.join("a", wanted=4, minimum=3)
    world.settle()
    world.coordinator = Coordinator.load(world.coordinator.save(), 2, 1, LEASE_S)
    world.slots = 4  # until the run has released two
    world.post(world.coordinator.tick(world.now))
    assert len(world.coordinator.workloads[0].held) == 4  # until the run has acknowledged
    world.settle()
    assert world.used == {"a": 2}


@pytest.mark.parametrize("minimum", [1, 2])
def test_slots_that_a_restarted_coordinator_does_not_have_are_replaced(minimum: int) -> None:
    world = World(slots=6)
    a, b = world.join("a", wanted=6, minimum=minimum), world.join("b", wanted=6, minimum=minimum)
    world.settle()
    assert (a.slots, b.slots) == ((0, 1, 2), (3, 4, 5))
    world.coordinator = Coordinator.load(world.coordinator.save(), 4, 0, LEASE_S)
    world.slots = 6  # until the runs have released two
    world.settle()
    world.slots = 4
    world.wait(1)
    assert sorted(a.slots + b.slots) == [0, 1, 2, 3] and len(a.slots) == 2


def test_run_grows_by_the_lowest_free_slots_and_releases_its_highest() -> None:
    world = World(slots=6)
    a, b, c = (world.join(name, wanted=2) for name in "abc")
    world.settle()
    assert [a.slots, b.slots, c.slots] == [(0, 1), (2, 3), (4, 5)]
    a.return_slots()
    c.sent.append(RequestSlots("c", 3))
    world.settle()
    assert c.slots == (0, 4, 5)
    c.sent.append(RequestSlots("c", 1))
    b.sent.append(RequestSlots("b", 5))
    world.settle()
    assert [b.slots, c.slots] == [(1, 2, 3, 4, 5), (0,)]


@pytest.mark.parametrize("saved", [b"", b"{}", b'{"now": 0, "admitted": ["a"]}', b'{"now": 0, "devices": ["a"]}'])
def test_damaged_state_is_refused(saved: bytes) -> None:
    with pytest.raises(ConfigError, match="state of the coordinator"):
        Coordinator.load(saved, 1)


def test_state_in_which_two_runs_hold_the_same_slot_is_refused() -> None:
    world = World(slots=2)
    world.join("a"), world.join("b")
    world.settle()
    saved = world.coordinator.save().replace(b'"held":[1]', b'"held":[0]')
    with pytest.raises(ConfigError, match="the same slot"):
        Coordinator.load(saved, 2)


@pytest.mark.parametrize("seed", range(16))
def test_random_histories_never_over_commit_and_starve_no_run(seed: int) -> None:
    draw = random.Random(seed)
    world = World(draw.randint(1, 6), draw.randint(1, 2))
    twin = Coordinator(world.slots, world.devices, LEASE_S)
    crashed: set[str] = set()
    for index in range(300):
        world.now += draw.choice([0.0, 0.0, 0.1, 1.0, LEASE_S / 2])
        kind = draw.random()
        runs = [run for run in world.runs.values() if run.name not in crashed]
        if (kind < 0.05 and len(runs) < 4) or not runs:
            minimum = draw.randint(1, world.slots)
            world.join(f"{index}", priority=draw.randint(1, 3), minimum=minimum, wanted=minimum + draw.randint(0, 4))
            continue
        run = draw.choice(runs)
        if kind < 0.07:
            crashed.add(run.name)
            run.slots, run.device = (), None
        elif kind < 0.09:
            run.sent.append(Leave(run.id))
            run.slots, run.device = (), None
            crashed.add(run.name)
        elif kind < 0.11 and not run.has_returned:
            run.sent.append(RequestSlots(run.id, draw.randint(1, 5), run.rollout, for_rollout=run.rollout > 0))
        elif kind < 0.17:
            run.roll(draw.randint(1, 5)) if run.has_returned else run.return_slots()
        elif kind < 0.21:
            (run.return_device if run.requests else run.request_device)()
        elif kind < 0.23:
            world.restart()
        elif kind < 0.4:
            run.sent.append(Heartbeat(run.id))
        elif kind < 0.7 and run.received:
            run.receive()
        elif run.sent:
            twin_answers = twin.handle(run.sent[0], world.now)
            answers = world.coordinator.handle(run.sent.popleft(), world.now)
            assert answers == twin_answers  # the coordinator that was restarted behaves as the one that was not
            world.post(answers)
        world.check()
    for name in crashed:
        del world.runs[name]
    world.wait(LEASE_S)  # until all have noticed that their leases have ended
    for run in world.runs.values():
        run.return_slots()
        run.roll(4)
    world.wait(2 * LEASE_S)
    assert {workload.name for workload in world.coordinator.workloads} == world.runs.keys()
    before = {workload.id: workload.slot_s for workload in world.coordinator.workloads}
    returns = draw.random() < 0.5
    end = world.now + 3 * TURN_S * len(world.runs) + LEASE_S
    while world.now < end:
        world.wait(draw.uniform(0.1, LEASE_S))
        for run in world.runs.values():  # runs that return their slots do not starve those that do not, or each other
            if returns and run.used and int(run.name) % 3:
                run.return_slots()
                run.roll(4)
    world.settle()
    assert all(workload.slot_s > before[workload.id] for workload in world.coordinator.workloads)
    for run in list(world.runs.values()):
        run.sent.append(Leave(run.id))
        world.deliver(run)
    assert not world.coordinator.workloads
    assert world.coordinator.devices == ("",) * world.devices
