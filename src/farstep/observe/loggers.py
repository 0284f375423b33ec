"""Loggers that write metrics to JSON lines, TensorBoard, Weights & Biases, or several of these.

    loggers = Loggers(JsonlLogger(run.metrics_file), TensorBoardLogger(run.tensorboard))
    loggers.log(step, {"env/return_mean": 21.5, "time/actor_training": 0.4})   # once per update
    loggers.close()

`step` counts environment steps and is the x axis of all plots. `console` has the loggers for the terminal.
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
from typing import Any, Protocol

from farstep.errors import ConfigError, RunError
from farstep.event import Emit, traceback_of
from farstep.observe.extras import require
from farstep.observe.files import as_run_error, read_lines, replace_file
from farstep.observe.line_file import LineFile

log = logging.getLogger("farstep")


class Logger(Protocol):
    """Receives the metrics of each update."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of an update.

        Args:
            step: Environment steps at the end of the update.
            metrics: Values by name.
        """

    def close(self) -> None:
        """Flush buffered metrics and free resources. `log` must not be called after this."""


class JsonlLogger:
    """Writes one JSON object per update to a file. NaN and infinity become null.

    While the disk is full, up to 64 MiB of lines are kept in memory, with a warning. `log` and `close` then raise
    `RunError` if lines cannot be kept or written.

    Args:
        path: The file.
        resume_step: If given, append to the file of an earlier run, after removing its lines with later steps. None:
            the file must be new or empty.

    Raises:
        RunError: The file cannot be written, or already has metrics.
    """

    def __init__(self, path: str | os.PathLike[str], resume_step: int | None = None) -> None:
        self.path = Path(path)
        try:
            if resume_step is not None:
                _cut(self.path, resume_step)
            self._lines = LineFile(self.path, "metrics")
        except OSError as error:
            raise self._error(error) from error
        if resume_step is None and self._lines.size:
            self._lines.close()
            raise RunError(f"{self.path} already has the metrics of a run. Resume this run, or choose another folder.")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line.

        Args:
            step: Environment steps at the end of the update.
            metrics: Values by name; an entry "step" is ignored.

        Raises:
            RunError: The line can be neither written nor kept in memory, or the logger is closed.
        """
        row = {"step": int(step)} | {name: _plain(value) for name, value in metrics.items() if name != "step"}
        try:
            self._lines.append(json.dumps(row, allow_nan=False).encode() + b"\n")
        except (OSError, ValueError) as error:  # a closed file raises a ValueError
            raise self._error(error) from error

    def close(self) -> None:
        """Write the lines that are still in memory, and close the file.

        Raises:
            RunError: Lines cannot be written.
        """
        try:
            self._lines.close()
        except OSError as error:
            raise self._error(error) from error

    def _error(self, error: Exception) -> RunError:
        return RunError(
            f"metrics cannot be written to {self.path}: {error}. The run ends without them; free disk space or choose "
            "another folder, then resume."
        )


def _plain(value: float) -> float | int | None:
    if isinstance(value, int):
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else None


def _cut(path: Path, resume_step: int) -> None:
    """Keep only complete lines up to a step. Replace the file atomically, so that a crash loses nothing."""
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
    """Writes event files for TensorBoard. It needs the package tensorboard, but not torch.

    Args:
        folder: Where event files are written.
        resume_step: The step from which the run resumes. TensorBoard then hides later steps in earlier files of the
            folder. None: a new run.

    Raises:
        ConfigError: TensorBoard is not installed.
        RunError: The folder cannot be written to.
    """

    def __init__(self, folder: str | os.PathLike[str], resume_step: int | None = None) -> None:
        records, self._event, self._summary = require_tensorboard()
        # TensorBoard reads the files of a folder in the order of their names, so the time comes first.
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
        """Write the metrics of an update.

        Args:
            step: Environment steps at the end of the update.
            metrics: Values by name.

        Raises:
            RunError: The file cannot be written.
        """
        value = self._summary.Summary.Value
        values = [value(tag=name, simple_value=float(number)) for name, number in metrics.items()]
        with as_run_error(self._path):
            self._write(step=int(step), summary=self._summary.Summary(value=values))
            self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()

    def _write(self, **content: object) -> None:
        self._writer.write(self._event.Event(wall_time=time.time(), **content).SerializeToString())


