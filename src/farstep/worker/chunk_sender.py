"""Sends the arrays of a chunk from a worker without shared memory, in one message or in stages.

`EnvConfig.transfer` configures this. Rows may be sent as `Part`s while the chunk is still being rolled; the rest is
sent in stages once the chunk is complete. The last stage is part of the `Chunk` message, which the worker's loop sends.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from farstep.batch import ENDS, is_final
from farstep.config.transfer import ALL_AT_ONCE, TransferTrigger
from farstep.core import Array, BytesLike
from farstep.rollout.rows import Rows
from farstep.wire import messages as m
from farstep.wire.compression import Compressor


class ChunkPayload(NamedTuple):
    """The frames of a `Chunk` message after its header, and the fields of the header that describe them."""

    frames: list[BytesLike]
    """Episode ends (empty if a `Part` has sent them), then one array per key."""
    keys: list[str]
    codecs: list[str]
    first: int


class ChunkSender:
    """Sends parts of a chunk before the rest, as the `TransferTrigger` requires.

    ZeroMQ does not report how much of its send queue is unsent. Therefore this class sends rows of an unfinished chunk
    only after the head has acknowledged the previous part (`Taken`). At most one such part is in flight. On a slow
    connection, rows wait here for the next part instead of filling the queue.
    """

    def __init__(
        self, transfer: TransferTrigger, send: Callable[..., None], poll: Callable[[], None], compressor: Compressor
    ) -> None:
        self._transfer, self._send, self._poll, self._compressor = transfer, send, poll, compressor
        self._in_flight, self._index = False, -1

    def begin(self, ticket: m.Ticket, index: int, rows: Rows, whole: bool = False) -> int:
        """Start a chunk. Return the row before which to call `send_rows`; -1: never.

        Args:
            ticket: Its ticket.
            index: Its index.
            rows: Its rows.
            whole: Whether no row may be sent before the chunk is complete.
        """
        self._ticket, self._index, self._rows = ticket, index, rows
        self._first, self._in_flight, self._since = 0, False, time.monotonic()
        self._trigger = self._transfer if ticket.steps > 1 else ALL_AT_ONCE  # for a single row, stages save no time
        self._row_bytes = sum(block[:1].nbytes for name, block in rows.row.items() if not is_final(name))
        return self._next(0) if self._trigger.sends_early and not whole else -1

    def _next(self, t: int) -> int:
        """The row before which to check the trigger next, after row `t`."""
        trigger = self._trigger
        other = trigger.also or trigger.episode_end or trigger.max_bytes is not None or trigger.seconds is not None
        return t + (1 if other or trigger.size is None else trigger.size)

    def acknowledged(self, taken: m.Taken) -> None:
        """Record that the head has received the part in flight."""
        if taken.index == self._index:
            self._in_flight = False

    def send_rows(self, t: int) -> int:
        """Send the unsent rows before `t` if the trigger fires. Return the row before which to call this again."""
        unsent = slice(self._first, t)
        ended = self._trigger.watches_ends and any(self._rows.row[k][unsent].any() for k in ("terminated", "truncated"))
        rows = t - self._first
        if not self._trigger.due(rows, rows * self._row_bytes, time.monotonic() - self._since, ended):
            return t + 1
        self._poll()
        if not self._in_flight:
            arrays = {name: block[unsent] for name, block in self._rows.row.items() if not is_final(name)}
            self._send_part(-1, arrays)
            self._first, self._in_flight, self._since = t, True, time.monotonic()
        return self._next(t)

    def finish(self, ends: bytes, passed: int) -> ChunkPayload:
        """Send all stages of the complete chunk except the last. Return the last stage; the caller sends it."""
        *stages, last = self._trigger.split(list(unsent := self._unsent(len(ends) // ENDS.itemsize)))
        for stage, names in enumerate(stages):
            self._send_part(stage, {name: unsent[name] for name in names}, b"" if stage else ends, passed)
        codecs, frames = self._packed({name: unsent[name] for name in last})
        return ChunkPayload([b"" if stages else ends, *frames], last, codecs, self._first)

    def _unsent(self, ends: int) -> dict[str, Array]:
        """The chunk's arrays, without unused rows and without rows that were already sent."""
        tables = self._rows.tables(self._ticket.steps)
        for name, table in tables.items():
            if is_final(name):
                tables[name] = table[: -(-ends // self._rows.num_envs)]
            elif name in self._rows.row:
                tables[name] = table[self._first :]
        return tables

    def _send_part(self, stage: int, arrays: dict[str, Array], ends: bytes = b"", passed: int = -1) -> None:
        codecs, frames = self._packed(arrays)
        part = m.Part(self._ticket.seq, self._index, stage, self._first, list(arrays), passed, codecs)
        self._send(part, ends, *frames)

    def _packed(self, arrays: dict[str, Array]) -> tuple[list[str], list[BytesLike]]:
        """The codec of each array (an empty list if none is compressed) and the frames."""
        packed = [self._compressor.pack(name, array) for name, array in arrays.items()]
        codecs = [codec for codec, _ in packed]
        return codecs if any(codecs) else [], [frame for _, frame in packed]
