"""What is here of chunks that still travel, for triggers that wait for some keys only (ARTOS: dual-stage pipeline).

Rows enter the buffer when all of their chunk is here. Arrays that came ahead are kept here until then, as copies, and
the ledger is told of their keys. If their chunk is lost they are taken back, and come again with another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from farstep.batch import Batch
from farstep.workflow.ledger import Ledger
from farstep.workflow.triggers import DataKeyTrigger


@dataclass
class _Chunk:
    """The arrays of a ticket's chunk that are here."""

    ticket: int
    key: int
    """Consecutive for chunks that follow each other without a gap."""
    version: int
    batch: Batch
    start: int = 0
    told: set[str] = field(default_factory=set)


class PartialChunks:
    """The chunks of all actors that are here in part; each is as long as the windows of `triggers`."""

    def __init__(self, ledger: Ledger, triggers: Sequence[DataKeyTrigger]) -> None:
        self._ledger, self._triggers = ledger, triggers
        self._chunks: dict[int, list[_Chunk]] = {}

    def add(self, actor: int, ticket: int, key: int, version: int, batch: Batch) -> None:
        """Further arrays of an actor's chunk are here; `batch` has all that are, and stays as it is."""
        chunks = self._chunks.setdefault(actor, [])
        if any(each.ticket == ticket and each.key != key for each in chunks):  # its worker does it once more
            self._take_back(actor, [each for each in chunks if each.ticket != ticket])
            chunks = self._chunks[actor]
        before = [each for each in chunks if each.ticket != ticket]
        if before:  # what it follows is here and was not handed out
            batch = replace(batch, continues=np.full(len(batch.slots), before[-1].key == key - 1))
        if len(before) < len(chunks):
            chunks[-1].batch = batch
        else:
            chunks.append(_Chunk(ticket, key, version, batch))
        self._tell(actor, chunks[-1])

    def _tell(self, actor: int, chunk: _Chunk) -> None:
        steps, _ = chunk.batch.shape
        chunk.start = self._ledger.written(actor) + steps * self._chunks[actor].index(chunk)
        new = [name for name in chunk.batch.arrays if name not in chunk.told]
        # Steps with all their keys count as being in the buffer: so the last ones are not told ahead of that.
        if new and len(chunk.told) + len(new) < len(self._ledger.keys):
            chunk.told.update(new)
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
                self._take_back(actor, left)

    def void_all(self) -> None:
        """Discard all parts of incomplete chunks."""
        self.void([(actor, each.ticket) for actor, chunks in self._chunks.items() for each in chunks])

    def _take_back(self, actor: int, left: list[_Chunk]) -> None:
        self._ledger.took_back(actor)
        for trigger in self._triggers:
            trigger.took_back(self._ledger, actor)
        self._chunks[actor] = left
        for chunk in left:  # theirs are the steps after the last that is whole, now
            chunk.told.clear()
            self._tell(actor, chunk)

    def stored(self, actor: int, ticket: int) -> list[str] | None:
        """A chunk is in the buffer; the keys that the ledger was not told of (None: of all)."""
        chunks = self._chunks.get(actor)
        if not chunks:
            return None
        chunk = chunks.pop(0)
        assert chunk.ticket == ticket, "an actor's chunks are stored in the order in which they came"
        return [name for name in self._ledger.keys if name not in chunk.told]

    def batch(self, actor: int, start: int) -> Batch:
        """What is here of the chunk that begins with an actor's row `start`."""
        return next(each.batch for each in self._chunks[actor] if each.start == start)
