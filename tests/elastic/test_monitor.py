"""The workload monitor on synthetic series: it predicts in time while updates are stable, and not otherwise."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable

import pytest

from farstep.elastic.monitor import WINDOW, WorkloadMonitor

START_S = 0.4


def outcomes(updates: Iterable[float], workers: Callable[[int], int] = lambda _: 8) -> list[tuple[float, float] | None]:
    """For every update: seconds that the next rollout waits, and that started workers wait; None without prediction."""
    monitor, found = WorkloadMonitor(), []
    for index, update_s in enumerate(updates):
        after = monitor.start_after()
        found.append(None if after is None else (max(0.0, after + START_S - update_s), update_s - after - START_S))
        monitor.add(START_S, update_s, workers(index))
    return found


def test_a_window_of_updates_comes_before_the_first_prediction() -> None:
    found = outcomes([2.0] * (WINDOW + 1))
    assert found[:WINDOW] == [None] * WINDOW
    assert found[WINDOW] == pytest.approx((0.0, 0.0))


def test_stable_updates_wait_for_no_worker() -> None:
    draw = random.Random(1)
    found = outcomes(draw.uniform(1.9, 2.1) for _ in range(300))
    predicted = [outcome for outcome in found if outcome is not None]
    assert len(predicted) == 300 - WINDOW
    late = [wait for wait, _ in predicted if wait > 0.05]
    assert len(late) <= 0.08 * len(predicted)
    assert sum(idle for _, idle in predicted) / len(predicted) < 0.25 * 2.0


def test_a_slow_drift_is_followed() -> None:
    found = outcomes(2.0 + 0.02 * index for index in range(100))
    assert all(outcome is not None and outcome[0] == 0.0 for outcome in found[WINDOW:])
    assert all(outcome is not None and outcome[1] < 0.3 for outcome in found[WINDOW:])


def test_a_step_change_stops_predictions_for_one_window() -> None:
    found = outcomes([2.0] * 10 + [4.0] * 10)
    assert found[10] is not None  # the step change cannot be predicted
    assert found[11 : 10 + WINDOW] == [None] * (WINDOW - 1)
    assert found[10 + WINDOW] == pytest.approx((0.0, 0.0))


def test_bursts_are_not_predicted() -> None:
    draw = random.Random(2)
    found = outcomes(draw.choice([0.5, 5.0]) for _ in range(200))
    assert sum(outcome is not None for outcome in found) < 0.15 * len(found)


def test_another_number_of_workers_begins_a_new_window() -> None:
    found = outcomes([2.0] * 20, workers=lambda index: 8 if index < 10 else 16)
    assert found[10] is not None
    assert found[11 : 10 + WINDOW] == [None] * (WINDOW - 1)
    small = outcomes([2.0] * 20, workers=lambda index: 8 if index < 10 else 9)
    assert None not in small[WINDOW:]


def test_starts_that_take_longer_than_updates_begin_at_once() -> None:
    monitor = WorkloadMonitor()
    for _ in range(WINDOW):
        monitor.add(3.0, 1.0, 4)
    assert monitor.start_after() == 0.0


def test_the_prediction_follows_the_paper() -> None:
    monitor = WorkloadMonitor()
    starts, updates = [0.3, 0.4, 0.35, 0.3, 0.3], [5.2, 5.0, 5.4, 5.1, 5.3]
    for start_s, update_s in zip(starts, updates, strict=True):
        monitor.add(start_s, update_s, 4)
    waits = [update - start for start, update in zip(starts, updates, strict=True)]
    after = monitor.start_after()
    assert after is not None and math.isclose(after, 5.0 - 0.4 - (max(waits) - min(waits)))
