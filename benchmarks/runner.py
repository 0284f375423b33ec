"""Runs one contender in a separate process, and measures the CPU time of other processes meanwhile."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from children import kill_children
from cpu_meter import CpuMeter
from roster import AnyContender, Contender

AnyCase = TypeVar("AnyCase")
Status = Literal["ok", "failed", "timeout", "not installed"]
DISTURBED_CORES = 0.2
"""A run counts as disturbed if other processes kept more cores than this busy."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """The outcome of one run."""

    contender: str
    status: Status
    report: dict[str, Any] | None = None
    """The report that the contender printed; None if it failed."""
    reason: str = ""
    """The reason why there is no report, in one line."""
    wall_s: float = 0.0
    own_cpu_s: float = 0.0
    others_cpu_s: float = 0.0

    @property
    def steps_per_second(self) -> float | None:
        return None if self.report is None else float(self.report["steps_per_second"])

    @property
    def others_cores(self) -> float:
        """Mean number of cores that other processes kept busy during the run."""
        return self.others_cpu_s / self.wall_s if self.wall_s else 0.0

    @property
    def disturbed(self) -> bool:
        """Whether other processes took too much CPU time for the result to be meaningful."""
        return self.others_cores > DISTURBED_CORES


class Plan(Protocol[AnyCase]):
    """The runs to make, in order."""

    @property
    def timeout_s(self) -> float: ...

    @property
    def num_runs(self) -> int: ...

    def __iter__(self) -> Iterator[tuple[AnyCase, int, Contender]]:
        """Case, number of the round (from 1), and contender."""

    def arguments(self, case: AnyCase) -> list[str]: ...


def runs_in(
    document: Mapping[str, Any], case_of: Callable[[Mapping[str, Any]], AnyCase]
) -> dict[AnyCase, dict[str, list[Run]]]:
    """The runs of a document under ``results/``, by case and contender."""
    known = {field.name for field in fields(Run)}
    found: dict[AnyCase, dict[str, list[Run]]] = {}
    for run in document["runs"]:
        done = Run(**{name: value for name, value in run.items() if name in known})
        found.setdefault(case_of(run), {}).setdefault(done.contender, []).append(done)
    return found


def turns(contenders: Sequence[AnyContender], rounds: int) -> Iterator[tuple[int, AnyContender]]:
    """The contenders of each round; every other round is reversed, so that the order varies."""
    for number in range(1, rounds + 1):
        for contender in contenders if number % 2 else contenders[::-1]:
            yield number, contender


def execute(
    plan: Plan[AnyCase], results: dict[AnyCase, dict[str, list[Run]]], outcome: Callable[[AnyCase, Run], str]
) -> None:
    """Run the rounds that ``results`` do not have yet, and print a line per run.

    A contender that failed in a case is not run in it again.
    """
    started, ran = time.monotonic(), 0
    for index, (case, number, contender) in enumerate(plan, start=1):
        runs = results[case][contender.name]
        if len(runs) >= number or (runs and runs[-1].report is None):
            continue
        done = run(contender, plan.arguments(case), plan.timeout_s)
        runs.append(done)
        ran += 1
        left_min = (time.monotonic() - started) / ran * (plan.num_runs - index) / 60
        place = f"[{index}/{plan.num_runs}, {left_min:.0f} min left] {case}, round {number}"
        print(f"{place}: {contender.name}: {outcome(case, done)}", flush=True)


def run(contender: Contender, arguments: list[str], timeout_s: float) -> Run:
    """Run ``contender`` until it ends or until ``timeout_s``; none of its processes survive."""
    if contender.interpreter is None:
        return Run(contender=contender.name, status="not installed", reason=f"install: {contender.how_to_install}")
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, CpuMeter() as meter:
        status, output, errors = run_command(contender.command(arguments), Path(folder), timeout_s)
    wall_s = time.monotonic() - started
    report = last_report(output)
    if status == "ok" and report is None:
        status = "failed"
    reason = f"took more than {timeout_s:.0f} s" if status == "timeout" else last_line(errors)
    return Run(
        contender=contender.name,
        status=status,
        report=report if status == "ok" else None,
        reason="" if status == "ok" else reason,
        wall_s=round(wall_s, 2),
        own_cpu_s=round(meter.own_s, 2),
        others_cpu_s=round(meter.others_s, 2),
    )


def run_command(command: list[str], folder: Path, timeout_s: float) -> tuple[Status, str, str]:
    """Run ``command`` in ``folder``, in a new session; returns its status, output and errors."""
    # Files, not pipes: a grandchild that outlives the contender would keep a pipe open.
    output, errors = folder / "stdout", folder / "stderr"
    with output.open("wb") as stdout, errors.open("wb") as stderr:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        try:
            status: Status = "ok" if process.wait(timeout_s) == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = "timeout"
        finally:
            end_group(process)
            kill_children()  # processes that the contender left behind
    return status, output.read_text(errors="replace"), errors.read_text(errors="replace")


def end_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def last_report(output: str) -> dict[str, Any] | None:
    """The last line of output that is a report; libraries may print other lines."""
    for line in reversed(output.splitlines()):
        try:
            found = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(found, dict) and "contender" in found:
            return found
    return None


def last_line(errors: str) -> str:
    """The last informative line of the errors, shortened to the width of a table."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line and not line.startswith(("raise ", "File "))]
    return (named or lines or ["it printed no report and no error"])[-1][:200]
