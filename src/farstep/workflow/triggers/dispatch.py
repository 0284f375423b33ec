"""Triggers, their combinations, and the dispatcher that evaluates them.

    Ledger changes ─ Dispatcher.check: trigger.ready? ─ trigger.consume ─ delivery(message) ─ ... ─ done

A trigger tests (`ready`) and commits (`consume`) in separate calls, so that `a & b` consumes from both or from neither.
This module neither blocks nor reads a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from farstep.config.transfer import TransferTrigger
from farstep.errors import ConfigError, unknown_name
from farstep.workflow.triggers.ledger import Ledger

Message = Mapping[str, Any]


class LazyMessage(Mapping[str, Any]):
    """A message that computes the list of all actors' steps only when a consumer reads it.

    Computing this list takes time in proportion to the number of actors, and consumers that sample rarely read it.
    """

    COLUMNS = ("actor_ids", "start", "versions")
    """The entries that are computed on first access."""

    def __init__(self, entries: Message, columns: Callable[[], Message]) -> None:
        """Make a message.

        Args:
            entries: All other entries.
            columns: Returns the entries of `COLUMNS`; every call must return the same entries.
        """
        self._entries, self._columns = entries, columns

    def __getitem__(self, name: str) -> Any:
        return self._columns()[name] if name in self.COLUMNS else self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self.COLUMNS or name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter((*self.COLUMNS, *self._entries))

    def __len__(self) -> int:
        return len(self.COLUMNS) + len(self._entries)

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        return dict, (dict(self),)  # copies and pickles are plain dictionaries with all entries

    def extended(self, **more: object) -> LazyMessage:
        return LazyMessage({**self._entries, **more}, self._columns)


def extended(message: Message, **more: object) -> Message:
    """Return a copy of the message with further entries."""
    return message.extended(**more) if isinstance(message, LazyMessage) else {**message, **more}


class Delivery(Protocol):
    """Delivers a message to its consumer. A delivery is a function of the message, or an object with further members.

    A call returns False if the consumer handles the message later. Any other value means that the message is done.

    Optional members:
        finished() -> list[str]: Ids of the messages that became done since the last call; raises the error of a message
        that failed. Without this method, the consumer must call `Dispatcher.done`.
        failed: set[str]: Ids of done messages that were not handled, or whose consumer raised.
        full: bool: Whether the delivery cannot take another message now.
    """

    def __call__(self, message: Message, /) -> bool | None: ...


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
            message = _evaluate(part, state)
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
        waits = [part.deadline(state) for part in self.parts if _evaluate(part, state) is None]
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
            message = _evaluate(self.parts[index], state)
            if message is not None:
                return extended(message, any=index)
        return None

    def consume(self, state: Ledger, message: Message) -> None:
        self.parts[message["any"]].consume(state, message)
        object.__setattr__(self, "_turn", message["any"] + 1)  # no part starves the others

    def deadline(self, state: Ledger) -> float | None:
        return min((found for part in self.parts if (found := part.deadline(state)) is not None), default=None)


@dataclass
class _Entry:
    trigger_id: str
    trigger: Trigger
    delivery: Delivery
    max_outstanding: int
    outstanding: int = 0
    fired: int = 0

    @property
    def has_room(self) -> bool:
        return self.outstanding < self.max_outstanding and not getattr(self.delivery, "full", False)


class Dispatcher:
    """Evaluates triggers and delivers their messages. It works in rounds; in a round, each trigger fires at most
    once."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._checking = False

    def add(
        self, trigger: Trigger, delivery: Delivery, *, trigger_id: str | None = None, max_outstanding: int = 1
    ) -> str:
        """Register a trigger.

        Args:
            trigger: The trigger. A trigger, and each part of it, can be registered only once.
            delivery: Delivers its messages.
            trigger_id: Id of the trigger in messages; default: its class and a number, e.g. `TimeTrigger-1`.
            max_outstanding: The trigger does not fire while this many of its messages are not done.

        Returns:
            The id.

        Raises:
            ConfigError: An argument is invalid, or the trigger or the id is already registered.
        """
        check_trigger(trigger, "derive it from farstep.workflow.triggers.Trigger")
        if not callable(delivery):
            raise ConfigError(f"delivery is {delivery!r}; expected a function of the message, or e.g. LocalQueue(...).")
        if not isinstance(max_outstanding, int) or max_outstanding < 1:
            raise ConfigError(f"max_outstanding is {max_outstanding!r}; expected a number of messages, at least 1.")
        trigger_id = f"{type(trigger).__name__}-{len(self._entries)}" if trigger_id is None else trigger_id
        if trigger_id in self._entries:
            raise ConfigError(f"there is already a trigger {trigger_id!r}; choose another trigger_id.")
        seen: list[Trigger] = []
        for leaf in leaves_of(trigger):
            if leaf._registered or any(leaf is other for other in seen):
                raise ConfigError(
                    f"{leaf!r} is already registered; a trigger counts what it has consumed, so create another trigger."
                )
            seen.append(leaf)
        for leaf in seen:
            object.__setattr__(leaf, "_registered", True)
        self._entries[trigger_id] = _Entry(trigger_id, trigger, delivery, max_outstanding)
        return trigger_id

    def resume(self, state: Ledger, now: float) -> None:
        """Start a run; the time since the last run does not count.

        Args:
            state: The ledger.
            now: The time now, in seconds on the clock of `state.now`.
        """
        paused_s = now - state.now
        state.tick(now)
        for entry in self._entries.values():
            for leaf in leaves_of(entry.trigger):
                leaf.resume(state, paused_s)

    def check(self, state: Ledger) -> list[Message]:
        """Fire triggers until none is ready, or all ready triggers have `max_outstanding` messages.

        If a delivery calls this method, it does nothing, because the outer call processes the change.

        Args:
            state: The ledger.

        Returns:
            The delivered messages, in order.
        """
        if self._checking:
            return []
        self._checking, fired = True, list[Message]()
        try:
            before = -1
            while len(fired) > before:
                before = len(fired)
                for entry in list(self._entries.values()):
                    fired += self._fire(entry, state)
        finally:
            self._checking = False
        return fired

    def _fire(self, entry: _Entry, state: Ledger) -> list[Message]:
        try:
            self._take_done(entry)
            message = _evaluate(entry.trigger, state) if entry.has_room else None
            if message is None:
                return []
            changes = state.changes
            entry.trigger.consume(state, message)
            message = extended(message, trigger_id=entry.trigger_id)
            entry.fired += 1
            entry.outstanding += 1  # count before the delivery, because the message may be done when it returns
            later = False
            try:
                later = entry.delivery(message) is False
            finally:
                entry.outstanding -= not later and entry.outstanding > 0
            _settle(entry.trigger, changes, state)
        except BaseException as error:
            _noted(error, entry)
            raise
        return [message]

    def _take_done(self, entry: _Entry) -> None:
        for trigger_id in getattr(entry.delivery, "finished", list)():
            self.done(trigger_id)

    def settle(self) -> list[BaseException]:
        """Record which messages are done, without firing. Return the errors of their consumers."""
        errors: list[BaseException] = []
        for entry in self._entries.values():
            for _ in range(entry.outstanding + 1):  # `finished` raises one error at a time
                try:
                    self._take_done(entry)
                    break
                except BaseException as error:
                    errors.append(_noted(error, entry))
        return errors

    def done(self, trigger_id: str) -> None:
        """Record that one message of a trigger was handled.

        Args:
            trigger_id: The id of the trigger.

        Raises:
            ConfigError: The id is unknown, or the trigger has no outstanding message.
        """
        entry = self._entries.get(trigger_id)
        if entry is None:
            raise ConfigError(unknown_name("trigger", trigger_id, self._entries))
        if not entry.outstanding:
            raise ConfigError(f"done({trigger_id!r}) was called, but none of its messages is outstanding.")
        entry.outstanding -= 1

    def outstanding(self, trigger_id: str | None = None) -> int:
        """Return the number of delivered messages that are not done.

        Args:
            trigger_id: Count only messages of this trigger; default: of all triggers.

        Returns:
            The number of messages.
        """
        return sum(entry.outstanding for name, entry in self._entries.items() if trigger_id in (None, name))

    def fired(self, trigger_id: str) -> int:
        """Return how often a trigger has fired.

        Args:
            trigger_id: The id of the trigger.

        Returns:
            The number of its messages.
        """
        return self._entries[trigger_id].fired

    def trigger(self, trigger_id: str) -> Trigger:
        """Return a registered trigger.

        Args:
            trigger_id: The id of the trigger.

        Returns:
            The trigger.
        """
        return self._entries[trigger_id].trigger

    def deadline(self, state: Ledger) -> float | None:
        """Return when to call `Ledger.tick` and `check` again if no other event occurs.

        Args:
            state: The ledger.

        Returns:
            A time in seconds on the clock of `state.now`; None: never.
        """
        deadlines = [entry.trigger.deadline(state) for entry in self._entries.values() if entry.has_room]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)


def _noted(error: BaseException, entry: _Entry) -> BaseException:
    """Add a note that names the trigger to an error, and return the error."""
    note = f"In trigger {entry.trigger_id!r}, {entry.trigger!r}."
    if note not in getattr(error, "__notes__", ()):  # a consumer may raise the same error object again
        error.add_note(note)
    return error


def _evaluate(trigger: Trigger, state: Ledger) -> Message | None:
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


def _settle(trigger: Trigger, changes: int, state: Ledger) -> None:
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
