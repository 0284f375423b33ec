"""Runs `farstep train` for a benchmark: several trainings at a time, over several sittings.

A training that was stopped, by `--minutes` or by a signal, continues from its last checkpoint in the next sitting. A
finished training continues if the next sitting has a larger number of steps. Metrics are read from the run folder.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roster import BENCHMARKS

RUNS = BENCHMARKS / "runs"
PROGRESS_S = 60.0
"""Seconds between progress lines."""
GRACE_S = 60.0
"""Seconds that a training has for its checkpoint when time is up."""
STOPPED = (130, 143)
"""Exit statuses of a training that a signal stopped, after it wrote a checkpoint."""

Metrics = dict[str, Any]
"""One line of metrics.jsonl."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """One command `farstep train`, and its run folder."""

    name: str
    """Name of the run folder; trainings with the same name are the same run."""
    learner: str
    options: tuple[str, ...]
    """Options, without the total steps and the folders."""
    total_steps: int
    restarts: bool = False
    """Whether a stopped run starts over instead of being continued, because its seconds are compared."""

    @property
    def command(self) -> str:
        """The command, as a user would type it."""
        return " ".join(("farstep train", self.learner, *self.options, "--total-steps", str(self.total_steps)))


@dataclass(frozen=True, kw_only=True)
class Sitting:
    """Parallelism, time limit and folder of this sitting, from the options that these benchmarks share."""

    jobs: int
    minutes: float | None
    folder: Path

    @staticmethod
    def add_options(parser: argparse.ArgumentParser, jobs: int = 1) -> None:
        parser.add_argument("--jobs", type=int, default=jobs, help="trainings at a time")
        parser.add_argument(
            "--minutes",
            type=float,
            help="stop after this time, with checkpoints; run the same command again to continue",
        )
        parser.add_argument("--runs", type=Path, default=RUNS, help="folder for run folders")

    @classmethod
    def of(cls, options: argparse.Namespace) -> Sitting:
        return cls(jobs=options.jobs, minutes=options.minutes, folder=options.runs)

    def train(self, trainings: Sequence[Training], finished: Callable[[int, list[Metrics]], str]) -> bool:
        """Carry out trainings; returns whether all of them ended.

        Args:
            trainings: The trainings, in order; a training whose run folder exists is continued.
            finished: Called in this thread with the index of a training that has ended and the lines of its
                metrics.jsonl; returns the text to print about it.
        """
        progress = _Progress(trainings, self.folder)
        deadline = None if self.minutes is None else time.monotonic() + 60 * self.minutes
        stop, complete = threading.Event(), True
        with concurrent.futures.ThreadPoolExecutor(self.jobs) as pool:
            waiting = {
                pool.submit(_carried_out, training, self.folder, deadline, stop): index
                for index, training in enumerate(trainings)
            }
            try:
                while waiting:
                    ended, _ = concurrent.futures.wait(waiting, PROGRESS_S, concurrent.futures.FIRST_COMPLETED)
                    for future in ended:
                        index = waiting.pop(future)
                        outcome = future.result()
                        if outcome == "ended":
                            progress.ended.add(index)
                            outcome = finished(index, metrics_of(self.folder / trainings[index].name))
                        else:
                            complete = False
                        if outcome != "not started":
                            print(f"{progress} {outcome}", flush=True)
                    if not ended:
                        print(progress, flush=True)
            except BaseException:
                stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return complete


class _Progress:
    """Completed trainings of the sitting, and the estimated time of the rest."""

    def __init__(self, trainings: Sequence[Training], folder: Path) -> None:
        self._trainings, self._folder = trainings, folder
        self._began, self._steps_before = time.monotonic(), sum(map(self._steps, trainings))
        self.ended: set[int] = set()
        """Indices of trainings that are complete."""

    def __str__(self) -> str:
        steps = list(map(self._steps, self._trainings))
        ended = [steps[index] for index in self.ended]
        # A training may end before its limit of steps.
        needed = sum(ended) / len(ended) if ended else None
        left = [index for index in range(len(steps)) if index not in self.ended]
        rest = sum(max(0.0, (needed or self._trainings[index].total_steps) - steps[index]) for index in left)
        rate = (sum(steps) - self._steps_before) / max(time.monotonic() - self._began, 1e-9)
        about = "about" if ended else "at most"
        minutes = f"{about} {rest / rate / 60:.0f} min left" if rate else "time left unknown"
        return f"[{len(self.ended)}/{len(self._trainings)}, {rate:,.0f} steps/s, {minutes}]"

    def _steps(self, training: Training) -> int:
        metrics = metrics_of(self._folder / training.name)
        return int(metrics[-1]["step"]) if metrics else 0


def _carried_out(training: Training, folder: Path, deadline: float | None, stop: threading.Event) -> str:
    """Train, or continue an existing run; returns `ended`, or the reason why it has not ended."""
    if stop.is_set() or (deadline is not None and time.monotonic() > deadline):
        return "not started"
    run = folder / training.name
    steps = ("--total-steps", str(training.total_steps))
    if not training.restarts and any((run / "checkpoints").glob("[!.]*")):
        # The run may come from another machine with another key; its options come from this script, so it is trusted.
        arguments = ["--resume", str(run), "--trust", *steps]
    else:
        shutil.rmtree(run, ignore_errors=True)  # no run, or stopped before its first checkpoint
        arguments = [*training.options, *steps, "--folder", str(folder), "--name", training.name]
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "farstep", "train", training.learner, *arguments]
    with (folder / f"{training.name}.log").open("w") as log:
        path = os.pathsep.join(
            filter(None, (str(BENCHMARKS), os.environ.get("PYTHONPATH")))
        )  # so that environment factories in this folder can be imported
        environment = os.environ | {"PYTHONPATH": path}
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        status = _status(process, deadline)
    if status == 0:
        return "ended"
    if status in STOPPED or status < 0:
        return f"{training.name} was stopped; it {'starts again' if training.restarts else 'continues'} next time"
    lines = [line for line in (folder / f"{training.name}.log").read_text().splitlines() if line.strip()]
    return f"{training.name} FAILED with status {status}: {(lines or ['no output'])[-1]}"


def _status(process: subprocess.Popen[bytes], deadline: float | None) -> int:
    try:
        return process.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.terminate()
    try:
        return process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def metrics_of(run: Path) -> list[Metrics]:
    """The complete lines of metrics.jsonl so far."""
    try:
        text = (run / "metrics.jsonl").read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def evaluations(metrics: Sequence[Metrics]) -> list[list[float]]:
    """Steps, mean return and standard deviation of every evaluation."""
    found = {int(line["eval/step"]): line for line in metrics if "eval/step" in line}
    return [
        [step, round(found[step]["eval/return_mean"], 1), round(found[step]["eval/return_std"], 1)]
        for step in sorted(found)
    ]


def curve(metrics: Sequence[Metrics], names: Mapping[str, int], points: int) -> list[list[float]]:
    """Steps and metrics of about `points` updates, including the last; `names` gives digits to round to."""
    lines = [line for line in metrics if all(name in line for name in names)]
    every = max(1, -(-len(lines) // points))
    kept = lines[::every] if not lines or (len(lines) - 1) % every == 0 else [*lines[::every], lines[-1]]
    return [[int(line["step"]), *(round(line[name], digits) for name, digits in names.items())] for line in kept]


def summed(metrics: Sequence[Metrics], names: Sequence[str]) -> tuple[list[list[float]], int]:
    """Make counters that restart with every process of a run cumulative; also returns the number of restarts."""
    totals, last, found, restarts = [0.0] * len(names), [0.0] * len(names), [], 0
    for line in metrics:
        values = [float(line[name]) for name in names]
        restarted = any(value < before for value, before in zip(values, last, strict=True))
        restarts += restarted
        totals = [
            total + value - (0.0 if restarted else before)
            for total, value, before in zip(totals, values, last, strict=True)
        ]
        last = values
        found.append(totals)
    return found, restarts
