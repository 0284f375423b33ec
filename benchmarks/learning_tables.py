"""The results of learning.py as tables and plots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from runner import DISTURBED_CORES
from tables import table

Row = dict[str, Any]
"""One run, as in the results file."""

BASELINE = "cleanrl"
LABELS = {
    "cleanrl": "CleanRL",
    "rllib": "RLlib",
    "farstep-cleanrls": "farstep, CleanRL's hyper-parameters",
    "farstep": "farstep, its own choice",
    "farstep-ppo": "farstep `ppo`",
    "farstep-async-ppo": "farstep `async-ppo`",
    "farstep-impala": "farstep `impala`",
}
"""Labels of contenders, by name without a trailing number of environments."""
PEERS = ("cleanrl", "rllib")


def summary(document: dict[str, Any]) -> str:
    """A table per task with a row per contender, and their settings."""
    parts = []
    for task in document["tasks"]:
        runs = [run for run in document["runs"] if run["env"] == task["env"]]
        if runs:
            goal = f"{task['env']}, mean return {task['threshold']:.0f} over the last 100 episodes"
            parts += [f"{goal}, at most {task['max_steps']:,} steps; medians (from the best to the worst seed):"]
            parts += [_table_of(runs)]
    done = [run for run in document["runs"] if run["report"]]
    noted = [run for run in done if run["report"]["notes"]]
    notes = sorted({f"{LABELS[_family(run['contender'])]} {run['report']['notes']}" for run in noted})
    if notes:
        parts.append(f"{'; '.join(notes)}.")
    parts += _tried(done)
    if done:
        others = [run["others_cpu_s"] / max(run["wall_s"], 1e-9) for run in done]
        parts.append(
            f"Other processes used {median(others):.2f} cores (median; at most {max(others):.2f}). Runs in which they "
            f"used more than {DISTURBED_CORES} cores are left out if three other runs of the contender remain."
        )
    parts.append(_versions(done))
    return "\n\n".join(parts)


def _table_of(runs: Sequence[Row]) -> str:
    names = _best_of(runs, PEERS)
    calm = {name: _calm([run for run in runs if run["contender"] == name and run["report"]]) for name in names}
    rows = []
    for name in names:
        found = calm[name]
        if not found:
            failed = next(run for run in runs if run["contender"] == name)
            rows.append([_label(failed["contender"]), failed["status"], *("-" for _ in range(6))])
            continue
        reports = [run["report"] for run in found]
        rows.append(
            [
                _label(name),
                f"{sum(report['reached'] for report in reports)} of {len(reports)}",
                _spread([report["seconds"] for report in reports], reports, "{:,.1f}"),
                _spread([run["wall_s"] for run in found], reports, "{:,.1f}"),
                _spread([report["steps"] for report in reports], reports, "{:,.0f}"),
                f"{median(report['steps'] / max(report['seconds'], 1e-9) for report in reports):,.0f}",
                _share(calm, name, "seconds"),
                _share(calm, name, "steps"),
            ]
        )
    header = ["", "reached", "seconds", "whole process, s", "steps", "steps/s", "of CleanRL's s", "of its steps"]
    return table(header, rows)


def _tried(done: Sequence[Row]) -> list[str]:
    """The numbers of environments that a peer was run with, if there are several."""
    said = []
    for peer in PEERS:
        names = {run["contender"] for run in done if _family(run["contender"]) == peer}
        numbers = ", ".join(str(number) for number in sorted(filter(None, map(_num_envs, names))))
        if numbers:
            own = "its own number and with " if peer in names else ""
            said.append(f"{LABELS[peer]} ran with {own}{numbers} environments; the table has the best of them.")
    return [" ".join(said)] if said else []


def _best_of(runs: Sequence[Row], families: Sequence[str]) -> list[str]:
    """Names of contenders in the order of LABELS, each with its best number of environments."""
    found: dict[str, list[str]] = {family: [] for family in LABELS}
    for name in dict.fromkeys(run["contender"] for run in runs):
        found[_family(name)].append(name)
    chosen = []
    for family, names in found.items():
        names.sort(key=lambda name: _num_envs(name) or 0)
        chosen += [min(names, key=lambda name: _rank(runs, name))] if names and family in families else names
    return chosen


def _rank(runs: Sequence[Row], name: str) -> tuple[int, float]:
    """Sort key of contenders: most seeds that reached the threshold, then fewest seconds."""
    reports = [run["report"] for run in runs if run["contender"] == name and run["report"]]
    seconds = median(report["seconds"] for report in reports) if reports else float("inf")
    return -sum(report["reached"] for report in reports), seconds


def _family(name: str) -> str:
    return name.rpartition("-")[0] if _num_envs(name) else name


def _num_envs(name: str) -> int | None:
    last = name.rpartition("-")[2]
    return int(last) if last.isdigit() else None


def _calm(runs: list[Row]) -> list[Row]:
    """Runs that other processes did not disturb; all runs if every one was disturbed."""
    calm = [run for run in runs if run["others_cpu_s"] <= DISTURBED_CORES * run["wall_s"]]
    return calm if len(calm) >= min(3, len(runs)) else runs


def _spread(values: Sequence[float], reports: Sequence[Row], form: str) -> str:
    """Median and extremes; a run that did not reach the threshold counts with its length, a lower bound."""
    more = "" if all(report["reached"] for report in reports) else "> "
    return f"{more}{form.format(median(values))} ({form.format(min(values))} - {form.format(max(values))})"


def _share(runs: dict[str, list[Row]], name: str, key: str) -> str:
    baseline = next((who for who in runs if _family(who) == BASELINE), BASELINE)
    if not runs.get(baseline) or name == baseline:
        return "1" if name == baseline else "-"
    own, other = (median(run["report"][key] for run in runs[who]) for who in (name, baseline))
    return f"{own / other:.2f}"


def _versions(done: Sequence[Row]) -> str:
    said = []
    for name in ("cleanrl", "rllib", "farstep"):
        found = next((run["report"]["versions"] for run in done if run["contender"].partition("-")[0] == name), None)
        if found:
            listed = ", ".join(f"{package} {version}" for package, version in found.items())
            said.append(f"{name}: {listed}")
    return f"Versions: {'; '.join(said)}."


def _label(name: str) -> str:
    number = _num_envs(name)
    return LABELS.get(_family(name), name) + (f", {number} environments" if number else "")


def draw(document: dict[str, Any], folder: Path) -> list[Path]:
    """Draw a plot per task: return over seconds and steps, each contender with its best number of environments."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    written = []
    for task in document["tasks"]:
        runs = [run for run in document["runs"] if run["env"] == task["env"] and run["report"]]
        if not runs:
            continue
        figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained", sharey=True)
        for column, (axis, what) in enumerate(zip(axes, ("seconds of training", "environment steps"), strict=True)):
            for number, name in enumerate(_best_of(runs, list(LABELS))):
                curves = [np.array(run["report"]["curve"]) for run in runs if run["contender"] == name]
                _line(axis, curves, column, f"C{number}", _label(name))
            axis.axhline(task["threshold"], color="grey", linestyle=":", linewidth=1)
            shortest = min(run["report"]["curve"][-1][column] for run in runs)
            axis.set(xlabel=what, xscale="log", xlim=(shortest / 20, None))
            axis.grid(alpha=0.3)
        axes[0].set_ylabel("mean return of the last 100 episodes")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), fontsize=8)
        figure.suptitle(f"{task['env']}: every run ends at the threshold (dotted line); bands from seed to seed")
        folder.mkdir(parents=True, exist_ok=True)
        written.append(folder / f"learning-{task['env'].lower()}.png")
        figure.savefig(written[-1], dpi=110)
        plt.close(figure)
    return written


def _line(axis: Any, curves: list[np.ndarray], column: int, color: str, label: str) -> None:
    """Draw mean and extremes while all seeds run, and a dot at the end of each seed."""
    first, last = max(curve[0, column] for curve in curves), max(curve[-1, column] for curve in curves)
    grid = np.geomspace(max(first, 1e-2), max(last, first * 1.01, 2e-2), 200)
    # A run that has reached the threshold keeps its last value.
    values = np.stack([np.interp(grid, curve[:, column], curve[:, 2]) for curve in curves])
    axis.plot(grid, values.mean(axis=0), color=color, label=label)
    axis.fill_between(grid, values.min(axis=0), values.max(axis=0), color=color, alpha=0.15, linewidth=0)
    axis.plot([c[-1, column] for c in curves], [c[-1, 2] for c in curves], "o", color=color, markersize=4)
