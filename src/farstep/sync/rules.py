"""Sync rules: pure functions of a `SyncState`."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass

from farstep.config.env import check_rule, is_number
from farstep.core import SyncRule, SyncState
from farstep.errors import ConfigError


class Rule:
    """Base class of farstep's sync rules. `a | b` pulls when either rule does."""

    probes = 0
    """Number of latest divergences that the rule uses; 0: no divergence is measured."""
    rows = 64
    """The number of observations on which a divergence is measured."""

    def should_pull(self, state: SyncState) -> bool:
        """Decide whether the worker pulls the newest weights before its next chunk.

        Args:
            state: The versions in use and published, the time since the last pull, and the measured divergences.

        Returns:
            True to pull.
        """
        raise NotImplementedError

    def divergence(self, state: SyncState) -> float | None:
        """Compute the running divergence that the rule compares with its threshold.

        Args:
            state: What the worker knows. Its `divergences` are used, newest first.

        Returns:
            The divergence in nats; None if none is measured.
        """
        return None

    def __or__(self, other: SyncRule) -> AnyOf:
        return AnyOf((self, other))

    def __ror__(self, other: SyncRule) -> AnyOf:
        return AnyOf((other, self))


@dataclass(frozen=True)
class Always(Rule):
    """Pull whenever a newer version exists."""

    def should_pull(self, state: SyncState) -> bool:
        return state.newest > state.held


@dataclass(frozen=True)
class EveryK(Rule):
    """Pull when the newest version is at least `k` versions newer than the worker's.

    Args:
        k: Number of versions, at least 1.

    Raises:
        ConfigError: `k` is not an int of at least 1.
    """

    k: int

    def __post_init__(self) -> None:
        _check(self, "k", self.k, isinstance(self.k, int) and self.k >= 1, "a number of versions, an int of at least 1")

    def should_pull(self, state: SyncState) -> bool:
        return state.held < 0 or state.newest - state.held >= self.k


@dataclass(frozen=True)
class EverySeconds(Rule):
    """Pull a newer version if the last pull was at least `seconds` ago.

    Args:
        seconds: Minimum time between two pulls, at least 0.

    Raises:
        ConfigError: `seconds` is not a number of at least 0.
    """

    seconds: float

    def __post_init__(self) -> None:
        _check(self, "seconds", self.seconds, is_number(self.seconds) and self.seconds >= 0, "a number of at least 0")

    def should_pull(self, state: SyncState) -> bool:
        return state.held < 0 or (state.newest > state.held and state.seconds >= self.seconds)


@dataclass(frozen=True)
class MaxLag(Rule):
    """Pull if the weights are more than `versions` versions behind the newest.

    This bounds the lag at the start of a chunk. Combine it with other rules: `AAPS(0.05) | MaxLag(10)`.

    Args:
        versions: The largest lag at which a chunk may start, at least 0.

    Raises:
        ConfigError: `versions` is not an int of at least 0.
    """

    versions: int

    def __post_init__(self) -> None:
        fits = isinstance(self.versions, int) and self.versions >= 0
        _check(self, "versions", self.versions, fits, "the largest lag in versions, an int of at least 0")

    def should_pull(self, state: SyncState) -> bool:
        return state.held < 0 or state.newest - state.held > self.versions


@dataclass(frozen=True)
class AAPS(Rule):
    """Pull when the running divergence between the worker's and the learner's policy exceeds `delta`.

    Let `D_0` be the divergence measured by the newest probe since the last pull, `D_1` that of the probe before it, and
    so on. The running divergence is

        sum_i decay**i * D_i / sum_i decay**i,    i = 0 ... window - 1

    Args:
        delta: Threshold in nats, at least 0. With 0 the rule equals `Always`; with infinity a worker pulls only once.
            In both cases no divergence is measured.
        window: Number of latest probes to average, from 1 to 1000. Default 4.
        decay: Weight of a probe relative to the next newer probe, in (0, 1]. Default 0.5.
        rows: Number of observations per probe, from 1 to 65536, taken from the worker's latest chunks. Default 64.

    Raises:
        ConfigError: An argument is out of range.
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
    """Pull when at least one of several rules pulls; the same as `a | b | ...`.

    Args:
        rules: The rules, at least one.

    Raises:
        ConfigError: There is no rule, or one of them is not a sync rule.
    """

    rules: tuple[SyncRule, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.rules, Sequence) or not self.rules:
            raise ConfigError(
                f"AnyOf.rules is {self.rules!r}; expected a sequence of rules, e.g. (AAPS(0.05), MaxLag(10))."
            )
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
    """Number of latest divergences that a rule uses; works for any rule."""
    return int(getattr(rule, "probes", 0))


def rows_of(rule: SyncRule) -> int:
    """Number of observations per probe for this rule."""
    return int(getattr(rule, "rows", Rule.rows))


def rule_of(sync: SyncRule | None, kl_threshold: float | None) -> SyncRule:
    """The rule of the options `sync` and `kl_threshold`, of which at most one is set."""
    return sync or (Always() if kl_threshold is None else AAPS(kl_threshold))


def threshold_of(rule: SyncRule) -> float | None:
    """The divergence above which the rule pulls; None if the rule is a user's or does not use divergences."""
    if isinstance(rule, AnyOf):
        return min((found for part in rule.rules if (found := threshold_of(part)) is not None), default=None)
    return rule.delta if isinstance(rule, AAPS) and rule.delta > 0 else None


def divergence_of(rule: SyncRule, state: SyncState) -> float | None:
    """The running divergence of a rule; for a user's rule, the divergence that the newest probe measured."""
    if isinstance(rule, Rule):
        return rule.divergence(state)
    return state.divergences[0] if probes_of(rule) and state.divergences else None


def name_of(rule: SyncRule) -> str:
    """The name of a rule in error messages."""
    return " | ".join(map(name_of, rule.rules)) if isinstance(rule, AnyOf) else type(rule).__name__


def _check(rule: Rule, name: str, value: object, fits: bool, meaning: str) -> None:
    if not fits or isinstance(value, bool):
        raise ConfigError(f"{type(rule).__name__}.{name} is {reprlib.repr(value)}; expected {meaning}.")
