"""Signals are deferred while they would interrupt a critical section."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from farstep.head.interrupts import Interrupts


class Told(BaseException):
    """The exception of a handler."""


@pytest.fixture(params=["SIGINT", "SIGTERM", "SIGHUP", "SIGALRM"])
def number(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    """A signal whose handler raises."""
    found = signal.Signals[request.param]

    def told(number: int, frame: Any) -> None:
        raise Told(number)

    before = signal.signal(found, told)
    yield found
    signal.signal(found, before)


def test_signal_is_deferred_to_the_end_of_the_block(number: signal.Signals) -> None:
    interrupts, done = Interrupts(), []
    with pytest.raises(Told):
        with interrupts.deferred(), interrupts.deferred():
            signal.raise_signal(number)
            done.append("all of it")
        done.append("and no more")
    assert done == ["all of it"]
    with interrupts.deferred():
        pass  # it came once


def test_a_signal_is_handled_while_a_call_waits(number: signal.Signals) -> None:
    interrupts = Interrupts()
    with interrupts.deferred():
        with pytest.raises(Told), interrupts.allowed():
            signal.raise_signal(number)
        signal.raise_signal(number)
        with pytest.raises(Told), interrupts.allowed():
            pass


def test_signal_handlers_are_restored() -> None:
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)}
    with Interrupts().deferred():
        assert signal.getsignal(signal.SIGTERM) == before[signal.SIGTERM]  # nothing of ours is raised from it
    assert {n: signal.getsignal(n) for n in before} == before
