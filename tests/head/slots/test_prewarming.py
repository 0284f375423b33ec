"""Prewarming: when workers are resumed, by the durations of updates and of starts."""

from __future__ import annotations

import queue

import pytest

from farstep.elastic.monitor import WINDOW
from farstep.head.slots.prewarming import Prewarming

PATIENCE_S = 60.0


def updated(prewarming: Prewarming, updates_s: list[float], start_s: float) -> None:
    """Report rollouts of 1 s, each followed by an update."""
    now = 0.0
    for update_s in updates_s:
        prewarming.rollout_begins(now)
        prewarming.issued(now)
        prewarming.chunk_arrived(now + 1.0, busy_s=1.0 - start_s)
        prewarming.rollout_ended(now + 1.0, workers=4)
        now += 1.0 + update_s


def test_workers_are_resumed_after_a_window_of_equal_updates_and_suspended_without_a_rollout() -> None:
    calls: queue.SimpleQueue[str] = queue.SimpleQueue()

    def resume() -> None:
        calls.put("resume")
        prewarming.resumed()

    prewarming = Prewarming(resume, lambda: calls.put("suspend"))
    updated(prewarming, [0.1] * (WINDOW + 1), start_s=0.02)
    assert calls.get(timeout=PATIENCE_S) == "resume"
    assert prewarming.is_early
    assert calls.get(timeout=PATIENCE_S) == "suspend"
    prewarming.close()


def test_unequal_updates_are_not_predicted() -> None:
    calls: list[str] = []
    prewarming = Prewarming(lambda: calls.append("resume"), lambda: calls.append("suspend"))
    updated(prewarming, [0.1, 0.1, 9.0] * WINDOW, start_s=0.02)
    prewarming.close()
    assert calls == []


@pytest.mark.parametrize("start_s", [0.0, 0.75])
def test_start_of_prewarmed_workers_does_not_count(start_s: float) -> None:
    calls: queue.SimpleQueue[str] = queue.SimpleQueue()
    prewarming = Prewarming(lambda: calls.put("resume"), lambda: None)
    updated(prewarming, [100.0] * (WINDOW + 1), start_s=0.5)
    now = 101.0 * (WINDOW + 1)
    for _ in range(2 * WINDOW):
        prewarming.is_early = True
        assert prewarming.rollout_begins(now)
        prewarming.issued(now)
        prewarming.chunk_arrived(now + 1.0, busy_s=1.0 - start_s)
        prewarming.rollout_ended(now + 1.0, workers=4)
        now += 101.0
    assert prewarming.resume_after() == 99.5
    prewarming.close()
