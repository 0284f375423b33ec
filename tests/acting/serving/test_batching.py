"""Which requests an acting server puts into its next batch, when it starts, and which processes may send them."""

from __future__ import annotations

import math
import os
import socket

import numpy as np
import pytest

from farstep.acting.serving.batching import StartTimes, most_rows, next_batch
from farstep.wire.channels.local import is_own_process


def batch_of(
    arrived: list[float], num_possible: int, now: float, max_batch: int, window_s: float, num_envs: int = 4
) -> tuple[list[int], float]:
    """The requests of the next batch, and the seconds to wait."""
    sizes = np.full(len(arrived), num_envs)
    chosen, wait_s = next_batch(np.array(arrived), sizes, num_possible, now, max_batch, window_s)
    return chosen.nonzero()[0].tolist(), wait_s


def test_without_a_window_all_waiting_requests_form_a_batch() -> None:
    assert batch_of([2.0, 1.0], 8, 2.0, 64, 0.0) == ([0, 1], 0.0)


def test_a_batch_has_at_most_max_batch_rows_and_the_oldest_come_first() -> None:
    assert batch_of([4.0, 1.0, 3.0, 2.0, 5.0], 5, 9.0, 10, 0.0) == ([1, 3], 0.0)


def test_a_request_larger_than_max_batch_is_a_batch() -> None:
    assert batch_of([1.0, 0.0], 2, 9.0, 10, 0.0, num_envs=100) == ([1], 0.0)


def test_window_ends_by_time_by_rows_or_when_no_other_request_can_arrive() -> None:
    assert batch_of([1.0], 3, 1.002, 64, 0.005) == ([], 1.0 + 0.005 - 1.002)
    assert batch_of([1.0], 3, 1.006, 64, 0.005)[0] == [0]
    assert batch_of([1.0, 1.001], 3, 1.002, 8, 0.005)[0] == [0, 1]
    assert batch_of([1.0, 1.001], 2, 1.002, 64, 0.005)[0] == [0, 1]


@pytest.mark.parametrize(
    ("num_envs", "max_batch", "most"), [(112, 4096, 56), (99, 4096, 56), (5, 4096, 8), (112, 40, 40)]
)
def test_a_batch_that_may_overlap_has_at_most_half_of_the_rows_padded(num_envs: int, max_batch: int, most: int) -> None:
    assert most_rows(num_envs, max_batch) == most


def test_the_next_start_depends_on_the_padded_size_of_the_running_batch() -> None:
    times = StartTimes()
    assert times.next_start(28, began=1.0) == math.inf
    times.note_end(28, 0.3)
    times.note_end(56, 0.4)
    starts = [times.next_start(rows, began=1.0) for rows in (26, 28, 54, 56)]
    assert starts[0] == starts[1] < 1.3 and starts[2] == starts[3] < 1.4
    assert starts[2] - starts[0] == pytest.approx(0.1)
    assert times.next_start(40, began=1.0) == math.inf


def test_a_batch_during_which_the_server_was_busy_hardly_changes_the_next_start() -> None:
    times, lead = StartTimes(), 1e-4
    times.note_end(28, 0.1)  # the first one of its size
    times.note_end(28, 4e-4)
    assert times.next_start(28, began=0.0) == pytest.approx(4e-4 - lead)
    times.note_end(28, 0.1)
    assert times.next_start(28, began=0.0) == pytest.approx(4.4e-4 - lead)


@pytest.mark.parametrize("start_s", [2e-5, 1e-3])
def test_starts_come_neither_much_too_early_nor_too_late(start_s: float) -> None:
    """Until a batch is on the GPU, it takes `start_s` to twice as long."""
    times, rng = StartTimes(), np.random.default_rng(0)
    times.note_end(28, 4e-3)
    late, leads = [], []
    for _ in range(2000):
        lead = 4e-3 - times.next_start(28, began=0.0)
        late.append(lead < start_s * (1 + rng.random()))
        times.note_start(late[-1])
        leads.append(lead)
    assert 0.2 < np.mean(late[1000:]) < 0.4
    assert start_s < min(leads[1000:]) and max(leads[1000:]) < 2.2 * start_s


def test_processes_of_other_users_are_recognized(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        assert is_own_process(ours)
        monkeypatch.setattr(os, "getuid", lambda me=os.getuid(): me + 1)
        assert not is_own_process(ours)
