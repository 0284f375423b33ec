"""Where metrics go: a file of JSON lines, TensorBoard, Weights & Biases, or several of them.

    loggers = Loggers(JsonlLogger(run.metrics_file), TensorBoardLogger(run.tensorboard))
    loggers.log(step, {"env/return_mean": 21.5, "time/train": 0.4})   # once per update
    loggers.close()

`step` counts environment steps and is the x axis everywhere. The terminal is a logger, too: see `console`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import socket
import time
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import IO, Any, Protocol

from farstep.checkpoint.files import no_follow
from farstep.errors import ConfigError, RunError
from farstep.observe.extras import require
from farstep.observe.files import as_run_error, read_lines, replace_file

log = logging.getLogger("farstep")


class Logger(Protocol):
    """Something that takes the metrics of each update."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of the update that ended at this environment step."""

    def close(self) -> None:
        """Finish what was begun; nothing is logged afterwards."""


class JsonlLogger:
    """A file with one JSON object per update; NaN and infinity become null.

    With `resume_step` the file of an earlier run goes on: what it says of later steps is cut off first.
    """

    def __init__(self, path: str | os.PathLike[str], resume_step: int | None = None) -> None:
        self.path = Path(path)
        try:
            if resume_step is not None:
                _cut(self.path, resume_step)
            self._stream: IO[bytes] = open(self.path, "ab", buffering=0, opener=no_follow)  # noqa: SIM115
        except OSError as error:
            raise self._error(error) from error
        if resume_step is None and self._stream.tell():
            self._stream.close()
            raise RunError(f"{self.path} already holds the metrics of a run. Resume that run, or take another folder.")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        row = {"step": int(step)} | {name: _plain(value) for name, value in metrics.items() if name != "step"}
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
        try:
            written = self._stream.write(line)
            if written != len(line):
                raise OSError(f"only {written} of {len(line)} bytes went to the disk")
        except (OSError, ValueError) as error:  # a closed file raises a ValueError
            raise self._error(error) from error

    def close(self) -> None:
        self._stream.close()

    def _error(self, error: Exception) -> RunError:
        return RunError(
            f"metrics cannot be written to {self.path}: {error}. A run without its metrics is of no use, so it ends; "
            "make room there or choose another folder, then resume."
        )


def _plain(value: float) -> float | int | None:
    if isinstance(value, int):
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else None


def _cut(path: Path, resume_step: int) -> None:
    """Leave only whole lines up to a step; the file is replaced at once, so that a crash here loses nothing."""
    if not path.exists():
        return
    kept = b"".join(line for line, row in read_lines(path) if row["step"] <= resume_step)
    if len(kept) != path.stat().st_size:
        replace_file(path, kept)


_FILES = count()


def require_tensorboard() -> tuple[Any, Any, Any]:
    """Import the modules of TensorBoard that write event files.

    Returns:
        The modules that define `RecordWriter`, `Event` and `Summary`.

    Raises:
        ConfigError: TensorBoard is not installed.
    """
    package, purpose = "tensorboard", "logging to TensorBoard"
    return (
        require("tensorboard.summary.writer.record_writer", package, purpose, "RecordWriter"),
        require("tensorboard.compat.proto.event_pb2", package, purpose, "Event"),
        require("tensorboard.compat.proto.summary_pb2", package, purpose, "Summary"),
    )


def require_wandb() -> Any:
    """Import and return the module `wandb`.

    Raises:
        ConfigError: Weights & Biases is not installed.
    """
    return require("wandb", "wandb", "logging to Weights & Biases", "init")


class TensorBoardLogger:
    """Event files for TensorBoard, through the tensorboard package's own format, without torch.

    With `resume_step`, TensorBoard hides what earlier files of the folder say of later steps.
    """

    def __init__(self, folder: str | os.PathLike[str], resume_step: int | None = None) -> None:
        records, self._event, self._summary = require_tensorboard()
        # TensorBoard reads the files of a folder in the order of their names: time comes first.
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_FILES)}"
        self._path = Path(folder) / name
        with as_run_error(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = records.RecordWriter(self._path.open("xb"))
            self._write(file_version="brain.Event:2")
            if resume_step is not None:
                start = self._event.SessionLog(status=self._event.SessionLog.START)
                self._write(step=resume_step + 1, session_log=start)
            self._writer.flush()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        value = self._summary.Summary.Value
        values = [value(tag=name, simple_value=float(number)) for name, number in metrics.items()]
        with as_run_error(self._path):
            self._write(step=int(step), summary=self._summary.Summary(value=values))
            self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _write(self, **content: object) -> None:
        self._writer.write(self._event.Event(wall_time=time.time(), **content).SerializeToString())


class WandbLogger:
    """A run of Weights & Biases; `WANDB_MODE=offline` keeps it on this machine.

    With the `run_id` of an earlier logger that run goes on. Weights & Biases never takes back what it was told: steps
    that are trained again after a resume are shown twice there.
    """

    def __init__(
        self,
        project: str,
        name: str | None = None,
        folder: str | os.PathLike[str] = ".",
        config: Mapping[str, object] | None = None,
        run_id: str | None = None,
    ) -> None:
        wandb = require_wandb()
        offline = os.environ.get("WANDB_MODE", "online") != "online"  # where it would warn of `resume`
        try:
            self._run = wandb.init(
                project=project,
                name=name,
                dir=os.fspath(folder),
                config=dict(config or {}),
                id=run_id,
                resume=None if offline or run_id is None else "allow",
                settings=wandb.Settings(console="off"),  # it would record each refresh of the live display
            )
            # Its own step must never go back, ours does on resume: so ours is a metric, and the x axis.
            self._run.define_metric("step")
            self._run.define_metric("*", step_metric="step")
        except Exception as error:
            raise ConfigError(
                f"Weights & Biases did not start: {error}. Log in with `wandb login`, or set WANDB_MODE=offline to "
                "keep the run on this machine, or leave it out."
            ) from error

    @property
    def run_id(self) -> str:
        """What to go on with after a resume."""
        return str(self._run.id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, "step": int(step)})

    def close(self) -> None:
        self._run.finish()


class Loggers:
    """Several loggers as one.

    One that raises is reported and left out from then on, and training goes on without it; only the failure of the
    JSON lines, which everything else can be made of again, is raised.
    """

    def __init__(self, *loggers: Logger) -> None:
        self._loggers = list(loggers)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for logger in list(self._loggers):
            try:
                logger.log(step, metrics)
            except Exception as error:
                if isinstance(logger, JsonlLogger):
                    raise
                self._loggers.remove(logger)
                log.warning(
                    "%s failed at step %d and gets no more metrics; training goes on without it: %s: %s",
                    type(logger).__name__,
                    step,
                    type(error).__name__,
                    error,
                )
                with contextlib.suppress(Exception):
                    logger.close()

    def close(self) -> None:
        failure: Exception | None = None
        while self._loggers:
            logger = self._loggers.pop()
            try:
                logger.close()
            except Exception as error:
                if isinstance(logger, JsonlLogger):
                    failure = error
                else:
                    log.warning("%s failed when it was closed: %s", type(logger).__name__, error)
        if failure is not None:
            raise failure

    def __enter__(self) -> Loggers:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
