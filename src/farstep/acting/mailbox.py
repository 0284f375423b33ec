"""The memory through which one worker and its acting server exchange observations and actions.

On one host, both map the same memory, in which the mailboxes of several workers are side by side (see
`serving/arena.py`). Over the network, each has a copy, and `packed` and `fill` transfer the contents.

A worker divides its environments into groups. For each group it writes observations, then the number of its request;
the server writes actions, then the same number as its answer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from farstep.core import Array, BytesLike
from farstep.errors import WireError
from farstep.schema import ArraySpec, Schema
from farstep.wire.channels.memory import SharedMemory

HELD, PULLS, PULLED_BYTES, DIVERGENCE = range(4)
"""Words of the whole mailbox. The worker writes the first, the server the others.

- HELD: the ticket whose rows must all have one version; 0: none
- PULLS: number of weight pulls of this server
- PULLED_BYTES: bytes that this worker reports for them
- DIVERGENCE: bits of the running divergence (see `divergence_bits`)
"""
TOTALS = slice(PULLS, DIVERGENCE + 1)
"""The words of the whole mailbox that the server writes."""
_MAILBOX_WORDS = 8
REQUEST, TICKET, MIN_VERSION, IS_FIRST, USED, NEWEST, CONTINUES, WAITS = range(8)
"""Words of a group that the worker writes.

- REQUEST: number of the current request
- TICKET, MIN_VERSION: its ticket, and the oldest version that may act. Written with the first request of a chunk
- IS_FIRST: whether it is the first request of its chunk, for which the recurrent state is recorded. The worker clears
  it when it uses the answer
- USED: the last request whose answer the worker has used. If the server has acted since then, its answer was given up
  with a cancelled chunk
- NEWEST: the newest version that the head has announced to the worker. Without shared memory, a ticket may arrive at
  the worker before the announcement arrives at the server
- CONTINUES: whether the worker sends another request after this one in the same chunk. The worker clears it after it
  has written the number of the last request, so that the server always expects or sees that request
- WAITS: whether the worker waits for its doorbell. Without shared memory, the server sets it, because it sends every
  answer
"""
ANSWER, VERSION, COUNTS_AS, FAILED = range(8, 12)
"""Words of a group that the server writes.

- ANSWER: number of the last request that was answered
- VERSION, COUNTS_AS: the version that acted, and the version that it counts as
- FAILED: whether `act` raised, or weights could not be loaded

