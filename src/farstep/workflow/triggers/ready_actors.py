"""Tracks which actors have the steps that a `DataKeyTrigger` waits for, in constant time per change."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import Any

from farstep.errors import ConfigError
from farstep.workflow.triggers.ledger import Actor, Ledger, Span

Columns = Mapping[str, tuple[Any, ...]]
"""`actor_ids`, `start` and `versions` of a message."""


class ReadyActors:
    """Tracks which actors have the steps that a trigger waits for.

    The time of an update is proportional to the number of actors that changed since the last update.
    """

    def __init__(self, state: Ledger) -> None:
        self.state = state
        self._checked_to = -1
        self._recheck: dict[Actor, None] = {}
        self._arrivals: dict[Actor, int] = {}
        """For each ready actor, the change at which it became ready."""
        self._order: list[tuple[int, int, Actor]] = []
        """A heap of (arrival, index, actor). Entries that are not in `_arrivals` any more are skipped."""
        self._pushed = 0
        self._missing: set[Actor] = set()
        """The actors that are present but not ready."""
        self._present: frozenset[Actor] | None = None

    def to_check(self) -> list[Actor]:
        """Return the actors that may have become ready, or stopped being ready, since the last call."""
        found = {**dict.fromkeys(self.state.touched_since(self._checked_to)), **self._recheck}
        self._checked_to = self.state.changes
        self._recheck = {}
        return list(found)

    def recheck(self, actor: Actor) -> None:
        """Make `to_check` return an actor again, e.g. because the trigger has consumed some of its steps."""
        self._recheck[actor] = None

    def put(self, actor: Actor, arrival: int | None) -> None:
        """Record that an actor became ready at the change `arrival`, or that it is not ready (None)."""
        if arrival is None:
            if self._arrivals.pop(actor, None) is not None and actor in (self._present or ()):
                self._missing.add(actor)
        elif self._arrivals.get(actor) != arrival:
            self._missing.discard(actor)
            self._arrivals[actor] = arrival
            self._pushed += 1
            heapq.heappush(self._order, (arrival, self._pushed, actor))

    def has(self, n: int | None) -> bool:
        """Return whether `n` actors (None: all present actors) are ready."""
        state = self.state
        if n is not None:
            return len(self._arrivals) >= n
        if state.present is None:
            raise ConfigError(
                'DataKeyTrigger(n="all") waits for all present actors, but the ledger does not know which are present: '
                "call Ledger.members(actors), or set n to a number."
            )
        if state.present is not self._present:
            self._present = state.present
            self._missing = {actor for actor in state.present if actor not in self._arrivals}
        return bool(self._arrivals) and not self._missing and len(state.present) >= state.quorum

    def first(self, n: int | None) -> list[Actor]:
        """Return the `n` actors that became ready first (None: all ready actors), in this order."""
        if n is None:
            self._order = sorted((at, i, actor) for at, i, actor in self._order if self._arrivals.get(actor) == at)
            return list(dict.fromkeys(actor for _, _, actor in self._order))
        found: dict[Actor, tuple[int, int, Actor]] = {}
        while len(found) < n:
            entry = heapq.heappop(self._order)
            if self._arrivals.get(entry[2]) == entry[0]:
                found[entry[2]] = entry
        for entry in found.values():
            heapq.heappush(self._order, entry)
        return list(found)


class ArrivedWindows:
    """The complete windows of all actors that a trigger has not consumed, in order of arrival.

    The time of an update is proportional to the number of windows that became complete since the last update.

    Args:
        state: The ledger.
        size: Steps per window.
        keys: The keys that must be written; None: all keys.
    """

    def __init__(self, state: Ledger, size: int, keys: Sequence[str] | None) -> None:
        self.state, self._size, self._keys = state, size, keys
        self._checked_to = -1
        self._queue: list[tuple[int, int, Actor, int]] = []
        """A heap of (arrival, index, actor, first step)."""
        self._queued_to: dict[Actor, int] = {}
        """For each actor, the first step that is in no queued window; missing: its first step that was not consumed."""
        self._pushed = 0

    def __len__(self) -> int:
        return len(self._queue)

    def update(self, first_of: Callable[[Actor], int]) -> None:
        """Queue the windows that became complete. `first_of` returns the first step that was not consumed."""
        for actor in self.state.touched_since(self._checked_to):
            start = self._queued_to.get(actor, first_of(actor))
            while (arrival := self.state.reached(actor, start + self._size, self._keys)) is not None:
                self._pushed += 1
                heapq.heappush(self._queue, (arrival, self._pushed, actor, start))
                start += self._size
            self._queued_to[actor] = start
        self._checked_to = self.state.changes

    def recheck(self, actor: Actor) -> None:
        """Remove an actor's windows, because some of its steps were withdrawn; the next `update` queues them again."""
        self._queue = [entry for entry in self._queue if entry[2] != actor]
        heapq.heapify(self._queue)
        self._queued_to.pop(actor, None)

    def first(self, n: int) -> list[tuple[Actor, int]]:
        """Return actor and first step of the `n` windows that were complete first."""
        return [(actor, start) for _, _, actor, start in heapq.nsmallest(n, self._queue)]

    def remove(self, n: int) -> None:
        """Remove the first `n` windows."""
        for _ in range(n):
            heapq.heappop(self._queue)


