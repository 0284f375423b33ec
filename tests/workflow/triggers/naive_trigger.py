"""DataKeyTrigger by its definition: checks every actor every time. The incremental trigger must agree with it."""

from __future__ import annotations

import math
from typing import Any

from farstep.workflow.triggers import Ledger, Message


class NaiveDataKeyTrigger:
    """Without stages. `present` is what `n="all"` waits for."""

    def __init__(
        self,
        n: int | None,
        size: int,
        keys: tuple[str, ...] | None = None,
        min_new: int | None = None,
        of: str = "actors",
    ) -> None:
        self.n, self.size, self.keys, self.min_new, self.of = n, size, keys, min_new, of
        self.taken_to: dict[Any, int] = {}
        self.warm = False

    def ready(self, state: Ledger) -> Message | None:
        if self.min_new is not None:
            return self._replay(state, self.min_new)
        if self.of == "windows":
            return self._windows(state)
        starts = {actor: self.taken_to.get(actor, 0) for actor in state.actors}
        arrivals = {
            actor: arrival
            for actor, start in starts.items()
            if (arrival := state.reached(actor, start + self.size, self.keys)) is not None
        }
        if not self._enough(state, arrivals):
            return None
        first = sorted(arrivals, key=arrivals.__getitem__)[: self.n]
        return self._message(state, [(actor, starts[actor]) for actor in first])

    def _windows(self, state: Ledger) -> Message | None:
        found = [
            (state.reached(actor, start + self.size, self.keys), actor, start)
            for actor in state.actors
            for start in range(self.taken_to.get(actor, 0), state.written(actor, self.keys) - self.size + 1, self.size)
        ]
        found.sort(key=lambda each: each[0] or 0)
        return self._message(state, [each[1:] for each in found[: self.n]]) if len(found) >= (self.n or 0) else None

    def _enough(self, state: Ledger, found: Any) -> bool:
        if self.n is not None:
            return len(found) >= self.n
        assert state.present is not None
        return bool(found) and state.present <= set(found) and len(state.present) >= state.quorum

    def _replay(self, state: Ledger, min_new: int) -> Message | None:
        written = {actor: state.written(actor, self.keys) for actor in state.actors}
        full = {actor: steps - self.size for actor, steps in written.items() if steps >= self.size}
        new = sum(steps - self.taken_to.get(actor, 0) for actor, steps in written.items())
        fires = new >= min_new if self.warm else self._enough(state, full)
        return self._message(state, list(full.items())) if fires else None

    def _message(self, state: Ledger, starts: list[tuple[Any, int]]) -> Message:
        spans = tuple(state.span(actor, start, start + self.size, self.keys) for actor, start in starts)
        return {
            "actor_ids": tuple(actor for actor, _ in starts),
            "start": tuple(start for _, start in starts),
            "size": self.size,
            "keys": state.keys if self.keys is None else self.keys,
            "versions": spans,
        }

    def consume(self, state: Ledger, message: Message) -> None:
        if self.min_new is None:
            for actor, start in zip(message["actor_ids"], message["start"], strict=True):
                self.taken_to[actor] = start + self.size
            return
        left = self.min_new if self.warm else math.inf
        self.warm = True
        for actor in state.actors:
            taken = self.taken_to.get(actor, 0)
            self.taken_to[actor] = taken + int(min(left, state.written(actor, self.keys) - taken))
            left -= self.taken_to[actor] - taken
