"""Splits a worker's time into the parts of `messages.Times`, with few readings of the clock.

Each moment between two chunks belongs to one part: `lap` adds the time since the previous reading to the part that
ends. Acting and stepping alternate too often for that. While a chunk is rolled, both count as environment; at its end
the time of inference is moved, as measured by `Actor.timed_act`. If rows take long, every row is measured, otherwise
about one in eight, at random so that no pattern of the agent is missed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Literal

from farstep.wire.messages import Times
from farstep.worker.acting import Actor

Part = Literal["env", "inference", "tickets", "send", "weights"]
_LONG_ROW_NS = 100_000
"""Duration of a row from which every row is measured: two readings of the clock take about 0.2 % of it."""
_MOST_ROWS_BETWEEN = 15
"""Most rows from one measured row to the next if rows are short; the mean is 8."""


class WorkerTimer:
    """The time since the last `take`, by part.

    Args:
        clock: Returns nanoseconds; None: `time.perf_counter_ns`.
    """

    def __init__(self, clock: Callable[[], int] | None = None) -> None:
        self._clock = clock or time.perf_counter_ns
        self._random = random.Random(0).random
        self._ns: dict[Part, float] = {"env": 0, "inference": 0, "tickets": 0, "send": 0, "weights": 0}
        self._last = self._clock()
        self._env_before = 0.0
        """Time of the environment when the chunk began."""
        self._measures_all = True
        self._rows_until_measured = 0
        self._act_ns = 0.0
        """Mean duration of `act` when it was measured last."""

    def lap(self, part: Part) -> None:
        """Add the time since the last reading to a part."""
        now = self._clock()
        self._ns[part] += now - self._last
        self._last = now

    def skip(self) -> None:
        """Leave out the time since the last reading: the worker was loading an agent."""
        self._last = self._clock()

    def restart(self) -> None:
        """Leave out all time until now: the worker was starting."""
        self._ns = dict.fromkeys(self._ns, 0)
        self.skip()

    def take(self) -> Times:
        """Return the seconds of each part, and start from 0."""
        times = Times(**{part: ns / 1e9 for part, ns in self._ns.items()})
        self._ns = dict.fromkeys(self._ns, 0)
        return times

    # ---- while a chunk is rolled ----

    def begin_roll(self) -> None:
        """Start a chunk."""
        self._env_before = self._ns["env"]

    def first_measured(self, actor: Actor) -> int:
        """Start the chunk's rows; returns the first one to measure. All `timed_act` before were measured exactly."""
        ns, _ = actor.take_timed()
        self._ns["inference"] += ns
        self._ns["env"] -= ns  # the next `lap` adds at least as much
        return self._rows_until_measured

    def next_measured(self, t: int) -> int:
        """The next row to measure after row `t`."""
        return t + 1 if self._measures_all else t + 1 + int(self._random() * _MOST_ROWS_BETWEEN)

    def end_roll(self, rows: int, actor: Actor | None, next_measured: int) -> None:
        """End a chunk after `rows` rows: move the time of inference out of that of the environment."""
        self.lap("env")
        if actor is None:
            return
        ns, count = actor.take_timed()
        rolled_ns = max(0.0, self._ns["env"] - self._env_before)
        self._act_ns = ns / count if count else self._act_ns
        inference_ns = min(ns if count >= rows else self._act_ns * rows, rolled_ns)
        self._ns["env"] -= inference_ns
        self._ns["inference"] += inference_ns
        self._rows_until_measured = max(0, next_measured - rows)
        self._measures_all = rolled_ns >= _LONG_ROW_NS * rows
