"""The mailboxes of several workers, side by side in one memory, as the acting server sees them.

NumPy reads the requests of all these workers together, and writes their answers together. This saves calls of NumPy:
the server copies each array of a batch once per arena, not once per worker.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from farstep.acting.mailbox import (
    CONTINUES,
    HELD,
    IS_FIRST,
    MIN_VERSION,
    NEWEST,
    REQUEST,
    TICKET,
    WAITS,
    Mailbox,
    MailboxLayout,
)
from farstep.core import Array
from farstep.wire.channels.doorbell import Fence
from farstep.wire.channels.memory import SharedMemory

if TYPE_CHECKING:
    from farstep.acting.serving.server_clients import Client

MAILBOXES_PER_ARENA = 32
"""Number of mailboxes in an arena."""


class Arena:
    """Mailboxes of one layout. A worker keeps its mailbox until it leaves; then another worker may get the mailbox.

    Args:
        layout: What the memory contains.
    """

    def __init__(self, layout: MailboxLayout) -> None:
        self.layout = layout
        self.memory = SharedMemory.create(layout.nbytes, "farstep-mailboxes")
        mailbox_words, group_words = layout.words(self.memory.map)
        self.mailbox_words = list(mailbox_words.T)
        """For each word of a mailbox, an array `[mailboxes]`."""
        self.totals: tuple[int, float | None] | None = None
        """The number of pulls and the divergence that all mailboxes have; None if they differ."""
        self.group_words = list(group_words.T)
        """For each word of a group, an array `[groups]`. All groups of the first mailbox come first."""
        self.arrays = layout.arrays(self.memory.map)
        self.clients: list[Client | None] = [None] * layout.num_mailboxes
        """The worker of each mailbox; None: the mailbox is free."""
        self.acted_tickets = [0] * layout.num_mailboxes
        """The newest ticket of each worker for which a request was acted on."""
        self.mailbox_of_group = np.repeat(np.arange(layout.num_mailboxes), len(layout.groups))
        self.num_envs = np.tile(layout.groups, layout.num_mailboxes)
        """Number of environments of each group."""
        self.group_of_row = np.zeros(0, np.int64)
        """The group of each row, without the mailboxes after the last one that was ever occupied."""
        self.slots = np.zeros(layout.num_mailboxes * layout.num_envs, np.int64)
        """Slot number of each row."""
        self.arrived = np.full(len(self.num_envs), math.inf)
        """Since when the current request of each group has waited, in seconds; infinite: it has not."""
        self.taken = np.zeros(len(self.num_envs), np.int64)
        """Number of each group's last request that was acted on or refused."""
        self._is_occupied = np.zeros(len(self.num_envs), bool)
        """Whether the mailbox of each group has a worker."""
        self._continues = np.zeros(len(self.num_envs), bool)
        """Whether each group will send another request in its chunk, as of the last call of `pending`."""

    def allocate(self, client: Client, first_slot: int) -> int:
        """Give a worker a free mailbox, and clear its words. Return its index."""
        index = self.clients.index(None)
        self.clients[index] = client
        groups = self.mailbox_of_group == index
        for words in self.mailbox_words:
            words[index] = 0
        self.totals = None
        for words in (*self.group_words, self.taken):
            words[groups] = 0
        self.arrived[groups], self._is_occupied[groups] = math.inf, True
        count = self.layout.num_envs
        self.slots[index * count : (index + 1) * count] = first_slot + np.arange(count)
        if len(self.group_of_row) < (index + 1) * count:
            self.group_of_row = np.repeat(np.arange(len(self.num_envs)), self.num_envs)[: (index + 1) * count]
        return index

    def free(self, index: int) -> bool:
        """Free a mailbox, and the memory with the last one. Return whether it was the last one.

        Unless all workers leave, this one must have closed its mailbox: another worker may get it.
        """
        self.clients[index], self.acted_tickets[index] = None, 0
        self._is_occupied[self.mailbox_of_group == index] = False
        if any(self.clients):
            return False
        self.memory.close()
        return True

    def mailbox(self, index: int) -> Mailbox:
        return Mailbox(self.memory, self.layout, index)

    @property
    def num_rows(self) -> int:
        """Number of environments of all workers."""
        return self.layout.num_envs * (len(self.clients) - self.clients.count(None))

    def clients_of(self, groups: Array) -> Iterator[tuple[Client, int]]:
        """The worker of each of these groups, and the number of the group among the worker's groups."""
        count = len(self.layout.groups)
        for group in groups.tolist():
            client = self.clients[group // count]
            assert client is not None
            yield client, group % count

    def holds(self, cancelled: int) -> bool:
        """Whether a worker is inside a chunk whose rows must all have one version.

        A worker that steps an environment notices late that its chunk was cancelled.

        Args:
            cancelled: The id of the last cancelled ticket.
        """
        held = self.mailbox_words[HELD].tolist()
        return any(held) and any(cancelled < a == b for a, b in zip(held, self.acted_tickets, strict=True))

    def pending(self, fence: Fence) -> Requests | None:
        """The requests that wait for a batch; None if there are none."""
        self._continues = self.group_words[CONTINUES] != 0
        fence()  # a worker clears it after its last request, which is therefore among those read next
        numbers = self.group_words[REQUEST].copy()
        is_pending = (numbers != self.taken) & self._is_occupied
        if not is_pending.any():
            return None
        fence()
        tickets = self.group_words[TICKET].copy()
        fence()  # a worker writes the ticket after its version
        return Requests(self, is_pending, numbers, tickets, self.group_words[MIN_VERSION].copy())

    def num_expected(self, waiting: Sequence[int] | Array, begins: bool) -> int:
        """The number of groups, without `waiting`, that may soon send a request.

        These are the groups inside a chunk; if `begins`, all groups, because those between chunks may begin one, too.

        Call `pending` first, which reads which groups are inside a chunk.
        """
        others = self._is_occupied.copy()
        others[waiting] = False
        return int(np.count_nonzero(others if begins else others & self._continues))


class Requests:
    """Requests of workers of one arena, read once: a worker whose chunk is cancelled replaces its request at any time.

    Args:
        arena: The arena.
        is_chosen: Whether the request of each of its groups is one of these.
        numbers, tickets, min_versions: Those of the requests of all groups of the arena.
    """

    def __init__(self, arena: Arena, is_chosen: Array, numbers: Array, tickets: Array, min_versions: Array) -> None:
        self.arena = arena
        self.groups = groups = is_chosen.nonzero()[0]
        """The group of each request, in ascending order."""
        self.rows = is_chosen[arena.group_of_row].nonzero()[0]
        """The rows of these groups in the arena's arrays."""
        self.mailboxes = arena.mailbox_of_group[groups]
        """The index of the mailbox of each request."""
        self._of_all = (numbers, tickets, min_versions)
        self.numbers, self.tickets, self.min_versions = numbers[groups], tickets[groups], min_versions[groups]

    def __len__(self) -> int:
        return len(self.groups)

    def select(self, chosen: Array) -> Requests:
        """The requests for which `chosen` is True."""
        is_chosen = np.zeros(len(self.arena.num_envs), bool)
        is_chosen[self.groups[chosen]] = True
        return Requests(self.arena, is_chosen, *self._of_all)

    @property
    def newest(self) -> Array:
        """The newest version that each worker knows."""
        newest: Array = self.arena.group_words[NEWEST][self.groups]
        return newest

    @property
    def have_begun(self) -> Array:
        """Whether the server has already acted in the chunk of each request."""
        have_begun: Array = self.tickets == np.array(self.arena.acted_tickets)[self.mailboxes]
        return have_begun

    @property
    def waits(self) -> Array:
        """Whether the worker of each request waits for its doorbell."""
        waits: Array = self.arena.group_words[WAITS][self.groups] != 0
        return waits

    def clients(self) -> Iterator[tuple[Client, int]]:
        """The worker of each request, and the number of the group among the worker's groups."""
        return self.arena.clients_of(self.groups)

    def note_arrival(self, now: float) -> None:
        """Note that these requests wait at least since `now`, in seconds."""
        arrived = self.arena.arrived
        arrived[self.groups] = np.minimum(arrived[self.groups], now)

    def mark_taken(self) -> None:
        """Note that these requests are acted on, or refused."""
        self.arena.taken[self.groups] = self.numbers
        self.arena.arrived[self.groups] = math.inf

    def begin_chunks(self) -> None:
        """Note that the server acts in the chunks of these requests."""
        tickets = self.arena.acted_tickets
        for index, ticket in zip(self.mailboxes.tolist(), self.tickets.tolist(), strict=True):
            if ticket > tickets[index]:
                tickets[index] = ticket


def arena_with_free_mailbox(layout: MailboxLayout, arenas: list[Arena]) -> Arena:
    """An arena with this layout and a free mailbox. If there is none, a new one is added to `arenas`."""
    suitable = (arena for arena in arenas if arena.layout.has_same_offsets(layout) and None in arena.clients)
    if (found := next(suitable, None)) is None:
        found = Arena(layout)
        arenas.append(found)
    return found


def cover_running_chunks(arenas: Sequence[Arena], requests: Sequence[Requests]) -> bool:
    """Whether each group that is inside a chunk has one of these requests, so that it sends no other one soon."""
    for arena in arenas:
        groups = [each.groups for each in requests if each.arena is arena]
        if arena.num_expected(np.concatenate(groups) if groups else [], begins=False):
            return False
    return True


def num_expected(arenas: Sequence[Arena], pending: Sequence[Requests]) -> int:
    """The number of groups, without those of `pending`, that may soon send a request (see `Arena.num_expected`)."""
    begins = any(requests.arena.group_words[IS_FIRST][requests.groups].any() for requests in pending)
    waiting = {requests.arena: requests.groups for requests in pending}
    return sum(arena.num_expected(waiting.get(arena, []), begins) for arena in arenas)
