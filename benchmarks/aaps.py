"""The AAPS experiment of ClusterEnv (figures 2 and 3) with `farstep train ppo`: what a threshold saves and costs.

    python benchmarks/aaps.py --jobs 6 --steps 1000000 --minutes 9     # repeat until all runs are complete
    python benchmarks/aaps.py --jobs 6 --steps 5000000 --minutes 9     # the same runs, continued
    python benchmarks/aaps.py --hidden 912 --deltas 0 0.05 --plain --out benchmarks/results/aaps-ppo-large.json
    python benchmarks/aaps.py --hidden 256 --deltas 0 --plain --compact 0.05 --seeds 5 --envs-per-worker 8
        --steps 1000000 --out benchmarks/results/aaps-compact.json                               # fewer bytes
    python benchmarks/aaps.py --show benchmarks/results/aaps-ppo.json          # only tables and plots

PPO on LunarLander-v3 with four workers of 64 environments each, and the paper's learning rate (5e-4), minibatches (8),
gamma (.99) and lambda (.95). The paper's rollouts have 1,024 steps and 30 epochs; here they have 128 steps and 10
epochs. Workers are connected over TCP on loopback, so that weights and probes are sent and counted. Returns are
those of evaluations: 20 episodes with the most likely actions, every 100,000 steps. `decoupled` clips around the
learner's own policy and weights rows by the ratio to the policy that acted, `plain` clips around the policy that acted.
`half` is `decoupled`, but weights are sent as differences of bfloat16 numbers. `compact` is `half` without the critic.
Runs differ in their steps until all have been continued; tables and plots end where the shortest run ends.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from children import run_script
from curve_plots import band, panels, save
from document import continued, machines, write_document
from roster import BENCHMARKS
from tables import table
from trainings import Metrics, Sitting, Training, evaluations, summed

RESULTS = BENCHMARKS / "results"
IMAGES = BENCHMARKS.parent / "docs" / "images"
LOWEST_RETURN = -400.0
"""Plots end here, so that the first bad policies do not hide the later differences."""
POINTS = 100
"""Points of the curves of pulls and bytes that are stored."""
HALF = {"half": "bfloat16", "delta": True}
WEIGHTS = {"half": HALF, "compact": {"only": ["actor.*", "heads.*", "encoders.*"], **HALF}}
"""In what form weights are sent in runs that do not send all of them in float32."""
LOSSES = {
    "decoupled": "decoupled loss",
    "plain": "plain loss",
    "half": "decoupled loss, bfloat16 differences",
    "compact": "decoupled loss, bfloat16 differences without the critic",
}
FORMS = {
    "decoupled": "all, float32",
    "half": "all, bfloat16 differences",
    "compact": "without the critic, bfloat16 differences",
}
"""In what form weights are sent, by loss."""
LAST = 0.1
"""Fraction of the steps, at the end, over whose evaluations the final return is the mean."""
SOLVED = 200.0
"""Return from which LunarLander-v3 counts as solved."""

Run = dict[str, Any]
"""One run, as in the results file."""
End = dict[str, float]
"""What one run has reached, by name."""


def main() -> int:
    options = parse_options()
    if options.show:
        for path in options.show:
            show(json.loads(path.read_text()), path.stem, options.images)
        return 0
    document = continued(options.out, "aaps.py")
    settings = settings_of(options)
    if document.setdefault("settings", settings) != settings:
        print(f"{options.out} was measured with {document['settings']}, not with {settings}; use another --out")
        return 1
    complete = measure(document, options)
    print("all runs are complete" if complete else "some runs are missing; run the same command again to continue")
    if document["runs"]:
        show(document, options.out.stem, options.images)
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    deltas, plain = (0.0, 0.01, 0.05, 0.2, 0.8, 1.0), (0.0, 0.05, 0.8)
    parser.add_argument("--deltas", nargs="*", type=float, default=deltas, help="thresholds with the decoupled loss")
    parser.add_argument("--plain", nargs="*", type=float, default=plain, help="thresholds with the plain loss")
    parser.add_argument("--half", nargs="*", type=float, default=(), help="thresholds with bfloat16 differences")
    parser.add_argument("--compact", nargs="*", type=float, default=(), help="the same without the critic")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each threshold, with seeds 1, 2, ...")
    parser.add_argument(
        "--repeated",
        nargs="*",
        type=float,
        help="thresholds to run with all seeds; the others run with seed 1 (default: all thresholds)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=5_000_000,
        help="environment steps of each run; a larger number continues finished runs",
    )
    parser.add_argument("--hidden", type=int, default=64, help="width of both hidden layers of actor and critic")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--envs-per-worker", type=int, default=64)
    parser.add_argument("--num-steps", type=int, default=128, help="steps of each environment per rollout")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--minibatches", type=int, default=8)
    parser.add_argument("--eval-every", type=int, default=100_000, help="steps between evaluations")
    parser.add_argument("--out", type=Path, default=RESULTS / "aaps-ppo.json")
    parser.add_argument("--images", type=Path, default=IMAGES, help="folder for plots")
    parser.add_argument(
        "--show", nargs="+", type=Path, metavar="FILE", help="only print tables and draw plots of these results"
    )
    Sitting.add_options(parser)
    return parser.parse_args()


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """Settings that all runs of a document share."""
    names = ("hidden", "workers", "envs_per_worker", "num_steps", "epochs", "minibatches", "eval_every")
    return {name: getattr(options, name) for name in names}


def measure(document: dict[str, Any], options: argparse.Namespace) -> bool:
    """Run or continue the runs that have too few steps; returns whether all are complete."""
    done = {key_of(run): run["steps"] for run in document["runs"]}
    cases = [case for case in cases_of(options) if done.get(key_of(case), 0) < options.steps]
    print(f"{len(cases)} runs to {options.steps:,} steps, {options.jobs} at a time; {len(done)} are in the results")

    def finished(index: int, metrics: list[Metrics]) -> str:
        run = outcome(cases[index], metrics) | {"command": trainings[index].command}
        others = [other for other in document["runs"] if key_of(other) != key_of(run)]
        document["runs"] = sorted([*others, run], key=key_of)
        write_document(options.out, document)
        steps, pulls, final = run["steps"], run["curve"][-1][2], run["evaluations"][-1][1]
        return f"{name_of(run)}: {steps:,} steps, {pulls:.0f} pulls per worker, last evaluation {final:.0f}"

    trainings = [training_of(case, options) for case in cases]
    return Sitting.of(options).train(trainings, finished)


def cases_of(options: argparse.Namespace) -> list[Run]:
    """All runs, ordered by seed, so that every threshold soon has one run."""
    thresholds = {name: getattr(options, name) for name in ("plain", "half", "compact")}
    thresholds = {"decoupled": options.deltas, **thresholds}
    chosen = [(loss, delta) for loss, deltas in thresholds.items() for delta in deltas]
    repeated = {delta for _, delta in chosen} if options.repeated is None else set(options.repeated)
    return [
        {"loss": loss, "delta": delta, "seed": seed}
        for seed in range(1, options.seeds + 1)
        for loss, delta in chosen
        if seed == 1 or delta in repeated
    ]


def key_of(run: Run) -> tuple[str, float, int]:
    return run.get("loss", "decoupled"), run["delta"], run["seed"]


def name_of(case: Run) -> str:
    return f"{case['loss']}, delta {case['delta']:g}, seed {case['seed']}"


def training_of(case: Run, options: argparse.Namespace) -> Training:
    rows = options.workers * options.envs_per_worker * options.num_steps
    values = {
        "env": "LunarLander-v3",
        "workers": options.workers,
        "num-envs": options.workers * options.envs_per_worker,
        "num-steps": options.num_steps,
        "minibatch-size": rows // options.minibatches,
        "update-epochs": options.epochs,
        "learning-rate": 5e-4,
        "gamma": 0.99,
        "gae-lambda": 0.95,
        "kl-threshold": case["delta"],
        "seed": case["seed"],
        "transport": "tcp",
        "eval-every": options.eval_every,
        "threads": 1,
    }
    words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    words += ["--hidden", str(options.hidden), str(options.hidden)]
    words.append("--no-decoupled" if case["loss"] == "plain" else "--decoupled")
    words += ["--weights", json.dumps(WEIGHTS[case["loss"]])] if case["loss"] in WEIGHTS else []
    name = f"aaps-{options.hidden}-{case['loss']}-{case['delta']:g}-{case['seed']}"
    return Training(name=name, learner="ppo", options=tuple(words), total_steps=options.steps)


def outcome(case: Run, metrics: list[Metrics]) -> Run:
    """The stored result of a run; its curve has steps, return, pulls per worker, bytes of weights and of probes."""
    lines = [line for line in metrics if "sync/pulls_per_worker" in line]
    counters, restarts = summed(lines, ("sync/pulls_per_worker", "bytes/weights_sent", "bytes/probes_sent"))
    points = [
        [line["step"], round(line.get("env/return_mean", 0.0), 1), pulls, weights, probes]
        for line, (pulls, weights, probes) in zip(lines, counters, strict=True)
    ]
    every = -(-len(points) // POINTS)
    return {
        **case,
        "steps": lines[-1]["step"],
        "versions": lines[-1]["train/actor/current_version"],
        "seconds": round(lines[-1]["seconds"], 1),
        "continued": restarts,
        "curve": [*points[:-1:every], points[-1]],
        "evaluations": evaluations(metrics),
    }


# ---- tables ----


def common_steps(runs: list[Run]) -> int:
    """Steps of the shortest run; later steps of other runs are not compared."""
    return int(min(run["curve"][-1][0] for run in runs))


def at_end(run: Run, steps: int) -> End:
    """Final return, pulls per worker and bytes of one run after `steps` steps."""
    if "evaluations" not in run:  # results of 2026-11-15: the script's own learner, and training returns
        sent = run["bytes"]
        found = {"weights": sent["weights_sent"], "probes": sent["probes_sent"]}
        return {"return": run["final_return"], "pulls": run["syncs_per_worker"], **found}
    last = [value for step, value, _ in run["evaluations"] if (1 - LAST) * steps <= step <= steps]
    before = [value for step, value, _ in run["evaluations"] if step <= steps]
    points = np.array(run["curve"])
    pulls, weights, probes = (float(np.interp(steps, points[:, 0], points[:, column])) for column in (2, 3, 4))
    value = float(np.mean(last or before[-1:] or [np.nan]))
    return {
        "return": value,
        "solved": solved_after(run, steps),
        "pulls": pulls,
        "weights": weights,
        "probes": probes,
    }


def solved_after(run: Run, steps: int) -> float:
    """Steps of the first evaluation from which on none, within `steps` steps, is below `SOLVED`; else infinity."""
    before = [(step, value) for step, value, _ in run["evaluations"] if step <= steps]
    good = list(itertools.takewhile(lambda evaluation: evaluation[1] >= SOLVED, reversed(before)))
    return good[-1][0] if good else math.inf


def ends_of(document: dict[str, Any]) -> dict[tuple[str, float], list[End]]:
    """Results of all seeds, by loss and threshold."""
    runs = document["runs"]
    steps = common_steps(runs)
    found: dict[tuple[str, float], list[End]] = {}
    for run in sorted(runs, key=key_of):
        found.setdefault(key_of(run)[:2], []).append(at_end(run, steps))
    return found


def summary(document: dict[str, Any]) -> str:
    """A table with a row for every loss and threshold; means over seeds."""
    ends = ends_of(document)
    always = ends.get(("decoupled", 0.0)) or ends.get(("plain", 0.0))
    full = _mean(always, "weights") if always else 0.0
    is_evaluated = all("solved" in end for found in ends.values() for end in found)
    rows = []
    for (loss, delta), found in ends.items():
        returns = [end["return"] for end in found]
        weights, probes = _mean(found, "weights"), _mean(found, "probes")
        rows.append(
            [
                *([loss] if len({loss for loss, _ in ends}) > 1 else []),
                f"{delta:g}" if delta else "0 (always)",
                str(len(found)),
                f"{np.mean(returns):.0f}" + (f" ± {np.std(returns):.0f}" if len(returns) > 1 else ""),
                *([_millions([end["solved"] for end in found])] if is_evaluated else []),
                f"{_mean(found, 'pulls'):.0f}",
                f"{weights / 1e6:,.1f}",
                f"{probes / 1e6:.2f}",
                f"{(weights + probes) / full:.3f}" if full else "-",
                f"{probes / full:.4f}" if full else "-",
            ]
        )
    header = ["δ", "seeds", "final return"]
    header += [f"million steps to {SOLVED:g}, by seed"] if is_evaluated else []
    header += ["pulls per worker", "weights, MB", "probes, MB"]
    header += ["all bytes / bytes of `always`", "probes / bytes of `always`"]
    return table(["loss", *header] if len(rows[0]) > len(header) else header, rows)


def page(document: dict[str, Any]) -> str:
    """The section of docs/aaps.md: setting, table, comparison of seeds, and plots."""
    settings, steps = document["settings"], common_steps(document["runs"])
    envs = settings["workers"] * settings["envs_per_worker"]
    versions = steps // (envs * settings["num_steps"])
    setting = (
        f"{settings['workers']} workers with {settings['envs_per_worker']} environments each over TCP, "
        f"{settings['num_steps']} steps per rollout, {settings['epochs']} epochs, {steps:,} steps ({versions} "
        f"versions), {machines(document)}. Final return: the mean of the evaluations in the last tenth of the steps, ± "
        f"the standard deviation over seeds (`results/aaps-ppo.json`). Steps to {SOLVED:g}: steps until the first "
        f"evaluation from which on the return stays at {SOLVED:g} or above (`-`: it does not)."
    )
    if continued_times := max(run["continued"] for run in document["runs"]):
        often = "once" if continued_times == 1 else f"up to {continued_times} times"
        setting += f" Runs were interrupted and resumed {often}. Each resume adds one pull per worker to the table."
    images = [
        "![evaluation returns over steps, for each threshold and loss](images/aaps-ppo-returns.png)",
        "![pulls over steps, bytes by threshold](images/aaps-ppo-pulls.png)",
    ]
    return "\n\n".join([setting, summary(document), verdict(document), *images])


def compact_page(document: dict[str, Any]) -> str:
    """The section of docs/aaps.md about the form of the weights: bytes, and returns with their range over seeds."""
    settings, steps = document["settings"], common_steps(document["runs"])
    ends = ends_of(document)
    full = _mean(ends["decoupled", 0.0], "weights")
    rows = []
    for loss, delta in sorted(ends, key=lambda case: (list(FORMS).index(case[0]), case[1])):
        found = ends[loss, delta]
        returns = [end["return"] for end in found]
        weights, probes = _mean(found, "weights"), _mean(found, "probes")
        spread = f"{np.mean(returns):.0f} ({min(returns):.0f} to {max(returns):.0f})"
        row = [FORMS[loss], f"{delta:g}", str(len(found)), spread, f"{_mean(found, 'pulls'):.0f}"]
        rows.append([*row, f"{weights / 1e6:,.2f}", f"{probes / 1e6:.2f}", f"{(weights + probes) / full:.1%}"])
    setting = (
        f"{settings['workers']} workers with {settings['envs_per_worker']} environments each over TCP, hidden layers "
        f"of {settings['hidden']} units, {steps:,} steps, {machines(document)}. Final return: the mean of the "
        "evaluations in the last tenth of the steps, mean (lowest to highest) of the seeds. The last column compares "
        "all bytes, probes included, with those of all weights in float32 at every version "
        "(`results/aaps-compact.json`):"
    )
    header = ["weights", "δ", "seeds", "final return", "pulls per worker", "weights, MB", "probes, MB", "bytes"]
    always = ends["decoupled", 0.0]
    compared = [
        f"{FORMS[loss].capitalize()}, δ = {delta:g}: {_compared(found, always)}."
        for (loss, delta), found in ends.items()
        if delta
    ]
    return "\n\n".join([setting, table(header, rows), " ".join(compared)])


def verdict(document: dict[str, Any]) -> str:
    """Compare each threshold with pulling every version, as far as the seeds allow."""
    ends = ends_of(document)
    sentences = []
    for loss in dict.fromkeys(loss for loss, _ in ends):
        # If workers always have the newest weights, both losses are equal, and so are the runs.
        always = ends.get((loss, 0.0)) or ends.get(("decoupled", 0.0), [])
        groups: dict[str, list[str]] = {}
        for (other, delta), found in ends.items():
            if other == loss and delta and min(len(always), len(found)) > 1:
                groups.setdefault(_compared(found, always), []).append(f"{delta:g}")
        said = [f"With δ = {_alternatives(deltas)}, {words}." for words, deltas in groups.items()]
        if said:
            returns = _values(always, "return")
            spread = f"{min(returns):.0f} and {max(returns):.0f}"
            sentences.append(
                f"{LOSSES[loss].capitalize()}: with δ = 0, the seeds end between {spread}. {' '.join(said)}"
            )
    return " ".join(sentences) or "There are too few seeds to compare thresholds."


def _compared(found: list[End], always: list[End]) -> str:
    said = []
    if _all_below(found, always, "return"):
        said.append("every seed ends below every seed of δ = 0")
    elif _all_below(always, found, "return"):
        said.append("every seed ends above every seed of δ = 0")
    if all(end.get("solved") == math.inf for end in found):
        said.append(f"no seed ends at {SOLVED:g} or above")
    elif _all_below(always, found, "solved"):
        said.append(f"every seed needs more steps to {SOLVED:g} than every seed of δ = 0")
    elif _all_below(found, always, "solved"):
        said.append(f"every seed needs fewer steps to {SOLVED:g} than every seed of δ = 0")
    if not said:
        return "the ranges of the seeds overlap those of δ = 0, so no difference is visible"
    overlap = "" if "ends" in said[0] else "final returns overlap with those of δ = 0, but "
    return overlap + " and ".join(said)


def _all_below(found: list[End], others: list[End], name: str) -> bool:
    """Whether every seed has a lower number than every other seed; False if one has no such number."""
    if not all(name in end for end in (*found, *others)):
        return False
    return max(_values(found, name)) < min(_values(others, name))


def _alternatives(words: list[str]) -> str:
    """Join words as in "a, b or c"."""
    return " or ".join([part for part in (", ".join(words[:-1]), words[-1]) if part])


def _millions(steps: list[float]) -> str:
    return ", ".join("-" if step == math.inf else f"{step / 1e6:.1f}" for step in steps)


def _values(found: list[End], name: str) -> list[float]:
    return [end[name] for end in found]


def _mean(found: list[End], name: str) -> float:
    return float(np.mean(_values(found, name)))


# ---- plots ----


def show(document: dict[str, Any], name: str, images: Path) -> None:
    """Print the table and draw the plots."""
    print(f"\n{common_steps(document['runs']):,} steps\n\n{summary(document)}\n\n{verdict(document)}")
    for path in draw(name, document, images):
        print(f"written: {path}")


def draw(name: str, document: dict[str, Any], folder: Path) -> list[Path]:
    """Draw returns over steps, with a panel per loss; pulls over steps; and bytes by threshold."""
    runs, steps = document["runs"], common_steps(document["runs"])
    losses = list(dict.fromkeys(key_of(run)[0] for run in sorted(runs, key=key_of)))
    evaluated = all("evaluations" in run for run in runs)

    def lines(axis: Any, loss: str, column: int, points: Callable[[Run], Any]) -> None:
        deltas = sorted({run["delta"] for run in runs})
        colors = _colors(len(deltas))
        for delta, color in zip(deltas, colors, strict=True):
            mine = [run for run in runs if key_of(run)[:2] == (loss, delta)]
            curves = [[point for point in points(run) if point[0] <= steps] for run in mine]
            band(axis, curves, column, f"δ = {delta:g}", color)

    figure, axes = panels(len(losses), "LunarLander-v3, PPO with AAPS: mean and range of the seeds")
    for axis, loss in zip(axes, losses, strict=True):
        axis.set(title=LOSSES[loss], ylabel="return of an evaluation" if evaluated else "return, last 100 episodes")
        lines(axis, loss, 1, lambda run: run["evaluations"] if evaluated else run["curve"])
    limits = [limit for axis in axes for limit in axis.get_ylim()]
    for axis in axes:
        axis.set_ylim(max(min(limits), LOWEST_RETURN), max(limits))
    written = [save(figure, folder / f"{name}-returns.png")]

    figure, axes = panels(len(losses) + 1, "Pulls per worker, and bytes that were sent")
    for axis, loss in zip(axes, losses, strict=False):
        axis.set(title=LOSSES[loss], ylabel="pulls per worker, so far")
        lines(axis, loss, 2, lambda run: run["curve"])
    ends = ends_of(document)
    for loss, style in zip(losses, ("o-", "s--", "^:", "D-."), strict=False):
        found = {delta: ends[loss, delta] for other, delta in ends if other == loss}
        megabytes = [(_mean(end, "weights") + _mean(end, "probes")) / 1e6 for end in found.values()]
        axes[-1].plot([f"{delta:g}" for delta in found], megabytes, style, color="black", label=LOSSES[loss])
    axes[-1].set(title="weights and probes", xlabel="δ", ylabel="MB", yscale="log")
    return [*written, save(figure, folder / f"{name}-pulls.png")]


def _colors(count: int) -> Any:
    import matplotlib.pyplot as plt

    return plt.get_cmap("viridis")(np.linspace(0, 0.95, count))


if __name__ == "__main__":
    run_script(main)
