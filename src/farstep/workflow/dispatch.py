"""What a trigger is, how triggers are joined, and who evaluates them.

    something changes ─ Ledger ─ Dispatcher.check: ready? consume, pass the message on ─ ... ─ done

A trigger looks (`ready`) and commits (`consume`) apart, so that `a & b` takes from both or from none. Nothing here
waits or reads a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from farstep.config.transfer import TransferTrigger
from farstep.errors import ConfigError, unknown_name
from farstep.workflow.ledger import Ledger

Message = Mapping[str, Any]


class LazyMessage(Mapping[str, Any]):
    """A message that lists the steps of all actors only when a consumer reads them.

    Listing them takes time in proportion to the number of actors, and consumers that sample rarely read them.
    """

    COLUMNS = ("actor_ids", "start", "versions")
    """The entries that are computed on first access."""

    def __init__(self, entries: Message, columns: Callable[[], Message]) -> None:
        """Make a message.

        Args:
            entries: All other entries.
            columns: Returns the entries of `COLUMNS`; every call must return the same ones.
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
    """The message with further entries."""
    return message.extended(**more) if isinstance(message, LazyMessage) else {**message, **more}


class Passer(Protocol):
    """Hands a message to its consumer.

    False: the consumer is not done yet. A passer that says so may have `finished() -> list[str]`, the trigger ids of
    messages that were done since the last call; without it somebody calls `Dispatcher.done`. It raises what went wrong
    with one; `failed: set[str]` says which of those that are done were not handled. One that may have no room has a
    property `full`.
    """

    def __call__(self, message: Message, /) -> bool | None: ...


class Trigger:
    """What triggers have in common; one of your own needs `ready` only.

    Without a `consume` of its own it fires at most once per change of the state. `a & b` fires when both are ready,
    `a | b` when one is.
    """

    _fired_at = -1
    _registered = False

    def ready(self, state: Ledger) -> Message | None:
        """The message, if it would fire now; changes nothing."""
        raise ConfigError(f"{type(self).__name__} has no ready(self, state); it returns the message, or None.")

    def consume(self, state: Ledger, message: Message) -> None:
        """It fires with what `ready` just returned, and is not ready again for the same."""
        object.__setattr__(self, "_fired_at", state.changes)  # also where it is a frozen dataclass

    def deadline(self, state: Ledger) -> float | None:
        """When, on the clock of `state.now`, it may become ready without any other change."""
        return None

    def resume(self, state: Ledger, paused_s: float) -> None:
        """A run begins at `state`; for so long none did."""

    def __and__(self, other: Trigger) -> AllOf:
        return AllOf((*_parts(self, AllOf), *_parts(other, AllOf)))

    def __or__(self, other: Trigger) -> AnyOf:
        return AnyOf((*_parts(self, AnyOf), *_parts(other, AnyOf)))


def check_trigger(value: object, remedy: str) -> None:
    """Refuse what is none."""
    if isinstance(value, TransferTrigger):
        raise ConfigError(value.NO_TRIGGER)
    if not isinstance(value, Trigger):
        raise ConfigError(f"{value!r} is no trigger; {remedy}.")


@dataclass(frozen=True, eq=False)
class _Joined(Trigger):
    parts: tuple[Trigger, ...]

    def __post_init__(self) -> None:
        for part in self.parts:
            check_trigger(part, "join triggers, such as TimeTrigger(60) | TimeTrigger(9)")


class AllOf(_Joined):
    """Fires when all of several are ready, and takes from all; their messages are listed under `all`."""

    def ready(self, state: Ledger) -> Message | None:
        messages = []
        for part in self.parts:
            message = _look(part, state)
            if message is None:
                return None
            messages.append(message)
        return {"all": messages}

    def consume(self, state: Ledger, message: Message) -> None:
        takes = [type(part).consume is not Trigger.consume for part in self.parts]
        for part, own, takes_some in zip(self.parts, message["all"], takes, strict=True):
            if takes_some or not any(takes):  # else it is a gate: open for as long as the others have something
                part.consume(state, own)

    def deadline(self, state: Ledger) -> float | None:
        waits = [part.deadline(state) for part in self.parts if _look(part, state) is None]
        known = [wait for wait in waits if wait is not None]
        return max(known, default=state.now) if len(known) == len(waits) else None


class AnyOf(_Joined):
    """Fires when one of several is ready, and takes from that alone; `any` in the message says which."""

    _turn = 0

    def ready(self, state: Ledger) -> Message | None:
        for offset in range(len(self.parts)):
            index = (self._turn + offset) % len(self.parts)
            message = _look(self.parts[index], state)
            if message is not None:
                return extended(message, any=index)
        return None

    def consume(self, state: Ledger, message: Message) -> None:
        self.parts[message["any"]].consume(state, message)
        object.__setattr__(self, "_turn", message["any"] + 1)  # so that none keeps the others from firing

    def deadline(self, state: Ledger) -> float | None:
        return min((found for part in self.parts if (found := part.deadline(state)) is not None), default=None)


@dataclass
class _Entry:
    trigger_id: str
    trigger: Trigger
    passer: Passer
    max_outstanding: int
    outstanding: int = 0

    @property
    def has_room(self) -> bool:
        return self.outstanding < self.max_outstanding and not getattr(self.passer, "full", False)


