"""Splits a worker's time into the parts of `messages.Times`, with few readings of the clock.

`lap` adds the time since the previous reading to the part that has just ended. Acting and stepping alternate too often
for this. While a chunk is rolled, both count as time of the environment. `Actor.timed_act` measures the time of
inference; at the end of the chunk, this time is moved to its own part. If rows take long, every row is measured.
Otherwise about one row in eight is measured, chosen at random, so that periodic patterns of the agent do not bias the
result.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Literal, Protocol

from farstep.wire.messages import Times


class TimedActor(Protocol):
    """What measures its own calls of `act`."""

    def take_timed(self) -> tuple[int, int]:
        """Total nanoseconds and number of measured calls since the last call of this method."""
        ...


Part = Literal["env", "inference", "tickets", "send", "weights"]
_LONG_ROW_NS = 100_000
"""If a row takes at least this long, every row is measured: two clock readings take about 0.2 % of this time."""
_MOST_ROWS_BETWEEN = 15
"""Maximum distance between two measured rows if rows are short; the mean is 8."""


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
        """Time of the environment part at the start of the chunk."""
        self._measures_all = True
        self._rows_until_measured = 0
        self._act_ns = 0.0
        """Mean duration of `act` in the last measurement."""

    def lap(self, part: Part) -> None:
        """Add the time since the last reading to a part."""
        now = self._clock()
        self._ns[part] += now - self._last
        self._last = now

    def lap_into(self, counters: memoryview, index: int) -> None:
        """Add the time since the last reading to a counter of nanoseconds in shared memory."""
        now = self._clock()
        counters[index] += now - self._last
        self._last = now

    def skip(self) -> None:
        """Ignore the time since the last reading, in which the worker loaded an agent."""
        self._last = self._clock()

    def remove_suspension(self, seconds: float) -> None:
        """Do not count a suspension since the last `take`. It fell into the wait for tickets, if that was as long;
        otherwise the worker was suspended earlier, such as just after it had sent its chunk."""
        self.lap("tickets")
        ns = seconds * 1e9
        part = "tickets" if self._ns["tickets"] >= ns else max(self._ns, key=lambda part: self._ns[part])
        self._ns[part] = max(0.0, self._ns[part] - ns)

    def restart(self) -> None:
        """Ignore all time until now, in which the worker started."""
        self._ns = dict.fromkeys(self._ns, 0)
        self.skip()

    def take(self) -> Times:
        """Return the seconds of each part, and reset them to 0."""
        times = Times(**{part: ns / 1e9 for part, ns in self._ns.items()})
        self._ns = dict.fromkeys(self._ns, 0)
        return times

    # ---- while a chunk is rolled ----

    def begin_roll(self) -> None:
        """Start a chunk."""
        self._env_before = self._ns["env"]

    def first_measured(self, actor: TimedActor) -> int:
        """Start the rows of a chunk, and return the first row to measure. Earlier `timed_act` calls count exactly."""
        ns, _ = actor.take_timed()
        self._ns["inference"] += ns
        self._ns["env"] -= ns  # the next `lap` adds at least this much
        return self._rows_until_measured

    def next_measured(self, t: int) -> int:
        """The next row to measure after row `t`."""
        return t + 1 if self._measures_all else t + 1 + int(self._random() * _MOST_ROWS_BETWEEN)

    def end_roll(self, rows: int, actor: TimedActor | None, next_measured: int) -> None:
        """End a chunk after `rows` rows: move the time of inference from the environment to its own part."""
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
