"""Which requests an acting server puts into its next batch, and which processes may send them."""

from __future__ import annotations

import os
import socket

import numpy as np
import pytest

from farstep.acting.serving.batching import next_batch
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


def test_processes_of_other_users_are_recognized(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        assert is_own_process(ours)
        monkeypatch.setattr(os, "getuid", lambda me=os.getuid(): me + 1)
        assert not is_own_process(ours)