class Dispatcher:
    """Evaluates triggers after a change and passes their messages on, in rounds of at most one firing each."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._checking = False

    def add(self, trigger: Trigger, passer: Passer, *, trigger_id: str | None = None, max_outstanding: int = 1) -> str:
        """Register a trigger; at most `max_outstanding` of its messages are not done at any time. Returns its id."""
        check_trigger(trigger, "derive it from farstep.workflow.triggers.Trigger")
        if not callable(passer):
            raise ConfigError(f"{passer!r} is no passer; expected a function of the message, or LocalQueue(...).")
        if not isinstance(max_outstanding, int) or max_outstanding < 1:
            raise ConfigError(f"max_outstanding is {max_outstanding!r}; expected a number of messages, at least 1.")
        trigger_id = f"{type(trigger).__name__}-{len(self._entries)}" if trigger_id is None else trigger_id
        if trigger_id in self._entries:
            raise ConfigError(f"there is a trigger {trigger_id!r} already; expected another trigger_id.")
        seen: list[Trigger] = []
        for leaf in leaves_of(trigger):
            if leaf._registered or any(leaf is other for other in seen):
                raise ConfigError(f"{leaf!r} is registered already; it counts what it took, so make another one.")
            seen.append(leaf)
        for leaf in seen:
            object.__setattr__(leaf, "_registered", True)
        self._entries[trigger_id] = _Entry(trigger_id, trigger, passer, max_outstanding)
        return trigger_id

    def resume(self, state: Ledger, now: float) -> None:
        """A run begins now: what passed since the last one does not count."""
        paused_s = now - state.now
        state.tick(now)
        for entry in self._entries.values():
            for leaf in leaves_of(entry.trigger):
                leaf.resume(state, paused_s)

    def check(self, state: Ledger) -> list[Message]:
        """Fire until no trigger is ready (or has room); returns what was passed on, in order.

        Called again by a passer it does nothing: the call under way goes on with what changed.
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
            message = _look(entry.trigger, state) if entry.has_room else None
            if message is None:
                return []
            changes = state.changes
            entry.trigger.consume(state, message)
            message = extended(message, trigger_id=entry.trigger_id)
            entry.outstanding += 1  # before: it may be done while the passer still runs
            later = False
            try:
                later = entry.passer(message) is False
            finally:
                entry.outstanding -= not later and entry.outstanding > 0
            _settle(entry.trigger, changes, state)
        except BaseException as error:
            _noted(error, entry)
            raise
        return [message]

    def _take_done(self, entry: _Entry) -> None:
        for trigger_id in getattr(entry.passer, "finished", list)():
            self.done(trigger_id)

    def settle(self) -> list[BaseException]:
        """Take in which messages are done, without firing; what their consumers raised."""
        errors: list[BaseException] = []
        for entry in self._entries.values():
            for _ in range(entry.outstanding + 1):  # each of them may have failed
                try:
                    self._take_done(entry)
                    break
                except BaseException as error:
                    errors.append(_noted(error, entry))
        return errors

    def done(self, trigger_id: str) -> None:
        """A message of this trigger was handled."""
        entry = self._entries.get(trigger_id)
        if entry is None:
            raise ConfigError(unknown_name("trigger", trigger_id, self._entries))
        if not entry.outstanding:
            raise ConfigError(f"a message of {trigger_id!r} is said to be done, but none is outstanding.")
        entry.outstanding -= 1

    def outstanding(self, trigger_id: str | None = None) -> int:
        """How many messages (of that trigger) were passed on and are not done."""
        return sum(entry.outstanding for name, entry in self._entries.items() if trigger_id in (None, name))

    def deadline(self, state: Ledger) -> float | None:
        """When to `tick` and `check` again if nothing else changes."""
        deadlines = [entry.trigger.deadline(state) for entry in self._entries.values() if entry.has_room]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)


def _noted(error: BaseException, entry: _Entry) -> BaseException:
    note = f"In trigger {entry.trigger_id!r}, {entry.trigger!r}."
    if note not in getattr(error, "__notes__", ()):  # a consumer may raise the same one again
        error.add_note(note)
    return error


def _look(trigger: Trigger, state: Ledger) -> Message | None:
    if trigger._fired_at == state.changes:
        return None
    message = trigger.ready(state)
    if message is not None and not isinstance(message, Mapping):
        raise ConfigError(
            f"{type(trigger).__name__}.ready returned {message!r}; expected the message, a mapping such as "
            '{"steps": state.env_steps}, or None while it is not ready.'
        )
    return message


def _settle(trigger: Trigger, changes: int, state: Ledger) -> None:
    """What the handling of its own message changed is no reason for a trigger without `consume` to fire again."""
    for leaf in leaves_of(trigger):
        if leaf._fired_at == changes:
            object.__setattr__(leaf, "_fired_at", state.changes)


def leaves_of(trigger: Trigger) -> Iterator[Trigger]:
    if isinstance(trigger, _Joined):
        for part in trigger.parts:
            yield from leaves_of(part)
    else:
        yield trigger


def _parts(trigger: Trigger, kind: type[_Joined]) -> tuple[Trigger, ...]:
    return trigger.parts if isinstance(trigger, kind) else (trigger,)
