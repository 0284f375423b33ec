"""Loggers: written metrics can be read again, also after a crash and a resume."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from farstep.errors import ConfigError, RunError
from farstep.head.events import EventLog
from farstep.observe import line_file
from farstep.observe.files import read_rows
from farstep.observe.loggers import JsonlLogger, Loggers, TensorBoardLogger, WandbLogger
from tests.observe.full_disk import full_disk


class Kept:
    """A logger that keeps the metrics that it gets, or raises."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.calls = self.closed = 0
        self.failure = failure

    def log(self, step, metrics):
        self.calls += 1
        if self.failure:
            raise self.failure
        self.rows.append((step, dict(metrics)))

    def close(self):
        self.closed += 1
        if self.failure:
            raise self.failure


def test_lines_are_there_as_soon_as_they_are_logged(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    logger: Any = JsonlLogger(file)
    logger.log(128, {"env/return_mean": 1.5, "update": 1, "train/a": np.float32(0.5), "train/b": np.int64(3)})
    assert file.read_text() == '{"step": 128, "env/return_mean": 1.5, "update": 1, "train/a": 0.5, "train/b": 3.0}\n'
    logger.log(np.int64(256), {"step": 7, "a": float("nan"), "b": float("-inf"), "c": np.float64("inf")})
    logger.close()
    assert read_rows(file)[1] == {"step": 256, "a": None, "b": None, "c": None}


def test_resumed_run_drops_metrics_that_it_logs_again(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    with Loggers(JsonlLogger(file)) as loggers:
        for step in (10, 20, 30):
            loggers.log(step, {"update": step / 10})
    with file.open("a") as stream:
        stream.write('{"step": 40, "upda')  # torn by a crash
    resumed = JsonlLogger(file, resume_step=20)
    assert [row["step"] for row in read_rows(file)] == [10, 20]
    resumed.log(25, {"update": 3})
    resumed.close()
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [10, 20, 25]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("rest", [b"", b"\x00\xff\n", b"[1]\n", b'{"update": 3}\n', b'{"step": "x"}\n', b"12"])
def test_a_resume_leaves_only_whole_lines(rest: bytes, tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step": 10}\n' + rest)
    JsonlLogger(file, resume_step=10).close()
    assert file.read_bytes() == b'{"step": 10}\n'


def test_crash_while_dropping_metrics_loses_no_row(tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(before := b'{"step": 10}\n{"step": 20}\n')

    def fail(*args: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(RunError, match="no space left"):
        JsonlLogger(file, resume_step=10)
    assert file.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_resuming_a_run_without_metrics_starts_them(tmp_path: Path) -> None:
    logger = JsonlLogger(tmp_path / "metrics.jsonl", resume_step=0)
    logger.log(1, {})
    logger.close()
    assert read_rows(tmp_path / "metrics.jsonl") == [{"step": 1}]


def test_metrics_of_another_run_are_not_added_to(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(RunError, match="already has the metrics of a run"):
        JsonlLogger(tmp_path / "metrics.jsonl")


def test_metrics_that_cannot_be_written_are_an_error() -> None:
    with pytest.raises(RunError, match=r"cannot be written to /no/such/file: .*free disk space"):
        JsonlLogger("/no/such/file")
    loggers = Loggers(other := Kept(), JsonlLogger("/dev/full"))
    loggers.log(1, {"a": 1.0})
    with pytest.raises(RunError, match=r"/dev/full: .*No space left"):
        loggers.close()
    assert other.closed


def test_metrics_wait_in_memory_until_the_disk_has_space(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = JsonlLogger(tmp_path / "m")
    with full_disk(monkeypatch, 40):
        for step in range(5):
            logger.log(step, {"a": 1.0})
    assert (tmp_path / "m").stat().st_size == 40
    logger.log(5, {})
    assert [row["step"] for row in read_rows(tmp_path / "m")] == list(range(6))
    logger.close()
    assert [record.message.partition(" until ")[0] for record in caplog.records] == ["metrics are kept in memory"]


def test_error_of_the_run_is_raised_rather_than_that_of_its_metrics() -> None:
    with pytest.raises(ValueError, match="the cause"), Loggers(JsonlLogger("/dev/full")) as loggers:
        loggers.log(1, {"a": 1.0})
        raise ValueError("the cause")


def test_more_metrics_than_memory_may_keep_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_file, "MAX_UNWRITTEN_BYTES", 30)
    logger = JsonlLogger("/dev/full")
    logger.log(1, {"a": 1.0})
    with pytest.raises(RunError, match="No space left"):
        logger.log(2, {"a": 1.0})
    with pytest.raises(RunError, match="No space left"):
        logger.close()


def test_a_logger_that_fails_is_reported_once_and_left_out(tmp_path: Path, caplog) -> None:
    bad, good = Kept(RuntimeError("the network is gone")), Kept()
    with caplog.at_level(logging.WARNING, "farstep"), Loggers(bad, JsonlLogger(tmp_path / "m"), good) as loggers:
        for step in (1, 2, 3):
            loggers.log(step, {"a": step})
    assert [row["step"] for row in read_rows(tmp_path / "m")] == [step for step, _ in good.rows] == [1, 2, 3]
    assert bad.calls == 1 and bad.closed == 1 and good.closed == 1
    [record] = caplog.records
    assert "Kept failed at step 1" in record.message and "the network is gone" in record.message


def test_a_logger_that_fails_is_an_event_with_its_traceback() -> None:
    events = EventLog()
    with Loggers(Kept(RuntimeError("the network is gone")), emit=events.emit) as loggers:
        loggers.log(1, {"a": 1.0})
    (event,) = events.events()
    assert "Kept failed at step 1" in event.text and event.kind == "warned"
    assert "RuntimeError: the network is gone" in event.traceback


def test_all_loggers_are_closed_though_one_fails(tmp_path: Path, caplog) -> None:
    loggers = Loggers(first := Kept(), bad := Kept(), last := Kept())
    bad.failure = OSError("disk")
    loggers.close()
    loggers.close()
    assert first.closed == bad.closed == last.closed == 1
    assert "Kept failed when it was closed: disk" in caplog.text


def test_ctrl_c_inside_a_logger_is_not_swallowed() -> None:
    class Interrupted(Kept):
        def log(self, step, metrics):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Loggers(Interrupted()).log(1, {})


def tensorboard_scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    reader = events.EventAccumulator(str(folder), purge_orphaned_data=True)
    reader.Reload()
    return [(event.step, event.value) for event in reader.Scalars(tag)]


def test_tensorboard_reads_what_was_logged(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path / "tb")
    for step in (10, 20, 30):
        logger.log(step, {"env/return_mean": step / 4, "update": step})
    assert tensorboard_scalars(tmp_path / "tb", "env/return_mean") == [(10, 2.5), (20, 5.0), (30, 7.5)]
    logger.close()
    resumed = TensorBoardLogger(tmp_path / "tb", resume_step=20)
    resumed.log(25, {"env/return_mean": -1.0})
    resumed.close()
    assert tensorboard_scalars(tmp_path / "tb", "env/return_mean") == [(10, 2.5), (20, 5.0), (25, -1.0)]


@pytest.mark.parametrize(
    ("start", "module", "command"),
    [
        (lambda folder: TensorBoardLogger(folder), "tensorboard", "pip install tensorboard"),
        (lambda folder: WandbLogger("project", folder=folder), "wandb", "pip install wandb"),
    ],
    ids=["tensorboard", "wandb"],
)
def test_a_missing_package_is_named_with_its_command(start, module: str, command: str, tmp_path, monkeypatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=command):
        start(tmp_path)


def test_a_folder_named_wandb_is_not_the_package(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", types.ModuleType("wandb"))
    with pytest.raises(ConfigError, match=r"has no init.*pip install wandb"):
        WandbLogger("project", folder=tmp_path)


class FakeRun:
    id = "abc"

    def __init__(self, **options: object) -> None:
        self.options, self.finished = options, False
        self.logged: list[Any] = []
        self.metrics: dict[str, Any] = {}

    def define_metric(self, name, step_metric=None):
        self.metrics[name] = step_metric

    def log(self, row):
        self.logged.append(row)

    def finish(self):
        self.finished = True


def test_wandb_gets_steps_as_x_axis_and_resumes_by_id(tmp_path: Path, monkeypatch) -> None:
    wandb = types.ModuleType("wandb")
    started: list[FakeRun] = []

    def init(**options: object) -> FakeRun:
        started.append(FakeRun(**options))
        return started[-1]

    monkeypatch.setattr(wandb, "init", init, raising=False)
    monkeypatch.setattr(wandb, "Settings", dict, raising=False)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    logger = WandbLogger("project", "name", tmp_path, {"gamma": 0.99}, run_id="abc")
    (run,) = started
    assert run.options["id"] == logger.run_id == "abc" and run.options["resume"] == "allow"
    assert run.options["dir"] == str(tmp_path) and run.options["config"] == {"gamma": 0.99}
    assert run.metrics == {"step": None, "*": "step"}
    logger.log(5, {"a": 1.0})
    logger.close()
    assert run.logged == [{"a": 1.0, "step": 5}] and run.finished

    def refuse(**options: object) -> None:
        raise RuntimeError("api key missing")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(ConfigError, match=r"api key missing.*wandb login.*WANDB_MODE=offline"):
        WandbLogger("project")


OFFLINE = """
import sys
from farstep.observe.loggers import WandbLogger
for step in (10, 5):
    logger = WandbLogger("project", "name", sys.argv[1], {"gamma": 0.99}, run_id="abc")
    logger.log(step, {"a": 1.0})
    logger.close()
print(logger.run_id)
"""


def test_wandb_itself_takes_it_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    environ = os.environ | {"WANDB_MODE": "offline", "HOME": str(tmp_path)}
    command = [sys.executable, "-c", OFFLINE, str(tmp_path)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split()[-1] == "abc"
    assert list(tmp_path.glob("wandb/offline-run-*-abc/*.wandb"))
