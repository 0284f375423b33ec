"""Holdings: which rows of a workflow's buffer somebody is still to read, and who holds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from farstep.batch import Batch
from farstep.buffer.dispatch import Message
from farstep.buffer.ledger import Ledger
from farstep.buffer.replay import Buffer
from farstep.buffer.windows import Windows
from farstep.errors import ConfigError, FarstepError


class Holder(Protocol):
    """Somebody with messages that name rows (see `consumers.Guard`)."""

    def holds(self, window: Mapping[str, Any], trigger_id: str | None) -> bool:
        """Whether a message (of that trigger, where it is known) that is not done names these rows."""
        ...

    def gaps_before(self, window: Mapping[str, Any]) -> list[int]:
        """The actors of which rows right before these were dropped."""
        ...

    def unread_from(self, actor: int) -> int:
        """The first row of an actor that is in use, or that a message to come may name."""
        ...

    def discard(self, state: Ledger) -> None:
        """What it was not told of is not wanted any more."""
        ...


class Holdings:
    """The rows of all actors from the first that somebody is to read, `holders` being those who do.

    `freed(actor, chunks, cause)` is called when chunks are not needed any more; a cause says why nobody read them.
    """

    def __init__(self, buffer: Buffer, ledger: Ledger, freed: Callable[[int, int, str | None], None]) -> None:
        self._buffer, self._ledger, self._freed = buffer, ledger, freed
        self._windows = Windows(buffer)
        self.holders: list[Holder] = []

    def add(self, actor: int, start: int, batch: Batch) -> None:
        """An actor's next chunk was inserted, its first row at `start`."""
        if self.holders:
            self._windows.add(actor, start, batch)
        else:
            self._freed(actor, 1, None)

    def has_room(self, actor: int, steps: int) -> bool:
        """Whether an actor's next rows overwrite nothing that somebody is still to read."""
        if not self.holders:
            return True
        return self._ledger.written(actor) + steps - self._unread_from(actor) <= self._buffer.store.rows

    def _unread_from(self, actor: int) -> int:
        return min(holder.unread_from(actor) for holder in self.holders)

    def free(self, actors: set[int], dropped: str | None = None) -> None:
        """Rows of these actors that nobody holds or will be told of can be overwritten."""
        for actor in actors if self.holders else ():
            if chunks := self._windows.forget(actor, self._unread_from(actor)):
                self._freed(actor, chunks, dropped)

    def discard(self, actors: set[int]) -> None:
        """Nobody wants what was not handed out."""
        for holder in self.holders:
            holder.discard(self._ledger)
        self.free(actors, "cancelled")

    def batch(self, message: Message) -> Batch:
        """The rows that a message names, if it is not done."""
        windows = list(windows_of(message))
        if len(windows) != 1:
            raise ConfigError(f"the message names {len(windows)} windows of rows; give one of message['all'].")
        window = windows[0]
        holder = next((each for each in self.holders if each.holds(window, message.get("trigger_id"))), None)
        if holder is None:
            raise FarstepError(
                "the rows of this message are not held: its consumer has returned, or its trigger takes none "
                "(consume=False). Use batch() in the consumer, and buffer.sample() for replay."
            )
        return self._windows.batch(window["actor_ids"], window["start"], window["size"], holder.gaps_before(window))

    def located(self, message: Message) -> Message:
        """A message that also says where its rows are in the buffer, for a consumer in another process."""
        if "all" in message:
            return {**message, "all": [self.located(part) for part in message["all"]]}
        if "actor_ids" not in message:
            return message
        pairs = zip(message["actor_ids"], message["start"], strict=True)
        places = [self._windows.where(actor, start, message["size"]) for actor, start in pairs]
        found = {"slots": tuple(slots for slots, _ in places), "rows": tuple(row for _, row in places)}
        return {**message, **found, "keys": message["keys"] or tuple(self._buffer.schema), "path": self._buffer.path}


def windows_of(message: Message) -> Iterator[Mapping[str, Any]]:
    """The parts of a message that name rows."""
    if "all" in message:
        for part in message["all"]:
            yield from windows_of(part)
    elif "actor_ids" in message:
        yield message


def rows_of(message: Message) -> Iterator[tuple[int, int, int]]:
    """The actors that a message names, each with its first row and the one after its last."""
    for window in windows_of(message):
        for actor, start in zip(window["actor_ids"], window["start"], strict=True):
            yield actor, start, start + window["size"]