class WandbLogger:
    """Writes to Weights & Biases. `WANDB_MODE=offline` keeps the run on this machine.

    Weights & Biases cannot remove logged steps, so steps that are trained again after a resume appear twice.

    Args:
        project: The project.
        name: Name of the run; None: Weights & Biases chooses it.
        folder: Where local files are written.
        config: Options of the run to show.
        run_id: The `run_id` of an earlier logger, to continue its run; None: a new run.

    Raises:
        ConfigError: The package wandb is not installed, or does not start.
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
        offline = os.environ.get("WANDB_MODE", "online") != "online"  # wandb warns about `resume` if offline
        try:
            self._run = wandb.init(
                project=project,
                name=name,
                dir=os.fspath(folder),
                config=dict(config or {}),
                id=run_id,
                resume=None if offline or run_id is None else "allow",
                settings=wandb.Settings(console="off"),  # "on" would record each refresh of the live display
            )
            # wandb's own step must never decrease, but a resume decreases our step. So log our step as a metric, and
            # use it as x axis.
            self._run.define_metric("step")
            self._run.define_metric("*", step_metric="step")
        except Exception as error:
            raise ConfigError(
                f"Weights & Biases did not start: {error}. Log in with `wandb login`, set WANDB_MODE=offline to "
                "keep the run on this machine, or train without it."
            ) from error

    @property
    def run_id(self) -> str:
        """The id with which another logger can continue this run."""
        return str(self._run.id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass the metrics of an update to Weights & Biases.

        Args:
            step: Environment steps at the end of the update.
            metrics: Values by name.
        """
        self._run.log({**metrics, "step": int(step)})

    def close(self) -> None:
        """End the run in Weights & Biases, after uploading what is left."""
        self._run.finish()


class Loggers:
    """Passes metrics to several loggers.

    If a logger raises, it is removed with a warning, and training continues without it. Only errors of a `JsonlLogger`
    are raised, because its file is the complete record of the run.

    Args:
        loggers: The loggers.
        emit: Receives an event for each logger that raises; None: a warning is logged.
    """

    def __init__(self, *loggers: Logger, emit: Emit | None = None) -> None:
        self._loggers, self._emit = list(loggers), emit

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass the metrics of an update to all loggers.

        Args:
            step: Environment steps at the end of the update.
            metrics: Values by name.

        Raises:
            RunError: A `JsonlLogger` cannot write its file.
        """
        for logger in list(self._loggers):
            try:
                logger.log(step, metrics)
            except Exception as error:
                if isinstance(logger, JsonlLogger):
                    raise
                self._loggers.remove(logger)
                self._warn(
                    f"{type(logger).__name__} failed at step {step} and gets no more metrics; training continues "
                    f"without it: {type(error).__name__}: {error}",
                    error,
                )
                with contextlib.suppress(Exception):
                    logger.close()

    def close(self) -> None:
        """Close all loggers. Later calls do nothing.

        Raises:
            RunError: A `JsonlLogger` cannot write its file; the other loggers are closed.
        """
        failure: Exception | None = None
        while self._loggers:
            logger = self._loggers.pop()
            try:
                logger.close()
            except Exception as error:
                if isinstance(logger, JsonlLogger):
                    failure = error
                else:
                    self._warn(f"{type(logger).__name__} failed when it was closed: {error}", error)
        if failure is not None:
            raise failure

    def _warn(self, text: str, error: Exception) -> None:
        if self._emit is None:
            log.warning("%s", text)
        else:
            self._emit("warned", text, traceback=traceback_of(error))

    def __enter__(self) -> Loggers:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            self.close()
        except RunError as failure:
            if error is None:
                raise
            self._warn(str(failure), failure)  # the first error is the cause
