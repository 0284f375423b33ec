"""Sync rules: pure functions of what a worker knows before a chunk."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass

from farstep.config.env import check_rule, is_number
from farstep.core import SyncRule, SyncState
from farstep.errors import ConfigError


class Rule:
    """What rules have in common: `a | b` pulls when either does."""

    probes = 0
    """How many of the latest divergences the rule looks at; without any, none are measured."""
    rows = 64
    """How many observations a divergence is measured on."""

    def should_pull(self, state: SyncState) -> bool:
        raise NotImplementedError

    def divergence(self, state: SyncState) -> float | None:
        """The running divergence that the rule compares, if it does."""
        return None

    def __or__(self, other: SyncRule) -> AnyOf:
        return AnyOf((self, other))

    def __ror__(self, other: SyncRule) -> AnyOf:
        return AnyOf((other, self))


@dataclass(frozen=True)
class Always(Rule):
    """Act with the newest version, always."""

    def should_pull(self, state: SyncState) -> bool:
        return state.newest > state.held


@dataclass(frozen=True)
class EveryK(Rule):
    """Pull when at least `k` versions were published since the last pull."""

    k: int

    def __post_init__(self) -> None:
        _check(self, "k", self.k, isinstance(self.k, int) and self.k >= 1, "a number of versions, an int of at least 1")

    def should_pull(self, state: SyncState) -> bool:
        return state.held < 0 or state.newest - state.held >= self.k


@dataclass(frozen=True)
class EverySeconds(Rule):
    """Pull a newer version when the last pull was at least `seconds` ago."""

    seconds: float

    def __post_init__(self) -> None:
        _check(self, "seconds", self.seconds, is_number(self.seconds) and self.seconds >= 0, "a number of at least 0")

    def should_pull(self, state: SyncState) -> bool:
        return state.held < 0 or (state.newest > state.held and state.seconds >= self.seconds)


@dataclass(frozen=True)
class MaxLag(Rule):
    """Never begin a chunk with weights more than `versions` behind: a hard bound, to be combined with other rules."""

    versions: int

    def __post_init__(self) -> None:
        fits = isinstance(self.versions, int) and self.versions >= 0
        _check(self, "versions", self.versions, fits, "how many to be behind at most, an int of at least 0")

    def should_pull(self, state: SyncState) -> bool:
        return state.held < 0 or state.newest - state.held > self.versions


@dataclass(frozen=True)
class AAPS(Rule):
    """Pull when the running divergence of the weights in use from the learner's exceeds `delta`.

    The running divergence is an average over the latest `window` probes since the last pull, each weighing `decay`
    times as much as the next one; `window=1` looks at the newest alone. `delta=0` is `Always`; with `delta=inf` a
    worker pulls only once; neither measures anything. A probe is about `rows` observations of the worker's latest
    chunks.
    """

    delta: float
    window: int = 4
    decay: float = 0.5
    rows: int = 64

    def __post_init__(self) -> None:
        _check(self, "delta", self.delta, is_number(self.delta) and self.delta >= 0, "a number of at least 0 (in nats)")
        fits = isinstance(self.window, int) and 1 <= self.window <= 1000
        _check(self, "window", self.window, fits, "a number of probes, an int from 1 to 1000")
        fits = isinstance(self.rows, int) and 1 <= self.rows <= 65536
        _check(self, "rows", self.rows, fits, "a number of observations, an int from 1 to 65536")
        _check(self, "decay", self.decay, is_number(self.decay) and 0 < self.decay <= 1, "a number in (0, 1]")

    @property
    def probes(self) -> int:  # type: ignore[override]
        return self.window if 0 < self.delta < math.inf else 0

    def should_pull(self, state: SyncState) -> bool:
        if state.held < 0 or self.delta == 0:
            return state.newest > state.held
        running = self.divergence(state)
        return running is not None and running > self.delta

    def divergence(self, state: SyncState) -> float | None:
        latest = state.divergences[: self.window]
        if not latest:
            return None
        weights = [self.decay**i for i in range(len(latest))]
        return sum(weight * value for weight, value in zip(weights, latest, strict=True)) / sum(weights)


@dataclass(frozen=True)
class AnyOf(Rule):
    """Pull when one of several rules says so."""

    rules: tuple[SyncRule, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.rules, Sequence) or not self.rules:
            raise ConfigError(f"AnyOf.rules is {self.rules!r}; expected some rules, e.g. (AAPS(0.05), MaxLag(10)).")
        for rule in self.rules:
            check_rule("one of several sync rules", rule)

    @property
    def probes(self) -> int:  # type: ignore[override]
        return max(probes_of(rule) for rule in self.rules)

    @property
    def rows(self) -> int:  # type: ignore[override]
        return max((rows_of(rule) for rule in self.rules if probes_of(rule)), default=Rule.rows)

    def should_pull(self, state: SyncState) -> bool:
        return any(rule.should_pull(state) for rule in self.rules)

    def divergence(self, state: SyncState) -> float | None:
        return next((found for rule in self.rules if (found := divergence_of(rule, state)) is not None), None)


def probes_of(rule: SyncRule) -> int:
    """How many divergences a rule looks at, be it ours or a user's."""
    return int(getattr(rule, "probes", 0))


def rows_of(rule: SyncRule) -> int:
    """How many observations a probe for that rule is about."""
    return int(getattr(rule, "rows", Rule.rows))


def threshold_of(rule: SyncRule) -> float | None:
    """The divergence above which a rule of ours pulls, if it does for that; infinite if it takes anything for close."""
    if isinstance(rule, AnyOf):
        return min((found for part in rule.rules if (found := threshold_of(part)) is not None), default=None)
    return rule.delta if isinstance(rule, AAPS) and rule.delta > 0 else None


def divergence_of(rule: SyncRule, state: SyncState) -> float | None:
    """The running divergence by a rule; by one that has none of its own, that of the newest probe."""
    if isinstance(rule, Rule):
        return rule.divergence(state)
    return state.divergences[0] if probes_of(rule) and state.divergences else None


def name_of(rule: SyncRule) -> str:
    """What to call a rule when something is wrong with it."""
    return " | ".join(map(name_of, rule.rules)) if isinstance(rule, AnyOf) else type(rule).__name__


def _check(rule: Rule, name: str, value: object, fits: bool, meaning: str) -> None:
    if not fits or isinstance(value, bool):
        raise ConfigError(f"{type(rule).__name__}.{name} is {reprlib.repr(value)}; expected {meaning}.")
