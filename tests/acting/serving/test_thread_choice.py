"""With how many threads an acting server computes a batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from farstep.acting.serving.thread_choice import ThreadChoice


def simulated(choice: ThreadChoice, rows: int, calls: int, duration: Callable[[int], float]) -> list[int]:
    """The numbers of threads of these calls, whose durations depend on them."""
    chosen = []
    for _ in range(calls):
        threads = choice.threads_for(rows)
        chosen.append(threads)
        choice.note(rows, threads, duration(threads))
    return chosen


def small(threads: int) -> float:
    return 100e-6 * threads


def large(threads: int) -> float:
    return 1.0 / threads


def test_the_faster_number_of_threads_is_chosen_for_each_size() -> None:
    choice = ThreadChoice(8)
    assert simulated(choice, 4, 40, small)[-20:] == [1] * 20
    assert simulated(choice, 512, 40, large)[-20:] == [8] * 20
    assert choice.threads_for(5) == 1 and choice.threads_for(1000) == 8


@pytest.mark.parametrize("duration", [small, large])
def test_measurements_take_a_small_share_of_the_time(duration: Callable[[int], float]) -> None:
    chosen = simulated(ThreadChoice(8), 16, 5000, duration)
    times = {threads: chosen.count(threads) * duration(threads) for threads in (1, 8)}
    assert min(times.values()) < 0.05 * max(times.values())


def test_the_choice_follows_the_load() -> None:
    choice = ThreadChoice(8)
    assert simulated(choice, 16, 100, lambda threads: 1e-3 / threads)[-1] == 8
    busy = simulated(choice, 16, 5000, lambda threads: 20e-3 if threads > 1 else 1e-3)
    assert busy[-1] == 1 and busy.count(8) < 500
    assert simulated(choice, 16, 50000, lambda threads: 1e-3 / threads)[-1] == 8


def test_one_slow_call_does_not_decide() -> None:
    durations = iter([1e-3, 30e-3])  # the first call with several threads starts them
    choice = ThreadChoice(8)
    chosen = simulated(choice, 16, 1000, lambda threads: next(durations, 1e-3 / threads))
    assert chosen[-1] == 8
