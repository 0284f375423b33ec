"""Does `diagnose` name the cause? One run for each of fifteen causes, and ten healthy runs, which must raise no alarm.

    python benchmarks/diagnosis.py                               # about ten minutes on an idle machine
    python benchmarks/diagnosis.py --list
    python benchmarks/diagnosis.py --only straggler memory

A cause counts as named if the last diagnosis of its run has it. An alarm on a healthy run is what `farstep train` would
warn about: a problem that two diagnoses in a row have found. Each run takes place in a process of its own;
`diagnosis_cases.py` has the runs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from children import run_script
from diagnosis_cases import CASES, RUNS, Case
from document import header, write_document
from tables import table

LIMIT_S = 300.0
"""Seconds after which a run has failed."""


@dataclass(kw_only=True)
class Args:
    """Diagnose runs with one deliberate fault each, and healthy runs."""

    only: tuple[str, ...] = ()
    """Names of the runs to make; without any: all."""
    list: bool = False
    """Print the names and exit."""
    seconds: float = 12.0
    """Seconds of a run, without its start; some runs take a multiple of it."""
    out: Path = Path(__file__).parent / "results" / "diagnosis.json"
    """The file to write."""


def diagnosed(name: str, case: Case, seconds: float) -> dict[str, Any]:
    """Make a run in a process of its own; returns its diagnosis."""
    script = Path(__file__).parent / "diagnosis_cases.py"
    line = [*case.prefix, sys.executable, str(script), name, str(seconds)]
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return {"cause": "failed", "text": f"not done within {LIMIT_S:.0f} s", "warned": []}
    if done.returncode:
        return {"cause": "failed", "text": (done.stderr.strip().splitlines() or ["?"])[-1], "warned": []}
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    args = tyro.cli(Args, description=__doc__)
    if args.list:
        print(*RUNS, sep="\n")
        return 0
    if unknown := [name for name in args.only if name not in RUNS]:
        raise SystemExit(f"unknown: {', '.join(unknown)}; --list prints the names")
    runs: list[dict[str, Any]] = []
    for name, case in RUNS.items():
        if args.only and name not in args.only:
            continue
        found = diagnosed(name, case, args.seconds)
        is_healthy = name not in CASES
        right = not found["warned"] and found["cause"] != "failed" if is_healthy else found["cause"] == name
        runs.append({"run": name, "healthy": is_healthy, "right": right, **found})
        print(f"{'right' if right else 'WRONG'}  {name}: {found['cause']}. {found['text']}", flush=True)
    rows = [[run["run"], run["cause"], "yes" if run["right"] else "no", run["text"]] for run in runs]
    print(table(["run", "named", "right", "sentence"], rows))
    faulty, healthy = ([run for run in runs if run["healthy"] is kind] for kind in (False, True))
    summary = {
        "causes": len(faulty),
        "causes_named": sum(run["right"] for run in faulty),
        "causes_warned_about": sum(run["run"] in run["warned"] for run in faulty),
        "healthy": len(healthy),
        "healthy_without_alarm": sum(run["right"] for run in healthy),
        "healthy_with_a_named_bottleneck": sum(run["cause"] not in ("healthy", "unknown") for run in healthy),
    }
    print(", ".join(f"{key.replace('_', ' ')}: {value}" for key, value in summary.items()))
    write_document(args.out, {**header("diagnosis.py"), **summary, "runs": runs})
    return 0


if __name__ == "__main__":
    run_script(main)
