"""The triggers of a workflow (ARTOS, table 3): conditions on a `Ledger`. `dispatch.py` evaluates them."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from farstep.errors import ConfigError, unknown_name
from farstep.workflow.triggers.fragments import Fragments
from farstep.workflow.triggers.ledger import Actor, Ledger
from farstep.workflow.triggers.messages import LazyMessage, Message
from farstep.workflow.triggers.ready_actors import ArrivedWindows, NewestSteps, ReadyActors
from farstep.workflow.triggers.trigger import Trigger

Unit = Literal["seconds", "env_steps", "learner_steps"]
Counted = Literal["actors", "windows"]


class DataKeyTrigger(Trigger):
    """Fires when `n` actors (workers) each have `size` steps that the trigger has not consumed.

    The message has `actor_ids`, the `n` actors that became ready first; `start`, the first step of each actor's window;
    `size`; `keys`; and `versions`, the oldest and newest version of each window. A step of an actor is one row of all
    its environments.

    With `of="windows"`, the trigger counts windows of `size` steps instead of actors. It fires for the first `n`
    windows to be complete, in order of arrival, so a slow actor does not delay a fast one. `actor_ids` names an actor
    once for each of its windows, and the windows of an actor are in the order of its steps.

    `n="all"` waits for all present actors. When an actor leaves, the trigger stops waiting for it. The next messages
    include the complete windows of this actor; the steps of its incomplete window are dropped.

    With stages, `keys=((...), (...))`, the trigger fires once per stage, in order, as soon as the keys of the stage
    have arrived. The message then also has `stage`, the index of the stage, and `fragment`, the number of the window.
    If steps are lost between two stages, the trigger fires again for all stages.

    For replay, use `consume=False, min_new=k`. The trigger first fires when `n` actors have `size` steps each, then
    after every `k` new steps of all actors together. `start` is the first of each actor's newest `size` steps.

    Args:
        n: Number of actors (or windows, see `of`) to wait for, or `"all"`.
        size: Steps per actor or window, at least 1.
        keys: Names of the arrays that must have arrived, or stages (a sequence of such names per stage); default: all.
        consume: Whether each step is consumed once; False: for replay. Default: True.
        min_new: For replay: number of new steps per firing.
        of: What `n` counts: `"actors"`, each with one window, or `"windows"` of any actors. Default: actors.

    Raises:
        ConfigError: An argument is invalid, or the arguments contradict each other.
    """

    def __init__(
        self,
        n: int | Literal["all"],
        size: int,
        keys: Sequence[str] | Sequence[Sequence[str]] | None = None,
        consume: bool = True,
        min_new: int | None = None,
        of: Counted = "actors",
    ) -> None:
        if of not in get_args(Counted):
            raise ConfigError(unknown_name("argument 'of' of DataKeyTrigger", str(of), get_args(Counted)))
        self.of = of
        self.n: int | None = None if n == "all" else _whole(self, "n", n, f"a number of {of}", ' (or "all")')
        """Number of actors or windows to wait for; None: all present actors."""
        self.size = _whole(self, "size", size, "a number of steps")
        self.staged = keys is not None and not isinstance(keys, str) and not any(isinstance(key, str) for key in keys)
        self.stages: tuple[tuple[str, ...] | None, ...] = (None,)
        if keys is not None:
            self.stages = _stages(self, keys if self.staged else [keys])
        self.min_new = None if min_new is None else _whole(self, "min_new", min_new, "a number of new steps")
        if not isinstance(consume, bool) or consume is not (min_new is None):
            raise ConfigError(
                f"DataKeyTrigger has consume={consume!r} and min_new={min_new!r}; expected neither (each step is "
                "consumed once), or consume=False with min_new=k (replay: the trigger fires for every k new steps)."
            )
        if self.staged and not consume:
            raise ConfigError(
                f"DataKeyTrigger has stages, {self.stages}, and consume=False; only consumed steps have stages. "
                "For replay, list all keys in one sequence."
            )
        if of == "windows" and (self.n is None or self.staged or not consume):
            raise ConfigError(
                f"DataKeyTrigger has of='windows' with n={n!r}, keys={keys!r} and consume={consume!r}. "
                "of='windows' needs a number n, and allows neither stages nor consume=False. To count actors, omit the "
                "argument 'of'."
            )
        self._consumed_to: dict[Actor, int] = {}
        """For each actor, the first step that was not consumed."""
        self._cuts: dict[Actor, list[int]] = {}
        """For each actor, the step counts at which it left. No window spans such a count."""
        self._open = Fragments(self.size, self.stages)
        self._fragments = 0
        self._warm = False
        self._counted = 0
        """For replay: number of steps of all actors that were already counted as new."""
        self._ready: ReadyActors | None = None
        self._newest: NewestSteps | None = None
        self._windows: ArrivedWindows | None = None

    def __repr__(self) -> str:
        keys = self.stages if self.staged else self.stages[0]
        replay = "" if self.min_new is None else f", consume=False, min_new={self.min_new}"
        n = "'all'" if self.n is None else self.n
        of = "" if self.of == "actors" else f", of={self.of!r}"
        return f"DataKeyTrigger(n={n}, size={self.size}, keys={keys}{replay}{of})"

    @property
    def min_actors(self) -> int | None:
        """The number of actors without which the trigger cannot fire; None: all present actors."""
        return self.n if self.of == "actors" else 1

    @property
    def windows_per_actor(self) -> int:
        """The largest number of windows of one actor in a message."""
        return 1 if self.of == "actors" or self.n is None else self.n

    def ready(self, state: Ledger) -> Message | None:
        if self.min_new is not None:
            return self._ready_for_replay(state, self.min_new)
        if self.of == "windows":
            assert self.n is not None
            windows = self._windows_of(state)
            windows.update(self.start_of)
            return self._message(state, windows.first(self.n)) if len(windows) >= self.n else None
        ready = self._ready_of(state)
        for actor in ready.to_check():
            ready.put(actor, state.reached(actor, self.start_of(actor) + self.size, self.stages[0]))
            self._open.update(state, actor)
        if (fragment := self._open.first_ready()) is not None:
            return self._message(state, list(fragment.starts.items()), fragment.stage, fragment.number)
        if not ready.has(self.n):
            return None
        return self._message(state, [(actor, self.start_of(actor)) for actor in ready.first(self.n)])

    def _ready_for_replay(self, state: Ledger, min_new: int) -> Message | None:
        newest = self._newest_of(state)
        newest.update()
        if not (newest.written - self._counted >= min_new if self._warm else newest.has(self.n)):
            return None
        return LazyMessage({"size": self.size, "keys": self.stages[0] or state.keys}, newest.snapshot())

    @property
    def is_warm(self) -> bool:
        """For replay: whether the trigger has fired before, and now waits only for new steps of any actor."""
        return self._warm

    def _ready_of(self, state: Ledger) -> ReadyActors:
        if self._ready is None or self._ready.state is not state:
            self._ready = ReadyActors(state)
            self._open.reset()
        return self._ready

    def _windows_of(self, state: Ledger) -> ArrivedWindows:
        if self._windows is None or self._windows.state is not state:
            self._windows = ArrivedWindows(state, self.size, self.stages[0])
        return self._windows

    def _newest_of(self, state: Ledger) -> NewestSteps:
        if self._newest is None or self._newest.state is not state:
            self._newest = NewestSteps(state, self.size, self.stages[0])
        return self._newest

    def start_of(self, actor: Actor) -> int:
        """Return the first step of an actor's next window.

        Args:
            actor: The actor.

        Returns:
            The number of the step, counted from 0.
        """
        start = self._consumed_to.get(actor, 0)
        for cut in self._cuts.get(actor, ()):
            start = cut if start < cut < start + self.size else start
        return start

    def next_of(self, actor: Actor) -> int:
        """Return the first step of an actor that a later message may name.

        Args:
            actor: The actor.

        Returns:
            The index of the step. It is below `start_of` if later stages of a window have not fired.
        """
        return min([self.start_of(actor), *(each.starts[actor] for each in self._open.of(actor))])

    def pending(self, state: Ledger) -> dict[Actor, int]:
        """Return the steps that wait for a message. For replay: all steps since the last message.

        Args:
            state: The ledger.

        Returns:
            Steps by actor.
        """
        actors = tuple(state.actors)
        if self.min_new is None:
            return {actor: max(0, state.written(actor) - self.start_of(actor)) for actor in actors}
        written = {actor: state.written(actor) for actor in actors}
        share = max(0, sum(written.values()) - self._counted) / max(1, sum(written.values()))
        return {actor: round(share * steps) for actor, steps in written.items()}

    def _recheck(self, actors: Iterable[Actor]) -> None:
        for actor in actors:
            if self._ready is not None:
                self._ready.recheck(actor)
            if self._windows is not None:
                self._windows.recheck(actor)

    def withdrew(self, state: Ledger, actor: Actor) -> None:
        """Handle the loss of an actor's incomplete steps. Stages that have fired for these steps fire again.

        Args:
            state: The ledger, after the steps were withdrawn.
            actor: The actor.
        """
        complete = state.written(actor)
        lost = [each for each in self._open.of(actor) if each.starts[actor] + self.size > complete]
        for fragment in lost:
            self._recheck(self._open.set_stage(fragment, 0))
        if self.min_new is None and self._consumed_to.get(actor, 0) > complete:
            self._consumed_to[actor] = max([complete, *(each.starts[actor] + self.size for each in lost)])
        self._recheck([actor])

    def left(self, state: Ledger, actor: Actor) -> None:
        """Handle the departure of an actor: keep its complete windows, and drop the steps of its incomplete window.

        A trigger with a fixed `n` drops nothing: it waits until `n` actors are ready again.

        Args:
            state: The ledger.
            actor: The actor.
        """
        if self.n is not None or self.min_new is not None:
            return
        for fragment in self._open.of(actor):
            if state.written(actor) < fragment.starts[actor] + self.size:
                self._open.remove_actor(fragment, actor)  # its later stages will not arrive, so repeat the first stage
                if fragment.starts:
                    self._recheck(self._open.set_stage(fragment, 0))
        start, written = self.start_of(actor), state.written(actor)
        self._consumed_to[actor] = start if start + self.size <= written else written
        self._cuts[actor] = [cut for cut in [*self._cuts.get(actor, ()), written] if cut > self._consumed_to[actor]]
        self._recheck([actor])

    def discard(self, state: Ledger) -> None:
        """Skip all written steps that were not consumed. For replay, do nothing.

        Args:
            state: The ledger.
        """
        if self.min_new is None:
            self._open.clear()
            self._consumed_to = {actor: state.written(actor, self.stages[0]) for actor in state.actors}
            self._ready = self._windows = None

    def _message(
        self, state: Ledger, starts: Sequence[tuple[Actor, int]], stage: int = 0, fragment: int | None = None
    ) -> Message:
        keys = self.stages[stage]
        message = {
            "actor_ids": tuple(actor for actor, _ in starts),
            "start": tuple(start for _, start in starts),
            "size": self.size,
            "keys": state.keys if keys is None else keys,
            "versions": tuple(state.span(actor, start, start + self.size, keys) for actor, start in starts),
        }
        fragment = self._fragments if fragment is None else fragment
        return {**message, "stage": stage, "fragment": fragment} if self.staged else message

    def consume(self, state: Ledger, message: Message) -> None:
        if self.min_new is not None:
            # Steps before the first firing do not count as new.
            self._counted = self._counted + self.min_new if self._warm else self._newest_of(state).written
            self._warm = True
        elif (fragment := self._open.get(message.get("fragment"))) is not None:
            self._recheck(self._open.set_stage(fragment, fragment.stage + 1))
        else:
            starts = dict(zip(message["actor_ids"], message["start"], strict=True))  # the last window of each actor
            self._consumed_to.update((actor, start + self.size) for actor, start in starts.items())
            if self.of == "windows":
                self._windows_of(state).remove(len(message["actor_ids"]))
                return
            if len(self.stages) > 1:
                self._open.add(self._fragments, starts)
            self._recheck(starts)
            self._fragments += 1

    def resume(self, state: Ledger, paused_s: float) -> None:
        self._ready = self._newest = self._windows = None  # the keys of the ledger may have changed


@dataclass(eq=False)
class ObjectKeyTrigger(Trigger):
    """Fires when a published object has a new version. Several new versions cause one firing, with the newest version.

    The message has `key` and `version`.

    Args:
        key: Name of the object, e.g. `"parameters"`.

    Raises:
        ConfigError: `key` is not a name.
    """

    key: str
    _seen: int | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.key, str) or not self.key:
            raise ConfigError(
                f'ObjectKeyTrigger.key is {self.key!r}; expected the name of an object, e.g. "parameters".'
            )

    def ready(self, state: Ledger) -> Message | None:
        version = state.versions.get(self.key)
        if version is None or (self._seen is not None and version <= self._seen):
            return None
        return {"key": self.key, "version": version}

    def consume(self, state: Ledger, message: Message) -> None:
        self._seen = message["version"]


@dataclass(eq=False)
class TimeTrigger(Trigger):
    """Fires periodically: when a period has passed since the last firing, or since the start of the first run.

    Several periods that pass at once cause one firing. Seconds between runs do not count. The message has `unit`; `at`,
    the current count or time; and `elapsed`, the amount since the last firing.

    Args:
        period: Length of the period, in `unit`.
        unit: `"seconds"`, `"env_steps"` (steps of single environments) or `"learner_steps"` (updates); default:
            seconds.

    Raises:
        ConfigError: `unit` is unknown, or `period` is not a positive number (an integer for steps).
    """

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
    """Check stages: at least one sequence of names, and no name twice."""
    whose = f"{type(owner).__name__}.keys"
    known: list[str] = []
    if not isinstance(stages, Sequence) or isinstance(stages, str) or not stages:
        raise ConfigError(f"{whose} is {stages!r}; expected names of arrays, or None for all.")
    for stage in stages:
        if not isinstance(stage, Sequence) or isinstance(stage, str) or not stage:
            raise ConfigError(f"{whose} has {stage!r}; expected a sequence of names: write [{stage!r}] for one name.")
        for name in stage:
            if not isinstance(name, str) or name in known:
                raise ConfigError(f"{whose} has {name!r} in {stage!r}; expected names of arrays, each only once.")
            known.append(name)
    return tuple(tuple(stage) for stage in stages)
