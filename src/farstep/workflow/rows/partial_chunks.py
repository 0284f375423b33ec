"""Stores parts of incomplete chunks, for triggers that need only some keys (dual-stage pipeline of ARTOS).

Rows are inserted into the buffer when their chunk is complete. Until then, this module keeps copies of the arrays that
have arrived, and the ledger counts their steps for their keys. If the chunk is lost, its steps are withdrawn from the
ledger; another chunk brings the arrays again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from farstep.batch import Batch
from farstep.workflow.triggers import DataKeyTrigger
from farstep.workflow.triggers.ledger import Ledger


@dataclass
class _Chunk:
    """The arrays of a ticket's chunk that have arrived."""

    ticket: int
    key: int
    """Successive chunks without a gap have consecutive keys."""
    version: int
    batch: Batch
    start: int = 0
    recorded: set[str] = field(default_factory=set)
    """Keys whose steps the ledger has counted."""


class PartialChunks:
    """The incomplete chunks of all actors. Each chunk is as long as the windows of `triggers`."""

    def __init__(self, ledger: Ledger, triggers: Sequence[DataKeyTrigger]) -> None:
        self._ledger, self._triggers = ledger, triggers
        self._chunks: dict[int, list[_Chunk]] = {}

    def add(self, actor: int, ticket: int, key: int, version: int, batch: Batch) -> None:
        """Add arrays of an actor's chunk. `batch` has all arrays of the chunk so far, and must not change."""
        chunks = self._chunks.setdefault(actor, [])
        if any(
            each.ticket == ticket and each.key != key for each in chunks
        ):  # the worker rolls the chunk of this ticket again
            self._withdraw(actor, [each for each in chunks if each.ticket != ticket])
            chunks = self._chunks[actor]
        before = [each for each in chunks if each.ticket != ticket]
        if before:  # the previous chunk is also incomplete
            batch = replace(batch, continues=np.full(len(batch.slots), before[-1].key == key - 1))
        if len(before) < len(chunks):
            chunks[-1].batch = batch
        else:
            chunks.append(_Chunk(ticket, key, version, batch))
        self._record(actor, chunks[-1])

    def _record(self, actor: int, chunk: _Chunk) -> None:
        """Count the steps of a chunk in the ledger, for newly arrived keys."""
        steps, _ = chunk.batch.shape
        chunk.start = self._ledger.written(actor) + steps * self._chunks[actor].index(chunk)
        new = [name for name in chunk.batch.arrays if name not in chunk.recorded]
        # Steps with all keys must be in the buffer, so `stored` records the last keys.
        if new and len(chunk.recorded) + len(new) < len(self._ledger.keys):
            chunk.recorded.update(new)
            self._ledger.wrote(actor, steps, chunk.version, new)

    def void(self, tickets: Iterable[tuple[int, int]]) -> None:
        """Discard the parts of the chunks of these tickets, given as pairs (actor, ticket)."""
        by_actor: dict[int, set[int]] = {}
        for actor, ticket in tickets:
            by_actor.setdefault(actor, set()).add(ticket)
        for actor, void in by_actor.items():
            chunks = self._chunks.get(actor, [])
            left = [each for each in chunks if each.ticket not in void]
            if len(left) < len(chunks):
                self._withdraw(actor, left)

    def void_all(self) -> None:
        """Discard all parts of incomplete chunks."""
        self.void([(actor, each.ticket) for actor, chunks in self._chunks.items() for each in chunks])

    def _withdraw(self, actor: int, left: list[_Chunk]) -> None:
        """Withdraw the incomplete steps of an actor from the ledger, then record the steps of the chunks in `left`."""
        self._ledger.withdrew(actor)
        for trigger in self._triggers:
            trigger.withdrew(self._ledger, actor)
        self._chunks[actor] = left
        for chunk in left:
            chunk.recorded.clear()
            self._record(actor, chunk)

    def stored(self, actor: int, ticket: int) -> list[str] | None:
        """Forget a chunk that is now in the buffer. Return the keys that are not recorded yet (None: all)."""
        chunks = self._chunks.get(actor)
        if not chunks:
            return None
        chunk = chunks.pop(0)
        assert chunk.ticket == ticket, "an actor's chunks are stored in order of arrival"
        return [name for name in self._ledger.keys if name not in chunk.recorded]

    def batch(self, actor: int, start: int) -> Batch:
        """Return the arrived arrays of the chunk that starts at an actor's row `start`."""
        return next(each.batch for each in self._chunks[actor] if each.start == start)
