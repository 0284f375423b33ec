"""Sync rules: pure decisions, one by one, joined, and over long random histories."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from farstep.config import EnvConfig
from farstep.core import SyncRule, SyncState
from farstep.errors import ConfigError
from farstep.sync import AAPS, Always, EveryK, EverySeconds, MaxLag
from farstep.sync.rules import divergence_of, probes_of
from farstep.testing import check_sync_rule

RULES: list[SyncRule] = [
    Always(),
    EveryK(3),
    EverySeconds(9),
    MaxLag(5),
    AAPS(0.1),
    AAPS(math.inf),
    AAPS(1) | MaxLag(2),
]


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_every_rule_keeps_the_contract(rule: SyncRule) -> None:
    check_sync_rule(lambda: rule)


class Reluctant:
    def should_pull(self, state: SyncState) -> bool:
        return state.newest > 3


class Moody(Always):
    def should_pull(self, state: SyncState) -> bool:
        object.__setattr__(self, "asked", not getattr(self, "asked", False))
        return state.held < 0 or self.asked  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize(("broken", "words"), [(Reluctant, "begins without weights"), (Moody, "to the same")])
def test_the_contract_finds_a_broken_rule(broken: Any, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        check_sync_rule(broken)


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_no_rule_pulls_what_it_has(rule: SyncRule) -> None:
    assert not rule.should_pull(SyncState(held=7, newest=7))


@pytest.mark.parametrize(
    ("rule", "state", "pulls"),
    [
        (Always(), SyncState(6, 7), True),
        (EveryK(3), SyncState(5, 7), False),
        (EveryK(3), SyncState(4, 7), True),
        (EverySeconds(9), SyncState(0, 7, seconds=8.9), False),
        (EverySeconds(9), SyncState(0, 7, seconds=9.0), True),
        (MaxLag(2), SyncState(5, 7), False),
        (MaxLag(2), SyncState(4, 7), True),
        (MaxLag(0), SyncState(6, 7), True),
        (AAPS(0.1), SyncState(0, 7), False),
        (AAPS(0.1), SyncState(0, 7, divergences=[0.1]), False),
        (AAPS(0.1), SyncState(0, 7, divergences=[0.11]), True),
        (AAPS(0.1, window=1), SyncState(0, 7, divergences=[0.0, 9.0]), False),
        (AAPS(0.1, window=2, decay=1.0), SyncState(0, 7, divergences=[0.0, 0.3, 9.0]), True),
        (AAPS(0.1), SyncState(0, 7, divergences=[math.inf]), True),
        (AAPS(math.inf), SyncState(0, 7, divergences=[math.inf]), False),
        (AAPS(0.0), SyncState(6, 7, divergences=[0.0]), True),
        (AAPS(0.1) | MaxLag(5), SyncState(0, 7, divergences=[0.0]), True),
        (AAPS(0.1) | MaxLag(8), SyncState(0, 7, divergences=[0.0]), False),
        (MaxLag(8) | EveryK(9) | AAPS(0.1), SyncState(0, 7, divergences=[0.2]), True),
    ],
    ids=repr,
)
def test_a_rule_pulls_when_it_should(rule: SyncRule, state: SyncState, pulls: bool) -> None:
    assert rule.should_pull(state) is pulls


def test_the_running_divergence_weighs_what_is_newer_more() -> None:
    state = SyncState(0, 9, divergences=[1.0, 2.0, 4.0, 100.0])
    assert AAPS(1.0, window=3, decay=0.5).divergence(state) == pytest.approx((1 + 0.5 * 2 + 0.25 * 4) / 1.75)
    assert AAPS(1.0, window=3, decay=1.0).divergence(state) == pytest.approx(7 / 3)
    assert (MaxLag(3) | AAPS(1.0, window=1)).divergence(state) == 1.0
    assert Always().divergence(state) is None


def test_rules_say_how_many_probes_they_look_at() -> None:
    assert probes_of(Always()) == probes_of(AAPS(0)) == probes_of(MaxLag(3) | EveryK(2)) == 0
    assert probes_of(AAPS(0.1, window=7)) == probes_of(MaxLag(3) | AAPS(0.1, window=7)) == 7
    assert probes_of(AAPS(math.inf)) > 0  # which is never exceeded, but worth to be seen


def test_a_rule_may_be_the_users_own() -> None:
    class Hourly:
        probes = 1

        def should_pull(self, state: SyncState) -> bool:
            return state.seconds > 3600

    rule = MaxLag(100) | Hourly()
    assert EnvConfig(env_name="CartPole-v1", sync=Hourly()).sync is not None
    assert rule.should_pull(SyncState(0, 1, seconds=4000)) and not rule.should_pull(SyncState(0, 1, seconds=1))
    assert probes_of(rule) == 1 and divergence_of(Hourly(), SyncState(0, 1, divergences=[0.5])) == 0.5


@pytest.mark.parametrize(
    "make",
    [
        lambda: EveryK(0),
        lambda: EveryK(1.5),  # type: ignore[arg-type]
        lambda: EveryK(True),
        lambda: EverySeconds(-1),
        lambda: EverySeconds(math.nan),
        lambda: MaxLag(-1),
        lambda: AAPS(-0.1),
        lambda: AAPS(math.nan),
        lambda: AAPS("0.1"),  # type: ignore[arg-type]
        lambda: AAPS(0.1, window=0),
        lambda: AAPS(0.1, decay=0.0),
        lambda: AAPS(0.1, decay=1.1),
        lambda: AAPS(0.1) | "often",  # type: ignore[operator]
    ],
)
def test_a_rule_that_makes_no_sense_is_refused_by_name(make: Callable[[], Any]) -> None:
    with pytest.raises(ConfigError, match=r"EveryK|EverySeconds|MaxLag|AAPS"):
        make()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kl_threshold": -1.0}, "at least 0"),
        ({"kl_threshold": math.nan}, "at least 0"),
        ({"kl_threshold": "much"}, "at least 0"),
        ({"kl_threshold": 0.1, "sync": MaxLag(3)}, "AAPS"),
    ],
)
def test_a_threshold_that_makes_no_sense_is_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        EnvConfig(env_name="CartPole-v1", **options)


def test_over_long_histories_lag_and_divergence_stay_within_their_bounds() -> None:
    """10^5 random events: publishes with probes, and chunks before which a rule decides."""
    generator = np.random.default_rng(0)
    rule, bound = AAPS(0.5, window=1) | MaxLag(20), 20
    held, newest, divergences, pulls, chunks = -1, 0, [], 0, 0
    for _ in range(100_000):
        if generator.random() < 0.5:
            newest += 1
            if generator.random() < 0.9:  # else its probe is still under way
                divergences.insert(0, float(generator.exponential(0.3)))
        state = SyncState(held, newest, divergences=divergences[:1])
        if generator.random() < 0.5:
            chunks += 1
            if rule.should_pull(state):
                held, divergences, pulls = newest, [], pulls + 1
            assert newest - held <= bound
            assert not divergences or divergences[0] <= 0.5
    assert 0 < pulls < chunks
