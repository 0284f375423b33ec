"""Divides slots and devices among the runs that share them. It does no I/O: messages and times go in, answers come out.

A slot is one running worker. Slots are numbered from 0, and no two runs hold the same slot. A run takes the lowest free
numbers and releases its highest ones. From the numbers, runs on the same nodes derive how many workers may run on each
node (`head/slots/placement.py`).
"""

from __future__ import annotations

import heapq
import itertools

import msgspec

from farstep.elastic.coordinator.messages import (
    PROTOCOL,
    Answer,
    Count,
    GrantDevice,
    GrantSlots,
    Leave,
    Message,
    Name,
    NotRegistered,
    Positive,
    Priority,
    Refused,
    Register,
    Released,
    RequestDevice,
    RequestSlots,
    ReturnDevice,
    ReturnSlots,
)
from farstep.errors import ConfigError, counted

TURN_S = 30.0
"""Default of `turn_s`."""
SHARE_S = 1.0
"""Seconds that a rollout waits for its whole share; afterwards it starts with what is free, at least its minimum."""


class Workload(msgspec.Struct):
    """A registered run. Times are seconds of the caller's clock."""

    id: Name
    name: Name
    priority: Priority
    minimum: Positive
    wanted: Count
    lease_ends: float
    held: list[Count] = []
    """The slots that the run may still use, including those that it was asked to release. In ascending order."""
    allowed: Count = 0
    """The newest `GrantSlots` had the first `allowed` of these. If there are more, the run has not acknowledged yet."""
    round: Count = 0
    slot_request: Count = 0
    """Number of the run's newest request for slots."""
    for_rollout: bool = False
    since: float = 0.0
    """When the run got slots; until then, when it was admitted; before that, when it began to wait."""
    slot_s: float = 0.0
    """Sum of the seconds that each slot was held."""
    request: Count = 0
    """Number of the run's newest request for a device."""
    device_s: float = 0.0
    device_wait_s: float = 0.0
    device_uses: Count = 0


class _State(msgspec.Struct):
    """All that a coordinator must remember."""

    now: float
    protocol: Count = 1
    workloads: list[Workload] = []
    admitted: list[str] = []
    queue: list[str] = []
    devices: list[str] = []
    """For each device the id of the run that holds it; empty if it is free."""
    device_queue: list[str] = []


class _Version(msgspec.Struct):
    """The part of a state that all versions have."""

    protocol: Count = 1
    workloads: list[msgspec.Raw] = []


def _grant(workload: Workload) -> GrantSlots:
    numbers = tuple(workload.held[: workload.allowed])
    return GrantSlots(workload.id, workload.round, numbers, workload.slot_request)