The server writes `ANSWER` last.
"""
_GROUP_WORDS = 16
WORKER_WORDS, SERVER_WORDS = slice(REQUEST, CONTINUES + 1), slice(ANSWER, FAILED + 1)
"""The words of a group that the worker sends over the network, and those that the server sends."""
STARTS, ROOTS, EPISODES = "#starts", "#roots", "#episodes"
"""Arrays beside observations, outputs and recurrent state; no agent can return these names."""
_ALIGN = 64


def divergence_bits(divergence: float | None) -> int:
    """A divergence as a word; NaN means None."""
    return int(np.float64(math.nan if divergence is None else divergence).view(np.int64))


def divergence_of_bits(word: int) -> float | None:
    """The divergence that `divergence_bits` encoded."""
    divergence = float(np.int64(word).view(np.float64))
    return None if math.isnan(divergence) else divergence


@dataclass(frozen=True)
class MailboxLayout:
    """What mailboxes contain. Server and worker compute the same offsets."""

    groups: Sequence[int]
    """Number of environments in each group."""
    obs: Schema
    outputs: Schema
    state: Schema
    num_mailboxes: int = 1
    """Number of mailboxes that are side by side in one memory."""

    @property
    def num_envs(self) -> int:
        """Number of environments of one mailbox."""
        return sum(self.groups)

    def _specs(self) -> Schema:
        own = {STARTS: ArraySpec((), "|b1"), ROOTS: ArraySpec((), "<i8"), EPISODES: ArraySpec((), "<i8")}
        return {**self.obs, **self.outputs, **self.state, **own}

    def _offsets(self) -> tuple[dict[str, int], int]:
        offsets, end = {}, 8 * self.num_mailboxes * (_MAILBOX_WORDS + _GROUP_WORDS * len(self.groups))
        for name, spec in self._specs().items():
            offsets[name] = end = -(-end // _ALIGN) * _ALIGN
            end += spec.nbytes * self.num_mailboxes * self.num_envs
        return offsets, end

    def has_same_offsets(self, other: MailboxLayout) -> bool:
        """Whether the layouts are equal and have their arrays in the same order, which `==` ignores."""
        return self == other and list(self._specs()) == list(other._specs())

    @property
    def nbytes(self) -> int:
        return self._offsets()[1]

    def request(self, any_starts: bool) -> list[str]:
        """The arrays of a request over the network. Only requests in which an episode starts have seeds."""
        return [STARTS, *self.obs, *((ROOTS, EPISODES) if any_starts else ())]

    def answer(self, is_first: bool) -> list[str]:
        """The arrays of an answer over the network. Only the first of a chunk has the recurrent state."""
        return [*self.outputs, *(self.state if is_first else ())]

    def parts(self, names: Sequence[str], rows: slice) -> list[slice]:
        """Where some rows of the named arrays are in the memory."""
        offsets, _ = self._offsets()
        sizes = {name: spec.nbytes for name, spec in self._specs().items()}
        return [
            slice(offsets[name] + rows.start * sizes[name], offsets[name] + rows.stop * sizes[name]) for name in names
        ]

    def words(self, memory: memoryview) -> tuple[Array, Array]:
        """The words of all mailboxes, `[num_mailboxes, words]`, and of all their groups, `[groups, words]`."""
        mailbox_words: Array = np.ndarray((self.num_mailboxes, _MAILBOX_WORDS), np.int64, memory)
        groups = self.num_mailboxes * len(self.groups)
        return mailbox_words, np.ndarray((groups, _GROUP_WORDS), np.int64, memory, mailbox_words.nbytes)

    def arrays(self, memory: memoryview) -> dict[str, Array]:
        """The arrays, with the rows of all mailboxes."""
        offsets, _ = self._offsets()
        rows = self.num_mailboxes * self.num_envs
        return {
            name: np.ndarray((rows, *spec.shape), np.dtype(spec.dtype), memory, offsets[name])
            for name, spec in self._specs().items()
        }


class Mailbox:
    """A mapped mailbox.

    Args:
        memory: The memory.
        layout: What it contains.
        index: Which of its mailboxes this is.
    """

    def __init__(self, memory: SharedMemory, layout: MailboxLayout, index: int = 0) -> None:
        self.memory, self.layout = memory, layout
        mailbox_words, group_words = layout.words(memory.map)
        first, self._first_row = index * len(layout.groups), index * layout.num_envs
        self.words = memoryview(mailbox_words[index])
        self.group_words = [memoryview(group_words[first + i]) for i in range(len(layout.groups))]
        rows = slice(self._first_row, self._first_row + layout.num_envs)
        self.arrays = {name: array[rows] for name, array in layout.arrays(memory.map).items()}
        edges = np.cumsum([0, *layout.groups]).tolist()
        self.ranges = [slice(first, stop) for first, stop in itertools.pairwise(edges)]
        self._known_parts: dict[tuple[int, tuple[str, ...]], Sequence[slice]] = {}

    @classmethod
    def create(cls, layout: MailboxLayout) -> Mailbox:
        return cls(SharedMemory.create(layout.nbytes, "farstep-mailbox"), layout)

    def packed(self, names: Sequence[str], group: int) -> bytes:
        """The contents of the named arrays of one group."""
        return b"".join(self.memory.map[part] for part in self._parts(names, group))

    def fill(self, names: Sequence[str], group: int, payload: BytesLike) -> None:
        """Write what `packed` returned. Raise `WireError` if it has another size."""
        parts, start = self._parts(names, group), 0
        if (expected := sum(part.stop - part.start for part in parts)) != len(payload):
            raise WireError(f"arrays of {len(payload)} bytes for a group that has {expected}.")
        for part in parts:
            stop = start + part.stop - part.start
            self.memory.map[part] = payload[start:stop]
            start = stop

    def _parts(self, names: Sequence[str], group: int) -> Sequence[slice]:
        key = (group, tuple(names))
        if key not in self._known_parts:
            rows = self.ranges[group]
            rows = slice(self._first_row + rows.start, self._first_row + rows.stop)
            self._known_parts[key] = self.layout.parts(names, rows)
        return self._known_parts[key]

    def close(self) -> None:
        self.memory.close()
