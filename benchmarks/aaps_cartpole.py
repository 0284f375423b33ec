"""Whether `farstep train` learns CartPole-v1 with default options while a threshold keeps workers from pulling weights.

    python benchmarks/aaps_cartpole.py --jobs 2
    python benchmarks/aaps_cartpole.py --show benchmarks/results/aaps-cartpole.json      # only the table

Two workers with 16 environments; PPO with 60,000 steps and thresholds from 0.01 to 0.2, also with the plain loss
(`--no-decoupled`), and with 120,000 steps and 0.2; and IMPALA with 150,000 steps. Stored are the mean training return
of the last 100 episodes, the evaluations (20 episodes with the most likely actions), the return of 100 episodes with
sampled actions and the final weights (`farstep eval --sample`), and the pulls per worker. A run that is in the results
file is not repeated; a stopped run starts over, because resuming adds pulls.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any

from children import run_script
from document import continued, machines, write_document
from roster import BENCHMARKS
from tables import table
from trainings import Metrics, Sitting, Training, evaluations

Run = dict[str, Any]
"""One run, as in the results file."""

EARLY = 20_480
"""Steps of an early evaluation of PPO; IMPALA is faster than its evaluations, and skips some."""
EVAL_LIMIT_S = 600.0
"""Seconds after which the evaluation of a run has failed."""
THRESHOLDS: dict[tuple[str, str, int], tuple[float | None, ...]] = {
    ("ppo", "decoupled", 60_000): (None, 0.01, 0.05, 0.2),
    ("ppo", "decoupled", 120_000): (None, 0.2),
    ("ppo", "plain", 60_000): (0.05,),
    ("impala", "V-trace", 150_000): (None, 0.05),
}
"""Thresholds by learner, loss and environment steps; None: without `--kl-threshold`."""


def main() -> int:
    options = parse_options()
    if options.show:
        document = json.loads(options.show.read_text())
    else:
        document = continued(options.out, "aaps_cartpole.py")
        complete = measure(document, options)
        print("all runs are complete" if complete else "some runs are missing; run the same command again to continue")
    if document["runs"]:
        print(f"\n{page(document)}")
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each case, with seeds 1, 2, ...")
    parser.add_argument("--out", type=Path, default=BENCHMARKS / "results" / "aaps-cartpole.json")
    parser.add_argument("--show", type=Path, metavar="FILE", help="only print the table of these results")
    Sitting.add_options(parser)
    return parser.parse_args()


def measure(document: dict[str, Any], options: argparse.Namespace) -> bool:
    """Run the missing runs; returns whether all are complete."""
    done = {key_of(run) for run in document["runs"]}
    cases = [case for case in cases_of(options.seeds) if key_of(case) not in done]
    print(f"{len(cases)} runs, {options.jobs} at a time; {len(done)} are in the results", flush=True)
    trainings = [training_of(case) for case in cases]

    def finished(index: int, metrics: list[Metrics]) -> str:
        sampled = sampled_return(options.runs / trainings[index].name)
        run = outcome(cases[index], metrics) | {"sampled_return": sampled, "command": trainings[index].command}
        document["runs"].append(run)
        write_document(options.out, document)
        return (
            f"{trainings[index].name}: training return {run['training_return']:.0f}, with the final weights "
            f"{sampled:.0f}, {run['pulls_per_worker']:.0f} pulls per worker"
        )

    return Sitting.of(options).train(trainings, finished)


def cases_of(seeds: int) -> list[Run]:
    """All runs, by learner and loss, and then by seed."""
    return [
        {"learner": learner, "loss": loss, "total_steps": steps, "delta": delta, "seed": seed}
        for (learner, loss, steps), deltas in THRESHOLDS.items()
        for seed in range(1, seeds + 1)
        for delta in deltas
    ]


def key_of(run: Run) -> tuple[Any, ...]:
    return tuple(run[name] for name in ("learner", "loss", "total_steps", "delta", "seed"))


def training_of(case: Run) -> Training:
    words = ["--env", "CartPole-v1", "--workers", "2", "--num-envs", "16"]
    words += ["--eval-every", "20000", "--threads", "1"]
    words += ["--seed", str(case["seed"])]
    words += ["--kl-threshold", f"{case['delta']:g}"] if case["delta"] is not None else []
    words += ["--no-decoupled"] if case["loss"] == "plain" else []
    name = "-".join(str(part).lower() for part in ("aaps-cartpole", *key_of(case)))
    total_steps = case["total_steps"]
    return Training(name=name, learner=case["learner"], options=tuple(words), total_steps=total_steps, restarts=True)


def sampled_return(run: Path) -> float:
    """The mean return of 100 episodes with sampled actions and the final weights of a run."""
    words = ["eval", str(run), "--sample", "--episodes", "100", "--workers", "1", "--json", "--trust"]
    done = subprocess.run(
        [sys.executable, "-m", "farstep", *words], stdout=subprocess.PIPE, text=True, check=True, timeout=EVAL_LIMIT_S
    )
    return round(json.loads(done.stdout)["return"]["mean"], 1)


def outcome(case: Run, metrics: list[Metrics]) -> Run:
    """The stored result of a run."""
    last = [line for line in metrics if "env/return_mean" in line][-1]
    return {
        **case,
        "steps": last["step"],
        "versions": last["train/actor/current_version"],
        "training_return": round(last["env/return_mean"], 1),
        "pulls_per_worker": last["sync/pulls_per_worker"],
        "evaluations": evaluations(metrics),
    }


def page(document: dict[str, Any]) -> str:
    """The section of docs/aaps.md: setting and table."""
    setting = (
        f"CartPole-v1, 2 workers, 16 environments; numbers by seed, on {machines(document)} "
        "(`results/aaps-cartpole.json`). Training return: mean of the last 100 episodes. Ratio: mean training return "
        "divided by the mean without a threshold. Evaluation: mean of 20 episodes with the most likely actions and the "
        "learner's weights, early and at the end. Sampled: mean of 100 episodes with sampled actions and the learner's "
        "final weights."
    )
    return f"{setting}\n\n{summary(document)}"


def summary(document: dict[str, Any]) -> str:
    """A table with a row for every learner, loss and threshold."""
    rows = []
    for (learner, loss, steps), deltas in THRESHOLDS.items():
        for delta in deltas:
            runs = _runs(document, learner, steps, delta, loss)
            if not runs:
                continue
            without = _runs(document, learner, steps, None)
            ratio = mean(_column(runs, "training_return")) / mean(_column(without, "training_return")) if without else 0
            rows.append(
                [
                    f"`{learner}`, {loss}",
                    f"{steps:,}",
                    "none" if delta is None else f"{delta:g}",
                    _joined(_column(runs, "training_return")),
                    f"{ratio:.2f}" if without else "-",
                    _joined([value for run in runs for step, value, _ in run["evaluations"] if step == EARLY]) or "-",
                    _joined([run["evaluations"][-1][1] for run in runs]),
                    _joined(_column(runs, "sampled_return")),
                    _joined(_column(runs, "pulls_per_worker")),
                    _joined(_column(runs, "versions")),
                ]
            )
    header = [
        "learner, loss",
        "steps",
        "δ",
        "training return",
        "ratio",
        f"evaluation, {EARLY:,} steps",
        "evaluation, end",
        "sampled, end",
        "pulls per worker",
        "versions",
    ]
    return table(header, rows)


def _runs(
    document: dict[str, Any], learner: str, steps: int, delta: float | None, loss: str | None = None
) -> list[Run]:
    wanted = (learner, steps, delta)
    found = [run for run in document["runs"] if (run["learner"], run["total_steps"], run["delta"]) == wanted]
    return sorted((run for run in found if loss in (None, run["loss"])), key=lambda run: run["seed"])


def _column(runs: list[Run], name: str) -> list[float]:
    return [run[name] for run in runs]


def _joined(values: list[float]) -> str:
    return ", ".join(f"{value:.0f}" for value in values)


if __name__ == "__main__":
    run_script(main)
