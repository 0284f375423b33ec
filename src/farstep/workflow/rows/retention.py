"""Tracks which rows the consumers of a workflow still have to read, and where these rows are stored.

Rows of complete chunks are in the buffer; parts of chunks that are still arriving are in `partial_chunks.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from farstep.batch import Batch, side_by_side
from farstep.buffer.bound_arrays import internals_of
from farstep.buffer.replay import Buffer
from farstep.errors import ConfigError, FarstepError
from farstep.head.tickets.records import DropCause
from farstep.workflow.rows.partial_chunks import PartialChunks
from farstep.workflow.rows.windows import Windows
from farstep.workflow.triggers import DataKeyTrigger
from farstep.workflow.triggers.ledger import Ledger
from farstep.workflow.triggers.messages import Message


class Holder(Protocol):
    """The unfinished messages of a consumer. The rows that these messages name are retained.

    Implemented by `consumers.GuardedDelivery`.
    """

    def holds(self, window: Mapping[str, Any], trigger_id: str | None) -> bool:
        """Return whether an unfinished message (of `trigger_id`; None: of any trigger) names exactly this window."""
        ...

    def gaps_before(self, window: Mapping[str, Any]) -> list[tuple[int, int]]:
        """Return (actor, first row) of each window whose preceding rows were dropped."""
        ...

    def unread_from(self, actor: int) -> int:
        """Return the first row of an actor that is in use, or that a later message may name."""
        ...

    def discard(self, state: Ledger) -> None:
        """Skip all rows that no message has named yet."""
        ...

    def left(self, state: Ledger, actor: int) -> None:
        """Handle the departure of an actor."""
        ...


class RowRetention:
    """Retains, for each actor, all rows from the oldest row that a holder still has to read.

    It calls `freed(actor, chunks, cause)` when chunks are no longer needed. `cause` is the reason if they were dropped,
    or None if they were read.
    """

    def __init__(
        self,
        buffer: Buffer,
        ledger: Ledger,
        triggers: Sequence[DataKeyTrigger],
        freed: Callable[[int, int, DropCause | None], None],
    ) -> None:
        self._buffer, self._ledger, self._freed = buffer, ledger, freed
        self._windows = Windows(buffer)
        self.partial_chunks = PartialChunks(ledger, triggers)
        self.holders: list[Holder] = []
        self._early: dict[int, Batch] = {}
        """The rows of messages that were delivered before all rows were in the buffer, by `message["ahead"]`."""
        self._num_early = 0

    def add(self, actor: int, ticket: int, version: int, batch: Batch) -> None:
        """Record that an actor's next chunk was inserted into the buffer."""
        steps, envs = batch.shape
        if self.holders:
            self._windows.add(actor, self._ledger.written(actor), batch)
            self._mark({actor})
        keys = self.partial_chunks.stored(actor, ticket)
        self._ledger.wrote(actor, steps, version, keys, envs)
        if not self.holders:
            self._freed(actor, 1, None)
        elif keys is not None:
            self.free({actor})  # consumers may have read all parts before the chunk was complete

    def has_room(self, actor: int, steps: int) -> bool:
        """Return whether there is room for an actor's next `steps` rows without overwriting rows that a holder
        needs."""
        if not self.holders:
            return True
        return self._ledger.written(actor) + steps - self._unread_from(actor) <= internals_of(self._buffer).store.rows

    def _unread_from(self, actor: int) -> int:
        return min(holder.unread_from(actor) for holder in self.holders)

    def free(self, actors: set[int], dropped: DropCause | None = None) -> None:
        """Free the rows of these actors that no holder needs; `dropped` is the reason if they were dropped unread."""
        self._mark(actors)
        for actor in actors if self.holders else ():
            if chunks := self._windows.forget(actor, self._unread_from(actor)):
                self._freed(actor, chunks, dropped)

    def _mark(self, actors: set[int]) -> None:
        """Write each holder's read position into the header of the buffer's blocks."""
        for consumer, holder in enumerate(self.holders):
            self._windows.read(consumer, {actor: holder.unread_from(actor) for actor in actors})

    def backlog(self) -> list[int]:
        """Return, for each holder, the largest number of unread rows in any slot."""
        if not self._buffer.is_bound:
            return [0] * len(self.holders)
        blocks = internals_of(self._buffer).store.blocks
        return [int(blocks.backlog(consumer).max()) for consumer in range(min(len(self.holders), len(blocks.cursors)))]

    def discard(self, actors: set[int]) -> None:
        """Drop all rows that were not delivered, and free the rows of these actors."""
        self.partial_chunks.void_all()
        for holder in self.holders:
            holder.discard(self._ledger)
        self.free(actors, "cancelled")

    def left(self, actor: int) -> None:
        """Free the rows of the incomplete window of a departed actor."""
        for holder in self.holders:
            holder.left(self._ledger, actor)
        self.free({actor}, "worker_left")

    def batch(self, message: Message) -> Batch:
        """Return the rows that a message names.

        Raises:
            ConfigError: The message does not name exactly one window.
            FarstepError: The message is done, or its trigger consumes no rows.
        """
        windows = list(windows_of(message))
        if len(windows) != 1:
            raise ConfigError(
                f"the message names {len(windows)} windows of rows; expected one. Pass the message of a "
                "DataKeyTrigger. If the trigger combines several triggers, pass one entry of message['all']."
            )
        window = windows[0]
        holder = next((each for each in self.holders if each.holds(window, message.get("trigger_id"))), None)
        if holder is None:
            raise FarstepError(
                "the rows of this message are no longer retained. If its consumer has returned, call batch() earlier. "
                "If its trigger has consume=False, use buffer.sample() instead."
            )
        if "ahead" in window:
            return self._early[window["ahead"]]
        return self._windows.batch(window["actor_ids"], window["start"], window["size"], holder.gaps_before(window))

    def located(self, message: Message, holder: Holder) -> Message:
        """Return a copy of a message that includes the location of its rows.

        Args:
            message: A message with any number of windows.
            holder: Its holder.

        Returns:
            The copy. If all rows of a window are in the buffer, the window has `slots`, `rows`, `keys` and `path`, so
            that another process can find the rows in shared memory. Otherwise it has `ahead`, a number for `batch`.
        """
        if "all" in message:
            return {**message, "all": [self.located(part, holder) for part in message["all"]]}
        if "actor_ids" not in message:
            return message
        if any(self._ledger.written(actor) < stop for actor, _, stop in rows_of(message)):
            self._num_early += 1
            self._early[self._num_early] = self._partial_batch(message, holder.gaps_before(message))
            return {**message, "ahead": self._num_early}
        pairs = zip(message["actor_ids"], message["start"], strict=True)
        places = [self._windows.where(actor, start, message["size"]) for actor, start in pairs]
        found = {"slots": tuple(slots for slots, _ in places), "rows": tuple(row for _, row in places)}
        return {**message, **found, "keys": message["keys"] or tuple(self._buffer.schema), "path": self._buffer.path}

    def _partial_batch(self, window: Mapping[str, Any], gaps: list[tuple[int, int]]) -> Batch:
        """Return a batch of complete chunks and of the arrived parts of incomplete chunks."""
        found = []
        for actor, start, stop in rows_of(window):
            if self._ledger.written(actor) >= stop:
                found.append(self._windows.batch([actor], [start], stop - start, gaps))
            else:
                batch = self.partial_chunks.batch(actor, start)
                found.append(replace(batch, continues=batch.continues & np.bool_((actor, start) not in gaps)))
        return side_by_side(found)

    def done(self, message: Message) -> None:
        """Forget the partial batch of a message that is done."""
        for window in windows_of(message):
            self._early.pop(window.get("ahead", 0), None)


def windows_of(message: Message) -> Iterator[Mapping[str, Any]]:
    """Yield the parts of a message that name rows."""
    if "all" in message:
        for part in message["all"]:
            yield from windows_of(part)
    elif "actor_ids" in message:
        yield message


def rows_of(message: Message) -> Iterator[tuple[int, int, int]]:
    """Yield the actors that a message names, each with the first row and the end (exclusive) of its window."""
    for window in windows_of(message):
        for actor, start in zip(window["actor_ids"], window["start"], strict=True):
            yield actor, start, start + window["size"]
