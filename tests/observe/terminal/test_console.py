"""Progress on the terminal: plain lines, the live display, and the state of the terminal afterwards."""

from __future__ import annotations

import fcntl
import io
import logging
import math
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from typing import Any

import pytest
from rich.console import Console
from rich.live import Live

from farstep.errors import ClosedError
from farstep.event import Event, EventKind
from farstep.learners.loop.stop_signals import StopSignals
from farstep.observe.diagnosis import Diagnosis
from farstep.observe.loggers import Loggers
from farstep.observe.run_status import RunStatus, data_size, duration, line, number, percent
from farstep.observe.terminal.console import LiveDisplay, PlainLines, console_logger
from farstep.observe.terminal.panel import panel
from farstep.testing import FakeClock

METRICS = {
    "update": 25,
    "train/actor/current_version": 24,
    "env/return_mean": 123.4,
    "env/length_mean": 99.5,
    "rate/steps_per_second": 8210.3,
    "lag/versions_mean": 0.5,
    "lag/versions_max": 1,
    "time/step": 1.0,
    "time/collect": 0.61,
    "time/actor_training": 0.37,
    "sync/pulls_per_worker": 150,
    "bytes/weights_sent": 42e6,
    "workers/alive": 8,
    "workers/restarts": 0,
}
EVALUATION = {"eval/return_mean": 433.2, "eval/return_std": 12.0, "eval/version": 20}


