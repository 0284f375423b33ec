"""How processes poll the board before they sleep."""

from __future__ import annotations

import time

import pytest

from farstep.rollout.step_board import MOST_SKIPPED, Polling, num_polling


def polls(polling: Polling) -> bool:
    """Whether a wait in which nothing becomes ready is polled."""
    is_polled = False

    def is_ready() -> bool:
        nonlocal is_polled
        is_polled = True
        return False

    assert not polling.succeeds(is_ready)
    return is_polled


def test_after_each_failure_more_waits_are_not_polled() -> None:
    polling = Polling()
    polled = [polls(polling) for _ in range(1 + 1 + 1 + 2 + 1 + 4)]
    assert polled == [True, False, True, False, False, True, False, False, False, False]
    many = "".join("p" if polls(polling) else "." for _ in range(500))
    assert max(map(len, many.split("p"))) == MOST_SKIPPED


def test_a_success_ends_the_backoff() -> None:
    polling = Polling()
    while not (polls(polling) and not polls(polling) and not polls(polling)):
        pass  # at least two waits after a failure are not polled
    while not polling.succeeds(lambda: True):
        pass
    assert [polls(polling) for _ in range(3)] == [True, False, True]


def test_another_process_that_uses_the_core_ends_the_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    num_yields = 0

    def sched_yield() -> None:
        nonlocal num_yields
        num_yields += 1
        time.sleep(1e-3)

    monkeypatch.setattr("os.sched_yield", sched_yield)
    assert not Polling().succeeds(lambda: False)
    assert num_yields == 1


@pytest.mark.parametrize(("cores", "polling"), [(1, 0), (2, 1), (3, 3), (16, 3)])
def test_processes_that_poll_leave_a_core_to_the_others(
    cores: int, polling: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farstep.rollout.step_board.usable_cpus", lambda: cores)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert num_polling(3) == polling
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert num_polling(3) == 0
