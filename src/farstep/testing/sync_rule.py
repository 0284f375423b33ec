"""The contract of sync rules."""

from __future__ import annotations

import math
from collections.abc import Callable

import cloudpickle

from farstep.core import SyncRule, SyncState
from farstep.sync.rules import divergence_of, probes_of, rows_of


def check_sync_rule(make: Callable[[], SyncRule]) -> None:
    """What every rule must keep; raises an AssertionError that says what it does not."""
    rule = make()
    assert isinstance(rule, SyncRule), f"{rule!r} has no should_pull(state)."
    assert probes_of(rule) >= 0 and rows_of(rule) >= 1, f"{rule!r} looks at {probes_of(rule)} probes."
    copy = cloudpickle.loads(cloudpickle.dumps(rule))  # as it reaches workers
    for newest in (0, 1, 7, 10**9):
        first = SyncState(-1, newest)
        assert rule.should_pull(first) is True, f"{rule!r} begins without weights: {first}."
    for held in (0, 1, 5):
        for newest in range(held, held + 12):
            for divergences in ((), (0.0,), (math.inf, 0.0), tuple(0.1 * k for k in range(100))):
                for seconds in (0.0, 1e9):
                    state = SyncState(held, newest, seconds, divergences)
                    answers = [one.should_pull(state) for one in (rule, rule, copy)]
                    assert answers in ([True] * 3, [False] * 3), f"{rule!r} answers {answers} to the same {state}."
                    running = divergence_of(rule, state)
                    assert running is None or running >= 0, f"{rule!r} takes the divergence of {state} for {running}."
