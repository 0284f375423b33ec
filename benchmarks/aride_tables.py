"""The results of aride.py as tables and plots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from curve_plots import band, panels, save
from document import machines
from tables import table

VARIANTS = {
    "full": "A-RIDE",
    "no-dper": "without DPER",
    "no-retrace": "without Retrace",
    "sync": "synchronous",
}
WARMUPS = {"none": "no warm-up", "recorded": "128 recorded episodes"}
PAPER = {"no-dper": -8, "no-retrace": -6}
"""Points of success that DistRL reports."""
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 8: 2.36, 10: 2.26}
"""Quantile of Student's t for a 95 % interval of the mean, by number of seeds."""

CALM_LOAD = 2.0
"""Load average per core up to which the seconds of a run are used."""

Run = dict[str, Any]


def key_of(run: Run) -> tuple[str, str, int]:
    return run["variant"], run["warmup"], run["seed"]


def summary(document: dict[str, Any]) -> str:
    """A table of success and time for each warm-up."""
    settings = document["settings"]
    low_ms, high_ms = settings["step_ms"]
    title = (
        f"On {machines(document)}: {settings['total_steps']:,} environment steps on {settings['workers']} workers "
        f"whose steps take {low_ms:g} to {high_ms:g} ms, {_seeds(document)}. *Success*: share of "
        f"successful episodes among {settings['final_episodes']:,} with the final agent, which takes its most likely "
        "actions; mean over the seeds, and 95 % interval. *Difference*: from A-RIDE with the same seeds, in percentage "
        "points. *DistRL*: the difference that the DistRL paper reports. *Seconds*: only of runs during which the load "
        f"average was at most {CALM_LOAD:g} per core. *Staleness*, *ess*: in the last line of metrics of each run; "
        "staleness is the age of rows when they arrive, in versions."
    )
    header = ["", "success", "by seed", "difference", "DistRL", "seconds", "steps/s", "staleness", "ess"]
    parts = [title]
    for warmup, name in WARMUPS.items():
        runs = [run for run in document["runs"] if run["warmup"] == warmup]
        rows = [_row(variant, runs, document) for variant in VARIANTS if any(run["variant"] == variant for run in runs)]
        if rows:
            parts += [f"With {name}:", table(header, rows)]
    loads = [load for run in document["runs"] for load in run["load"]]
    jobs = max(run["jobs"] for run in document["runs"])
    parts.append(
        f"{_time(document)}During the runs, the machine's load average was {min(loads):.0f} to {max(loads):.0f} on "
        f"{document['machine']['cores']} cores. Up to {jobs} of these runs ran at the same time. `results/aride.json` "
        "has every run."
    )
    return "\n\n".join(parts)


def page(document: dict[str, Any]) -> str:
    """The section of docs/aride.md: tables and plot."""
    has_seconds = any(_is_calm(run, document) for run in document["runs"])
    image = f"![success over environment steps{' and over seconds' if has_seconds else ''}, by variant and warm-up]"
    return f"{summary(document)}\n\n{image}(images/aride-success.png)"


def _seeds(document: dict[str, Any]) -> str:
    """How many seeds the variants have, and whether runs are missing."""
    runs = document["runs"]
    counts = [
        sum((run["variant"], run["warmup"]) == (variant, warmup) for run in runs)
        for variant in VARIANTS
        for warmup in WARMUPS
    ]
    if min(counts) == max(counts):
        return f"{max(counts)} seed{'s' if max(counts) > 1 else ''} of each variant"
    return f"{min(counts)} to {max(counts)} seeds of each variant (some runs are still missing)"


def _is_calm(run: Run, document: dict[str, Any]) -> bool:
    """Whether other programs left the run enough of the machine for its seconds to mean something."""
    return max(run["load"]) <= CALM_LOAD * document["machine"]["cores"]


def _row(variant: str, runs: Sequence[Run], document: dict[str, Any]) -> list[str]:
    mine = sorted((run for run in runs if run["variant"] == variant), key=lambda run: run["seed"])
    full = {run["seed"]: run["success"] for run in runs if run["variant"] == "full"}
    calm = [run for run in mine if _is_calm(run, document)]
    gaps = [100 * (run["success"] - full[run["seed"]]) for run in mine if run["seed"] in full]
    return [
        VARIANTS[variant],
        _interval([run["success"] for run in mine], ".2f"),
        ", ".join(f"{run['success']:.2f}" for run in mine),
        "-" if variant == "full" or not gaps else _interval(gaps, "+.0f"),
        f"{PAPER[variant]:+d}" if variant in PAPER else "-",
        _spread([run["seconds"] for run in calm]) if calm else "-",
        f"{sum(run['steps'] for run in calm) / sum(run['seconds'] for run in calm):.0f}" if calm else "-",
        f"{mean(run['staleness'] for run in mine):.1f}",
        f"{mean(run['ess'] for run in mine):.2f}",
    ]


def _interval(values: Sequence[float], form: str) -> str:
    """The mean, and half the width of its 95 % interval; only the mean of one value."""
    if len(values) not in T_95:
        return f"{mean(values):{form}}"
    half = T_95[len(values)] * stdev(values) / math.sqrt(len(values))
    return f"{mean(values):{form}} ± {half:{form.removeprefix('+')}}"


def _spread(values: Sequence[float]) -> str:
    return f"{mean(values):.0f} ({min(values):.0f} to {max(values):.0f})"


def _time(document: dict[str, Any]) -> str:
    """A sentence on the time of synchronous runs, relative to asynchronous ones with the same seed and warm-up."""
    seconds = {key_of(run): run["seconds"] for run in document["runs"] if _is_calm(run, document)}
    ratios = [
        seconds["sync", warmup, seed] / seconds["full", warmup, seed]
        for variant, warmup, seed in seconds
        if variant == "full" and ("sync", warmup, seed) in seconds
    ]
    if not ratios:
        return (
            "Synchronous and asynchronous times are not compared: no pair of runs had a load average of at most "
            f"{CALM_LOAD:g} per core. "
        )
    return (
        f"For the same steps, the synchronous run took {mean(ratios):.1f} times as long as the asynchronous one with "
        f"the same seed ({min(ratios):.1f} to {max(ratios):.1f}, {len(ratios)} pairs). "
    )


def draw(document: dict[str, Any], folder: Path) -> list[Path]:
    """Draw evaluations over steps and over seconds, for each warm-up."""
    calm = [run for run in document["runs"] if _is_calm(run, document)]
    present = [warmup for warmup in WARMUPS if any(run["warmup"] == warmup for run in document["runs"])]
    title = "A-RIDE without its parts: success of the most likely actions, mean and range of the seeds"
    shown = [(warmup, 0, "environment steps", document["runs"]) for warmup in present]
    shown += [(warmup, 1, "seconds", calm) for warmup in present if any(run["warmup"] == warmup for run in calm)]
    figure, axes = panels(len(shown), title)
    for axis, (warmup, column, xlabel, chosen) in zip(axes, shown, strict=True):
        axis.set(title=WARMUPS[warmup], xlabel=xlabel, ylabel="success", ylim=(0, 1))
        for color, (variant, name) in enumerate(VARIANTS.items()):
            runs = [run for run in chosen if (run["variant"], run["warmup"]) == (variant, warmup)]
            curves = [[[point[column], point[2]] for point in run["evaluations"]] for run in runs]
            band(axis, curves, 1, name, f"C{color}")
    return [save(figure, folder / "aride-success.png")]
