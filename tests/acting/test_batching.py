"""Which requests an acting server puts into its next batch, and which processes may send them."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

import pytest

from farstep.acting.batching import next_batch
from farstep.wire.channels.local import is_own_process


@dataclass
class Request:
    arrived: float
    num_envs: int = 4


def test_without_a_window_all_waiting_requests_form_a_batch() -> None:
    pending = [Request(2.0), Request(1.0)]
    assert next_batch(pending, 8, 2.0, 64, 0.0) == ([pending[1], pending[0]], 0.0)


def test_a_batch_has_at_most_max_batch_rows_and_the_oldest_come_first() -> None:
    pending = [Request(float(i)) for i in range(5)]
    assert next_batch(pending, 5, 9.0, 10, 0.0)[0] == pending[:2]


def test_a_request_larger_than_max_batch_is_a_batch() -> None:
    large = Request(0.0, 100)
    assert next_batch([large, Request(1.0)], 2, 9.0, 10, 0.0)[0] == [large]


def test_the_window_ends_with_time_with_rows_or_when_nobody_else_can_come() -> None:
    one, two = Request(1.0), Request(1.001)
    assert next_batch([one], 3, 1.002, 64, 0.005) == ([], 1.0 + 0.005 - 1.002)
    assert next_batch([one], 3, 1.006, 64, 0.005)[0] == [one]
    assert next_batch([one, two], 3, 1.002, 8, 0.005)[0] == [one, two]
    assert next_batch([one, two], 2, 1.002, 64, 0.005)[0] == [one, two]


def test_processes_of_other_users_are_recognized(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        assert is_own_process(ours)
        monkeypatch.setattr(os, "getuid", lambda me=os.getuid(): me + 1)
        assert not is_own_process(ours)
