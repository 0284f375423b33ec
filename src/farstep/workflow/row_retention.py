"""Holdings: which rows of a workflow somebody is still to read, who holds them, and where they are.

They are in the buffer; of chunks that still travel, what came ahead is beside it (`ahead.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from farstep.batch import Batch, side_by_side
from farstep.buffer.replay import Buffer
from farstep.errors import ConfigError, FarstepError
from farstep.workflow.dispatch import Message
from farstep.workflow.ledger import Ledger
from farstep.workflow.partial_chunks import PartialChunks
from farstep.workflow.triggers import DataKeyTrigger
from farstep.workflow.windows import Windows


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

    def left(self, state: Ledger, actor: int) -> None:
        """An actor has left."""
        ...


class RowRetention:
    """The rows of all actors from the first that somebody is to read, `holders` being those who do.

    `freed(actor, chunks, cause)` is called when chunks are not needed any more; a cause says why nobody read them.
    """

    def __init__(
        self,
        buffer: Buffer,
        ledger: Ledger,
        triggers: Sequence[DataKeyTrigger],
        freed: Callable[[int, int, str | None], None],
    ) -> None:
        self._buffer, self._ledger, self._freed = buffer, ledger, freed
        self._windows = Windows(buffer)
        self.ahead = PartialChunks(ledger, triggers)
        self.holders: list[Holder] = []
        self._early: dict[int, Batch] = {}
        """What messages name that were passed on before it was in the buffer, by their `ahead`."""
        self._passed = 0

    def add(self, actor: int, ticket: int, version: int, batch: Batch) -> None:
        """An actor's next chunk is in the buffer."""
        steps, envs = batch.shape
        if self.holders:
            self._windows.add(actor, self._ledger.written(actor), batch)
            self._mark({actor})
        keys = self.ahead.stored(actor, ticket)
        self._ledger.wrote(actor, steps, version, keys, envs)
        if not self.holders:
            self._freed(actor, 1, None)
        elif keys is not None:
            self.free({actor})  # perhaps everybody had what came ahead of it, and wants no more

    def has_room(self, actor: int, steps: int) -> bool:
        """Whether an actor's next rows overwrite nothing that somebody is still to read."""
        if not self.holders:
            return True
        return self._ledger.written(actor) + steps - self._unread_from(actor) <= self._buffer.store.rows

    def _unread_from(self, actor: int) -> int:
        return min(holder.unread_from(actor) for holder in self.holders)

    def free(self, actors: set[int], dropped: str | None = None) -> None:
        """Rows of these actors that nobody holds or will be told of can be overwritten."""
        self._mark(actors)
        for actor in actors if self.holders else ():
            if chunks := self._windows.forget(actor, self._unread_from(actor)):
                self._freed(actor, chunks, dropped)

    def _mark(self, actors: set[int]) -> None:
        """Say in the blocks' header how far everybody has read."""
        for consumer, holder in enumerate(self.holders):
            self._windows.read(consumer, {actor: holder.unread_from(actor) for actor in actors})

    def backlog(self) -> list[int]:
        """Per holder, how many rows it is not done with, of the environment slot with most."""
        if not self._buffer.is_bound:
            return [0] * len(self.holders)
        blocks = self._buffer.store.blocks
        return [int(blocks.backlog(consumer).max()) for consumer in range(min(len(self.holders), len(blocks.cursors)))]

    def discard(self, actors: set[int]) -> None:
        """Nobody wants what was not handed out."""
        self.ahead.void_all()
        for holder in self.holders:
            holder.discard(self._ledger)
        self.free(actors, "cancelled")

    def left(self, actor: int) -> None:
        """An actor has left: free the rows of its incomplete window."""
        for holder in self.holders:
            holder.left(self._ledger, actor)
        self.free({actor}, "worker left")

    def batch(self, message: Message) -> Batch:
        """The rows that a message names, if it is not done."""
        windows = list(windows_of(message))
        if len(windows) != 1:
            raise ConfigError(
                f"the message names {len(windows)} windows of rows; expected one: the message of a DataKeyTrigger, or "
                "the one of message['all'] that is."
            )
        window = windows[0]
        holder = next((each for each in self.holders if each.holds(window, message.get("trigger_id"))), None)
        if holder is None:
            raise FarstepError(
                "the rows of this message are not held: its consumer has returned, or its trigger takes none "
                "(consume=False). Use batch() in the consumer, and buffer.sample() for replay."
            )
        if "ahead" in window:
            return self._early[window["ahead"]]
        return self._windows.batch(window["actor_ids"], window["start"], window["size"], holder.gaps_before(window))

    def located(self, message: Message, holder: Holder) -> Message:
        """A message that also says where its rows are in the buffer, for a consumer in another process; or, where some
        still travel, by which number `batch` knows what is here."""
        if "all" in message:
            return {**message, "all": [self.located(part, holder) for part in message["all"]]}
        if "actor_ids" not in message:
            return message
        if any(self._ledger.written(actor) < stop for actor, _, stop in rows_of(message)):
            self._passed += 1
            self._early[self._passed] = self._came_ahead(message, holder.gaps_before(message))
            return {**message, "ahead": self._passed}
        pairs = zip(message["actor_ids"], message["start"], strict=True)
        places = [self._windows.where(actor, start, message["size"]) for actor, start in pairs]
        found = {"slots": tuple(slots for slots, _ in places), "rows": tuple(row for _, row in places)}
        return {**message, **found, "keys": message["keys"] or tuple(self._buffer.schema), "path": self._buffer.path}

    def _came_ahead(self, window: Mapping[str, Any], gaps: list[int]) -> Batch:
        found = []
        for actor, start, stop in rows_of(window):
            if self._ledger.written(actor) >= stop:
                found.append(self._windows.batch([actor], [start], stop - start, gaps))
            else:
                batch = self.ahead.batch(actor, start)
                found.append(replace(batch, continues=batch.continues & np.bool_(actor not in gaps)))
        return side_by_side(found)

    def done(self, message: Message) -> None:
        """Nobody asks for its batch any more."""
        for window in windows_of(message):
            self._early.pop(window.get("ahead", 0), None)


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