class Coordinator:
    """Divides slots by fair share, and hands out devices in the order of the requests.

    A run is admitted as soon as its minimum fits; waiting runs are admitted in the order of their arrival. Each
    admitted run gets its minimum. The other slots go, one by one, to the run with the fewest slots per priority that
    wants more (weighted max-min fairness). If the minimum of a waiting run does not fit, admitted runs whose turn of
    `turn_s` times their priority is over release all their slots and wait at the end of the queue.

    A run may instead request slots for one rollout, and return them while its learner works. Such a grant stays as it
    is for a turn, so that the other slots are divided among the other runs; each request goes to the end of the queue.

    Args:
        slots: Number of slots.
        devices: Number of devices.
        lease_s: Seconds of silence after which a run loses all that it holds.
        turn_s: Seconds for which a run of priority 1 keeps its slots while another one waits for its minimum.
        now: Current time of the clock that later calls use, in seconds.
    """

    def __init__(
        self, slots: int, devices: int = 0, lease_s: float = 10.0, turn_s: float = TURN_S, now: float = 0.0
    ) -> None:
        self.slots, self.lease_s, self._turn_s = slots, lease_s, turn_s
        self._state = _State(now, PROTOCOL, devices=[""] * devices)
        self._by_id: dict[str, Workload] = {}

    # ---- what happens ----

    def handle(self, message: Message, now: float) -> list[Answer]:
        """Process a message of a run.

        Args:
            message: The message.
            now: Current time in seconds.

        Returns:
            Answers to this run and to others.
        """
        answers = self.tick(now)
        if reason := self._why_not(message):
            return [*answers, Refused(message.workload, reason, isinstance(message, RequestDevice))]
        if isinstance(message, Register):
            self._register(message, now)
        workload = self._by_id.get(message.workload)
        if workload is None:
            return [*answers, *([] if isinstance(message, Leave) else [NotRegistered(message.workload)])]
        workload.lease_ends = now + self.lease_s
        if isinstance(message, Register):
            answers.append(_grant(workload))
            if workload.id in self._state.devices:
                device = self._state.devices.index(workload.id)
                answers.append(GrantDevice(workload.id, device, workload.request))
        elif isinstance(message, RequestSlots):
            self._request_slots(workload, message)
        elif isinstance(message, ReturnSlots):
            if message.request >= workload.slot_request:
                self._return_slots(workload, message.request)
        elif isinstance(message, Released):
            if message.round == workload.round:
                del workload.held[workload.allowed :]
        elif isinstance(message, RequestDevice):
            self._request_device(workload, message.request)
        elif isinstance(message, ReturnDevice):
            self._return_device(workload.id)
        elif isinstance(message, Leave):
            self._remove(workload)
        return answers + self._divide(now)

    def tick(self, now: float) -> list[Answer]:
        """Account for the time that has passed, end leases and turns, and return the answers to runs."""
        self._account(now)
        for workload in [w for w in self._by_id.values() if w.lease_ends <= now]:
            self._remove(workload)
        return self._divide(now)

    def renew(self, now: float) -> None:
        """Renew all leases: runs could not send heartbeats while the coordinator was down."""
        self._account(now)
        for workload in self._by_id.values():
            workload.lease_ends = now + self.lease_s
            workload.since = min(workload.since, now)  # the clock restarts when the machine does

    def _account(self, now: float) -> None:
        passed = max(0.0, now - self._state.now)
        self._state.now = now
        for workload in self._by_id.values():
            workload.slot_s += passed * len(workload.held)
        for holder in filter(None, self._state.devices):
            self._by_id[holder].device_s += passed
        for waiting in self._state.device_queue:
            self._by_id[waiting].device_wait_s += passed

    def _why_not(self, message: Message) -> str:
        """Return the reason why a message can never be fulfilled; empty if it can."""
        if isinstance(message, Register) and message.minimum > self.slots:
            needed = counted(message.minimum, "slot")
            return f"the run needs at least {needed}, and the coordinator was started with --slots {self.slots}"
        if isinstance(message, RequestDevice) and not self._state.devices:
            return "the coordinator was started without --devices"
        return ""

    def _register(self, message: Register, now: float) -> None:
        workload = self._by_id.get(message.workload)
        if workload is None:
            workload = Workload(message.workload, message.name, message.priority, message.minimum, 0, 0.0, since=now)
            self._by_id[workload.id] = workload
            self._state.workloads.append(workload)
        elif message.request != workload.slot_request or not message.wanted:
            self._return_slots(workload, message.request)  # the coordinator ended before it knew
        workload.name, workload.priority, workload.minimum = message.name, message.priority, message.minimum
        workload.slot_request, workload.for_rollout = message.request, message.for_rollout
        workload.wanted = max(message.minimum, message.wanted) if message.wanted else 0

    def _remove(self, workload: Workload) -> None:
        self._return_device(workload.id)
        self._return_slots(workload, workload.slot_request)
        del self._by_id[workload.id]
        self._state.workloads.remove(workload)

    # ---- slots ----

    def _request_slots(self, workload: Workload, message: RequestSlots) -> None:
        if message.request < workload.slot_request or (
            message.request == workload.slot_request and not workload.wanted
        ):
            return  # returned already
        if message.request > workload.slot_request:
            self._return_slots(workload, message.request)
        workload.wanted, workload.for_rollout = max(message.wanted, workload.minimum), message.for_rollout

    def _return_slots(self, workload: Workload, request: int) -> None:
        workload.held, workload.allowed, workload.wanted = [], 0, 0
        workload.round, workload.slot_request = workload.round + 1, request
        for ids in (self._state.admitted, self._state.queue):
            if workload.id in ids:
                ids.remove(workload.id)

    def _divide(self, now: float) -> list[Answer]:
        self._queue_up(now)
        self._end_turns(now)
        self._admit(now)
        targets = self._targets(now)
        answers: list[Answer] = []
        free = max(0, self.slots - sum(len(w.held) for w in self._by_id.values()))
        others = [id_ for id_ in self._by_id if id_ not in targets]
        for workload in map(self._by_id.__getitem__, [*targets, *others]):
            target = targets.get(workload.id, 0)
            missing = max(0, target - len(workload.held))
            usable = sum(number < self.slots for number in workload.held)
            is_complete = usable == len(workload.held)  # if not, the coordinator was restarted with fewer slots
            if is_complete and usable + free >= self._needed(workload, target, now):
                workload.held = sorted([*workload.held, *self._lowest_free(min(free, missing))])
                usable = len(workload.held)
            free -= min(free, missing)  # if they do not suffice yet, no later run gets them
            allowed = min(target, usable)
            if allowed < self._needed(workload, target, now):
                allowed = 0  # a run that was asked to release all gets at least its minimum again, or nothing
            if allowed != workload.allowed:
                workload.since = workload.since if workload.allowed else now
                workload.allowed, workload.round = allowed, workload.round + 1
                answers.append(_grant(workload))
        return answers + self._hand_out_devices()

    def _lowest_free(self, count: int) -> list[int]:
        """Return the lowest numbers of slots that no run holds. `count` must be at most the number of free slots."""
        taken = {number for workload in self._by_id.values() for number in workload.held}
        return list(itertools.islice((number for number in itertools.count() if number not in taken), count))

    def _needed(self, workload: Workload, target: int, now: float) -> int:
        """Return with how many slots a run can start or continue."""
        waits_for_share = workload.for_rollout and not workload.allowed and now - workload.since < SHARE_S
        return target if waits_for_share else min(target, workload.minimum)

    def _queue_up(self, now: float) -> None:
        """Put runs that want slots into the queue."""
        state = self._state
        for workload in self._by_id.values():
            if workload.wanted and workload.id not in state.admitted and workload.id not in state.queue:
                workload.since = now
                state.queue.append(workload.id)

    def _end_turns(self, now: float) -> None:
        """If the first run of the queue does not fit, end the turns that are over, if that makes enough room."""
        state = self._state
        if not state.queue or (missing := self._missing(self._by_id[state.queue[0]])) <= 0:
            return
        ended: list[Workload] = []
        for workload in map(self._by_id.__getitem__, state.admitted):
            if missing > 0 and workload.allowed and self._turn_is_over(workload, now):
                ended.append(workload)
                missing -= workload.minimum
        if missing > 0:
            return
        for workload in ended:
            workload.since = now
            state.admitted.remove(workload.id)
            state.queue.append(workload.id)

    def _admit(self, now: float) -> None:
        state = self._state
        while state.queue and self._missing(first := self._by_id[state.queue[0]]) <= 0:
            state.admitted.append(state.queue.pop(0))
            first.since = now

    def _missing(self, workload: Workload) -> int:
        """Return how many slots are missing for a run's minimum, if all admitted runs had only theirs."""
        return sum(self._by_id[each].minimum for each in self._state.admitted) + workload.minimum - self.slots

    def _turn_is_over(self, workload: Workload, now: float) -> bool:
        return now - workload.since >= self._turn_s * workload.priority

    def _targets(self, now: float) -> dict[str, int]:
        """Return the fair share of each admitted run, in the order of admission; 0 if its minimum has to wait."""
        runs = [self._by_id[each] for each in self._state.admitted]
        most = [min(run.wanted, run.allowed) if run.for_rollout and run.allowed else run.wanted for run in runs]
        targets = dict.fromkeys(self._state.admitted, 0)
        for run, slots in zip(runs, most, strict=True):
            if run.for_rollout and run.allowed and not self._turn_is_over(run, now):
                targets[run.id] = slots
        if sum(targets.values()) > self.slots:  # the coordinator was restarted with fewer slots
            targets = dict.fromkeys(targets, 0)
        free = self.slots - sum(targets.values())
        heap: list[tuple[float, int]] = []
        for i, run in sorted(enumerate(runs), key=lambda each: not each[1].allowed):
            if targets[run.id]:
                continue
            if run.minimum > free:
                break  # no later run overtakes it
            targets[run.id] = run.minimum
            free -= run.minimum
            if run.minimum < most[i]:
                heap.append((run.minimum / run.priority, i))
        heapq.heapify(heap)
        while free > 0 and heap:
            _, i = heapq.heappop(heap)
            run = runs[i]
            targets[run.id] += 1
            free -= 1
            if targets[run.id] < most[i]:
                heapq.heappush(heap, (targets[run.id] / run.priority, i))
        return targets

    # ---- devices ----

    def _request_device(self, workload: Workload, request: int) -> None:
        if workload.id not in self._state.device_queue and workload.id not in self._state.devices:
            workload.request = request
            self._state.device_queue.append(workload.id)

    def _return_device(self, workload_id: str) -> None:
        state = self._state
        state.devices[:] = ["" if holder == workload_id else holder for holder in state.devices]
        state.device_queue[:] = [waiting for waiting in state.device_queue if waiting != workload_id]

    def _hand_out_devices(self) -> list[Answer]:
        state = self._state
        answers: list[Answer] = []
        for device, holder in enumerate(state.devices):
            if not holder and state.device_queue:
                workload = self._by_id[state.device_queue.pop(0)]
                state.devices[device] = workload.id
                workload.device_uses += 1
                answers.append(GrantDevice(workload.id, device, workload.request))
        return answers

    # ---- state ----

    @property
    def workloads(self) -> tuple[Workload, ...]:
        """All registered runs, in the order of their registration. Do not change them."""
        return tuple(self._state.workloads)

    @property
    def devices(self) -> tuple[str, ...]:
        """For each device the id of the run that holds it; empty if it is free."""
        return tuple(self._state.devices)

    @property
    def device_queue(self) -> tuple[str, ...]:
        """The ids of the runs that wait for a device, first the one that is next."""
        return tuple(self._state.device_queue)

    def state_of(self, workload: Workload) -> str:
        """Return what a run does, in a few words."""
        if len(workload.held) > workload.allowed:
            return f"releasing {counted(len(workload.held) - workload.allowed, 'slot')}"
        if workload.id in self._state.queue:
            return f"number {self._state.queue.index(workload.id) + 1} in the queue for slots"
        if not workload.held:
            return "waiting for slots to be released" if workload.wanted else "wants no slots"
        return "running"

    def save(self) -> bytes:
        """Return the state, for `load`."""
        return msgspec.json.encode(self._state)

    @classmethod
    def load(
        cls, saved: bytes, slots: int, devices: int = 0, lease_s: float = 10.0, turn_s: float = TURN_S
    ) -> Coordinator:
        """Return a coordinator with a saved state.

        If there are fewer slots than before, runs are asked to release those with the highest numbers. If there are
        fewer devices than before, the runs that hold the devices with the highest numbers keep them until they return
        them; after that, the coordinator does not grant them again.

        Args:
            saved: What `save` returned.
            slots: Number of slots from now on.
            devices: Number of devices from now on.
            lease_s: Seconds of silence after which a run loses all that it holds.
            turn_s: As for a new coordinator.

        Raises:
            ConfigError: `saved` is not a state that `save` returned.
        """
        try:
            version = msgspec.json.decode(saved, type=_Version)
            if version.protocol != PROTOCOL and version.workloads:
                raise ConfigError(
                    f"the runs of this coordinator use version {version.protocol} of its protocol; this farstep has "
                    f"version {PROTOCOL}. Start the coordinator with the farstep of the runs until they have ended."
                )
            state = msgspec.json.decode(saved, type=_State)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"the state of the coordinator cannot be read: {error}.") from None
        state.protocol = PROTOCOL
        coordinator = cls(slots, devices, lease_s, turn_s, state.now)
        coordinator._by_id = {workload.id: workload for workload in state.workloads}
        named = {*state.admitted, *state.queue, *state.device_queue, *filter(None, state.devices)}
        if not named <= coordinator._by_id.keys() or len(coordinator._by_id) < len(state.workloads):
            raise ConfigError("the state of the coordinator is inconsistent: it names runs that are not registered.")
        numbers = [number for workload in state.workloads for number in workload.held]
        if len(set(numbers)) < len(numbers):
            raise ConfigError("the state of the coordinator is inconsistent: several runs hold the same slot.")
        for workload in state.workloads:
            workload.minimum = min(workload.minimum, slots)
        state.devices = (state.devices + [""] * devices)[:devices]
        coordinator._state = state
        return coordinator
