"""Rules for messages from workers: in which state and over which connection each type is valid.

The head replaces a worker whose message breaks a rule (`Supervisor.reject`). The code that uses a message checks its
contents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from farstep.core import Received
from farstep.errors import WireError
from farstep.head.members.membership import RUNNING, State
from farstep.wire import messages as m


@dataclass(frozen=True)
class Rule:
    """When one type of message is valid."""

    states: tuple[State, ...] = (State.ALIVE, State.RELEASED)
    only_remote: bool = False
    """Whether only workers without shared memory send it."""
    only_shared: bool = False
    """Whether only workers with shared memory send it."""
    heartbeat: bool = False
    """Whether it is sent over the heartbeat connection, which carries no other messages."""
    frames: tuple[int, int | None] = (0, 0)
    """Minimum and maximum number of frames after the header; None: no fixed maximum, because the header lists the
    frames."""
    shared_frames: tuple[int, int] | None = None
    """The same for workers with shared memory; None: as `frames`."""


RULES: Mapping[type, Rule] = {
    m.Hello: Rule((State.STARTING,)),
    m.Ready: Rule((State.CONSTRUCTING,)),
    m.Failure: Rule((State.CONSTRUCTING, State.ALIVE, State.RELEASED)),
    m.ClientAdmitted: Rule(),
    m.RejectClient: Rule(),
    m.AgentReady: Rule(),
    m.Reply: Rule(frames=(1, 1)),
    m.Idle: Rule(),
    m.Chunk: Rule(frames=(1, None), shared_frames=(1, 2)),  # episode ends, and infos if the ticket requests them
    m.Part: Rule(only_remote=True, frames=(1, None)),
    m.StepInfos: Rule(only_shared=True, frames=(1, 1)),
    m.RequestSend: Rule(only_remote=True),
    m.WeightRequest: Rule(only_remote=True),
    m.Progress: Rule(RUNNING, only_remote=True, heartbeat=True),
}


def check_message(message: m.FromWorker, received: Received, state: State, shares_memory: bool) -> None:
    """Raise `WireError` unless a worker in this state may send this message over this connection.

    Args:
        message: The decoded header frame.
        received: The message as it arrived.
        state: The worker's state. Messages of a worker that no longer runs are checked with `is_late` instead.
        shares_memory: Whether the worker shares memory with the head.
    """
    rule, kind = RULES[type(message)], type(message).__name__
    if state in RUNNING and state not in rule.states:
        raise WireError(f"{kind} from a worker that is {state.value}.")
    if rule.only_remote and shares_memory:
        raise WireError(f"{kind} from a worker with shared memory.")
    if rule.only_shared and not shares_memory:
        raise WireError(f"{kind} from a worker without shared memory.")
    if rule.heartbeat is not received.heartbeat:
        raise WireError(f"{kind} {'outside of' if rule.heartbeat else 'on'} the heartbeat connection.")
    fewest, most = (shares_memory and rule.shared_frames) or rule.frames
    count = len(received.frames) - 1
    if count < fewest or (most is not None and count > most):
        raise WireError(f"{kind} with {count} frames; expected {fewest if most == fewest else f'{fewest} to {most}'}.")


def is_late(message: m.FromWorker, state: State) -> bool:
    """Whether to ignore a message because its worker was declared lost. A `Failure` is kept: it may have the reason."""
    return state not in RUNNING and not isinstance(message, m.Failure)
