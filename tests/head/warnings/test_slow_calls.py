"""A long wait is one event; the log repeats it at growing intervals."""

from __future__ import annotations

import pytest

from farstep.head.events import EventLog
from farstep.head.warnings.slow_calls import WaitWarning


@pytest.mark.parametrize(("starting", "first"), [(True, 1005), (False, 1010)])
def test_a_wait_of_an_hour_is_one_event_and_a_few_lines(
    starting: bool, first: int, caplog: pytest.LogCaptureFixture
) -> None:
    events = EventLog()
    warning = WaitWarning(events.emit, 1000.0, starting=starting)
    warned_at = []
    for now in range(1000, 4600):
        if now >= warning.due:
            warning.warn(f" for {now - 999} workers", now)
            warned_at.append(now)
    gaps = [10, 20, 40, 80, 160, *[300] * 10]
    assert warned_at == [first + sum(gaps[:i]) for i in range(len(gaps) + 1)]
    assert [event.text for event in events.events()] == [f"waiting {first - 1000} s for {first - 999} workers"]
    assert [event.kind for event in events.events()] == ["warned"]
    assert caplog.messages == [f"waiting {now - 1000} s for {now - 999} workers" for now in warned_at]


def test_only_long_starts_of_workers_are_unusual() -> None:
    warning = WaitWarning(EventLog().emit, 1000.0, starting=True)
    assert [warning.is_unusual(now, nodes_are_missing=False) for now in (1005, 1019, 1020)] == [False, False, True]
    assert warning.is_unusual(1005, nodes_are_missing=True)
    assert WaitWarning(EventLog().emit, 1000.0).is_unusual(1005, nodes_are_missing=False)
