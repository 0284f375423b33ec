"""The triggers of a workflow (ARTOS, table 3): small rules over a `Ledger`. How they fire is in `dispatch.py`."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from farstep.buffer.dispatch import AllOf, AnyOf, Dispatcher, Message, Passer, Trigger
from farstep.buffer.ledger import Actor, Ledger
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

    `keys=((...), (...))` are stages of a fragment: it fires for each stage, in order, as soon as that is there, with
    `stage` and the `fragment`'s number. If steps are lost between two stages, all come again.

    `consume=False, min_new=k` is for replay: once `n` actors have written `size` steps each it fires, from then on
    for every `k` new steps of all actors together. `start` is then where each actor's newest `size` steps begin.
    """

    def __init__(
        self,
        n: int,
        size: int,
        keys: Sequence[str] | Sequence[Sequence[str]] | None = None,
        consume: bool = True,
        min_new: int | None = None,
    ) -> None:
        self.n = _whole(self, "n", n, "a number of actors")
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
        self._open: list[_Fragment] = []
        self._fragments = 0
        self._warm = False

    def __repr__(self) -> str:
        keys = self.stages if self.staged else self.stages[0]
        replay = "" if self.min_new is None else f", consume=False, min_new={self.min_new}"
        return f"DataKeyTrigger(n={self.n}, size={self.size}, keys={keys}{replay})"

    def ready(self, state: Ledger) -> Message | None:
        if self.min_new is not None:
            return self._ready_for_replay(state, self.min_new)
        for fragment in self._open:
            keys = self.stages[fragment.stage]
            if all(state.written(actor, keys) >= start + self.size for actor, start in fragment.starts.items()):
                return self._message(state, fragment.starts, fragment.stage, fragment.number)
        starts = {actor: self._taken_to.get(actor, 0) for actor in state.actors}
        arrivals = {
            actor: arrival
            for actor, start in starts.items()
            if (arrival := state.reached(actor, start + self.size, self.stages[0])) is not None
        }
        if len(arrivals) < self.n:
            return None
        first = sorted(arrivals, key=arrivals.__getitem__)[: self.n]
        return self._message(state, {actor: starts[actor] for actor in first}, 0, self._fragments)

    def _ready_for_replay(self, state: Ledger, min_new: int) -> Message | None:
        written = {actor: state.written(actor, self.stages[0]) for actor in state.actors}
        full = {actor: steps - self.size for actor, steps in written.items() if steps >= self.size}
        new = sum(steps - self._taken_to.get(actor, 0) for actor, steps in written.items())
        fires = new >= min_new if self._warm else len(full) >= self.n
        return self._message(state, full, 0, 0) if fires else None

    def next_of(self, actor: Actor) -> int:
        """The first step of an actor that a message to come may name."""
        staged = (each.starts[actor] for each in self._open if actor in each.starts)
        return min([self._taken_to.get(actor, 0), *staged])

    def took_back(self, state: Ledger, actor: Actor) -> None:
        """Steps of an actor that were there on some keys are lost: what fired for them fires again, for others."""
        whole = state.written(actor)
        lost = [each for each in self._open if each.starts.get(actor, whole - self.size) + self.size > whole]
        for fragment in lost:
            fragment.stage = 0
        if self.min_new is None and self._taken_to.get(actor, 0) > whole:
            self._taken_to[actor] = max([whole, *(each.starts[actor] + self.size for each in lost)])

    def discard(self, state: Ledger) -> None:
        """What is there and was not taken is not wanted any more (unless it is for replay)."""
        if self.min_new is None:
            self._open = []
            self._taken_to = {actor: state.written(actor, self.stages[0]) for actor in state.actors}

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
            left = self.min_new if self._warm else math.inf
            self._warm = True
            for actor in state.actors:
                taken = self._taken_to.get(actor, 0)
                self._taken_to[actor] = taken + int(min(left, state.written(actor, self.stages[0]) - taken))
                left -= self._taken_to[actor] - taken
        elif again := [each for each in self._open if each.number == message.get("fragment")]:
            again[0].stage += 1
            self._open = [each for each in self._open if each.stage < len(self.stages)]
        else:
            starts = dict(zip(message["actor_ids"], message["start"], strict=True))
            self._taken_to |= {actor: start + self.size for actor, start in starts.items()}
            if len(self.stages) > 1:
                self._open.append(_Fragment(self._fragments, starts))
            self._fragments += 1


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


def _whole(owner: object, name: str, value: object, meaning: str) -> int:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{type(owner).__name__}.{name} is {value!r}; expected {meaning}, an int of at least 1.")
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
