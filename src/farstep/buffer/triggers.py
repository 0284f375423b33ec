"""The triggers of a workflow (ARTOS, table 3): small rules over a `Ledger`. How they fire is in `dispatch.py`."""

from __future__ import annotations

import heapq
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from farstep.buffer.dispatch import AllOf, AnyOf, Dispatcher, Message, Passer, Trigger
from farstep.buffer.ledger import Actor, Ledger, Span
from farstep.errors import ConfigError, unknown_name
from farstep.transfer_config import TransferTrigger

__all__ = [
    "AllOf",
    "AnyOf",
    "DataKeyTrigger",
    "Dispatcher",
    "Ledger",
    "Message",
    "ObjectKeyTrigger",
    "Passer",
    "TimeTrigger",
    "TransferTrigger",
    "Trigger",
]

Unit = Literal["seconds", "env_steps", "learner_steps"]


@dataclass
class _Fragment:
    """Steps whose first stage has fired and whose next ones are awaited."""

    number: int
    starts: dict[Actor, int]
    stage: int = 1


class DataKeyTrigger(Trigger):
    """Fires when `n` actors each have `size` steps that it has not taken yet, on all of `keys` (None: all).

    It takes the `n` actors that were ready first; `start`, `versions` and `actor_ids` of the message go together. A
    step is one of an actor, whatever number of environments the actor steps at a time.

    `n="all"` waits for all actors that are present at the time. When an actor leaves, the trigger stops waiting for it:
    its completed windows are part of the next messages, and the steps of an incomplete one are dropped.

    `keys=((...), (...))` are stages of a fragment: it fires for each stage, in order, as soon as that is there, with
    `stage` and the `fragment`'s number. If steps are lost between two stages, all come again.

    `consume=False, min_new=k` is for replay: once `n` actors have written `size` steps each it fires, from then on
    for every `k` new steps of all actors together. `start` is then where each actor's newest `size` steps begin.
    """

    def __init__(
        self,
        n: int | Literal["all"],
        size: int,
        keys: Sequence[str] | Sequence[Sequence[str]] | None = None,
        consume: bool = True,
        min_new: int | None = None,
    ) -> None:
        self.n: int | None = None if n == "all" else _whole(self, "n", n, "a number of actors", ' (or "all")')
        """Actors to wait for; None: all that are present."""
        self.size = _whole(self, "size", size, "a number of steps")
        self.staged = keys is not None and not isinstance(keys, str) and not any(isinstance(key, str) for key in keys)
        self.stages: tuple[tuple[str, ...] | None, ...] = (None,)
        if keys is not None:
            self.stages = _stages(self, keys if self.staged else [keys])
        self.min_new = None if min_new is None else _whole(self, "min_new", min_new, "a number of new steps")
        if not isinstance(consume, bool) or consume is not (min_new is None):
            raise ConfigError(
                f"DataKeyTrigger has consume={consume!r} and min_new={min_new!r}; expected neither (each step is taken "
                "once), or consume=False with min_new=k (replay: it fires for every k new steps)."
            )
        if self.staged and not consume:
            raise ConfigError(
                f"DataKeyTrigger has stages, {self.stages}, and consume=False; stages are of steps taken once. "
                "For replay, list all keys in one sequence."
            )
        self._taken_to: dict[Actor, int] = {}
        self._cuts: dict[Actor, list[int]] = {}
        """Per actor, the step counts at which it left: no window spans one of them."""
        self._open: list[_Fragment] = []
        self._fragments = 0
        self._warm = False
        self._taken = 0
        """For replay: steps of all actors that were already counted as new."""
        self._ready: _Ready | None = None

    def __repr__(self) -> str:
        keys = self.stages if self.staged else self.stages[0]
        replay = "" if self.min_new is None else f", consume=False, min_new={self.min_new}"
        n = "'all'" if self.n is None else self.n
        return f"DataKeyTrigger(n={n}, size={self.size}, keys={keys}{replay})"

    def ready(self, state: Ledger) -> Message | None:
        if self.min_new is not None:
            return self._ready_for_replay(state, self.min_new)
        for fragment in self._open:
            keys = self.stages[fragment.stage]
            if all(state.written(actor, keys) >= start + self.size for actor, start in fragment.starts.items()):
                return self._message(state, fragment.starts, fragment.stage, fragment.number)
        ready = self._ready_of(state)
        for actor in ready.to_look_at():
            ready.put(actor, state.reached(actor, self._start_of(actor) + self.size, self.stages[0]))
        if not ready.has(self.n):
            return None
        starts = {actor: self._start_of(actor) for actor in ready.first(self.n)}
        return self._message(state, starts, 0, self._fragments)

    def _ready_for_replay(self, state: Ledger, min_new: int) -> Message | None:
        ready = self._ready_of(state)
        for actor in ready.to_look_at():
            written = state.written(actor, self.stages[0])
            ready.wrote(actor, written)
            if written >= self.size:
                span = state.span(actor, written - self.size, written, self.stages[0])
                ready.put(actor, written - self.size, span)
            else:
                ready.put(actor, None)
        if not (ready.written - self._taken >= min_new if self._warm else ready.has(self.n)):
            return None
        ready.sort()
        return {
            "actor_ids": tuple(ready.arrivals),
            "start": tuple(ready.arrivals.values()),
            "size": self.size,
            "keys": self.stages[0] or state.keys,
            "versions": tuple(ready.spans.values()),
        }

    @property
    def is_warm(self) -> bool:
        """For replay: whether it has fired before, so that it waits only for new steps, of any actor."""
        return self._warm

    def _ready_of(self, state: Ledger) -> _Ready:
        if self._ready is None or self._ready.state is not state:
            self._ready = _Ready(state)
        return self._ready

    def _start_of(self, actor: Actor) -> int:
        """Where the next window of an actor begins."""
        start = self._taken_to.get(actor, 0)
        for cut in self._cuts.get(actor, ()):
            start = cut if start < cut < start + self.size else start
        return start

    def next_of(self, actor: Actor) -> int:
        """The first step of an actor that a message to come may name."""
        start = self._start_of(actor)
        return (
            min([start, *(each.starts[actor] for each in self._open if actor in each.starts)]) if self._open else start
        )

    def _look_at(self, actor: Actor) -> None:
        if self._ready is not None:
            self._ready.look_at(actor)

    def took_back(self, state: Ledger, actor: Actor) -> None:
        """Steps of an actor that were there on some keys are lost: what fired for them fires again, for others."""
        whole = state.written(actor)
        lost = [each for each in self._open if each.starts.get(actor, whole - self.size) + self.size > whole]
        for fragment in lost:
            fragment.stage = 0
        if self.min_new is None and self._taken_to.get(actor, 0) > whole:
            self._taken_to[actor] = max([whole, *(each.starts[actor] + self.size for each in lost)])
        self._look_at(actor)

    def left(self, state: Ledger, actor: Actor) -> None:
        """An actor has left: keep its completed windows, drop the steps of an incomplete one.

        A trigger with a fixed `n` drops nothing: it waits until `n` actors are ready again.
        """
        if self.n is not None or self.min_new is not None:
            return
        for fragment in self._open:
            start = fragment.starts.get(actor)
            if start is not None and state.written(actor) < start + self.size:
                del fragment.starts[actor]  # its later stages will not arrive: repeat the first stage without it
                fragment.stage = 0
        self._open = [fragment for fragment in self._open if fragment.starts]
        start, written = self._start_of(actor), state.written(actor)
        self._taken_to[actor] = start if start + self.size <= written else written
        self._cuts[actor] = [cut for cut in [*self._cuts.get(actor, ()), written] if cut > self._taken_to[actor]]
        self._look_at(actor)

    def discard(self, state: Ledger) -> None:
        """What is there and was not taken is not wanted any more (unless it is for replay)."""
        if self.min_new is None:
            self._open = []
            self._taken_to = {actor: state.written(actor, self.stages[0]) for actor in state.actors}
            self._ready = None

    def _message(self, state: Ledger, starts: Mapping[Actor, int], stage: int, fragment: int) -> Message:
        keys = self.stages[stage]
        message = {
            "actor_ids": tuple(starts),
            "start": tuple(starts.values()),
            "size": self.size,
            "keys": state.keys if keys is None else keys,
            "versions": tuple(state.span(actor, start, start + self.size, keys) for actor, start in starts.items()),
        }
        return {**message, "stage": stage, "fragment": fragment} if self.staged else message

    def consume(self, state: Ledger, message: Message) -> None:
        if self.min_new is not None:
            # What came before the first firing was waited for anyway: it does not count as new.
            self._taken = self._taken + self.min_new if self._warm else self._ready_of(state).written
            self._warm = True
        elif again := [each for each in self._open if each.number == message.get("fragment")]:
            again[0].stage += 1
            self._open = [each for each in self._open if each.stage < len(self.stages)]
        else:
            starts = dict(zip(message["actor_ids"], message["start"], strict=True))
            for actor, start in starts.items():
                self._taken_to[actor] = start + self.size
                self._look_at(actor)
            if len(self.stages) > 1:
                self._open.append(_Fragment(self._fragments, starts))
            self._fragments += 1

    def resume(self, state: Ledger, paused_s: float) -> None:
        self._ready = None  # the ledger may have got other keys


