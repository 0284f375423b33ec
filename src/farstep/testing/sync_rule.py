"""Contract check of sync rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import cloudpickle
import numpy as np

from farstep.config.env import check_rule
from farstep.core import SyncRule, SyncState
from farstep.errors import ConfigError
from farstep.sync.rules import divergence_of, probes_of


def check_sync_rule(rule: SyncRule | Callable[[], SyncRule]) -> None:
    """Check the contract of `farstep.core.SyncRule`: a rule can be sent to workers, and decides in every state.

    Args:
        rule: A rule, or a function that makes a rule.

    Raises:
        AssertionError: The rule breaks the contract; the message says how.
    """
    makes_one = callable(rule) and (isinstance(rule, type) or not isinstance(rule, SyncRule))
    made: SyncRule = rule() if makes_one else rule  # type: ignore[assignment, operator]
    try:
        check_rule("the rule", made)
    except ConfigError as error:
        raise AssertionError(str(error)) from error
    try:
        copy = cloudpickle.loads(cloudpickle.dumps(made))  # workers get such a copy
    except Exception as error:
        raise AssertionError(f"{made!r} cannot be sent to workers: {type(error).__name__}: {error}.") from error
    for state in _states(probes_of(made)):
        for one in (made, copy):
            try:
                answer, running = one.should_pull(state), divergence_of(one, state)
            except Exception as error:
                raise AssertionError(f"{made!r} raised {type(error).__name__}: {error}, for {state}.") from error
            assert isinstance(answer, (bool, np.bool_)), f"{made!r} returned {answer!r} for {state}, not True or False."
            assert running is None or running >= 0, f"{made!r} has the running divergence {running} for {state}."


def _states(probes: int) -> Iterator[SyncState]:
    """Yield states in which a worker calls a rule: before the first pull, and with newer versions."""
    for newest in (0, 1, 7, 10**9):
        yield SyncState(-1, newest)
    for held in (0, 1, 5):
        for newest in range(held + 1, held + 12):
            for divergences in ((), (0.0,), (math.inf, 0.0), tuple(0.1 * k for k in range(100))):
                for seconds in (0.0, 1e9):
                    yield SyncState(held, newest, seconds, divergences[:probes])
