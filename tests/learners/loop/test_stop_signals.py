"""Signals that arrive together when a terminal or a session ends."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from farstep.learners.loop.stop_signals import StopSignals

HUP, TERM = signal.SIGHUP, signal.SIGTERM


@pytest.fixture(autouse=True)
def default_hangup(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """SIGHUP ends the process, and this process keeps its output."""
    monkeypatch.setattr("farstep.learners.loop.stop_signals.leave_terminal", lambda: None)
    before = signal.signal(HUP, signal.SIG_DFL)
    yield
    signal.signal(HUP, before)


@pytest.mark.parametrize("numbers", [(HUP, HUP), (HUP, TERM), (TERM, HUP), (HUP, TERM, HUP)])
def test_signals_of_a_session_that_ends_stop_once(numbers: tuple[signal.Signals, ...]) -> None:
    warned: list[str] = []
    stop = StopSignals(False, lambda: None, lambda kind, text, *_, **__: warned.append(text))
    with stop.installed():
        for number in numbers:
            signal.raise_signal(number)
        assert stop.is_received
    assert len(warned) == 1
    assert signal.getsignal(HUP) is signal.SIG_IGN  # another one must not interrupt the clean-up


def test_a_second_sigterm_after_a_hangup_stops_at_once() -> None:
    stop = StopSignals(False, lambda: None, lambda *_, **__: None)
    with stop.installed():
        signal.raise_signal(HUP)
        signal.raise_signal(TERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(TERM)


def test_ignored_hangups_stay_ignored() -> None:
    signal.signal(HUP, signal.SIG_IGN)
    stop = StopSignals(False, lambda: None, lambda *_, **__: None)
    with stop.installed():
        signal.raise_signal(HUP)
    assert not stop.is_received