class NewestSteps(ReadyActors):
    """For replay: the newest `size` steps of each actor that has written at least `size` steps with all of `keys`."""

    def __init__(self, state: Ledger, size: int, keys: Sequence[str] | None) -> None:
        super().__init__(state)
        self._size, self._keys = size, keys
        self.written = 0
        """Total number of steps of all actors."""
        self._written: dict[Actor, int] = {}
        self._newest: dict[Actor, tuple[int, Span]] = {}
        """For each ready actor, the first of its newest steps, and the versions of these steps."""
        # An earlier copy of `_newest`, and all changes since. A message refers to both, and applies the changes only
        # when it is read. When the number of changes reaches the number of actors, a new copy is made, so the cost per
        # change is constant.
        self._before: dict[Actor, tuple[int, Span]] = {}
        self._changes: list[tuple[Actor, tuple[int, Span] | None]] = []

    def update(self) -> None:
        """Process the changes of the ledger since the last call."""
        for actor in self.to_check():
            written = self.state.written(actor, self._keys)
            self.written += written - self._written.get(actor, 0)
            self._written[actor] = written
            start = written - self._size
            if start < 0:
                self.put(actor, None)
                self._set(actor, None)
            else:
                self.put(actor, 0)
                self._set(actor, (start, self.state.span(actor, start, written, self._keys)))

    def _set(self, actor: Actor, newest: tuple[int, Span] | None) -> None:
        if len(self._changes) > len(self._newest):
            self._before, self._changes = self._newest.copy(), []
        self._changes.append((actor, newest))
        if newest is None:
            self._newest.pop(actor, None)
        else:
            self._newest[actor] = newest

    def snapshot(self) -> Callable[[], Columns]:
        """Return a function that returns the newest steps as of now. It may be called later, in any thread."""
        before, changes, count, actors = self._before, self._changes, len(self._changes), self.state.actors
        return cache(lambda: _listed(before, changes[:count], actors))


def _listed(
    before: Mapping[Actor, tuple[int, Span]],
    changes: Sequence[tuple[Actor, tuple[int, Span] | None]],
    actors: Collection[Actor],
) -> Columns:
    """Apply `changes` to `before`, and list the result in the order of `actors`."""
    newest = {**before, **dict(changes)}
    found = [(actor, entry) for actor in tuple(actors) if (entry := newest.get(actor)) is not None]
    return {
        "actor_ids": tuple(actor for actor, _ in found),
        "start": tuple(start for _, (start, _) in found),
        "versions": tuple(span for _, (_, span) in found),
    }
