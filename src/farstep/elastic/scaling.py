"""Rules that choose the number of workers, and so the rows per update, after every update (adaptive batch size).

A rule is a function of `Signals` that returns a number of workers. `Schedule`, `Fill` and `NoiseScale` are such
functions; a user's function works in the same place. Rules do no I/O and keep no state: `Scaling` holds the current
number, and its owner (a learner, a `Workflow`) passes the result to `ClusterEnv.scale`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral

from farstep.config.field_docs import show_fields
from farstep.elastic.damping import Damping
from farstep.errors import ConfigError, counted, unknown_name

_FORMS = {
    "schedule": "schedule:FIRST:LAST:ADD:EVERY, e.g. schedule:4:32:4:25",
    "noise": "noise, or noise:FACTOR, e.g. noise:0.5",
    "fill": "fill, or fill:LOW:HIGH, e.g. fill:0.25:0.75",
}
"""How to write each rule as text."""


@show_fields
@dataclass(frozen=True, kw_only=True)
class Signals:
    """What a rule may use."""

    update: int
    """Updates so far; 0 before the first rollout."""
    workers: int
    """Workers that run now."""
    max_workers: int
    """Largest number of workers (`ClusterEnv.num_workers`)."""
    rows_per_worker: float
    """Mean number of rows that one worker contributes to an update; in a replay learner, rows of its chunk."""
    buffer_fill: float | None = None
    """How far workers are ahead of the learner, from 0 (it waits for rows) to 1 (they wait). In a workflow: the
    fraction of the buffer that holds rows which a consumer has not read yet; for replay, the position of the
    limiter's `diff` between its bounds. In IMPALA: the number of chunks that wait for the learner, divided by the
    largest number allowed. None: the learner has no such bound."""
    noise_scale: float | None = None
    """Gradient noise scale in rows (`GradientNoise`); infinite if noise hides the gradient. None: not known yet."""


Rule = Callable[[Signals], int]
"""Returns how many workers to run next. Results outside 1 to `max_workers` are set to the nearer bound."""


@dataclass(frozen=True)
class Schedule:
    """Changes the number of workers in equal steps, from `first` to `last`.

    ARTOS uses `Schedule(4, 32, 4, 25)` for 200 updates, and `Schedule(4, 32, 4, 5)` for 40.

    Args:
        first: Workers of the first update.
        last: Workers at the end; may be smaller than `first`.
        add: Workers to add at a time; if `last` is smaller than `first`, to remove.
        every: Updates between two changes.

    Raises:
        ConfigError: A number is not a positive integer.
    """

    first: int
    last: int
    add: int
    every: int

    def __post_init__(self) -> None:
        for name in ("first", "last", "add", "every"):
            value = getattr(self, name)
            if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"Schedule's {name} is {value!r}; expected a positive integer.")

    def __call__(self, signals: Signals) -> int:
        change = self.add * (signals.update // self.every)
        if self.last >= self.first:
            return min(self.first + change, self.last)
        return max(self.first - change, self.last)


@dataclass(frozen=True)
class Fill:
    """Adds or removes one worker at a time to keep `Signals.buffer_fill` between two bounds.

    A learner or a workflow changes the number only after the fill has stayed outside for several updates (`Damping`).

    Args:
        low: If the fill is below this, one more worker runs; default 0.25.
        high: If the fill is above this, one fewer worker runs; default 0.75.

    Raises:
        ConfigError: The bounds are not numbers with `0 <= low < high <= 1`.
    """

    low: float = 0.25
    high: float = 0.75

    def __post_init__(self) -> None:
        if not (_is_number(self.low) and _is_number(self.high) and 0 <= self.low < self.high <= 1):
            raise ConfigError(
                f"Fill has low={self.low!r} and high={self.high!r}; expected fractions of the buffer with low below "
                "high, e.g. Fill(0.25, 0.75)."
            )

    def __call__(self, signals: Signals) -> int:
        if signals.buffer_fill is None:
            raise ConfigError(
                "Fill needs a bound on how far workers can be ahead of the learner, and here is none. Bounds are: a "
                "Workflow with a DataKeyTrigger that takes rows, a limiter with max_diff, or workers that roll while "
                "the learner updates. Without a bound, use Schedule or a function."
            )
        return signals.workers + (signals.buffer_fill < self.low) - (signals.buffer_fill > self.high)


@dataclass(frozen=True)
class NoiseScale:
    """Runs enough workers for updates of `factor * noise_scale` rows.

    The number of workers at most doubles or halves per update. It does not change while the noise scale is unknown.

    Args:
        factor: Rows per update, in units of the noise scale; default 1. With more rows, updates hardly
            improve; with fewer, the same number of steps gives more updates.

    Raises:
        ConfigError: `factor` is not a number above 0.
    """

    factor: float = 1.0

    def __post_init__(self) -> None:
        if not (_is_number(self.factor) and self.factor > 0):
            raise ConfigError(f"NoiseScale's factor is {self.factor!r}; expected a number above 0.")

    def __call__(self, signals: Signals) -> int:
        if signals.noise_scale is None:
            return signals.workers
        wanted = self.factor * signals.noise_scale / signals.rows_per_worker
        return round(min(max(wanted, math.ceil(signals.workers / 2)), 2 * signals.workers))


def rule_of(text: str) -> Rule:
    """Return the rule that a text describes, for command lines and configuration files.

    Args:
        text: `schedule:FIRST:LAST:ADD:EVERY`, `noise`, `noise:FACTOR`, `fill` or `fill:LOW:HIGH`.

    Returns:
        The rule.

    Raises:
        ConfigError: The text has another form, or a number is out of range.
    """
    if not isinstance(text, str):
        raise ConfigError(f"scaling is {text!r}; expected a text: {'; '.join(_FORMS.values())}.")
    name, *numbers = text.split(":")
    if name not in _FORMS:
        raise ConfigError(unknown_name("scaling rule", name, _FORMS))
    refused = ConfigError(f"scaling is {text!r}; expected {_FORMS[name]}.")
    try:
        values = [int(number) if name == "schedule" else float(number) for number in numbers]
    except ValueError:
        raise refused from None
    match name, values:
        case "schedule", [first, last, add, every]:
            return Schedule(int(first), int(last), int(add), int(every))
        case "noise", [] | [_]:
            return NoiseScale(*values)
        case "fill", [] | [_, _]:
            return Fill(*values)
    raise refused


class Scaling:
    """Applies a rule: keeps the current number of workers, and checks and bounds the rule's results.

    Args:
        rule: The rule.
        max_workers: Largest number of workers.

    Raises:
        ConfigError: `rule` is not a function.
    """

    def __init__(self, rule: Rule, max_workers: int) -> None:
        if not callable(rule):
            raise ConfigError(
                f"scaling is {rule!r}; expected Schedule, Fill or NoiseScale of farstep.elastic, or a function of "
                "Signals that returns a number of workers."
            )
        self._rule, self._max_workers = rule, max_workers
        self._damping = Damping() if isinstance(rule, Fill) else None
        self.workers = max_workers
        """Workers that run now."""

    def choose(
        self,
        update: int,
        rows_per_worker: float,
        buffer_fill: float | None = None,
        noise_scale: float | None = None,
        min_workers: int = 1,
    ) -> int:
        """Ask the rule, and make its result the current number of workers.

        Args:
            update: As in `Signals`.
            rows_per_worker: As in `Signals`.
            buffer_fill: As in `Signals`.
            noise_scale: As in `Signals`.
            min_workers: Number of workers without which the run could not continue; default 1.

        Returns:
            The number of workers, from `min_workers` to `max_workers`.

        Raises:
            ConfigError: The rule returned something other than an integer, or needs a signal that does not exist.
        """
        signals = Signals(
            update=update,
            workers=self.workers,
            max_workers=self._max_workers,
            rows_per_worker=rows_per_worker,
            buffer_fill=buffer_fill,
            noise_scale=noise_scale,
        )
        found = self._rule(signals)
        if not isinstance(found, Integral) or isinstance(found, bool):
            raise ConfigError(f"the scaling rule {self._rule!r} returned {found!r}; expected a number of workers.")
        chosen = min(max(min_workers, int(found)), self._max_workers)
        if self._damping is not None and not self._damping.admits(chosen - self.workers, buffer_fill or 0.0):
            chosen = max(min_workers, self.workers)
        self.workers = chosen
        return self.workers


def uses_noise_scale(rule: Rule) -> bool:
    """Return whether a rule may read `Signals.noise_scale`; a user's function may."""
    return not isinstance(rule, Schedule | Fill)


def no_effect(rule: Rule, max_workers: int) -> str:
    """Return why a rule cannot do what it says with this many workers; empty if it can."""
    if max_workers == 1:
        return "the scaling rule has no effect, since the run has only 1 worker; use more workers"
    if isinstance(rule, Schedule) and (most := max(rule.first, rule.last)) > max_workers:
        return (
            f"the scaling rule {rule} asks for up to {most} workers, but the run has only "
            f"{counted(max_workers, 'worker')}; start more workers, or lower the schedule's numbers"
        )
    return ""


def _is_number(value: object) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool) and math.isfinite(value)