class _Ready:
    """Which actors have the steps that a trigger waits for, updated incrementally.

    An update costs time in proportion to the number of actors that changed since the last one, not to all actors.
    """

    def __init__(self, state: Ledger) -> None:
        self.state = state
        self._seen = -1
        self._again: dict[Actor, None] = {}
        self.arrivals: dict[Actor, int] = {}
        """Per ready actor, the change at which it became ready (for replay: where its newest steps begin)."""
        self.spans: dict[Actor, Span] = {}
        self._order: list[tuple[int, int, Actor]] = []
        """A heap of these; entries that are no longer in `arrivals` are skipped."""
        self._pushed = 0
        self._missing: set[Actor] = set()
        """The actors that are present and not ready."""
        self._present: frozenset[Actor] | None = None
        self._written: dict[Actor, int] = {}
        self.written = 0
        self._sorted = True

    def to_look_at(self) -> list[Actor]:
        """Actors that may have become ready, or stopped being ready, since the last call."""
        found = {**dict.fromkeys(self.state.touched_since(self._seen)), **self._again}
        self._seen = self.state.changes
        self._again = {}
        return list(found)

    def look_at(self, actor: Actor) -> None:
        """Check an actor again: the trigger has taken some of its steps."""
        self._again[actor] = None

    def put(self, actor: Actor, arrival: int | None, span: Span | None = None) -> None:
        """Note that an actor became ready at `arrival`, or that it is not ready (None)."""
        if arrival is None:
            if self.arrivals.pop(actor, None) is not None and actor in (self._present or ()):
                self._missing.add(actor)
            self.spans.pop(actor, None)
            return
        self._missing.discard(actor)
        self._sorted &= actor in self.arrivals
        if span is not None:
            self.spans[actor] = span
        elif self.arrivals.get(actor) != arrival:
            self._pushed += 1
            heapq.heappush(self._order, (arrival, self._pushed, actor))
        self.arrivals[actor] = arrival

    def wrote(self, actor: Actor, steps: int) -> None:
        self.written += steps - self._written.get(actor, 0)
        self._written[actor] = steps

    def has(self, n: int | None) -> bool:
        """Whether `n` actors are ready, or all that are present."""
        state = self.state
        if n is not None:
            return len(self.arrivals) >= n
        if state.present is None:
            raise ConfigError(
                'DataKeyTrigger(n="all") waits for all present actors, but the ledger does not know which are present: '
                "call Ledger.members(actors), or give a number."
            )
        if state.present is not self._present:
            self._present = state.present
            self._missing = {actor for actor in state.present if actor not in self.arrivals}
        return bool(self.arrivals) and not self._missing and len(state.present) >= state.quorum

    def first(self, n: int | None) -> list[Actor]:
        """The `n` actors that were ready first, or all that are ready, in that order."""
        if n is None:
            self._order = sorted((at, i, actor) for at, i, actor in self._order if self.arrivals.get(actor) == at)
            return list(dict.fromkeys(actor for _, _, actor in self._order))
        found: dict[Actor, tuple[int, int, Actor]] = {}
        while len(found) < n:
            entry = heapq.heappop(self._order)
            if self.arrivals.get(entry[2]) == entry[0]:
                found[entry[2]] = entry
        for entry in found.values():
            heapq.heappush(self._order, entry)
        return list(found)

    def sort(self) -> None:
        """Bring the actors into the order of their first writes."""
        if not self._sorted:
            self.arrivals = {actor: self.arrivals[actor] for actor in self.state.actors if actor in self.arrivals}
            self.spans = {actor: self.spans[actor] for actor in self.arrivals}
            self._sorted = True


