"""What of a chunk travels when, from a worker that rolls into a block of its own and not into shared memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from farstep.batch import ENDS, is_final
from farstep.config.transfer import ALL_AT_ONCE, TransferTrigger
from farstep.core import Array, BytesLike
from farstep.rollout.rows import Rows
from farstep.wire import messages as m
from farstep.wire.compression import Compressor


class ChunkSender:
    """Sends parts of a chunk ahead of it, as a `TransferTrigger` says.

    ZeroMQ does not tell how much of what it was given still waits to be sent. So rows of a chunk that is being rolled
    go only when the head has answered for those before: at most one such part is ahead of the first stage, and what a
    slow connection does not take stays here, for the next part.
    """

    def __init__(
        self, transfer: TransferTrigger, send: Callable[..., None], look: Callable[[], None], compressor: Compressor
    ) -> None:
        self._transfer, self._send, self._look, self._compressor = transfer, send, look, compressor
        self._under_way, self._index = False, -1

    def begin(self, ticket: m.Ticket, index: int, rows: Rows) -> int:
        """A chunk begins; returns the row before which `ship` wants to be called, -1 for never."""
        self._ticket, self._index, self._rows = ticket, index, rows
        self._first, self._under_way, self._since = 0, False, time.monotonic()
        self._now = self._transfer if ticket.steps > 1 else ALL_AT_ONCE  # a single step has nothing to gain
        self._row_bytes = sum(block[:1].nbytes for name, block in rows.row.items() if not is_final(name))
        return self._next(0) if self._now.sends_early else -1

    def _next(self, t: int) -> int:
        """When to look again after row `t`: where only a number of rows counts, not before they can be there."""
        now = self._now
        other = now.also or now.episode_end or now.max_bytes is not None or now.seconds is not None
        return t + (1 if other or now.size is None else now.size)

    def heard(self, taken: m.Taken) -> None:
        """The head has what was sent."""
        if taken.index == self._index:
            self._under_way = False

    def ship(self, t: int) -> int:
        """Rows before `t` are written: send those that were not sent, if it is time; returns when to be called next."""
        waiting = slice(self._first, t)
        ended = self._now.watches_ends and any(self._rows.row[k][waiting].any() for k in ("terminated", "truncated"))
        rows = t - self._first
        if not self._now.due(rows, rows * self._row_bytes, time.monotonic() - self._since, ended):
            return t + 1
        self._look()
        if not self._under_way:
            arrays = {name: block[waiting] for name, block in self._rows.row.items() if not is_final(name)}
            self._part(-1, arrays)
            self._first, self._under_way, self._since = t, True, time.monotonic()
        return self._next(t)

    def finish(self, chunk: m.Chunk, ends: bytes) -> list[Any]:
        """The chunk is rolled: send all stages but the last one; the frames of that go with the chunk itself."""
        *stages, last = self._now.split(list(left := self._left(len(ends) // ENDS.itemsize)))
        for stage, names in enumerate(stages):
            self._part(stage, {name: left[name] for name in names}, b"" if stage else ends, chunk.passed)
        chunk.first, chunk.keys = self._first, last
        chunk.codecs, frames = self._packed({name: left[name] for name in last})
        return [b"" if stages else ends, *frames]

    def _left(self, ends: int) -> dict[str, Array]:
        """The chunk's arrays, as far as they were written and not sent."""
        tables = self._rows.tables(self._ticket.steps)
        for name, table in tables.items():
            if is_final(name):
                tables[name] = table[: -(-ends // self._rows.num_envs)]
            elif name in self._rows.row:
                tables[name] = table[self._first :]
        return tables

    def _part(self, stage: int, arrays: dict[str, Array], ends: bytes = b"", passed: int = -1) -> None:
        codecs, frames = self._packed(arrays)
        part = m.Part(self._ticket.seq, self._index, stage, self._first, list(arrays), passed, codecs)
        self._send(part, ends, *frames)

    def _packed(self, arrays: dict[str, Array]) -> tuple[list[str], list[BytesLike]]:
        """Codecs, none if nothing is compressed, and frames."""
        packed = [self._compressor.pack(name, array) for name, array in arrays.items()]
        codecs = [codec for codec, _ in packed]
        return codecs if any(codecs) else [], [frame for _, frame in packed]
