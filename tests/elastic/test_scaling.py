"""Rules that choose the number of workers: what each chooses, and that results stay within bounds."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

import farstep
from farstep.elastic import Fill, NoiseScale, Schedule, Signals
from farstep.elastic.scaling import Scaling, rule_of


def signals(**changes: Any) -> Signals:
    return Signals(**{"update": 0, "workers": 4, "max_workers": 32, "rows_per_worker": 100, **changes})


@pytest.mark.parametrize(("updates", "every"), [(200, 25), (40, 5)])
def test_schedule_of_artos_ends_with_all_workers(updates: int, every: int) -> None:
    rule = Schedule(4, 32, 4, every)
    chosen = [rule(signals(update=update)) for update in range(updates)]
    assert chosen == [4 * (1 + update // every) for update in range(updates)]
    assert chosen[-1] == 32 == rule(signals(update=10 * updates))


def test_schedule_may_remove_workers() -> None:
    rule = Schedule(8, 3, 2, 1)
    assert [rule(signals(update=update)) for update in range(5)] == [8, 6, 4, 3, 3]


def test_fill_changes_one_worker_at_a_time_outside_its_bounds() -> None:
    rule = Fill(0.25, 0.75)
    assert [rule(signals(buffer_fill=fill)) for fill in (0.0, 0.25, 0.5, 0.75, 1.0)] == [5, 4, 4, 4, 3]
    with pytest.raises(farstep.ConfigError, match="Fill needs a bound"):
        rule(signals())


def test_noise_scale_sets_the_rows_of_an_update_within_a_factor_of_two() -> None:
    rule = NoiseScale(0.5)
    scales = (None, 1000.0, 800.0, 0.0, math.inf)
    assert [rule(signals(noise_scale=scale)) for scale in scales] == [4, 5, 4, 2, 8]
    assert rule(signals(workers=1, noise_scale=0.0)) == 1


def test_texts_describe_rules() -> None:
    assert rule_of("schedule:4:32:4:25") == Schedule(4, 32, 4, 25)
    assert (rule_of("noise"), rule_of("noise:0.5")) == (NoiseScale(), NoiseScale(0.5))
    assert (rule_of("fill"), rule_of("fill:0.1:0.9")) == (Fill(), Fill(0.1, 0.9))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("schedule:4:32:4", "expected schedule:FIRST:LAST:ADD:EVERY"),
        ("schedule:4:32:4:x", "expected schedule:FIRST:LAST:ADD:EVERY"),
        ("schedule:0:32:4:5", "first is 0; expected a positive integer"),
        ("noise:-1", "factor is -1.0; expected a number above 0"),
        ("noise:nan", "expected a number above 0"),
        ("fill:0.9:0.1", "with low below high"),
        ("noisy", "Did you mean 'noise'"),
    ],
)
def test_other_texts_are_refused_with_the_expected_form(text: str, expected: str) -> None:
    with pytest.raises(farstep.ConfigError, match=expected):
        rule_of(text)


@pytest.mark.parametrize("chunks", [4, 100], ids=["small buffer", "large buffer"])
def test_fill_settles_and_follows_a_lasting_change_of_the_load(chunks: int) -> None:
    """The learner uses as many chunks per update as some number of workers and a half roll."""
    scaling, waiting, chosen = Scaling(Fill(), max_workers=32), 0.0, []
    for update in range(4000):
        used = 6.5 if update < 2000 else 20.5
        waiting = min(chunks, max(0.0, waiting + scaling.workers - used))
        chosen.append(scaling.choose(update, 64, waiting / chunks))
    for start, expected in (0, {6, 7}), (2000, {20, 21}):
        settled = chosen[start + 1000 : start + 2000]
        assert set(settled) <= expected
        assert sum(a != b for a, b in itertools.pairwise(settled)) <= 5


def test_fill_that_fluctuates_changes_nothing() -> None:
    scaling = Scaling(Fill(), max_workers=8)
    scaling.workers = 4
    assert {scaling.choose(update, 64, update % 5 / 4) for update in range(1000)} == {4}


def test_results_of_a_users_function_are_bounded_and_checked() -> None:
    seen: list[Signals] = []
    results: list[Any] = [100, -3, 2, 2.5, True]

    def rule(given: Signals) -> Any:
        seen.append(given)
        return results[len(seen) - 1]

    scaling = Scaling(rule, max_workers=8)
    assert [scaling.choose(update, 64) for update in range(2)] == [8, 1]
    assert scaling.choose(2, 64, min_workers=3) == 3
    assert [each.workers for each in seen] == [8, 8, 1]
    for _ in range(2):
        with pytest.raises(farstep.ConfigError, match="expected a number of workers"):
            scaling.choose(3, 64)
    with pytest.raises(farstep.ConfigError, match="expected Schedule, Fill or NoiseScale"):
        Scaling(3, max_workers=8)  # type: ignore[arg-type]
