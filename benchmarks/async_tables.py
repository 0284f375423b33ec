"""The results of async.py as tables and plots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tables import table

Row = dict[str, Any]
"""One run, as in the results file."""
BASELINE = "sync"


def summary(document: dict[str, Any]) -> str:
    """Tables of times per update compared with the ideal, and of returns."""
    runs, settings = document["runs"], document["settings"]
    names = list(dict.fromkeys(run["setting"] for run in runs))
    found = {name: [run for run in runs if run["setting"] == name] for name in names}
    rows = settings["workers"] * settings["num_steps"]
    parts = [
        f"{settings['workers']} workers with an environment each, steps of {settings['mean_ms']:g} ms on average "
        f"(log-normal, sigma {settings['sigma']:g}), {settings['num_steps']} steps per rollout. The table has seconds "
        f"per {rows:,} rows, means over seeds. The ideal is the longer of collecting alone and learning alone; for "
        "synchronous PPO it is their sum:"
    ]
    parts.append(_times(found, rows))
    if BASELINE in found:
        waited = [sum(run["curve"]["collect_s"][1:]) for run in found[BASELINE]]
        whole = [run["curve"]["seconds"][-1] - run["curve"]["seconds"][0] for run in found[BASELINE]]
        share = f"{1 - sum(waited) / sum(whole):.0%}"
        parts.append(f"In these runs, everything except collecting took {share} of a synchronous update.")
    parts.append(
        f"The same runs, {settings['total_steps']:,} steps, means over the seeds, with the lowest and the highest "
        "value in brackets:"
    )
    parts.append(_learned(found, settings["threshold"]))
    parts.append(
        "*Staleness* is the mean age of the rows of an update, in versions; *at most* is the highest age. *Behavior "
        "KL* is the KL divergence, in nats, between the policy at the start of an update and the policy that acted "
        "(`train/actor/behave_k3`). *Filtered* is the fraction of rows whose weight, the ratio of the action's "
        "probabilities under these two policies, is beyond its bound (`train/actor/behav_clip_fraction`)."
    )
    others = [run["others_cpu_s"] / run["wall_s"] for run in runs]
    if others:
        parts.append(f"Other processes used {np.median(others):.2f} cores (median; at most {max(others):.2f}).")
    return "\n\n".join(parts)


def _times(found: dict[str, list[Row]], rows: int) -> str:
    sync = _mean(found.get(BASELINE, []), "seconds_per_update", rows)
    lines = []
    for name, runs in found.items():
        collect, learn, update = (_mean(runs, key, rows) for key in ("collect_only_s", "learn_only_s", _UPDATE))
        overlaps = runs[0]["overlaps"]
        ideal = max(collect, learn) if overlaps else collect + learn
        saved = "-" if name == BASELINE or not sync else f"{1 - update / sync:.0%}"
        overlap = "-" if not overlaps or not sync or sync <= ideal else f"{(sync - update) / (sync - ideal):.2f}"
        times = [f"{seconds:.3f}" for seconds in (collect, learn, ideal, update)]
        lines.append([name, *times, saved, overlap, f"{ideal / update:.2f}"])
    header = ["", "collect alone", "learn alone", "ideal", "achieved", "less than sync", "of the ideal saving"]
    return table([*header, "ideal / achieved"], lines)


_UPDATE = "seconds_per_update"


def _mean(runs: Sequence[Row], key: str, rows: int) -> float:
    """Mean seconds per `rows` rows; batches of the first chunks to arrive have fewer rows."""
    return float(np.mean([run[key] * rows / run["rows_per_update"] for run in runs])) if runs else 0.0


def _learned(found: dict[str, list[Row]], threshold: float) -> str:
    lines = []
    for name, runs in found.items():
        there = [run for run in runs if run["seconds_to_threshold"] is not None]
        curves = [run["curve"] for run in runs]
        lines.append(
            [
                name,
                f"{len(there)} of {len(runs)}",
                _spread([run["seconds_to_threshold"] for run in there], "{:.1f}"),
                _spread([run["steps_to_threshold"] for run in there], "{:,.0f}"),
                _spread([run["final_return"] for run in runs], "{:.0f}"),
                f"{np.mean([np.mean(curve['lag']) for curve in curves]):.2f}",
                f"{max(max(curve['lag_max']) for curve in curves):.0f}",
                f"{np.mean([np.mean(curve['behave_k3']) for curve in curves]):.4f}",
                f"{np.mean([np.mean(curve['filtered']) for curve in curves]):.4f}",
            ]
        )
    header = ["", f"reach {threshold:g}", "seconds to it", "steps to it", "last 100 episodes"]
    return table([*header, "staleness", "at most", "behavior KL", "filtered"], lines)


def _spread(values: Sequence[float], form: str) -> str:
    if not values:
        return "-"
    return f"{form.format(np.mean(values))} ({form.format(min(values))} - {form.format(max(values))})"


def draw(document: dict[str, Any], folder: Path) -> list[Path]:
    """Draw return over time and over steps; and staleness, divergence and filtered rows over steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    runs = document["runs"]
    names = list(dict.fromkeys(run["setting"] for run in runs))
    pictures = {
        "async-returns": (("seconds", "return", "seconds"), ("step", "return", "environment steps")),
        "async-staleness": (
            ("step", "lag", "staleness, versions"),
            ("step", "behave_k3", "behavior KL (k3), nats"),
            ("step", "filtered", "filtered fraction of rows"),
        ),
    }
    written = []
    folder.mkdir(parents=True, exist_ok=True)
    for picture, panels in pictures.items():
        figure, axes = plt.subplots(1, len(panels), figsize=(5.2 * len(panels), 4.4), layout="constrained")
        for axis, (x, y, label) in zip(axes, panels, strict=True):
            for number, name in enumerate(names):
                _line(axis, [run["curve"] for run in runs if run["setting"] == name], x, y, f"C{number}", name)
            axis.set(xlabel="environment steps" if x == "step" else "seconds")
            axis.set_ylabel("mean return of the last 100 episodes" if y == "return" else label)
            axis.grid(alpha=0.3)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(names), fontsize=8)
        written.append(folder / f"{picture}.png")
        figure.savefig(written[-1], dpi=110)
        plt.close(figure)
    return written


def _line(axis: Any, curves: list[dict[str, list[float]]], x: str, y: str, color: str, label: str) -> None:
    """Draw the mean over seeds up to the end of the shortest, with a band from the lowest to the highest seed."""
    grid = np.linspace(max(curve[x][0] for curve in curves), min(curve[x][-1] for curve in curves), 120)
    smooth = [_smoothed(np.array(curve[y]), 1 if y == "return" else 5) for curve in curves]
    values = np.stack([np.interp(grid, curve[x], kept) for curve, kept in zip(curves, smooth, strict=True)])
    axis.plot(grid, values.mean(axis=0), color=color, label=label)
    axis.fill_between(grid, values.min(axis=0), values.max(axis=0), color=color, alpha=0.12, linewidth=0)


def _smoothed(values: np.ndarray, width: int) -> np.ndarray:
    """Running means, so that lines can be distinguished."""
    padded = np.pad(values, (width // 2, width - 1 - width // 2), mode="edge")
    return np.convolve(padded, np.ones(width) / width, mode="valid")
