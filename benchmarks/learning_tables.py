"""The results of learning.py, and of benchmarks like it, as tables and plots."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from runner import DISTURBED_CORES
from tables import table

Row = dict[str, Any]
"""One run, as in the results file."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Names in the tables and plots of a benchmark."""

    labels: Mapping[str, str]
    """Labels of contenders, by name without a trailing number of environments, in the order of the rows."""
    peers: tuple[str, ...]
    """Contenders of which a table has only the best number of environments."""
    baseline: str
    """The peer that all contenders are compared with."""
    image: str
    """Beginning of the names of plots."""

    def label(self, name: str) -> str:
        number = _num_envs(name)
        return self.labels.get(family(name), name) + (f", {number} environments" if number else "")


PPO = Layout(
    labels={
        "cleanrl": "CleanRL",
        "rllib": "RLlib",
        "farstep-cleanrls": "farstep, CleanRL's hyper-parameters",
        "farstep": "farstep, its own choice",
        "farstep-ppo": "farstep `ppo`",
        "farstep-async-ppo": "farstep `async-ppo`",
        "farstep-impala": "farstep `impala`",
    },
    peers=("cleanrl", "rllib"),
    baseline="cleanrl",
    image="learning",
)
"""The layout of learning.py."""


def summary(document: dict[str, Any], layout: Layout = PPO) -> str:
    """A table per task with a row per contender, and their settings."""
    parts = []
    for task in document["tasks"]:
        runs = [run for run in document["runs"] if run["env"] == task["env"]]
        if runs:
            parts += [f"{_goal(task)}; medians (from the best to the worst seed):"]
            parts += [_table_of(runs, task, layout), *_stopped(runs, layout)]
    done = [run for run in document["runs"] if run["report"]]
    noted = [run for run in done if run["report"]["notes"]]
    notes = sorted({f"{layout.labels[family(run['contender'])]} {run['report']['notes']}" for run in noted})
    if notes:
        parts.append(f"Exceptions: {'; '.join(notes)}.")
    parts += _tried(done, layout)
    if done:
        others = [run["others_cpu_s"] / max(run["wall_s"], 1e-9) for run in done]
        parts.append(
            f"Other processes used {median(others):.2f} cores (median; at most {max(others):.2f}). Runs in which they "
            f"used more than {DISTURBED_CORES} cores are left out if three other runs of the contender remain."
            f"{_disturbed(done, layout)}"
        )
    parts.append(_versions(done, layout))
    return "\n\n".join(parts)


def _goal(task: Row) -> str:
    if task["threshold"] is None:
        return f"{task['env']}, {task['max_steps']:,} steps"
    goal = f"{task['env']}, mean return {task['threshold']:.0f} over the last 100 episodes"
    return f"{goal}, at most {task['max_steps']:,} steps"


def _stopped(runs: Sequence[Row], layout: Layout) -> list[str]:
    """The runs that `--max-seconds` ended."""
    stopped = [run for run in runs if run["report"] and run["report"].get("stopped")]
    named = ", ".join(
        f"{layout.label(run['contender'])}, seed {run['seed']} (after {run['report']['seconds']:,.0f} s, "
        f"{run['report']['steps']:,} steps, with a mean return of {run['report']['last_mean']:,.0f})"
        for run in stopped
    )
    return [f"Stopped by `--max-seconds`: {named}."] if stopped else []


