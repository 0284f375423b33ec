"""The events of a run: bounds, order, threads, and subscribers that are slow or raise."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any, cast

import pytest

from farstep.errors import ConfigError, FarstepError, Where, WorkerError
from farstep.event import EVENT_KINDS, Event
from farstep.head import events as module
from farstep.head.events import MAX_EVENTS, EventLog


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_only_the_latest_events_are_stored_and_all_are_counted() -> None:
    log = EventLog()
    for i in range(MAX_EVENTS + 5):
        log.emit("evaluated", f"number {i}")
    log.emit("joined", "worker 0 joined", worker=0, node="host")
    stored = log.events()
    assert len(stored) == MAX_EVENTS == 1_000
    assert stored[0].text == "number 6"
    last = stored[-1]
    assert (last.kind, last.text, last.worker, last.node) == ("joined", "worker 0 joined", 0, "host")
    assert log.counts() == {**dict.fromkeys(EVENT_KINDS, 0), "evaluated": MAX_EVENTS + 5, "joined": 1}


def test_equal_failures_are_counted_only_among_the_latest_different_ones() -> None:
    """An environment may put a different number into each message, so not all of them are kept."""
    log = EventLog()
    where = Where(worker=0, incarnation=0, host="host", pid=1, phase="step")

    def fail(number: int) -> str:
        log.emit_retry(WorkerError(f"position {number}", where))
        return log.events()[-1].text

    assert "such failures" not in fail(0)
    assert "(2 such failures so far)" in fail(0)
    for number in range(1, MAX_EVENTS + 1):
        fail(number)
    assert "such failures" not in fail(0)


def test_texts_and_tracebacks_of_any_length_are_cut() -> None:
    log = EventLog()
    log.emit("lost", "x" * 10**6, traceback="first line" + "y" * 10**6 + "the error")
    (event,) = log.events()
    assert len(event.text) < 5_000 and len(event.traceback) < 20_000
    assert event.traceback.endswith("the error") and "characters left out" in event.traceback


def test_times_increase_even_if_the_clock_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    log = EventLog()
    for now in (100.0, 50.0, 50.0, 101.0):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        log.emit("warned", str(now))
    times = [event.time for event in log.events()]
    assert times == sorted(set(times)) and times[0] == 100.0 and times[-1] == 101.0


def test_events_are_selected_by_kind_and_time() -> None:
    log = EventLog()
    for kind in ("joined", "lost", "restarted", "lost"):
        log.emit(cast(Any, kind), kind)
    _, first_lost, *later = log.events()
    assert [event.kind for event in log.events(["lost", "joined"])] == ["joined", "lost", "lost"]
    assert log.events(since=first_lost.time) == later
    assert log.events(since=later[-1].time) == []


@pytest.mark.parametrize(("kinds", "since"), [(3, 0.0), (None, "yesterday"), (None, None)])
def test_arguments_of_a_wrong_type_are_named(kinds: Any, since: Any) -> None:
    with pytest.raises(ConfigError, match="expected"):
        EventLog().events(kinds, since)


def test_many_threads_emit_in_one_order_that_all_subscribers_see() -> None:
    log, seen = EventLog(), list[Event]()
    subscription = log.subscribe(seen.append)

    def emit(i: int) -> None:
        for k in range(100):
            log.emit("evaluated", f"{i} {k}")

    threads = [threading.Thread(target=emit, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    subscription.close()
    stored = log.events()
    assert seen == stored and len(stored) == 800
    assert all(a.time < b.time for a, b in pairwise(stored))
    for i in range(8):
        assert [e.text for e in stored if e.text.startswith(f"{i} ")] == [f"{i} {k}" for k in range(100)]


def test_a_subscriber_gets_stored_events_first() -> None:
    log, seen = EventLog(), list[str]()
    log.emit("joined", "before")
    subscription = log.subscribe(lambda event: seen.append(event.text))
    log.emit("joined", "after")
    subscription.close()
    log.emit("joined", "after the end")
    assert seen == ["before", "after"]


def test_subscriber_that_raises_is_removed_and_reported_to_the_others() -> None:
    log, seen = EventLog(), list[Event]()

    def fail(event: Event) -> None:
        raise OSError("the disk is full")

    failing, reading = log.subscribe(fail), log.subscribe(seen.append)
    log.emit("joined", "worker 0 joined")
    wait_until(lambda: len(seen) == 2)
    log.emit("joined", "worker 1 joined")
    failing.close()
    reading.close()
    assert [event.kind for event in seen] == ["joined", "warned", "joined"]
    assert "the disk is full" in seen[1].text and "in fail" in seen[1].traceback


def test_slow_subscriber_blocks_no_emitter_and_its_lost_events_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_UNREAD", 10)
    log, release, seen = EventLog(), threading.Event(), list[str]()

    def read(event: Event) -> None:
        release.wait(60)
        seen.append(event.text)

    subscription = log.subscribe(read)
    for i in range(100):
        log.emit("evaluated", str(i))  # returns although the subscriber reads nothing
    assert len(log.events()) == 100 and not seen
    release.set()
    wait_until(lambda: log.counts()["warned"] == 1)
    subscription.close()
    dropped = 100 - (len(seen) - 1)
    assert seen[-1] == f"a reader of events is too slow: {dropped} events were dropped for it"


def test_emitting_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise RuntimeError("a handler that raises")

    log, handler = EventLog(), Broken()
    logging.getLogger("farstep").addHandler(handler)
    try:
        log.emit("warned", "a sentence")
    finally:
        logging.getLogger("farstep").removeHandler(handler)
    log.emit("warned", cast(Any, object()))
    assert log.events()[0].text == "a sentence"


def test_the_logger_shows_the_sentence_at_a_level_by_kind(caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog()
    with caplog.at_level(logging.INFO, "farstep"):
        log.emit("lost", "100% of worker 0 is lost")
        log.emit("joined", "worker 0 joined")
        log.emit("warned", "raised as an exception, too", logged=False)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "100% of worker 0 is lost"),
        ("INFO", "worker 0 joined"),
    ]


def test_only_the_first_failure_is_emitted_and_it_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog()
    for error in (ArithmeticError("first\nmore"), FarstepError("second")):
        with pytest.raises(type(error)), log.emitting_failure():
            raise error
    (event,) = log.events()
    assert (event.kind, event.text) == ("warned", "the run failed: ArithmeticError: first")
    assert "raise error" in event.traceback and not caplog.messages