def terminal(width: int = 100, **options: Any) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=40, **options)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def plain(console: Console) -> str:
    """What was written, without colors and movements."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written(console))


def shown(status: RunStatus, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(panel(status, "CartPole-v1", 16.0, 20.0, width))
    return written(console)


def after(*updates: dict[str, float], total_steps: int = 500_000) -> RunStatus:
    status = RunStatus(total_steps)
    for position, metrics in enumerate(updates, 1):
        status.update(position * 2048, metrics, float(position))
    return status


def test_line_shows_the_progress_of_the_run() -> None:
    status = RunStatus(500_000)
    status.update(51_200, METRICS, 0.0)
    assert line(status, 0.0) == (
        "steps 51,200 of 500,000 (10 %) · return 123.4 · mean 8,210 steps/s · staleness 0.5 · "
        "collect 61 % train 37 % other 2 %"
    )
    dropped = {"dropped/stale": 30, "dropped/lost": 0, "dropped/cancelled": 5}
    status.update(53_248, {**EVALUATION, "workers/restarts": 2, **dropped}, 1.0)
    assert "(11 %) · 0:03:38 left · return 123.4 · evaluation 433.2 · " in line(status, 1.0)
    assert "restarts 2 · dropped 30" in line(status, 1.0)
    assert line(status, 1.0, "slow\nenvironment").endswith(" · slow environment")
    status.update(500_000, {}, 2.0)
    assert "left" not in line(status, 2.0)


def test_a_run_that_reached_its_target_is_done() -> None:
    status = RunStatus(500_000, target_return=120.5)
    for step, episodes in ((51_200, 99), (53_248, 100)):
        status.update(step, METRICS | {"env/episodes": episodes}, step / 2048)
        assert status.reached_target == (episodes == 100)
    assert line(status, 26.0).startswith("target return 120.5 reached after 53,248 of 500,000 steps · return 123.4 · ")
    text = shown(status)
    assert "53,248 of 500,000" in text and "target return 120.5 reached" in text
    assert "left" not in text and "%" not in text.splitlines()[1]
    assert not after(METRICS | {"env/episodes": 100}).reached_target


def test_metrics_that_are_not_finite_are_ignored() -> None:
    status = after({"env/return_mean": 5.0}, {"env/return_mean": math.nan, "time/actor_training": math.inf})
    assert status.latest == {"env/return_mean": 5.0} and status.returns == [5.0] and not status.shares()
    assert line(after({"env/return_mean": math.nan}), 1.0) == "steps 2,048 of 500,000 (0 %)"


def test_shares_are_of_the_recent_updates_and_sum_to_one() -> None:
    status = after({"time/step": 2.0, "time/collect": 1.0, "time/recompute_logprobs": 0.5, "time/publish": 0.0})
    assert status.shares() == {"collect": 0.5, "recompute": 0.25, "other": 0.25}
    for position in range(20):
        status.update(5000 + position, {"time/step": 1.0, "time/actor_training": 1.0}, 5.0)
    assert status.shares() == {"train": 1.0}
    with_workers = after({"time/step": 1.0, "time/collect": 1.0, "time/env/env_interact_step": 0.7})
    assert with_workers.shares() == {"collect": 1.0}, "workers spend their time at the same time"
    overlapping = after({"time/step": 1.0, "time/collect": 1.0, "time/evaluate": 1.0})
    assert overlapping.shares() == {"collect": 0.5, "evaluate": 0.5}


def test_the_time_left_follows_the_latest_speed() -> None:
    status = RunStatus(1000)
    assert status.seconds_left(0.0) is None
    status.update(100, {}, 10.0)
    assert status.seconds_left(10.0) is None  # a resumed run starts at a step without having been fast
    status.update(200, {}, 11.0)
    assert status.seconds_left(11.0) == pytest.approx(8.0)
    assert status.seconds_left(13.0) == pytest.approx(6.0)
    assert status.seconds_left(99.0) == 0.0
    status.update(1100, {}, 20.0)
    assert status.seconds_left(20.0) == 0.0 and status.fraction == 1.0


def test_a_long_history_keeps_its_shape() -> None:
    status = RunStatus(10**6)
    for position in range(10_000):
        status.update(position, {"env/return_mean": float(position)}, float(position))
    assert 64 <= len(status.returns) < 256 and status.returns == sorted(status.returns)
    assert status.returns[0] < 100 and status.returns[-1] > 9_800
    assert "▁▁▁▁▂▂▂▂▃▃▃▃▄▄▄▄▅▅▅▅▆▆▆▆▇▇▇▇████" in shown(status)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (number(123.44), "123.4"),
        (number(-1.234), "-1.23"),
        (number(0.9), "0.900"),
        (number(0), "0.00"),
        (number(12345.6), "12,346"),
        (number(1.5e9), "1.5e+09"),
        (number(1e-5), "1e-05"),
        (percent(0.999), "99 %"),
        (percent(1.0), "100 %"),
        (duration(3661), "1:01:01"),
        (duration(200_000), "2 d 7:33:20"),
        (data_size(0), "0 B"),
        (data_size(1500), "1.5 kB"),
        (data_size(420e6), "420 MB"),
        (data_size(3e15), "3,000.0 TB"),
    ],
)
def test_numbers_are_short(text: str, expected: str) -> None:
    assert text == expected


def test_live_display_shows_every_part() -> None:
    text = shown(after(METRICS, METRICS | EVALUATION | {"workers/restarts": 1, "dropped/stale": 12}))
    for part in (
        "CartPole-v1",
        "4,096 of 500,000",
        "0:03:44 left",
        "123.4  ▁▁",
        "length 99.5",
        "433.2 ± 12.0   version 20",
        "mean speed",
        "8,210 steps/s",
        "0.50 versions   at most 1",
        "version 24   150 pulls per worker   42.0 MB",
        "8 alive   1 restart   dropped: stale 12",
        "█ collect 61 %   ▓ train 37 %   ▒ other 2 %",
    ):
        assert part in text, part
    [bar] = re.findall(r"time +(\S+) │", text)
    assert len(bar) == 84 and [bar.count(mark) for mark in "█▓▒"] == [51, 31, 2]


def test_live_display_says_that_there_was_no_update_yet() -> None:
    assert "waiting for the first update" in shown(RunStatus(100))


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 200])
def test_live_display_fits_any_terminal(width: int) -> None:
    phases = ("collect", "recompute_logprobs", "advantages", "actor_training", "publish", "checkpoint", "evaluate")
    text = shown(after(METRICS | EVALUATION | {f"time/{name}": 0.1 for name in phases}), width)
    assert {len(each) for each in text.splitlines()} == {min(width, 100)}


def test_plain_lines_come_at_most_every_five_seconds_and_at_both_ends() -> None:
    console, clock = Console(file=io.StringIO(), width=40), FakeClock()
    logger = PlainLines(10_000, console, clock)
    for step in range(1, 14):
        logger.log(step * 100, METRICS)
        clock.advance(1.0)
    logger.show(Diagnosis(cause="slow environment", text="the environment is slow", is_problem=True), EVENTS)
    logger.close()
    logger.close()
    lines = written(console).splitlines()
    assert [each.split(" · return")[0] for each in lines] == [
        "steps 100 of 10,000 (1 %)",
        "steps 600 of 10,000 (6 %) · 0:01:34 left",
        "steps 1,100 of 10,000 (11 %) · 0:01:29 left",
        "steps 1,300 of 10,000 (13 %) · 0:01:26 left",
    ]
    assert [each.endswith(" · the environment is slow") for each in lines] == [False, False, False, True]


def test_plain_lines_have_only_diagnoses_that_are_problems() -> None:
    console = Console(file=io.StringIO(), width=80)
    logger = PlainLines(10_000, console)
    logger.show(Diagnosis(cause="slow learner", text="the learner is the bottleneck"))
    logger.log(100, METRICS)
    assert "bottleneck" not in written(console)


KINDS: tuple[EventKind, ...] = ("lost", "joined", "stuck", "lost")
EVENTS = [Event(time=60.0 * i, kind=kind, text=f"worker {i}\nof [red]") for i, kind in enumerate(KINDS)]
SENTENCE = "the environment is slow: workers spend 93 % of their time in step; use more workers, or a faster one"
DIAGNOSIS = Diagnosis(cause="slow environment", text=SENTENCE)


def test_panel_has_the_diagnosis_and_the_latest_three_events() -> None:
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(panel(after(METRICS), "run", 1.0, 1.0, 80, diagnosis=DIAGNOSIS, events=EVENTS))
    text = written(console)
    assert {len(each) for each in text.splitlines()} == {80}
    words = " ".join(re.sub("[│╰╯─]", " ", text).split())
    assert SENTENCE in words, "a long sentence is wrapped, not cut off"
    shown_events = re.findall(r"\d\d:\d\d:00 (\w+)  worker (\d) of \[red\]", text)
    assert shown_events == [("joined", "1"), ("stuck", "2"), ("lost", "3")]
    assert "diagnosis" not in shown(after(METRICS)) and "events" not in shown(after(METRICS))


def test_panel_shows_the_whole_event_of_a_run_that_stops() -> None:
    said: list[str] = []
    signals = StopSignals(False, lambda: None, lambda kind, text, **_: said.append(text))
    with signals.installed():
        signal.raise_signal(signal.SIGINT)
    event = Event(time=60.0, kind="warned", text=said[0])
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(panel(after(METRICS), "run", 1.0, 1.0, 80, events=[*EVENTS, event]))
    words = " ".join(re.sub("[│╰╯─]", " ", written(console)).split())
    assert f"warned {said[0]}" in words and len(said[0]) > 80


@pytest.mark.parametrize(("width", "height"), [(40, 40), (40, 12), (100, 6)])
def test_a_small_terminal_shows_steps_time_left_and_diagnosis(width: int, height: int) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=width, height=height)
    status = after(*[METRICS] * 3)
    drawn = panel(status, "run", 16.0, 3.0, width, diagnosis=DIAGNOSIS, events=EVENTS)
    with Live(console=console, auto_refresh=False) as live:
        live.update(drawn, refresh=True)
        first = plain(console)
    words = " ".join(re.sub("[│╰╯─]", " ", first).split())
    for part in ("6,144 of 500,000", "0:04:01 left", SENTENCE):
        assert part in words, part


def test_live_display_shows_what_it_is_given() -> None:
    console = terminal()
    live = LiveDisplay(500_000, "CartPole-v1", console)
    live.log(51_200, METRICS)
    live.show(Diagnosis(cause="slow learner", text="the learner is slow"), EVENTS)
    live.close()
    assert "the learner is slow" in plain(console) and "worker 3 of [red]" in plain(console)


def test_a_stream_of_ascii_gets_ascii() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    PlainLines(1000, Console(file=stream)).log(100, METRICS)
    stream.flush()
    assert b"(10 %) ? return 123.4" in stream.buffer.getvalue()


def test_display_depends_on_the_terminal(monkeypatch) -> None:
    assert isinstance(console_logger(10, console=Console(file=io.StringIO())), PlainLines)
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    assert isinstance(console_logger(10, console=Console(file=ascii_only, force_terminal=True)), PlainLines)
    live = console_logger(10, console=terminal())
    live.close()
    assert isinstance(live, LiveDisplay)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(console_logger(10, console=terminal()), PlainLines)


def test_close_restores_the_terminal() -> None:
    console, streams = terminal(), (sys.stdout, sys.stderr)
    live = LiveDisplay(500_000, "CartPole-v1", console)
    assert sys.stdout is not streams[0]
    live.log(51_200, METRICS)
    live.close()
    live.close()
    assert (sys.stdout, sys.stderr) == streams
    text = written(console)
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is shown again
    assert "51,200 of 500,000" in plain(console) and plain(console).endswith("╯\n")


def test_printed_and_logged_lines_appear_above_the_live_display() -> None:
    console = terminal()
    log = logging.getLogger("farstep")
    stream = sys.stderr
    log.addHandler(handler := logging.StreamHandler(stream))
    try:
        live = LiveDisplay(500_000, "CartPole-v1", console)
        live.log(51_200, METRICS)
        log.warning("worker [3] was replaced")
        print("printed", "\x1b[31mred\x1b[0m")
        print("a question: ", end="", flush=True)
        print("not ended", end="")
        live.close()
    finally:
        log.removeHandler(handler)
    assert handler.stream is stream
    text = plain(console)
    last = text.rindex("╭─ CartPole-v1")
    for each in ("worker [3] was replaced\n", "printed red\n", "a question: \n", "not ended\n"):
        assert text.count(each) == 1 and text.index(each) < last


def test_continuous_printing_does_not_stop_the_live_display() -> None:
    console = terminal()
    live = LiveDisplay(500_000, "CartPole-v1", console)
    live.log(51_200, METRICS)
    deadline = time.monotonic() + 30
    while "51,200 of 500,000" not in plain(console) and time.monotonic() < deadline:
        for _ in range(1000):
            print("x")
    live.close()
    assert time.monotonic() < deadline


def test_a_fork_prints_where_it_printed_before() -> None:
    code = """