def _table_of(runs: Sequence[Row], task: Row, layout: Layout) -> str:
    calm = calm_runs(runs, layout)
    has_goal = task["threshold"] is not None
    rows = []
    for name, found in calm.items():
        if not found:
            failed = next(run for run in runs if run["contender"] == name)
            rows.append([layout.label(failed["contender"]), failed["status"], *("-" for _ in range(6))])
            continue
        reports = [{**run["report"], "reached": _is_complete(run["report"], has_goal)} for run in found]
        is_bound = not all(report["reached"] for report in reports)
        rows.append(
            [
                layout.label(name),
                f"{sum(report['reached'] for report in reports)} of {len(reports)}"
                if has_goal
                else _spread([report["last_mean"] for report in reports], "{:,.0f}"),
                _spread([report["seconds"] for report in reports], "{:,.1f}", is_bound=is_bound),
                _spread([run["wall_s"] for run in found], "{:,.1f}", is_bound=is_bound),
                _spread([report["steps"] for report in reports], "{:,.0f}", is_bound=is_bound),
                f"{median(report['steps'] / max(report['seconds'], 1e-9) for report in reports):,.0f}",
                _share(calm, name, "seconds", layout, has_goal),
                _share(calm, name, "steps", layout, has_goal),
            ]
        )
    columns = ["", "reached" if has_goal else "return", "seconds", "whole process, s", "steps", "steps/s"]
    return table([*columns, f"of {layout.labels[layout.baseline]}'s s", "of its steps"], rows)


def calm_runs(runs: Sequence[Row], layout: Layout) -> dict[str, list[Row]]:
    """The undisturbed runs of each contender of a task, in the order of the table; empty if all its runs failed."""
    names = _best_of(runs, layout.peers, layout)
    return {name: _calm([run for run in runs if run["contender"] == name and run["report"]]) for name in names}


def _tried(done: Sequence[Row], layout: Layout) -> list[str]:
    """The numbers of environments that a peer was run with, and the tasks on which there are several."""
    tasks: dict[str, list[str]] = {}
    for peer, env in itertools.product(layout.peers, dict.fromkeys(run["env"] for run in done)):
        names = {run["contender"] for run in done if family(run["contender"]) == peer and run["env"] == env}
        numbers = [str(number) for number in sorted(filter(None, map(_num_envs, names)))]
        if len(names) > 1:
            own = "and its default number of environments" if peer in names else "environments"
            which = "better" if len(names) == 2 else "best"
            text = f"{layout.labels[peer]} ran with {', '.join(numbers)} {own}; the table shows the {which} of them"
            tasks.setdefault(text, []).append(env)
    return [" ".join(f"On {_listed(envs)}, {text}." for text, envs in tasks.items())] if tasks else []