@dataclass(eq=False)
class ObjectKeyTrigger(Trigger):
    """Fires once per version increase of a published object; of several since the last look, with the newest."""

    key: str
    _seen: int | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.key, str) or not self.key:
            raise ConfigError(f'ObjectKeyTrigger.key is {self.key!r}; expected the name of an object, as "parameters".')

    def ready(self, state: Ledger) -> Message | None:
        version = state.versions.get(self.key)
        if version is None or (self._seen is not None and version <= self._seen):
            return None
        return {"key": self.key, "version": version}

    def consume(self, state: Ledger, message: Message) -> None:
        self._seen = message["version"]


@dataclass(eq=False)
class TimeTrigger(Trigger):
    """Fires when a period has passed since it last fired (at first: since its first run began); missed ones coalesce.
    Seconds between runs do not count."""

    period: float
    unit: Unit = "seconds"
    _last: float | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.unit not in get_args(Unit):
            raise ConfigError(unknown_name("unit of TimeTrigger", str(self.unit), get_args(Unit)))
        if self.unit == "seconds":
            _positive(self, "period", self.period)
        else:
            self.period = _whole(self, "period", self.period, f"a number of {self.unit}")

    def ready(self, state: Ledger) -> Message | None:
        at, last = self._at(state), self._since(state)
        return {"unit": self.unit, "at": at, "elapsed": at - last} if at >= last + self.period else None

    def consume(self, state: Ledger, message: Message) -> None:
        self._last = message["at"]

    def deadline(self, state: Ledger) -> float | None:
        return self._since(state) + self.period if self.unit == "seconds" else None

    def resume(self, state: Ledger, paused_s: float) -> None:
        if self._last is None:
            self._last = self._at(state)
        elif self.unit == "seconds":
            self._last += paused_s

    def _at(self, state: Ledger) -> float:
        return {"seconds": state.now, "env_steps": state.env_steps, "learner_steps": state.learner_steps}[self.unit]

    def _since(self, state: Ledger) -> float:
        if self._last is not None:
            return self._last
        return state.started if self.unit == "seconds" else 0


