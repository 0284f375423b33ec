"""Divides slots and devices among the runs that share them. It does no I/O: messages and times go in, answers come out.

A slot is one running worker. The sum of all slots that runs hold never exceeds the number of slots:

    run                             coordinator
    Register ───────────────────►                                name, priority, minimum, wanted
                  ◄────────────── GrantSlots(slots=3, round=1)    the run may use 3 slots
    Heartbeat ──────────────────►                                a run that is silent for `lease_s` loses all it holds
                  ◄────────────── GrantSlots(slots=1, round=2)    another run registered
    Released(round=2) ──────────►                                only now are 2 slots free for the other run
    RequestDevice ──────────────►
                  ◄────────────── GrantDevice(device=0)           in the order of the requests
    ReturnDevice ───────────────►
    Leave ──────────────────────►

Every change of an allowance increments `round`, and `Released` repeats it. An acknowledgement of an earlier round is
ignored: a later `GrantSlots`, which may permit more slots, is already on its way to the run.
"""

from __future__ import annotations

import heapq
from typing import Annotated, TypeAlias

import msgspec

from farstep.errors import ConfigError, counted

TURN_S = 30.0
"""Default of `turn_s`."""
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128, pattern=r"\A[^\x00-\x1f\x7f-\x9f\u2028\u2029]*\Z")]
"""Text that is safe in one line of a terminal."""
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=2**31)]
Priority = Annotated[int, msgspec.Meta(ge=1, le=100)]


class Register(msgspec.Struct, tag="register", frozen=True):
    """A run joins, or connects again. `workload` is the random id of this run; `name` is shown to people."""

    workload: Name
    name: Name
    priority: Priority
    minimum: Positive
    wanted: Count


class RequestSlots(msgspec.Struct, tag="request-slots", frozen=True):
    """A run can use another number of slots; 0: none for now."""

    workload: Name
    wanted: Count


class Released(msgspec.Struct, tag="released", frozen=True):
    """A run uses no more slots than `GrantSlots` of this round permits."""

    workload: Name
    round: Count


class Heartbeat(msgspec.Struct, tag="heartbeat", frozen=True):
    """A run is alive."""

    workload: Name


class Leave(msgspec.Struct, tag="leave", frozen=True):
    """A run has ended and uses nothing anymore."""

    workload: Name


class RequestDevice(msgspec.Struct, tag="request-device", frozen=True):
    """A learner waits for a device. `request` is larger than in all earlier requests of this run."""

    workload: Name
    request: Count


class ReturnDevice(msgspec.Struct, tag="return-device", frozen=True):
    """A learner has returned its device, or no longer waits for one."""

    workload: Name


class GrantSlots(msgspec.Struct, tag="grant-slots", frozen=True):
    """A run may use `slots` slots. If it uses more, it must release the others and answer `Released`."""

    workload: Name
    slots: Count
    round: Count


class GrantDevice(msgspec.Struct, tag="grant-device", frozen=True):
    """A learner may use this device until it sends `ReturnDevice`; not if it has returned this request already."""

    workload: Name
    device: Count
    request: Count


class NotRegistered(msgspec.Struct, tag="not-registered", frozen=True):
    """The coordinator does not know this run, or its lease has ended. It may use nothing until it registers again,
    with another id, so that it cannot mistake an earlier `GrantSlots` for a new one."""

    workload: Name


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """The coordinator cannot do what a run requests, and never will."""

    workload: Name
    reason: str


Message: TypeAlias = Register | RequestSlots | Released | Heartbeat | Leave | RequestDevice | ReturnDevice
Answer: TypeAlias = GrantSlots | GrantDevice | NotRegistered | Refused


class Workload(msgspec.Struct):
    """A registered run. Times are seconds of the caller's clock."""

    id: Name
    name: Name
    priority: Priority
    minimum: Positive
    wanted: Count
    lease_ends: float
    held: Count = 0
    """Slots that the run may still use, including those that it was asked to release."""
    allowed: Count = 0
    """Slots of the newest `GrantSlots`. If `held` is larger, the run has not acknowledged yet."""
    round: Count = 0
    since: float = 0.0
    """When the run was admitted, or when it began to wait."""
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
    workloads: list[Workload] = []
    admitted: list[str] = []
    queue: list[str] = []
    devices: list[str] = []
    """For each device the id of the run that holds it; empty if it is free."""
    device_queue: list[str] = []


