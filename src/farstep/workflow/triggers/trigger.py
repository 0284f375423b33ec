"""The base class of triggers, and their combinations `a & b` and `a | b`.

A trigger tests (`ready`) and commits (`consume`) in separate calls, so that `a & b` consumes from both or from neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from farstep.config.transfer import TransferTrigger
from farstep.errors import ConfigError
from farstep.workflow.triggers.ledger import Ledger
from farstep.workflow.triggers.messages import Message, extended


class Trigger:
    """Base class of triggers. Your own trigger must define only `ready`.

    A trigger that does not override `consume` fires at most once per change of the ledger. `a & b` fires when both are
    ready, `a | b` when one of them is.
    """

    _fired_at = -1
    _registered = False

    def ready(self, state: Ledger) -> Message | None:
        """Decide whether to fire now, without changing anything.

        Args:
            state: Steps, versions, updates and time of the workflow.

        Returns:
            The message for the consumer, or None if the trigger does not fire.
        """
        raise ConfigError(f"{type(self).__name__} has no ready(self, state), which returns the message or None.")

    def consume(self, state: Ledger, message: Message) -> None:
        """Commit a firing, so that the trigger does not fire again for the same reason.

        Args:
            state: The ledger that `ready` was called with.
            message: The message that `ready` returned.
        """
        object.__setattr__(self, "_fired_at", state.changes)  # also works for frozen dataclasses

    def deadline(self, state: Ledger) -> float | None:
        """Return when the trigger may become ready without any other change of the ledger.

        Args:
            state: The ledger.

        Returns:
            A time on the clock of `state.now`, in seconds, or None.
        """
        return None

    def resume(self, state: Ledger, paused_s: float) -> None:
        """Handle the start of a run.

        Args:
            state: The ledger.
            paused_s: Seconds since the last run ended.
        """

    def __and__(self, other: Trigger) -> AllOf:
        return AllOf((*_parts(self, AllOf), *_parts(other, AllOf)))

    def __or__(self, other: Trigger) -> AnyOf:
        return AnyOf((*_parts(self, AnyOf), *_parts(other, AnyOf)))


def check_trigger(value: object, remedy: str) -> None:
    """Raise `ConfigError`, with the remedy, unless the value is a trigger."""
    if isinstance(value, TransferTrigger):
        raise ConfigError(value.NO_TRIGGER)
    if not isinstance(value, Trigger):
        raise ConfigError(f"{value!r} is not a trigger; {remedy}.")


@dataclass(frozen=True, eq=False)
class _Joined(Trigger):
    parts: tuple[Trigger, ...]

    def __post_init__(self) -> None:
        for part in self.parts:
            check_trigger(part, "combine triggers, e.g. TimeTrigger(60) | TimeTrigger(9)")


class AllOf(_Joined):
    """`a & b`: fires when all parts are ready, and consumes from all of them.

    `message["all"]` is the list of the parts' messages. A part without its own `consume` acts as a gate: it must be
    ready, but does not count as fired.

    Args:
        parts: The triggers.

    Raises:
        ConfigError: A part is not a trigger.
    """

    def ready(self, state: Ledger) -> Message | None:
        messages = []
        for part in self.parts:
            message = evaluate(part, state)
            if message is None:
                return None
            messages.append(message)
        return {"all": messages}

    def consume(self, state: Ledger, message: Message) -> None:
        takes = [type(part).consume is not Trigger.consume for part in self.parts]
        for part, own, takes_some in zip(self.parts, message["all"], takes, strict=True):
            if takes_some or not any(takes):
                part.consume(state, own)

    def deadline(self, state: Ledger) -> float | None:
        waits = [part.deadline(state) for part in self.parts if evaluate(part, state) is None]
        known = [wait for wait in waits if wait is not None]
        return max(known, default=state.now) if len(known) == len(waits) else None


class AnyOf(_Joined):
    """`a | b`: fires when one of the parts is ready, and consumes only from this part.

    The message is the message of the ready part, plus the index of this part as `message["any"]`. Ready parts take
    turns.

    Args:
        parts: The triggers.

    Raises:
        ConfigError: A part is not a trigger.
    """

    _turn = 0

    def ready(self, state: Ledger) -> Message | None:
        for offset in range(len(self.parts)):
            index = (self._turn + offset) % len(self.parts)
            message = evaluate(self.parts[index], state)
            if message is not None:
                return extended(message, any=index)
        return None

    def consume(self, state: Ledger, message: Message) -> None:
        self.parts[message["any"]].consume(state, message)
        object.__setattr__(self, "_turn", message["any"] + 1)  # no part starves the others

    def deadline(self, state: Ledger) -> float | None:
        return min((found for part in self.parts if (found := part.deadline(state)) is not None), default=None)


def evaluate(trigger: Trigger, state: Ledger) -> Message | None:
    """Return the message of a trigger if it is ready and has not fired since the last change; otherwise None."""
    if trigger._fired_at == state.changes:
        return None
    message = trigger.ready(state)
    if message is not None and not isinstance(message, Mapping):
        raise ConfigError(
            f"{type(trigger).__name__}.ready returned {message!r}; expected the message, a mapping such as "
            '{"steps": state.env_steps}, or None if it is not ready.'
        )
    return message


def register(trigger: Trigger) -> None:
    """Mark a trigger and all its parts as registered, because a trigger counts what it has consumed.

    Args:
        trigger: The trigger.

    Raises:
        ConfigError: One of them is already registered, or is a part twice; none was marked.
    """
    seen: list[Trigger] = []
    for leaf in leaves_of(trigger):
        if leaf._registered or any(leaf is other for other in seen):
            raise ConfigError(
                f"{leaf!r} is already registered; a trigger counts what it has consumed, so create another trigger."
            )
        seen.append(leaf)
    for leaf in seen:
        object.__setattr__(leaf, "_registered", True)


def ignore_own_changes(trigger: Trigger, changes: int, state: Ledger) -> None:
    """Prevent a trigger without its own `consume` from firing again for changes that its own message caused."""
    for leaf in leaves_of(trigger):
        if leaf._fired_at == changes:
            object.__setattr__(leaf, "_fired_at", state.changes)


def leaves_of(trigger: Trigger) -> Iterator[Trigger]:
    """Yield the triggers that `&` and `|` combine; for a simple trigger, the trigger itself."""
    if isinstance(trigger, _Joined):
        for part in trigger.parts:
            yield from leaves_of(part)
    else:
        yield trigger


def _parts(trigger: Trigger, kind: type[_Joined]) -> tuple[Trigger, ...]:
    return trigger.parts if isinstance(trigger, kind) else (trigger,)
