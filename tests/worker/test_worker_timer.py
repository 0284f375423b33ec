"""A worker's timer loses no time, and finds the share of inference although it measures few rows."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from farstep.worker.worker_timer import WorkerTimer


class Clock:
    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        return self.ns


class Acting:
    """Stands for the actor: acting takes time, and only `timed_act` measures it."""

    def __init__(self, clock: Clock, act_ns: Callable[[int], int]) -> None:
        self._clock, self._act_ns = clock, act_ns
        self._timed, self._calls, self.measured = (0, 0), 0, 0

    def act(self) -> int:
        took = self._act_ns(self._calls)
        self._clock.ns += took
        self._calls += 1
        return took

    def timed_act(self) -> None:
        self._timed = self._timed[0] + self.act(), self._timed[1] + 1
        self.measured += 1

    def take_timed(self) -> tuple[int, int]:
        timed, self._timed = self._timed, (0, 0)
        return timed


def rolled(act_ns: Callable[[int], int], env_ns: Callable[[int], int], chunks: int, steps: int) -> Any:
    """Roll chunks in the way of `Roller`; returns the summed times in nanoseconds and the number of measured rows."""
    clock = Clock()
    timer = WorkerTimer(clock)
    actor: Any = Acting(clock, act_ns)
    sums = SimpleNamespace(env=0.0, inference=0.0, total=0)
    for chunk in range(chunks):
        timer.begin_roll()
        measured = timer.first_measured(actor)
        for t in range(steps):
            if t == measured:
                actor.timed_act()
                measured = timer.next_measured(t)
            else:
                actor.act()
            clock.ns += env_ns(chunk * steps + t)
        timer.end_roll(steps, actor, measured)
        times = timer.take()
        sums.env += times.env * 1e9
        sums.inference += times.inference * 1e9
    sums.total, sums.measured = clock.ns, actor.measured
    return sums


def test_long_rows_are_all_measured() -> None:
    found = rolled(lambda call: 200_000 * (call % 7), lambda row: 90_000, chunks=5, steps=64)
    assert found.measured == 5 * 64
    assert found.env == pytest.approx(90_000 * 5 * 64)
    assert found.env + found.inference == pytest.approx(found.total)


@pytest.mark.parametrize("period", [2, 3, 5, 7, 8, 16])
def test_periodic_short_rows_are_sampled_without_bias(period: int) -> None:
    def act_ns(call: int) -> int:
        return 30_000 if call % period == 0 else 3_000

    found = rolled(act_ns, lambda row: 12_000, chunks=200, steps=128)
    exact = sum(act_ns(call) for call in range(200 * 128))
    assert found.measured < 200 * 128 / 6
    assert found.inference == pytest.approx(exact, rel=0.05)
    assert found.env + found.inference == pytest.approx(found.total)


def test_rare_slow_resets_are_environment_time_even_if_their_rows_are_not_measured() -> None:
    def env_ns(row: int) -> int:
        return 2_000_000 if row % 100 == 99 else 5_000

    found = rolled(lambda call: 5_000, env_ns, chunks=100, steps=128)
    assert found.env == pytest.approx(sum(env_ns(row) for row in range(100 * 128)), rel=0.01)


def test_chunks_of_one_row_are_sampled_too() -> None:
    found = rolled(lambda call: 4_000, lambda row: 6_000, chunks=2000, steps=1)
    assert found.measured < 2000 / 6
    assert found.inference == pytest.approx(4_000 * 2000, rel=0.01)


def test_every_moment_belongs_to_one_part() -> None:
    clock = Clock()
    timer = WorkerTimer(clock)
    clock.ns += 50
    timer.restart()  # the worker was starting
    for part, ns in (("tickets", 10), ("weights", 20), ("send", 30), ("tickets", 40), ("inference", 5)):
        clock.ns += ns
        timer.lap(part)  # type: ignore[arg-type]
    clock.ns += 1000
    timer.skip()
    times = timer.take()
    got = [round(seconds * 1e9) for seconds in (times.env, times.inference, times.tickets, times.send, times.weights)]
    assert got == [0, 5, 50, 30, 20]
    assert timer.take().tickets == 0


@pytest.mark.parametrize("suspended_in", ["tickets", "send"])
def test_suspension_is_counted_in_no_phase(suspended_in: str) -> None:
    clock = Clock()
    timer = WorkerTimer(clock)
    clock.ns += 3_000_000 + 10**9 * (suspended_in == "send")
    timer.lap("send")
    clock.ns += 2_000_000 + 10**9 * (suspended_in == "tickets")
    timer.remove_suspension(1.0)
    times = timer.take()
    assert (times.send, times.tickets) == pytest.approx((0.003, 0.002))