class Coordinator:
    """Divides slots by fair share, and hands out devices in the order of the requests.

    A run is admitted as soon as its minimum fits; waiting runs are admitted in the order of their arrival. Each
    admitted run gets its minimum. The other slots go, one by one, to the run with the fewest slots per priority that
    wants more (weighted max-min fairness). If the minimum of a waiting run does not fit, admitted runs whose turn of
    `turn_s` times their priority is over release all their slots and wait at the end of the queue.

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
        self._state = _State(now, devices=[""] * devices)
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
            return [*answers, Refused(message.workload, reason)]
        if isinstance(message, Register):
            self._register(message, now)
        workload = self._by_id.get(message.workload)
        if workload is None:
            return [*answers, *([] if isinstance(message, Leave) else [NotRegistered(message.workload)])]
        workload.lease_ends = now + self.lease_s
        if isinstance(message, Register):
            answers.append(GrantSlots(workload.id, workload.allowed, workload.round))
            if workload.id in self._state.devices:
                device = self._state.devices.index(workload.id)
                answers.append(GrantDevice(workload.id, device, workload.request))
        elif isinstance(message, RequestSlots):
            workload.wanted = max(message.wanted, workload.minimum) if message.wanted else 0
        elif isinstance(message, Released):
            if message.round == workload.round:
                workload.held = workload.allowed
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
            workload.slot_s += passed * workload.held
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
        if (known := self._by_id.get(message.workload)) is not None:
            known.name, known.priority = message.name, message.priority
            known.minimum, known.wanted = message.minimum, max(message.minimum, message.wanted)
            return
        wanted = max(message.minimum, message.wanted)
        workload = Workload(
            message.workload, message.name, message.priority, message.minimum, wanted, now + self.lease_s, since=now
        )
        self._by_id[workload.id] = workload
        self._state.workloads.append(workload)

    def _remove(self, workload: Workload) -> None:
        self._return_device(workload.id)
        del self._by_id[workload.id]
        self._state.workloads.remove(workload)
        for ids in (self._state.admitted, self._state.queue):
            if workload.id in ids:
                ids.remove(workload.id)

    # ---- slots ----

    def _divide(self, now: float) -> list[Answer]:
        self._queue_up(now)
        self._end_turns(now)
        self._admit(now)
        targets = self._targets()
        answers: list[Answer] = []
        free = self.slots - sum(w.held for w in self._by_id.values())
        for workload in self._by_id.values():
            target = targets.get(workload.id, 0)
            if target > workload.held and free > 0 and workload.held + free >= min(target, workload.minimum):
                more = min(free, target - workload.held)
                workload.held, free = workload.held + more, free - more
            allowed = min(target, workload.held)
            if 0 < allowed < workload.minimum:
                allowed = 0  # a run that was asked to release all gets at least its minimum again, or nothing
            if allowed != workload.allowed:
                workload.allowed, workload.round = allowed, workload.round + 1
                answers.append(GrantSlots(workload.id, allowed, workload.round))
        return answers + self._hand_out_devices()

    def _queue_up(self, now: float) -> None:
        """Let runs wait that want slots; those that want none are neither admitted nor waiting."""
        state = self._state
        for ids in (state.admitted, state.queue):
            ids[:] = [each for each in ids if self._by_id[each].wanted]
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
            if missing > 0 and now - workload.since >= self._turn_s * workload.priority:
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

    def _targets(self) -> dict[str, int]:
        """Return the fair share of each admitted run."""
        runs = [self._by_id[each] for each in self._state.admitted]
        targets = {run.id: run.minimum for run in runs}
        free = self.slots - sum(targets.values())
        heap = [(run.minimum / run.priority, i) for i, run in enumerate(runs) if run.minimum < run.wanted]
        heapq.heapify(heap)
        while free > 0 and heap:
            _, i = heapq.heappop(heap)
            run = runs[i]
            targets[run.id] += 1
            free -= 1
            if targets[run.id] < run.wanted:
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
        if workload.held > workload.allowed:
            return f"releasing {counted(workload.held - workload.allowed, 'slot')}"
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

        If there are fewer slots than before, runs are asked to release some. If there are fewer devices than before,
        the runs that hold the devices with the highest numbers keep them until they return them; after that, the
        coordinator does not grant them again.

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
            state = msgspec.json.decode(saved, type=_State)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"the state of the coordinator cannot be read: {error}.") from None
        coordinator = cls(slots, devices, lease_s, turn_s, state.now)
        coordinator._by_id = {workload.id: workload for workload in state.workloads}
        named = {*state.admitted, *state.queue, *state.device_queue, *filter(None, state.devices)}
        if not named <= coordinator._by_id.keys() or len(coordinator._by_id) < len(state.workloads):
            raise ConfigError("the state of the coordinator is inconsistent: it names runs that are not registered.")
        for workload in state.workloads:
            workload.minimum = min(workload.minimum, slots)
        state.devices = (state.devices + [""] * devices)[:devices]
        coordinator._state = state
        return coordinator
