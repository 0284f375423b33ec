"""Plots return, throughput, staleness, dropped chunks and restarts of runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from farstep.errors import ConfigError, RunError
from farstep.observe.curves import Curve, Group, common_range, read_groups, smoothed, stacked
from farstep.observe.extras import require
from farstep.observe.files import replacing
from farstep.observe.glossary import METRICS
from farstep.observe.run_status import EVALUATION, RESTARTS, RETURN, SPEED, STALENESS, label

_FORMATS = (".png", ".svg", ".pdf")
# Okabe and Ito's palette for color-blind readers, without yellow, because yellow is hard to see on paper.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")
_LINES = ("-", "--", "-.", ":")
_INK, _FAINT = "#333333", "#8a8a8a"
_POINTS_PER_WINDOW = 100
_LARGE_DOTS = 30
_SHOWN_RAW = 3
_LEGEND_CHARACTERS = 120
_RATE_UPDATES = 10
"""Minimum number of updates over which a rate is measured, in runs of at least 50 updates."""
_OLDEST = "lag/versions_max"
_STYLE = {
    "font.size": 10,
    "axes.edgecolor": "#bbbbbb",
    "axes.labelcolor": _INK,
    "axes.titlecolor": _INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#e8e8e8",
    "xtick.color": _INK,
    "ytick.color": _INK,
    "text.color": _INK,
    "legend.frameon": False,
}


def plot(
    runs: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    band: Literal["range", "std"] = "range",
    smooth: int | None = None,
    title: str | None = None,
) -> Path:
    """Plot one or several runs. Runs that differ only in their seed share a line with a band around it.

    Args:
        runs: Folders of the runs.
        out: File to write, ending in .png, .svg or .pdf.
        band: What the band shows: the lowest to the highest seed (`range`), or one standard deviation to both sides
            (`std`).
        smooth: Updates per moving average; 1: no smoothing. None: a hundredth of the run; for rates, at least ten
            updates, or a fifth of a run of fewer than fifty updates.
        title: Heading; None: the environment and the learner, if all runs have the same.

    Returns:
        The path of the file.

    Raises:
        ConfigError: An argument is invalid, or matplotlib is not installed.
        RunError: A folder is not a run, or has no metrics.

    Example:
        plot(["runs/first", "runs/second"], "comparison.png")
    """
    out = Path(out)
    if out.suffix not in _FORMATS:
        raise ConfigError(f"cannot plot to {out.name}; expected a name that ends in {', '.join(_FORMATS)}.")
    if band not in ("range", "std"):
        raise ConfigError(f"got band={band!r}; expected 'range' or 'std'.")
    if smooth is not None and smooth < 1:
        raise ConfigError(f"got smooth={smooth}; expected a number of updates, at least 1.")
    matplotlib = require("matplotlib", "matplotlib", "drawing runs", "rc_context")
    groups = read_groups(runs)
    # A Figure without pyplot changes no global state and needs no display.
    figures = require("matplotlib.figure", "matplotlib", "drawing runs", "Figure")
    with matplotlib.rc_context(_STYLE):
        figure = figures.Figure(layout="constrained")
        _Drawing(figure, groups, band, smooth).draw(title or _title(groups))
        out.parent.mkdir(parents=True, exist_ok=True)
        with replacing(out) as partial:
            figure.savefig(partial, dpi=150)
    return out


def _title(groups: Sequence[Group]) -> str:
    """Return the environment and the learner, if all runs have the same."""
    runs = [run for group in groups for run in group.runs]
    if len(runs) == 1:
        return runs[0].name
    options = (("env_name", "env_id", "env"), ("algorithm", "learner"))
    return " · ".join(
        values.pop()
        for names in options
        if len(values := {run.option(names) for run in runs}) == 1 and "" not in values
    )


class _Drawing:
    """Panels with one line for each group of runs. A panel is drawn only if at least one run has data for it."""

    def __init__(self, figure: Any, groups: Sequence[Group], band: str, smooth: int | None) -> None:
        self._figure, self._groups, self._band, self._smooth = figure, groups, band, smooth

    def draw(self, title: str) -> None:
        panels = [panel for happened, panel in self._panels() if happened]
        if not panels:
            names = ", ".join(run.name for group in self._groups for run in group.runs)
            raise RunError(f"{names}: no episode has ended and no time was logged yet, so there is nothing to plot.")
        for panel, axes in zip(panels, self._axes(len(panels)), strict=True):
            panel(axes)
            axes.margins(x=0.01)
            axes.set_xlim(left=0)
        self._figure.suptitle(title, fontsize=13, fontweight="bold")
        self._legend()

    def _panels(self) -> Iterator[tuple[bool, Callable[[Any], None]]]:
        """Yield for each panel whether there is data, and the function that draws it."""
        for x, panel in (("step", self._return_by_steps), ("seconds", self._return_by_time)):
            yield any(group.curves(name, x) for group in self._groups for name in (RETURN, EVALUATION)), panel
        yield any(self._speeds(group) for group in self._groups), self._throughput
        yield self._positive(lambda group: group.curves(_OLDEST)), self._staleness
        yield self._positive(lambda group: group.increases("dropped/")), self._dropped
        yield self._positive(lambda group: group.curves(RESTARTS)), self._restarts

    def _positive(self, curves: Callable[[Group], list[Curve]]) -> bool:
        return any((ys > 0).any() for group in self._groups for _, ys in curves(group))

    def _axes(self, number: int) -> list[Any]:
        """Return axes in two columns; in three for more than four panels. The last panel fills its row."""
        columns = min(number, 2 if number <= 4 else 3)
        rows = -(-number // columns)
        self._figure.set_size_inches(5.5 * max(columns, 1.5), 0.3 + 3.5 * rows)
        grid = self._figure.add_gridspec(rows, columns)
        places = [divmod(i, columns) for i in range(number)]
        last = number - 1
        return [
            self._figure.add_subplot(grid[row, column:] if i == last else grid[row, column])
            for i, (row, column) in enumerate(places)
        ]

    def _style(self, position: int) -> dict[str, Any]:
        lines = _LINES[position // len(_COLORS) % len(_LINES)]
        return {"color": _COLORS[position % len(_COLORS)], "linestyle": lines}

    # ---- panels ----

    def _return_by_steps(self, axes: Any) -> None:
        self._averaged(axes, METRICS[RETURN].title, lambda group: group.curves(RETURN))
        self._evaluations(axes, "step")

    def _return_by_time(self, axes: Any) -> None:
        self._averaged(axes, f"{METRICS[RETURN].title} over time", lambda group: group.curves(RETURN, "seconds"))
        self._evaluations(axes, "seconds")
        self._clock(axes)

    def _throughput(self, axes: Any) -> None:
        self._heading(axes, f"Recent speed in {METRICS[SPEED].unit}")  # `rate/` is the mean since the start
        for position, group in enumerate(self._groups):
            self._line(axes, self._speeds(group, 1), self._speeds(group), self._style(position))
        axes.yaxis.set_major_formatter(_thousands)
        axes.set_ylim(bottom=0)

    def _staleness(self, axes: Any) -> None:
        self._averaged(axes, METRICS[STALENESS].title, lambda group: group.curves(STALENESS))
        self._oldest(axes)
        top = max(1.0, axes.get_ylim()[1])
        axes.set_ylim(-0.02 * top, top)  # separates a line at zero from the axis

    def _dropped(self, axes: Any) -> None:
        self._heading(axes, f"Dropped {METRICS['dropped/stale'].unit} per update")
        for position, group in enumerate(self._groups):
            averages = [smoothed(curve, self._rate_window(len(curve[0]))) for curve in group.increases("dropped/")]
            self._line(axes, averages, averages, self._style(position))
        axes.set_ylim(bottom=0)

    def _restarts(self, axes: Any) -> None:
        self._heading(axes, f"Worker {label(RESTARTS)} so far")
        for position, group in enumerate(self._groups):
            raw = group.curves(RESTARTS)
            self._line(axes, raw, raw, self._style(position))
        axes.set_ylim(bottom=0)
        axes.yaxis.get_major_locator().set_params(integer=True)

    # ---- lines ----

    def _heading(self, axes: Any, title: str) -> None:
        axes.set_title(title, loc="left", fontsize=11)
        axes.set_xlabel("environment steps")
        axes.xaxis.set_major_formatter(_thousands)

    def _window(self, points: int) -> int:
        return self._smooth or max(points // _POINTS_PER_WINDOW, 1)

    def _rate_window(self, points: int) -> int:
        return self._smooth or max(self._window(points), min(_RATE_UPDATES, points // 5))

    def _speeds(self, group: Group, updates: int | None = None) -> list[Curve]:
        """Return the throughput of each run that has one, over this many updates; None: depends on the length of the
        run."""
        found = [run.speed(updates or self._rate_window(len(run.rows))) for run in group.runs]
        return [curve for curve in found if len(curve[0])]

    def _averaged(self, axes: Any, title: str, curves: Callable[[Group], list[Curve]]) -> None:
        """Draw moving averages of the groups' curves."""
        self._heading(axes, title)
        for position, group in enumerate(self._groups):
            raw = curves(group)
            averages = [smoothed(curve, self._window(len(curve[0]))) for curve in raw]
            self._line(axes, raw, averages, self._style(position))

    def _line(self, axes: Any, raw: list[Curve], curves: list[Curve], style: dict[str, Any]) -> None:
        """Draw the mean of a group's curves with its band. Where only some curves have values, draw thin lines."""
        if not raw:
            return
        if len(raw) == 1 and len(self._groups) <= _SHOWN_RAW and not np.array_equal(raw[0][1], curves[0][1]):
            axes.plot(*raw[0], color=style["color"], alpha=0.22, linewidth=0.8)
        grid, values = stacked(curves)
        mean = values.mean(0)
        if len(curves) > 1:
            spread = values.std(0)
            low, high = (values.min(0), values.max(0)) if self._band == "range" else (mean - spread, mean + spread)
            axes.fill_between(grid, low, high, color=style["color"], alpha=0.16, linewidth=0)
            _, end = common_range(curves)
            for xs, ys in curves:
                axes.plot(xs[xs >= end], ys[xs >= end], color=style["color"], alpha=0.45, linewidth=0.9)
        axes.plot(grid, mean, linewidth=1.8, marker="o" if len(grid) == 1 else None, **style)

    def _evaluations(self, axes: Any, x: str) -> None:
        """Draw the return of evaluations as dots: the mean over seeds, at the steps of the run with the fewest
        evaluations."""
        shown = False
        for position, group in enumerate(self._groups):
            curves = group.curves(EVALUATION, x)
            if not curves:
                continue
            grid = min((xs for xs, _ in curves), key=len)
            start, end = common_range(curves)
            grid = grid[(grid >= start) & (grid <= end)]
            mean = np.mean([np.interp(grid, *curve) for curve in curves], 0)
            color = self._style(position)["color"]
            dots = {"markersize": 4.5, "markeredgecolor": "white"} if len(grid) <= _LARGE_DOTS else {"markersize": 2.2}
            axes.plot(grid, mean, "o", color=color, markeredgewidth=0.8, **dots)
            shown = True
        if shown:
            axes.plot([], [], color=_INK, label="training")
            axes.plot([], [], "o", color=_INK, markersize=4.5, label=label(EVALUATION))
            axes.legend(loc="best", fontsize=9)

    def _oldest(self, axes: Any) -> None:
        """Draw the maximum staleness of each update, unless it equals the mean."""
        shown = False
        for position, group in enumerate(self._groups):
            oldest, means = group.curves(_OLDEST), group.curves(STALENESS)
            if not oldest or all(np.array_equal(a[1], b[1]) for a, b in zip(oldest, means, strict=False)):
                continue
            grid, values = stacked(oldest)
            axes.plot(grid, values.max(0), ":", color=self._style(position)["color"], linewidth=1.1)
            shown = True
        if shown:
            axes.plot([], [], color=_INK, label="mean")
            axes.plot([], [], ":", color=_INK, linewidth=1.1, label=label(_OLDEST))
            axes.legend(loc="best", fontsize=9)

    def _clock(self, axes: Any) -> None:
        """Label the axis of wall-clock time in seconds, minutes or hours."""
        ends = [
            curve[0][-1]
            for group in self._groups
            for name in (RETURN, EVALUATION)
            for curve in group.curves(name, "seconds")
        ]
        longest = max(ends, default=0.0)
        unit, length = next(
            (each for each in (("hours", 3600), ("minutes", 60)) if longest >= 3 * each[1]), ("seconds", 1)
        )
        axes.set_xlabel(f"wall-clock {unit}")
        axes.xaxis.set_major_formatter(lambda seconds, _: f"{seconds / length:g}")
        if length > 1:
            step = _round_step(longest / length / 6) * length
            axes.set_xticks(np.arange(0, longest + step / 2, step))

    def _legend(self) -> None:
        several = any(len(group.runs) > 1 for group in self._groups)
        if len(self._groups) == 1 and not several:
            return
        lines = require("matplotlib.lines", "matplotlib", "drawing runs", "Line2D")
        patches = require("matplotlib.patches", "matplotlib", "drawing runs", "Patch")
        handles = [
            lines.Line2D([], [], linewidth=1.8, label=group.label, **self._style(position))
            for position, group in enumerate(self._groups)
        ]
        if several:
            meaning = "lowest to highest run" if self._band == "range" else "one standard deviation"
            handles.append(patches.Patch(color=_INK, alpha=0.16, linewidth=0, label=meaning))
        widest = max(len(handle.get_label()) for handle in handles)
        columns = max(min(len(handles), _LEGEND_CHARACTERS // (widest + 8)), 1)
        self._figure.legend(handles=handles, loc="outside lower center", ncols=columns)


def _thousands(value: float, position: int | None = None) -> str:
    """Format 12,000 as 12k, and 1,500,000 as 1.5M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def _round_step(rough: float) -> float:
    """Round up to 1, 2 or 5 times a power of ten."""
    power = 10.0 ** np.floor(np.log10(rough))
    return float(next(power * digit for digit in (1, 2, 5, 10) if power * digit >= rough * 0.999))
