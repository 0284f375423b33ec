"""Which defaults PPO and asynchronous PPO need: LunarLander-v3 with one option changed at a time.

    python benchmarks/ablation.py --jobs 7 --minutes 9       # repeat until all runs are complete
    python benchmarks/ablation.py --show benchmarks/results/ablation.json

All runs have 112 environments, and end when the mean return of the last 100 training episodes reaches 200. Besides the
steps, the table has what an update did on average: the KL divergence by which it changed the policy, the fraction of
rows that clipping excluded, the norm of the gradient and, for asynchronous PPO, the KL divergence of the rows' policy
and their effective sample size. So it shows whether both learners make updates of the same size.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean
from typing import Any

from children import run_script
from document import continued, machines, write_document
from roster import BENCHMARKS
from tables import table
from trainings import Metrics, Sitting, Training, curve, evaluations

NUM_ENVS = 112
THRESHOLD = 200.0
LEARNERS = ("ppo", "async-ppo")
MINIBATCH_SIZE = {"ppo": "--minibatch-size", "async-ppo": "--global-batch-size"}
VARIANTS: dict[str, tuple[str, ...]] = {
    "defaults": (),
    "128 steps per rollout": ("--num-steps", "128"),
    "128 steps per rollout, 4 minibatches": ("--num-steps", "128", "{minibatch}", str(128 * NUM_ENVS // 4)),
    "learning rate that falls to 0": ("--anneal-lr",),
    "rewards as they are": ("--no-normalize-reward",),
    "observations as they are": ("--no-normalize-obs",),
}
"""The second one has the rollout length of earlier defaults, the third one also their number of minibatches."""
MEASURED = {
    "proximal_k3": "KL of an update",
    "clip_fraction": "rows clipped",
    "grad_norm": "gradient norm",
    "behave_k3": "KL of the rows",
    "ess": "sample size",
}
"""Metrics `train/actor/...` of an update, and their titles."""


def main() -> int:
    options = parse_options()
    if options.show:
        document = json.loads(options.show.read_text())
    else:
        document = continued(options.out, "ablation.py")
        complete = measure(document, options)
        print("all runs are complete" if complete else "some runs are missing; run the same command again to continue")
    print(page(document))
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2, help="runs of each case, with seeds 1, 2, ...")
    parser.add_argument("--workers", type=int, default=2, help="worker processes of each run")
    parser.add_argument("--total-steps", type=int, default=500_000, help="limit of steps")
    parser.add_argument("--out", type=Path, default=BENCHMARKS / "results" / "ablation.json")
    parser.add_argument("--show", type=Path, metavar="FILE", help="only print the table of these results")
    Sitting.add_options(parser)
    return parser.parse_args()


def measure(document: dict[str, Any], options: argparse.Namespace) -> bool:
    """Run the missing runs; returns whether all are complete."""
    done = {key_of(run) for run in document["runs"]}
    cases = [
        {"variant": variant, "learner": learner, "seed": seed}
        for seed in range(1, options.seeds + 1)
        for variant in VARIANTS
        for learner in LEARNERS
    ]
    cases = [case for case in cases if key_of(case) not in done]
    trainings = [training_of(case, options) for case in cases]

    def finished(index: int, metrics: list[Metrics]) -> str:
        run = cases[index] | outcome(metrics) | {"command": trainings[index].command, "jobs": options.jobs}
        document["runs"] = sorted([*document["runs"], run], key=key_of)
        write_document(options.out, document)
        came = "reached its threshold" if run["reached"] else f"ended at {run['return']}"
        return f"{run['learner']}, {run['variant']}, seed {run['seed']}: {came} after {run['steps']:,} steps"

    print(f"{len(cases)} runs, {options.jobs} at a time; {len(done)} are in {options.out.name} already", flush=True)
    return Sitting.of(options).train(trainings, finished)


def key_of(run: dict[str, Any]) -> tuple[int, int, int]:
    return list(VARIANTS).index(run["variant"]), LEARNERS.index(run["learner"]), run["seed"]


def training_of(case: dict[str, Any], options: argparse.Namespace) -> Training:
    chosen = ["--env", "LunarLander-v3", "--num-envs", str(NUM_ENVS), "--seed", str(case["seed"])]
    chosen += ["--target-return", f"{THRESHOLD:g}", "--workers", str(options.workers), "--threads", "1"]
    chosen += ["--eval-every", "100000", "--eval-episodes", "20"]
    chosen += [word.format(minibatch=MINIBATCH_SIZE[case["learner"]]) for word in VARIANTS[case["variant"]]]
    name = "-".join(("ablation", *map(str, key_of(case))))
    return Training(name=name, learner=case["learner"], options=tuple(chosen), total_steps=options.total_steps)


def outcome(metrics: list[Metrics]) -> dict[str, Any]:
    """The stored result of a run, with means over its updates."""
    steps, final, seconds = curve(metrics, {"env/return_mean": 1, "seconds": 1}, 1)[-1]
    updates = [line for line in metrics if "train/actor/proximal_k3" in line]
    found = {name: [line[f"train/actor/{name}"] for line in updates] for name in MEASURED}
    return {
        "reached": final >= THRESHOLD,
        "steps": steps,
        "return": final,
        "seconds": seconds,
        "updates": len(updates),
        **{name: round(mean(values), 5) for name, values in found.items()},
        "evaluations": evaluations(metrics),
    }


def page(document: dict[str, Any]) -> str:
    """The table of all variants, and where they were measured."""
    rows = []
    for variant in VARIANTS:
        for learner in LEARNERS:
            runs = [run for run in document["runs"] if (run["variant"], run["learner"]) == (variant, learner)]
            if not runs:
                continue
            steps = ", ".join(
                f"{run['steps'] / 1000:.0f}" if run["reached"] else f"({run['return']:.0f})" for run in runs
            )
            of_update = [f"{mean(run[name] for run in runs):.3g}" for name in MEASURED]
            rows.append([variant, f"`{learner}`", steps, f"{mean(run['updates'] for run in runs):.0f}", *of_update])
    header = ["options", "learner", "thousand steps, by seed", "updates", *MEASURED.values()]
    where = f"On {machines(document)}, `results/ablation.json`"
    return f"{where} (in brackets: the last return of a run that ended below 200):\n\n{table(header, rows)}"


if __name__ == "__main__":
    run_script(main)