def _whole(owner: object, name: str, value: object, meaning: str, instead: str = "") -> int:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < 1:
        raise ConfigError(
            f"{type(owner).__name__}.{name} is {value!r}; expected {meaning}, an int of at least 1{instead}."
        )
    return int(value)


def _positive(owner: object, name: str, value: object) -> None:
    if not isinstance(value, numbers.Real) or isinstance(value, bool) or not 0 < float(value) < math.inf:
        raise ConfigError(f"{type(owner).__name__}.{name} is {value!r}; expected a number of seconds above 0.")


def _stages(owner: object, stages: object) -> tuple[tuple[str, ...], ...]:
    """Checked stages: some sequences of names, none twice."""
    whose = f"{type(owner).__name__}.keys"
    known: list[str] = []
    if not isinstance(stages, Sequence) or isinstance(stages, str) or not stages:
        raise ConfigError(f"{whose} is {stages!r}; expected names of arrays, or None for all.")
    for stage in stages:
        if not isinstance(stage, Sequence) or isinstance(stage, str) or not stage:
            raise ConfigError(f"{whose} has {stage!r} for a sequence of names; write [{stage!r}] if that is one name.")
        for name in stage:
            if not isinstance(name, str) or name in known:
                raise ConfigError(f"{whose} has {name!r} in {stage!r}; expected names of arrays, none of them twice.")
            known.append(name)
    return tuple(tuple(stage) for stage in stages)
