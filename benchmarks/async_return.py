"""Asynchronous compared with synchronous PPO at equal return: seconds to a return of 200 on LunarLander-v3.

`python benchmarks/async.py --task lunarlander` runs it: `farstep train ppo` and `async-ppo` with their defaults, 112
environments on 14 workers, which leaves one of 16 cores for the learner and one for the system. Because seconds are
compared, trainings run one at a time, and a training that was stopped starts over instead of being continued.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from curve_plots import band, panels, save
from document import check_machine, continued, machines, write_document
from tables import table
from trainings import Metrics, Sitting, Training, curve, evaluations

LEARNERS = ("ppo", "async-ppo")
THRESHOLD = 200.0
POINTS = 100
PARTS = {
    "collect": ("time/collect",),
    "learn": ("time/advantages", "time/recompute_logprobs", "time/actor_training"),
    "publish": ("time/publish",),
    "checkpoint": ("time/checkpoint",),
}
"""Parts of the learner's time, each the sum of these metrics; the rest of an update is `other`."""

Run = dict[str, Any]
"""One run, as in the results file."""


def measure(sitting: Sitting, out: Path, seeds: int, settings: dict[str, int], total_steps: int) -> dict[str, Any]:
    """Run the missing runs; returns the document with all runs."""
    document = continued(out, "async.py")
    check_machine(document, out)
    if document.setdefault("settings", settings) != settings:
        raise SystemExit(f"{out} was measured with {document['settings']}, not with {settings}; use another --out")
    done = {key_of(run) for run in document["runs"]}
    cases = [(learner, seed) for seed in range(1, seeds + 1) for learner in LEARNERS]
    cases = [case for case in cases if case not in done]
    trainings = [training_of(*case, settings, total_steps) for case in cases]

    def finished(index: int, metrics: list[Metrics]) -> str:
        run = outcome(*cases[index], metrics) | {"command": trainings[index].command}
        document["runs"] = sorted([*document["runs"], run], key=key_of)
        write_document(out, document)
        came = f"reached {THRESHOLD:g}" if run["reached"] else "did NOT reach its threshold"
        return f"{run['learner']}, seed {run['seed']}: {came} after {run['seconds']:.0f} s, {run['steps']:,} steps"

    print(f"{len(cases)} runs; {len(done)} are in {out.name} already", flush=True)
    complete = sitting.train(trainings, finished)
    print("all runs are complete" if complete else "some runs are missing; run the same command again to continue")
    return document


def key_of(run: Run) -> tuple[str, int]:
    return run["learner"], run["seed"]


def training_of(learner: str, seed: int, settings: dict[str, int], total_steps: int) -> Training:
    workers, num_envs = settings["workers"], settings["num_envs"]
    chosen = ["--env", "LunarLander-v3", "--num-envs", str(num_envs), "--workers", str(workers), "--seed", str(seed)]
    # Only the first and the final agent are evaluated, because evaluations take CPU time from the measured run.
    chosen += ["--target-return", f"{THRESHOLD:g}", "--eval-every", str(10**9), "--checkpoint-every", str(10**6)]
    name = f"async-{learner}-{num_envs}-{workers}-{seed}"
    return Training(name=name, learner=learner, options=tuple(chosen), total_steps=total_steps, restarts=True)


def outcome(learner: str, seed: int, metrics: list[Metrics]) -> Run:
    """The stored result of a run, with the seconds of each part."""
    lines = [line for line in metrics if "time/step" in line]
    seconds = lines[-1]["seconds"]
    parts = {part: sum(line.get(name, 0.0) for line in lines for name in names) for part, names in PARTS.items()}
    parts["other"] = seconds - sum(parts.values())
    return {
        "learner": learner,
        "seed": seed,
        "reached": lines[-1].get("env/return_mean", float("-inf")) >= THRESHOLD,
        "steps": int(lines[-1]["step"]),
        "seconds": round(seconds, 2),
        "updates": int(lines[-1]["update"]),
        "staleness": round(mean(line["lag/versions_mean"] for line in lines), 3),
        "seconds_in": {part: round(value, 2) for part, value in parts.items()},
        "evaluations": evaluations(metrics),
        "curve": curve(lines, {"env/return_mean": 1, "seconds": 2}, POINTS),
    }


