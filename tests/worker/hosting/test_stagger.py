"""The schedule of staggered resets, without environments: spec 2.2's groups, offsets and gates; and its options."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import farstep
from farstep.config.env import Stagger
from farstep.rollout.rows import Slots
from farstep.worker.hosting.stagger import StaggerSchedule, num_groups, offsets_of


def slots(first: int, count: int, root: int = 5) -> Slots:
    return Slots(first, [root] * count, [0] * count)


def offsets(stagger: Stagger, num_slots: int, steps: int = 5, parts: int = 1) -> list[int]:
    """Of all slots, as `parts` workers of about equal size find them."""
    borders = np.linspace(0, num_slots, parts + 1).astype(int)
    found = [offsets_of(stagger, slots(int(a), int(b - a)), num_slots, steps) for a, b in pairwise(borders)]
    return [int(o) for part in found for o in part]


# ---- options ----


def of(**options: Any) -> Stagger | None:
    return farstep.EnvConfig(env_name="CartPole-v1", stagger=cast(Any, {"horizon": 200, **options})).stagger


def test_options_have_defaults_and_may_be_a_mapping() -> None:
    expected = Stagger(horizon=200, groups="auto", init="advance", offsets="even", early="partial")
    assert of() == expected
    assert farstep.EnvConfig(env_name="CartPole-v1").stagger is None
    assert farstep.EnvConfig(env_name="CartPole-v1", stagger=expected).stagger is expected
    assert of(groups=np.int64(4)) == Stagger(horizon=200, groups=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"horizon": None}, "horizon is missing.*e.g."),
        ({"horizon": 0}, "horizon is 0; it must be an integer of at least 1"),
        ({"horizon": 2.5}, "horizon is 2.5; it must be an integer"),
        ({"groups": 0}, "groups is 0; it must be an integer of at least 1"),
        ({"groups": True}, "groups is True; it must be an integer"),
        ({"groups": 2.0}, "groups is 2.0; it must be an integer"),
        ({"groups": "many"}, "groups is 'many'; expected 'auto' or a number"),
        ({"groups": 201}, "groups is 201 with horizon=200.*at most one group per step"),
        ({"groups": 4, "offsets": "random"}, "groups=4 and offsets='random'.*leave out one"),
        ({"init": "advanced"}, "init of Stagger 'advanced'.*advance"),
        ({"offsets": "evenly"}, "offsets of Stagger 'evenly'.*even"),
        ({"early": "gated"}, "early of Stagger 'gated'.*gate"),
        ({"horizn": 3}, "option of Stagger 'horizn'.*horizon"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(farstep.ConfigError, match=message):
        of(**options)


@pytest.mark.parametrize("value", [200, "auto", True])
def test_value_that_is_not_a_mapping_is_refused(value: Any) -> None:
    with pytest.raises(farstep.ConfigError, match="expected a Stagger or a mapping"):
        farstep.EnvConfig(env_name="CartPole-v1", stagger=value)


@pytest.mark.parametrize("options", [{}, {"init": "policy"}, {"init": "clock", "early": "gate"}])
@pytest.mark.parametrize("kind", ["vector", "envpool"])
def test_vectors_are_staggered_by_the_clock_only(options: dict[str, Any], kind: Any) -> None:
    with pytest.raises(farstep.ConfigError, match=r"single environment of a vector.*init='clock' and early='partial'"):
        farstep.EnvConfig(type=kind, env_name="CartPole-v1", stagger=cast(Any, {"horizon": 9, **options}))
    farstep.EnvConfig(type=kind, env_name="CartPole-v1", stagger=cast(Any, {"horizon": 9, "init": "clock"}))


# ---- groups and offsets ----


@pytest.mark.parametrize(
    ("groups", "num_slots", "steps", "expected"),
    [("auto", 64, 5, 40), ("auto", 16, 5, 16), ("auto", 64, 200, 1), ("auto", 64, 500, 1), (7, 64, 5, 7), (7, 3, 5, 3)],
)
def test_as_many_groups_as_rollouts_in_a_horizon(groups: Any, num_slots: int, steps: int, expected: int) -> None:
    assert num_groups(Stagger(horizon=200, groups=groups), num_slots, steps) == expected


def test_offsets_by_hand() -> None:
    assert offsets(Stagger(horizon=20, groups=3), 7) == [0, 6, 12, 0, 6, 12, 0]
    assert offsets(Stagger(horizon=20, groups=1), 4) == [0, 0, 0, 0]
    assert offsets(Stagger(horizon=8), 4, steps=2) == [0, 2, 4, 6]


@given(st.data())
def test_groups_are_even_and_the_same_for_any_number_of_workers(data: st.DataObject) -> None:
    horizon = data.draw(st.integers(1, 300))
    groups: Any = data.draw(st.integers(1, horizon) | st.just("auto"))
    num_slots, steps = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 400))
    stagger = Stagger(horizon=horizon, groups=groups)
    found = offsets(stagger, num_slots, steps)
    count = num_groups(stagger, num_slots, steps)
    assert sorted(set(found)) == [g * (horizon // count) for g in range(count)]
    sizes = [found.count(o) for o in set(found)]
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= -(-num_slots // count)  # invariant (c): the bound on simultaneous resets
    active = data.draw(st.integers(1, num_slots))  # the last workers are parked
    sizes = [found[:active].count(o) for o in set(found)]
    assert max(sizes) - min(sizes) <= 1
    parts = data.draw(st.integers(1, num_slots))
    assert offsets(stagger, num_slots, steps, parts) == found


def test_random_offsets_depend_on_seed_and_slot_only() -> None:
    stagger = Stagger(horizon=100, offsets="random")
    found = offsets(stagger, 50)
    assert offsets(stagger, 50, parts=4) == found == offsets(stagger, 50, steps=9)
    assert min(found) >= 0 and max(found) < 100 and len(set(found)) > 25
    assert offsets_of(stagger, slots(0, 50, root=6), 50, 5).tolist() != found


# ---- schedule over time ----


def test_phases_stay_the_same_multiset_modulo_the_horizon() -> None:
    """Invariant (a): as seen from group 0, nothing changes."""
    schedule = StaggerSchedule(Stagger(horizon=20, groups=4), 8)
    schedule.fix_offsets(slots(0, 8), 5)
    at_first = [schedule.phase(i, 0) for i in range(8)]
    assert at_first == [0, 5, 10, 15, 0, 5, 10, 15]
    at_first.sort()
    for row in range(0, 200, 5):
        assert sorted((schedule.phase(i, row) - row) % 20 for i in range(8)) == at_first
        # With groups as far apart as rollouts are long, they are so even as they stand.
        assert sorted(schedule.phase(i, row) for i in range(8)) == at_first


def test_gates_open_where_the_specification_says() -> None:
    """(s + g * S) mod H == 0."""
    schedule, size = StaggerSchedule(Stagger(horizon=10, groups=3), 3), 3
    schedule.fix_offsets(slots(0, 3), 5)
    for i in range(3):
        gates = [row for row in range(40) if schedule.phase(i, row) == 0]
        assert gates == [s for s in range(40) if (s + i * size) % 10 == 0]


def test_replaced_worker_continues_at_the_phase_that_is_due() -> None:
    old, new = StaggerSchedule(Stagger(horizon=10, groups=3), 3), None
    old.fix_offsets(slots(0, 3), 4)
    new = StaggerSchedule(Stagger(horizon=10, groups=3), 3, clock=old.clock(17))
    new.fix_offsets(slots(0, 3), 4)
    for later in range(25):
        assert [new.phase(i, later) for i in range(3)] == [old.phase(i, 17 + later) for i in range(3)]
        assert new.clock(later) == old.clock(17 + later)


def test_restart_computes_all_offsets_again() -> None:
    schedule = StaggerSchedule(Stagger(horizon=12), 4)
    schedule.fix_offsets(slots(0, 4), 3)
    schedule.fix_offsets(slots(0, 4), 6)  # a later rollout of another length changes nothing ...
    assert [schedule.phase(i, 12) for i in range(4)] == [0, 3, 6, 9]
    schedule.restart(14)
    schedule.fix_offsets(slots(0, 4), 6)  # ... until the schedule restarts
    assert [schedule.phase(i, 14) for i in range(4)] == [0, 6, 0, 6]
    assert schedule.clock(14) == 0


def test_resumed_worker_catches_up_with_the_clock_of_the_others() -> None:
    schedule, others = (StaggerSchedule(Stagger(horizon=10, groups=3), 3) for _ in range(2))
    for each in (schedule, others):
        each.fix_offsets(slots(0, 3), 4)
    assert not schedule.catch_up(others.clock(8), 8)  # no worker rolled meanwhile
    assert schedule.catch_up(others.clock(25), 8)
    for later in range(25):
        assert [schedule.phase(i, 8 + later) for i in range(3)] == [others.phase(i, 25 + later) for i in range(3)]
