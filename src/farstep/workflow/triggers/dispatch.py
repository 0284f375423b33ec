"""The dispatcher: evaluates triggers and passes their messages to deliveries.

    Ledger changes ─ Dispatcher.check: trigger.ready? ─ trigger.consume ─ delivery(message) ─ ... ─ done

This module neither blocks nor reads a clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from farstep.errors import ConfigError, unknown_name
from farstep.workflow.triggers.ledger import Ledger
from farstep.workflow.triggers.messages import Message, extended
from farstep.workflow.triggers.trigger import Trigger, check_trigger, evaluate, ignore_own_changes, leaves_of, register


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
        register(trigger)
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
            message = evaluate(entry.trigger, state) if entry.has_room else None
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
            ignore_own_changes(entry.trigger, changes, state)
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
