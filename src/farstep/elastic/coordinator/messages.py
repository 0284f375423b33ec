"""The messages between runs and the coordinator.

    run                             coordinator
    Register ───────────────────►                                name, priority, minimum, wanted
                  ◄── GrantSlots(numbers=(0, 1, 2), round=1)      the run may use 3 slots
    Heartbeat ──────────────────►                                a run that is silent for `lease_s` loses all it holds
                  ◄── GrantSlots(numbers=(0,), round=2)           another run registered
    Released(round=2) ──────────►                                only now are slots 1 and 2 free for the other run
    ReturnSlots(request=0) ─────►                                the run uses no slots until its next request
    RequestSlots(request=1) ────►                                its next rollout; waits behind earlier requests
                  ◄── GrantSlots(numbers=(0,), round=4, request=1)
    RequestDevice ──────────────►
                  ◄────────────── GrantDevice(device=0)           in the order of the requests
    ReturnDevice ───────────────►
    Leave ──────────────────────►

Every change of an allowance increments `round`, and `Released` repeats it. An acknowledgement of an earlier round is
ignored: a later `GrantSlots`, which may permit more slots, is already on its way to the run. In the same way, a run
ignores a `GrantSlots` for a request that it has returned.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

PROTOCOL = 3
"""Version of the messages and of the saved state. Increment it with every change."""
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
    """0: the run has returned its slots."""
    request: Count = 0
    for_rollout: bool = False
    protocol: Count = 1
    """`PROTOCOL` of the run; version 1 has no such field."""


class RequestSlots(msgspec.Struct, tag="request-slots", frozen=True):
    """A run wants slots, or another number of slots than before."""

    workload: Name
    wanted: Positive
    request: Count = 0
    """Larger than in all requests that the run has returned."""
    for_rollout: bool = False
    """Whether the run returns the slots after one rollout. Then it gets its share at once, and keeps exactly this until
    it returns it, or until its turn is over."""


class ReturnSlots(msgspec.Struct, tag="return-slots", frozen=True):
    """A run uses no slots any more, and wants none before its next request."""

    workload: Name
    request: Count


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
    """A run may use these slots. If it uses others, it must release them and answer `Released`."""

    workload: Name
    round: Count
    numbers: tuple[Count, ...] = ()
    """In ascending order; earlier versions had the number of slots instead."""
    request: Count = 0


class GrantDevice(msgspec.Struct, tag="grant-device", frozen=True):
    """A learner may use this device until it sends `ReturnDevice`; not if it has returned this request already."""

    workload: Name
    device: Count
    request: Count


class NotRegistered(msgspec.Struct, tag="not-registered", frozen=True):
    """The coordinator does not know this run, or its lease has ended. It may use nothing until it registers again,
    with another id, so that it cannot mistake an earlier `GrantSlots` for a new one."""

    workload: Name


class Welcome(msgspec.Struct, tag="welcome", frozen=True):
    """The first answer to `Register` on each connection."""

    workload: Name
    protocol: Count


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """The coordinator cannot do what a run requests, and never will."""

    workload: str
    reason: str
    device: bool = False
    """Whether only a device was refused."""


Message: TypeAlias = Register | RequestSlots | ReturnSlots | Released | Heartbeat | Leave | RequestDevice | ReturnDevice
Answer: TypeAlias = Welcome | GrantSlots | GrantDevice | NotRegistered | Refused
