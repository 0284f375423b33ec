"""Fragments: windows of a `DataKeyTrigger` with stages whose first stage has fired, but not the last stage."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from farstep.workflow.triggers.ledger import Actor, Ledger


@dataclass
class Fragment:
    """A window of steps of some actors, and the stage to fire next."""

    number: int
    starts: dict[Actor, int]
    """For each actor, the first step of its window."""
    stage: int = 1
    missing: set[Actor] = field(default_factory=set)
    """Actors that have not written all keys of the stage, as of the last `update`."""
    queued: bool = False
    """Whether the queue of `Fragments` has an entry for this fragment."""


class Fragments:
    """All incomplete fragments, indexed by actor.

    An update for one actor visits only that actor's fragments.
    """

    def __init__(self, size: int, stages: Sequence[Sequence[str] | None]) -> None:
        self._size, self._stages = size, stages
        self._open: dict[int, Fragment] = {}
        self._of: dict[Actor, dict[int, Fragment]] = {}
        self._queue: list[int] = []
        """A heap with the numbers of fragments whose stage is ready to fire. Entries may be outdated."""

    def __bool__(self) -> bool:
        return bool(self._open)

    def add(self, number: int, starts: Mapping[Actor, int]) -> None:
        """Add a fragment whose first stage has fired. The caller must call `update` for each of its actors."""
        fragment = self._open[number] = Fragment(number, dict(starts), missing=set(starts))
        for actor in starts:
            self._of.setdefault(actor, {})[number] = fragment

    def get(self, number: int | None) -> Fragment | None:
        return None if number is None else self._open.get(number)

    def of(self, actor: Actor) -> list[Fragment]:
        return list(self._of.get(actor, {}).values())

    def update(self, state: Ledger, actor: Actor) -> None:
        """Check the fragments of an actor again, after its steps or the stage of a fragment changed."""
        for fragment in self._of.get(actor, {}).values():
            if state.written(actor, self._stages[fragment.stage]) < fragment.starts[actor] + self._size:
                fragment.missing.add(actor)
            else:
                fragment.missing.discard(actor)
                if not fragment.missing and not fragment.queued:
                    fragment.queued = True
                    heapq.heappush(self._queue, fragment.number)

    def first_ready(self) -> Fragment | None:
        """Return the oldest fragment whose stage is ready to fire."""
        while self._queue:
            fragment = self._open.get(self._queue[0])
            if fragment is not None and not fragment.missing:
                return fragment
            heapq.heappop(self._queue)
            if fragment is not None:
                fragment.queued = False
        return None

    def set_stage(self, fragment: Fragment, stage: int) -> Iterable[Actor]:
        """Set the stage to fire next, or remove the fragment after its last stage. Return the actors to update."""
        fragment.stage, fragment.missing = stage, set(fragment.starts)
        if stage < len(self._stages):
            return list(fragment.starts)
        del self._open[fragment.number]
        for actor in fragment.starts:
            self._unlink(fragment, actor)
        return ()

    def remove_actor(self, fragment: Fragment, actor: Actor) -> None:
        """Remove an actor from a fragment. If it was the last actor, remove the fragment."""
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

    def reset(self) -> None:
        """Start with another ledger. The caller must call `update` for every actor."""
        self._queue.clear()
        for fragment in self._open.values():
            fragment.missing, fragment.queued = set(fragment.starts), False

    def clear(self) -> None:
        self._open.clear()
        self._of.clear()
        self._queue.clear()