def _listed(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else words[0]


def _best_of(runs: Sequence[Row], families: Sequence[str], layout: Layout) -> list[str]:
    """Names of contenders in the order of the labels, each with its best number of environments."""
    found: dict[str, list[str]] = {label: [] for label in layout.labels}
    for name in dict.fromkeys(run["contender"] for run in runs):
        found[family(name)].append(name)
    chosen = []
    for label, names in found.items():
        names.sort(key=lambda name: _num_envs(name) or 0)
        chosen += [min(names, key=lambda name: _rank(runs, name))] if names and label in families else names
    return chosen


def _rank(runs: Sequence[Row], name: str) -> tuple[int, float]:
    """Sort key of contenders: most seeds that reached the threshold, then fewest seconds; if none did, highest return.

    Without the threshold, seconds are those of a fixed number of steps, and say nothing about learning.
    """
    reports = [run["report"] for run in runs if run["contender"] == name and run["report"]]
    reached = sum(report["reached"] for report in reports)
    if reached:
        return -reached, median(report["seconds"] for report in reports)
    return 0, -median(report["last_mean"] for report in reports) if reports else float("inf")


def family(name: str) -> str:
    """The name of a contender without a trailing number of environments."""
    return name.rpartition("-")[0] if _num_envs(name) else name


def _num_envs(name: str) -> int | None:
    last = name.rpartition("-")[2]
    return int(last) if last.isdigit() else None


def _calm(runs: list[Row]) -> list[Row]:
    """Runs that other processes did not disturb; all runs if every one was disturbed."""
    calm = [run for run in runs if run["others_cpu_s"] <= DISTURBED_CORES * run["wall_s"]]
    return calm if len(calm) >= min(3, len(runs)) else runs


def _disturbed(done: Sequence[Row], layout: Layout) -> str:
    """A sentence that names the disturbed runs, if there are any."""
    cores = [(run, run["others_cpu_s"] / max(run["wall_s"], 1e-9)) for run in done]
    named = [
        f"{layout.label(run['contender'])}, seed {run['seed']} ({used:.2f} cores)"
        for run, used in cores
        if used > DISTURBED_CORES
    ]
    if not named:
        return ""
    most = max((used for _, used in cores if used <= DISTURBED_CORES), default=0.0)
    return f" Disturbed runs: {'; '.join(named)}. In all other runs they used at most {most:.2f} cores."


def _spread(values: Sequence[float], form: str, *, is_bound: bool = False) -> str:
    """Median and extremes; a lower bound if runs are incomplete, since these count as far as they came."""
    more = "> " if is_bound else ""
    return f"{more}{form.format(median(values))} ({form.format(min(values))} - {form.format(max(values))})"


def _share(runs: dict[str, list[Row]], name: str, key: str, layout: Layout, has_goal: bool) -> str:
    """Median divided by that of the baseline; a bound if one of them has incomplete runs, `-` if both have."""
    baseline = next((who for who in runs if family(who) == layout.baseline), layout.baseline)
    if not runs.get(baseline) or name == baseline:
        return "1" if name == baseline else "-"
    own, other = (median(run["report"][key] for run in runs[who]) for who in (name, baseline))
    late = [not all(_is_complete(run["report"], has_goal) for run in runs[who]) for who in (name, baseline)]
    bound = "> " if late[0] else "< " if late[1] else ""
    return "-" if all(late) else f"{bound}{own / other:.2f}"


def _is_complete(report: Row, has_goal: bool) -> bool:
    """Whether a run reached the threshold or, if the task has none, made all steps."""
    return bool(report["reached"] if has_goal else not report.get("stopped"))


def _versions(done: Sequence[Row], layout: Layout) -> str:
    said = []
    for name in (*layout.peers, "farstep"):
        found = next((run["report"]["versions"] for run in done if run["contender"].partition("-")[0] == name), None)
        if found:
            listed = ", ".join(f"{package} {version}" for package, version in found.items())
            said.append(f"{name}: {listed}")
    return f"Versions: {'; '.join(said)}."


def draw(document: dict[str, Any], folder: Path, layout: Layout = PPO) -> list[Path]:
    """Draw a plot per task: return over seconds and steps, each contender with its best number of environments."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    written = []
    for task in document["tasks"]:
        runs = [run for run in document["runs"] if run["env"] == task["env"] and run["report"]]
        if not runs:
            continue
        figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained", sharey=True)
        for column, (axis, what) in enumerate(zip(axes, ("seconds of training", "environment steps"), strict=True)):
            for number, name in enumerate(_best_of(runs, list(layout.labels), layout)):
                curves = [np.array(run["report"]["curve"]) for run in runs if run["contender"] == name]
                _line(axis, curves, column, f"C{number}", layout.label(name))
            if task["threshold"] is not None:
                axis.axhline(task["threshold"], color="grey", linestyle=":", linewidth=1)
            shortest = min(run["report"]["curve"][-1][column] for run in runs)
            axis.set(xlabel=what, xscale="log", xlim=(shortest / 20, None))
            axis.xaxis.set(major_locator=LogLocator(subs=(1, 2, 5)), major_formatter=EngFormatter(sep=""))
            axis.xaxis.set_minor_formatter(NullFormatter())
            axis.grid(alpha=0.3)
        axes[0].set_ylabel("mean return of the last 100 episodes")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), fontsize=8)
        ends = f"after {task['max_steps']:,} steps" if task["threshold"] is None else "at the threshold (dotted line)"
        if any(run["report"].get("stopped") for run in runs):
            ends += " or at a limit"
        figure.suptitle(f"{task['env']}: every run ends {ends}; bands from seed to seed")
        folder.mkdir(parents=True, exist_ok=True)
        written.append(folder / f"{layout.image}-{task['env'].lower()}.png")
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