def summary(document: dict[str, Any]) -> str:
    """A table of seconds and steps to the threshold, and the fraction of time of each part."""
    runs, settings = document["runs"], document["settings"]
    found = {learner: [run for run in runs if run["learner"] == learner] for learner in LEARNERS}
    rows = [_row(learner, mine) for learner, mine in found.items() if mine]
    parts = [f"{part}" for part in (*PARTS, "other")]
    header = ["", "reached", "seconds", "thousand steps", "steps/s", "staleness", *parts, "final evaluation (range)"]
    title = (
        f"LunarLander-v3 to a mean training return of {THRESHOLD:g}, {settings['num_envs']} environments on "
        f"{settings['workers']} workers, {machines(document)}, defaults of both learners. The table has means over "
        "the seeds, with the lowest and the highest value in brackets, and shares of the learner's time:"
    )
    return "\n\n".join(filter(None, (title, table(header, rows), _saving(found))))


def page(document: dict[str, Any]) -> str:
    """The section of docs/async_ppo.md."""
    image = "![training return over seconds and over steps, synchronous and asynchronous](images/async-lunarlander.png)"
    return f"{summary(document)}\n\n{image}\n\nEvery run is in `benchmarks/results/async-lunarlander.json`."


def _row(learner: str, runs: list[Run]) -> list[str]:
    total = sum(run["seconds"] for run in runs)
    shares = [f"{sum(run['seconds_in'][part] for run in runs) / total:.0%}" for part in (*PARTS, "other")]
    last = [run["evaluations"][-1][1] for run in runs if run["evaluations"]]
    return [
        f"`{learner}`",
        f"{sum(run['reached'] for run in runs)} of {len(runs)}",
        _spread([run["seconds"] for run in runs]),
        _spread([run["steps"] / 1000 for run in runs]),
        f"{sum(run['steps'] for run in runs) / total:,.0f}",
        f"{mean(run['staleness'] for run in runs):.2f}",
        *shares,
        _spread(last) if last else "-",
    ]


def _saving(found: dict[str, list[Run]]) -> str:
    """A sentence on the time that asynchronous PPO saved, if every run reached the threshold."""
    sync, other = found["ppo"], found["async-ppo"]
    if not sync or not other or not all(run["reached"] for run in (*sync, *other)):
        return "Not every run reached the threshold, so times to it are not compared." if sync and other else ""
    time, steps = (mean(run[name] for run in other) / mean(run[name] for run in sync) for name in ("seconds", "steps"))
    apart = max(run["seconds"] for run in other) < min(run["seconds"] for run in sync)
    seeds = "every seed is faster than every synchronous one" if apart else "the ranges of the seeds overlap"
    words = f"{1 - time:.0%} less" if time < 1 else f"{time - 1:.0%} more"
    found = f"Asynchronous PPO took {words} time and {steps:.2f} times the steps of PPO ({seeds})."
    return f"{found} RLinf reports speed-ups of 11 to 38 % for large robot policies (its pull request 654)."


def _spread(values: Sequence[float]) -> str:
    return f"{mean(values):.0f} ({min(values):.0f} to {max(values):.0f})"


def draw(document: dict[str, Any], folder: Path) -> list[Path]:
    """Draw training returns over seconds and over steps."""
    title = "LunarLander-v3, synchronous and asynchronous PPO: mean and range of the seeds"
    figure, axes = panels(2, f"{title}; runs end at the threshold")
    for axis, what in zip(axes, ("seconds", "environment steps"), strict=True):
        axis.set(xlabel=what, ylabel="mean return of the last 100 episodes")
        axis.axhline(THRESHOLD, color="grey", linestyle=":", linewidth=1)
        for index, learner in enumerate(LEARNERS):
            curves = [run["curve"] for run in document["runs"] if run["learner"] == learner]
            if what == "seconds":
                curves = [[[seconds, value] for _, value, seconds in points] for points in curves]
            band(axis, curves, 1, learner, f"C{index}")
    return [save(figure, folder / "async-lunarlander.png")]
