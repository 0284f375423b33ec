"""Sync rules: pure decisions, one by one, joined, and over long random histories."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from farstep.config.env import EnvConfig
from farstep.core import SyncRule, SyncState
from farstep.errors import ConfigError
from farstep.sync import AAPS, Always, AnyOf, EveryK, EverySeconds, MaxLag
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
    check_sync_rule(rule)
    check_sync_rule(lambda: rule)


class Reluctant:
    """Leaves even the first pull to others."""

    probes = 2

    def should_pull(self, state: SyncState) -> bool:
        assert len(state.divergences) <= self.probes
        return state.newest > 3


class ByArrays:
    def should_pull(self, state: SyncState) -> Any:
        return np.less(state.held, state.newest)  # np.bool_


class Counting:
    """Its decision depends on the number of calls."""

    asked = 0

    def should_pull(self, state: SyncState) -> bool:
        self.asked += 1
        return self.asked % 4 == 0


@pytest.mark.parametrize("kind", [Reluctant, ByArrays, Counting])
def test_the_contract_is_kept_by_rules_that_run(kind: Any) -> None:
    check_sync_rule(kind)
    check_sync_rule(kind())


class Hasty(Reluctant):
    def should_pull(self, state: SyncState) -> bool:
        return state.divergences[0] > 0.1


class Vague(Reluctant):
    def should_pull(self, state: SyncState) -> Any:
        return "perhaps"


class Blind(Reluctant):
    rows = 0


class Backward(Reluctant):
    probes = -1


class Halved(Reluctant):
    rows = 16.5


class Rooted(Reluctant):
    def __init__(self) -> None:
        self.lock = threading.Lock()


class Mute:
    pass


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (Hasty, "raised IndexError.*held=-1"),
        (Vague, "returned 'perhaps'"),
        (Blind, r"Blind\.rows is 0; it must be an integer of at least 1"),
        (Backward, r"Backward\.probes is -1; it must be an integer of at least 0"),
        (Rooted, "cannot be sent to workers: TypeError"),
        (Mute, r"has no should_pull\(state\)"),
    ],
)
def test_the_contract_finds_a_broken_rule(broken: Any, words: str) -> None:
    for given in (broken, broken()):
        with pytest.raises(AssertionError, match=words):
            check_sync_rule(given)


@pytest.mark.parametrize("kind", [Blind, Backward, Halved])
def test_invalid_measurements_of_a_rule_are_refused_at_construction(kind: Any) -> None:
    for make in (lambda: EnvConfig(env_name="A", sync=kind()), lambda: MaxLag(3) | kind(), lambda: kind() | MaxLag(3)):
        with pytest.raises(ConfigError, match=r"(rows|probes) is .*; it must be an integer of at least"):
            make()


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_no_rule_pulls_the_version_that_it_holds(rule: SyncRule) -> None:
    assert not rule.should_pull(SyncState(held=7, newest=7))


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_every_rule_pulls_before_its_first_action(rule: SyncRule) -> None:
    assert all(rule.should_pull(SyncState(-1, newest)) is True for newest in (0, 1, 7, 10**9))


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


def test_running_divergence_weighs_newer_probes_more() -> None:
    state = SyncState(0, 9, divergences=[1.0, 2.0, 4.0, 100.0])
    assert AAPS(1.0, window=3, decay=0.5).divergence(state) == pytest.approx((1 + 0.5 * 2 + 0.25 * 4) / 1.75)
    assert AAPS(1.0, window=3, decay=1.0).divergence(state) == pytest.approx(7 / 3)
    assert (MaxLag(3) | AAPS(1.0, window=1)).divergence(state) == 1.0
    assert Always().divergence(state) is None


def test_rules_say_how_many_probes_they_look_at() -> None:
    assert probes_of(Always()) == probes_of(AAPS(0)) == probes_of(MaxLag(3) | EveryK(2)) == 0
    assert probes_of(AAPS(0.1, window=7)) == probes_of(MaxLag(3) | AAPS(0.1, window=7)) == 7
    assert probes_of(AAPS(math.inf)) == probes_of(AAPS(math.inf) | MaxLag(3)) == 0  # which nothing exceeds


def test_users_may_define_rules() -> None:
    class Hourly:
        probes = 1

        def should_pull(self, state: SyncState) -> bool:
            return state.seconds > 3600

    rule = MaxLag(100) | Hourly()
    assert (Hourly() | MaxLag(100)).rules[1] == rule.rules[0]
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
        lambda: AAPS(0.1) | AAPS,
        lambda: AAPS | AAPS(0.1),
        lambda: AAPS(10**400),
        lambda: EverySeconds(10**400),
        lambda: AnyOf(()),
        lambda: AnyOf(AAPS(0.1)),  # type: ignore[arg-type]
    ],
)
def test_invalid_rules_are_refused_by_name(make: Callable[[], Any]) -> None:
    with pytest.raises(ConfigError, match=r"EveryK|EverySeconds|MaxLag|AAPS"):
        make()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kl_threshold": -1.0}, "at least 0"),
        ({"kl_threshold": math.nan}, "at least 0"),
        ({"kl_threshold": "much"}, "at least 0"),
        ({"kl_threshold": 10**400}, "at least 0"),
        ({"kl_threshold": 0.1, "sync": MaxLag(3)}, "AAPS"),
    ],
)
def test_invalid_thresholds_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        EnvConfig(env_name="CartPole-v1", **options)


@pytest.mark.slow
def test_over_long_histories_lag_and_divergence_stay_within_their_bounds() -> None:
    """10^5 random events: publishes with probes, and chunks before which a rule decides."""
    generator = np.random.default_rng(0)
    rule, bound = AAPS(0.5, window=1) | MaxLag(20), 20
    held, newest, pulls, chunks = -1, 0, 0, 0
    divergences: list[float] = []
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