import io, os
from rich.console import Console
from rich.live import Live
from farstep.observe.terminal.console import LiveDisplay
live = LiveDisplay(10, console=Console(file=io.StringIO(), force_terminal=True))
if not os.fork():
    print("from the fork", flush=True)
    os._exit(0)
os.wait()
live.close()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "from the fork\n"


class Gone(io.StringIO):
    """A terminal that was closed."""

    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")


def test_pipe_without_a_reader_does_not_end_the_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in `farstep train ... | head`, or when the connection that the output goes through is closed."""
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        loggers = Loggers(console_logger(100_000))
        os.close(reader)
        loggers.log(51_200, METRICS)
        loggers.log(51_201, METRICS)
        loggers.close()
        output.write("the summary of the run\n")
    (warning,) = caplog.messages
    assert warning == "the program that read the output of this run has ended; training continues without printing"


def test_closed_terminal_does_not_end_the_training(caplog, capsys) -> None:
    streams = (sys.stdout, sys.stderr)
    live = LiveDisplay(100, "run", Console(file=Gone(), force_terminal=True))
    print("what is said is not lost")
    deadline = time.monotonic() + 10
    with pytest.raises(ClosedError, match="live display has failed"):
        while time.monotonic() < deadline:  # its thread fails when it draws
            live.log(1, {})
            time.sleep(0.01)
    Loggers(live).log(1, {})
    assert "what is said is not lost" in "".join(capsys.readouterr())
    assert "LiveDisplay failed" in caplog.text and (sys.stdout, sys.stderr) == streams


TRAINING = """
import logging, sys, time
logging.basicConfig()
from farstep.observe.terminal.console import console_logger
from farstep.observe.loggers import Loggers
loggers = Loggers(console_logger(10**9, "run"))
step = 0
try:
    while True:
        step += 1
        loggers.log(step, {"env/return_mean": step})
        if step % 50 == 0:
            logging.getLogger("farstep").warning("at step %d", step)
        time.sleep(0.001)
except KeyboardInterrupt:
    if sys.argv[1] == "close":
        loggers.close()
    print("ended by Ctrl-C")
"""


@pytest.mark.parametrize("end", ["close", "forget"])
def test_ctrl_c_on_a_real_terminal(end: str) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 80, 0, 0))
    environ = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINING, end],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environ | {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"},
    )
    os.close(theirs)
    said, interrupted, deadline = b"", False, time.monotonic() + 60
    try:
        while time.monotonic() < deadline:
            if select.select([ours], [], [], 0.1)[0]:
                try:
                    said += os.read(ours, 65536)
                except OSError:  # the other end is closed
                    break
            if b"at step 100" in said and not interrupted:
                process.send_signal(signal.SIGINT)
                interrupted = True
        assert process.wait(10) == 0, said.decode()
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert b"ended by Ctrl-C" in said and b"Traceback" not in said
    assert said.count(b"\x1b[?25l") == said.count(b"\x1b[?25h") == 1
    assert said.rindex(b"\x1b[?25h") > said.rindex("╯".encode())
