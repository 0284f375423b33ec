"""Steps until `farstep train` has learned a task with its defaults: only `--env` and `--num-envs` are given.

    python benchmarks/defaults.py --jobs 8 --out benchmarks/results/defaults-16-cores.json

A task is learned when the mean return of the last 100 training episodes reaches its threshold. Runs that the file of
results has already are not made again, so that a measurement can be continued later.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

from children import run_script
from document import header, write_document
from roster import BENCHMARKS
from tables import table

THRESHOLDS = {"CartPole-v1": 475.0, "LunarLander-v3": 200.0}
LEARNERS = ("ppo", "async-ppo", "impala")
POINTS = 40
"""Of a learning curve that is kept."""


def main() -> int:
    options = parse_options()
    document = json.loads(options.out.read_text()) if options.out.exists() else {**header("defaults.py"), "runs": []}
    done = {key_of(run) for run in document["runs"]}
    cases = [case for case in cases_of(options) if key_of(case) not in done]
    print(f"{len(cases)} runs, {options.jobs} at a time; {len(done)} are in {options.out.name} already", flush=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        for number, run in enumerate(pool.map(lambda case: trained(case, options.workers), cases), 1):
            document["runs"].append(run)
            write_document(options.out, document)
            print(f"{number}/{len(cases)} {in_words(run)}", flush=True)
    print(f"\n{summary(document)}")
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learners", nargs="+", choices=LEARNERS, default=list(LEARNERS))
    parser.add_argument("--envs", nargs="+", choices=list(THRESHOLDS), default=list(THRESHOLDS))
    parser.add_argument("--num-envs", nargs="+", type=int, default=[16, 64, 128])
    parser.add_argument("--seeds", type=int, default=3, help="runs of each case, with seeds 1, 2, ...")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; each takes one core and its workers")
    parser.add_argument("--workers", type=int, default=2, help="worker processes of each run")
    parser.add_argument("--out", type=Path, default=BENCHMARKS / "results" / "defaults.json")
    return parser.parse_args()


def cases_of(options: argparse.Namespace) -> list[dict[str, Any]]:
    seeds = range(1, options.seeds + 1)
    chosen = itertools.product(options.envs, options.learners, options.num_envs, seeds)
    return [dict(zip(("env", "learner", "num_envs", "seed"), case, strict=True)) for case in chosen]


def key_of(run: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(run[name] for name in ("env", "learner", "num_envs", "seed"))


def trained(case: dict[str, Any], workers: int) -> dict[str, Any]:
    """One run, with its curve of training returns; `reached` says whether it came to its threshold."""
    threshold = THRESHOLDS[case["env"]]
    options = ["--env", case["env"], "--num-envs", str(case["num_envs"]), "--seed", str(case["seed"])]
    options += ["--target-return", str(threshold), "--workers", str(workers), "--threads", "1"]
    with tempfile.TemporaryDirectory(prefix="defaults-") as folder:
        command = [sys.executable, "-m", "farstep", "train", case["learner"], *options, "--folder", folder]
        subprocess.run([*command, "--name", "run"], check=True, capture_output=True, text=True)
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    found = [metrics for metrics in map(json.loads, lines) if "env/return_mean" in metrics]
    curve = [[point["step"], round(point["env/return_mean"], 1), round(point["seconds"], 1)] for point in found]
    steps, final, seconds = curve[-1]
    return {
        **case,
        "command": f"farstep train {case['learner']} {' '.join(options)}",
        "reached": final >= threshold,
        "steps": steps,
        "seconds": seconds,
        "curve": [*curve[:: -(-len(curve) // POINTS)], curve[-1]],
    }


def in_words(run: dict[str, Any]) -> str:
    came = "reached its threshold" if run["reached"] else f"ended at {run['curve'][-1][1]}"
    where = f"{run['learner']} on {run['env']}, {run['num_envs']} environments, seed {run['seed']}"
    return f"{where}: {came} after {run['steps']:,} steps, {run['seconds']:.0f} s"


def summary(document: dict[str, Any]) -> str:
    """A table for each task: steps of every seed, by learner and number of environments."""
    parts = []
    for env, threshold in THRESHOLDS.items():
        runs = [run for run in document["runs"] if run["env"] == env]
        numbers = sorted({run["num_envs"] for run in runs})
        rows = []
        for learner in LEARNERS:
            mine = [run for run in runs if run["learner"] == learner]
            if mine:
                cells = [_cell([run for run in mine if run["num_envs"] == number]) for number in numbers]
                rows.append([f"`{learner}`", *cells, f"{mean(run['steps'] for run in mine) / 1000:.0f}k"])
        if rows:
            parts.append(f"{env}, thousand steps to a mean return of {threshold:.0f} (not reached: in brackets):")
            parts.append(table(["", *(f"{number} environments" for number in numbers), "mean"], rows))
    return "\n\n".join(parts)


def _cell(runs: list[dict[str, Any]]) -> str:
    steps = [f"{run['steps'] / 1000:.0f}" for run in sorted(runs, key=lambda run: run["seed"])]
    return ", ".join(text if run["reached"] else f"({text})" for text, run in zip(steps, runs, strict=True))


if __name__ == "__main__":
    run_script(main)
