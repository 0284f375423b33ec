"""Fragments: steps of which a `DataKeyTrigger` with stages has fired the first stage and waits for the next ones."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from farstep.buffer.ledger import Actor, Ledger


@dataclass
class Fragment:
    """Steps of some actors, and the stage that they wait for."""

    number: int
    starts: dict[Actor, int]
    stage: int = 1
    missing: set[Actor] = field(default_factory=set)
    """Actors that may not have written the stage yet."""
    queued: bool = False


class Fragments:
    """The fragments that are not complete, by actor: a change of one actor costs nothing for those of the others."""

    def __init__(self, size: int, stages: Sequence[Sequence[str] | None]) -> None:
        self._size, self._stages = size, stages
        self._open: dict[int, Fragment] = {}
        self._of: dict[Actor, dict[int, Fragment]] = {}
        self._queue: list[int] = []
        """A heap of fragments whose stage is there; entries may be stale."""

    def __bool__(self) -> bool:
        return bool(self._open)

    def add(self, number: int, starts: Mapping[Actor, int]) -> None:
        """The first stage of a fragment has fired. Its actors must be looked at."""
        fragment = self._open[number] = Fragment(number, dict(starts), missing=set(starts))
        for actor in starts:
            self._of.setdefault(actor, {})[number] = fragment

    def get(self, number: int | None) -> Fragment | None:
        return None if number is None else self._open.get(number)

    def of(self, actor: Actor) -> list[Fragment]:
        return list(self._of.get(actor, {}).values())

    def look_at(self, state: Ledger, actor: Actor) -> None:
        """An actor's steps have changed, or the stage that one of its fragments waits for."""
        for fragment in self._of.get(actor, {}).values():
            if state.written(actor, self._stages[fragment.stage]) < fragment.starts[actor] + self._size:
                fragment.missing.add(actor)
            else:
                fragment.missing.discard(actor)
                if not fragment.missing and not fragment.queued:
                    fragment.queued = True
                    heapq.heappush(self._queue, fragment.number)

    def first(self) -> Fragment | None:
        """The oldest fragment whose stage is there."""
        while self._queue:
            fragment = self._open.get(self._queue[0])
            if fragment is not None and not fragment.missing:
                return fragment
            heapq.heappop(self._queue)
            if fragment is not None:
                fragment.queued = False
        return None

    def go_to(self, fragment: Fragment, stage: int) -> Iterable[Actor]:
        """Wait for another stage of a fragment; beyond the last one, forget it. Returns the actors to look at."""
        fragment.stage, fragment.missing = stage, set(fragment.starts)
        if stage < len(self._stages):
            return list(fragment.starts)
        del self._open[fragment.number]
        for actor in fragment.starts:
            self._unlink(fragment, actor)
        return ()

    def leave_out(self, fragment: Fragment, actor: Actor) -> None:
        """Do not wait for an actor of a fragment; one without actors is forgotten."""
        del fragment.starts[actor]
        fragment.missing.discard(actor)
        self._unlink(fragment, actor)
        if not fragment.starts:
            del self._open[fragment.number]

    def _unlink(self, fragment: Fragment, actor: Actor) -> None:
        others = self._of[actor]
        del others[fragment.number]
        if not others:
            del self._of[actor]

    def look_at_all(self) -> None:
        """Nothing is known of what was written; the caller looks at every actor."""
        self._queue.clear()
        for fragment in self._open.values():
            fragment.missing, fragment.queued = set(fragment.starts), False

    def clear(self) -> None:
        self._open.clear()
        self._of.clear()
        self._queue.clear()
