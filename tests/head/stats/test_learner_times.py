"""The learner's time is split into parts that do not overlap, whichever threads collect, update and publish."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from farstep.head.stats.learner_times import LearnerTimes
from farstep.head.stats.rates import Rate


class Clock:
    """A clock that moves only when the test advances it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def in_thread(call: Callable[[], None]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def test_time_between_two_batches_is_that_of_the_update() -> None:
    clock = Clock()
    times = LearnerTimes(clock)
    clock.sleep(1000)  # nothing was requested yet
    for _ in range(3):
        with times.measure("wait"):
            clock.sleep(4)
        with times.measure("prepare"):
            clock.sleep(2)
        clock.sleep(8)
        with times.measure("publish"):
            clock.sleep(1)
    assert times.snapshot() == {"wait": 12, "prepare": 6, "update": 24, "publish": 3}
    clock.sleep(1000)
    assert times.snapshot()["update"] == 24, "only the next call shows whether the loop continues"


def test_a_wait_in_progress_is_counted_until_now() -> None:
    clock = Clock()
    times = LearnerTimes(clock)
    with times.measure("wait"):
        clock.sleep(5)
        assert times.snapshot()["wait"] == 5


def test_a_new_thread_for_each_batch_loses_no_time() -> None:
    clock = Clock()
    times = LearnerTimes(clock)

    def collect() -> None:
        with times.measure("wait"):
            clock.sleep(1)

    for _ in range(3):
        in_thread(collect)
        clock.sleep(5)
        collect()
        clock.sleep(2)
    in_thread(collect)
    assert times.snapshot() == {"wait": 7, "prepare": 0, "update": 21, "publish": 0}


def test_storing_a_chunk_is_not_waiting_for_it() -> None:
    clock = Clock()
    times = LearnerTimes(clock)
    with times.measure("wait"):
        clock.sleep(3)
        with times.measure("prepare"):
            clock.sleep(2)
    assert times.snapshot() == {"wait": 3, "prepare": 2, "update": 0, "publish": 0}


def test_another_thread_that_publishes_takes_no_time_from_the_update() -> None:
    clock = Clock()
    times = LearnerTimes(clock)
    with times.measure("wait"):
        clock.sleep(1)

    def publish() -> None:
        with times.measure("publish"):
            clock.sleep(2)

    in_thread(publish)
    clock.sleep(3)
    with times.measure("wait"):
        clock.sleep(1)
    assert times.snapshot() == {"wait": 2, "prepare": 0, "update": 5, "publish": 2}


def test_the_loop_of_a_workflow_does_not_wait_while_a_consumer_thread_updates() -> None:
    clock = Clock()
    times = LearnerTimes(clock)

    def handle() -> None:
        with times.handling():
            clock.sleep(6)
            with times.measure("publish"):
                clock.sleep(1)

    with times.measure("wait"):
        clock.sleep(2)
        in_thread(handle)
        clock.sleep(3)
    assert times.snapshot() == {"wait": 5, "prepare": 0, "update": 6, "publish": 1}


def test_a_workflow_that_ended_does_not_update() -> None:
    clock = Clock()
    times = LearnerTimes(clock)
    for _ in range(2):
        with times.measure("wait"):
            clock.sleep(1)
        times.end()
        clock.sleep(100)
    assert times.snapshot() == {"wait": 2, "prepare": 0, "update": 0, "publish": 0}


def test_rate_is_that_of_the_last_ten_seconds() -> None:
    rate = Rate()
    assert rate.per_second(0.0) == 0.0
    for second in range(100):
        rate.add(50 if second < 80 else 7, float(second))
    assert rate.per_second(99.0) == 7.0
    assert rate.per_second(200.0) == 0.0, "a worker that stopped has no rate"


def test_rate_of_chunks_that_take_longer_than_the_window() -> None:
    rate = Rate()
    for chunk in range(4):
        rate.add(600, 60.0 * chunk)
    assert rate.per_second(190.0) == pytest.approx(10.0)


def test_thread_may_begin_to_collect_inside_a_part() -> None:
    clock = Clock()
    times = LearnerTimes(clock)

    def collect() -> None:
        with times.measure("wait"):
            clock.sleep(4)

    in_thread(collect)
    with times.measure("prepare"):
        collect()
    assert times.snapshot()["wait"] == 8
