"""Compares two commits: CPU seconds per million steps and steps per second, in interleaved pairs of runs.

    python benchmarks/compare_commits.py HEAD~3 HEAD --pairs 20 --out benchmarks/results/compare.json

Both commits are extracted into a temporary folder and collect with the same benchmark code, Python and packages. The
two runs of a pair follow each other, in alternating order, so that a machine that becomes slower affects both. The
result is the median of the pairs' ratios: CPU time per step depends less on other processes than the rate does.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from children import run_script
from document import header, write_document
from tables import table

BENCHMARKS = Path(__file__).resolve().parent
CASES = ("CartPole-v1:16", "LunarLander-v3:64")
CPU, RATE = "cpu_s_per_million_steps", "steps_per_second"
TIMEOUT_S = 600.0


def main() -> None:
    args = arguments()
    document: dict[str, Any] = {**header("compare_commits.py"), "commits": {}, "runs": []}
    with tempfile.TemporaryDirectory(prefix="farstep-compare-") as folder:
        trees = {}
        for name, commit in (("before", args.before), ("after", args.after)):
            trees[name] = Path(folder) / name
            document["commits"][name] = extract(commit, trees[name])
        for case in args.cases:
            for pair in range(args.pairs):
                order = ("before", "after") if pair % 2 == 0 else ("after", "before")
                found = {name: run(trees[name], case, args.seconds) for name in order}
                document["runs"].append({"case": case, "pair": pair, **{name: found[name] for name in trees}})
                if args.out is not None:
                    write_document(args.out, document)
                print(f"{case}, pair {pair + 1} of {args.pairs}: {ratio(document['runs'][-1], CPU):.3f}", flush=True)
    print(summary(document))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", help="a commit")
    parser.add_argument("after", help="another commit")
    parser.add_argument("--pairs", type=int, default=20, help="pairs of runs per case; default 20")
    parser.add_argument("--seconds", type=float, default=4.0, help="seconds of each run; default 4")
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="ENV:N", help=f"default {' '.join(CASES)}")
    parser.add_argument("--out", type=Path, help="JSON file with every run; default: none")
    return parser.parse_args()


def extract(commit: str, folder: Path) -> str:
    """Write the package of a commit into a folder; returns the commit's full hash."""
    git = ["git", "-C", str(BENCHMARKS.parent)]
    name = subprocess.run([*git, "rev-parse", "--verify", f"{commit}^{{commit}}"], check=True, capture_output=True)
    archive = subprocess.run([*git, "archive", name.stdout.decode().strip(), "src"], check=True, capture_output=True)
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    return name.stdout.decode().strip()


def run(tree: Path, case: str, seconds: float) -> dict[str, float]:
    """Collect for some seconds with the package in a folder."""
    env, _, num_envs = case.rpartition(":")
    words = ["--env", env, "--num-envs", num_envs, "--sampler", "lean", "--seconds", str(seconds)]
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "contenders" / "farstep_cpu.py"), *words],
        env={**os.environ, "PYTHONPATH": str(tree / "src")},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S + seconds,
    )
    if done.returncode:
        raise SystemExit(f"{case} failed with the package in {tree.name}:\n{done.stderr[-4000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    if not Path(found.pop("farstep")).is_relative_to(tree):
        raise SystemExit(f"the run used another farstep than that in {tree}; is PYTHONPATH ignored?")
    return dict(found)


def ratio(pair: dict[str, Any], key: str) -> float:
    """After divided by before."""
    return float(pair["after"][key] / pair["before"][key])


def summary(document: dict[str, Any]) -> str:
    """A table with the median ratio of each case, and the middle half of the pairs' ratios."""
    rows = []
    for case in dict.fromkeys(pair["case"] for pair in document["runs"]):
        pairs = [pair for pair in document["runs"] if pair["case"] == case]
        cells = [case, str(len(pairs))]
        for key in (CPU, RATE):
            cells += [f"{median(pair[name][key] for pair in pairs):,.1f}" for name in ("before", "after")]
            cells.append(spread([ratio(pair, key) for pair in pairs]))
        rows.append(cells)
    head = ["", "pairs", "CPU s per million steps, before", "after", "ratio", "steps/s, before", "after", "ratio"]
    return table(head, rows)


def spread(ratios: list[float]) -> str:
    if len(ratios) < 2:
        return f"{ratios[0]:.3f}"
    low, middle, high = quantiles(ratios, n=4, method="inclusive")
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


if __name__ == "__main__":
    run_script(main)
