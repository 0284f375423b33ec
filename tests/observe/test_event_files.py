"""events.jsonl: bounded on disk, appended to by a resumed run, and read even if lines are damaged."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from farstep.event import Event
from farstep.head.events import EventLog
from farstep.observe.event_files import MAX_BYTES, EventFile, read_events
from tests.observe.full_disk import full_disk


def event(number: int, text: str = "a sentence", traceback: str = "") -> Event:
    return Event(time=float(number), kind="lost", text=text, worker=number, node="host", traceback=traceback)


def test_events_are_read_as_they_were_written(tmp_path: Path) -> None:
    events = [
        event(1, "two\nlines, 100 % \N{SNOWMAN}", traceback="Traceback:\n  in f\n"),
        Event(time=1.5, kind="scaled", text=""),
    ]
    file = EventFile(tmp_path / "events.jsonl")
    for each in events:
        file.write(each)
    assert read_events(tmp_path / "events.jsonl") == events  # also before it is closed
    file.close()


def test_a_resumed_run_appends_after_a_line_that_was_cut_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "events.jsonl"
    for number in (1, 2):
        file = EventFile(path)
        file.write(event(number))
        file.close()
        with path.open("ab") as stream:
            stream.write(b'{"time": 3.0, "ki')
    assert read_events(path) == [event(1), event(2)]
    assert "skipped line 2, 4: truncated, or not written by farstep" in caplog.text


@pytest.mark.parametrize(
    "line", [b"", b"[]", b"{}", b'{"time": "now", "kind": "lost", "text": ""}', b"[" * 10**5, b"\xff\0"]
)
def test_lines_that_farstep_did_not_write_are_skipped(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    unknown = b'{"time": 1.0, "kind": "exploded", "text": ""}'
    file = EventFile(path)
    file.write(event(1))
    with path.open("ab") as stream:
        stream.write(line + b"\n" + unknown + b"\n")
    file.write(event(2))
    file.close()
    assert read_events(path) == [event(1), event(2)]


def test_the_older_half_is_dropped_when_the_file_is_full(tmp_path: Path) -> None:
    path, written = tmp_path / "events.jsonl", 0
    file = EventFile(path, max_bytes=4_000)
    sizes = []
    for written in range(1, 201):
        file.write(event(written))
        sizes.append(path.stat().st_size)
        assert read_events(path)[-1] == event(written)
    file.close()
    assert max(sizes) <= 4_000 and min(sizes[100:]) >= 1_800 and MAX_BYTES == 5_000_000
    numbers = [each.worker for each in read_events(path)]
    assert numbers == list(range(201 - len(numbers), 201))
    assert [entry.name for entry in tmp_path.iterdir()] == ["events.jsonl"]


def test_events_wait_in_memory_until_the_disk_has_space(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, file = EventLog(), EventFile(tmp_path / "events.jsonl")
    subscription = log.subscribe(file.write)
    with full_disk(monkeypatch, 100):
        log.emit("joined", "worker 0 joined")
        log.emit("lost", "worker 0 was lost")
        log.emit_failure(ValueError("the run's error"))
        subscription.close()
        assert file.path.stat().st_size == 100
    file.close()
    assert read_events(file.path) == log.events()
    assert "the run's error" in log.events()[-1].text
    kept = [record.message for record in caplog.records if "kept in memory" in record.message]
    assert len(kept) == 1 and kept[0].startswith("events are kept in memory until")


def test_older_half_is_dropped_once_the_disk_has_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk, not even the younger half can be written to a new file."""
    file = EventFile(tmp_path / "events.jsonl", max_bytes=1_000)
    with full_disk(monkeypatch, 300):
        for number in range(20):
            file.write(event(number))
    file.write(event(20))
    assert [each.worker for each in read_events(file.path)] == list(range(21))
    file.write(event(21))
    file.close()
    assert file.path.stat().st_size <= 1_000 and read_events(file.path)[-1] == event(21)


def test_events_that_the_full_disk_never_takes_do_not_stop_the_run(caplog: pytest.LogCaptureFixture) -> None:
    log, file = EventLog(), EventFile("/dev/full")
    subscription = log.subscribe(file.write)
    with caplog.at_level(logging.WARNING, "farstep"):
        log.emit("joined", "worker 0 joined")
        subscription.close()
        file.close()
    assert "the last events could not be written to /dev/full" in caplog.text
    assert "a reader of events failed" not in caplog.text


@pytest.mark.parametrize(
    "odd", [{"text": "\udcff"}, {"node": "\udc80"}, {"traceback": "\udcff"}, {"worker": np.int64(3)}], ids=repr
)
def test_event_with_unusual_values_and_the_next_one_are_written(odd: dict[str, Any], tmp_path: Path) -> None:
    log, file = EventLog(), EventFile(tmp_path / "events.jsonl")
    subscription = log.subscribe(file.write)
    log.emit("lost", **{"text": "an environment died", **odd})
    log.emit("checkpointed", "wrote checkpoint 000001")
    subscription.close()
    file.close()
    assert read_events(file.path) == log.events()
    assert [event.kind for event in log.events()] == ["lost", "checkpointed"]
