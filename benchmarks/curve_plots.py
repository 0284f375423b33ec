"""Draws learning curves of several seeds as one line with a band; needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

Curve = Sequence[Sequence[float]]
"""Points; the first number of each is the number of steps."""


def panels(count: int, title: str, xlabel: str = "environment steps") -> tuple[Any, list[Any]]:
    """Make a figure with panels side by side; more than three are in two columns."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import EngFormatter

    columns = count if count <= 3 else 2
    rows = -(-count // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(5.4 * columns, 4.2 * rows), layout="constrained", squeeze=False)
    axes = list(grid.flat)
    for unused in axes[count:]:
        unused.remove()
    figure.suptitle(title)
    for axis in axes[:count]:
        axis.set_xlabel(xlabel)
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        axis.grid(alpha=0.3)
    return figure, axes[:count]


def band(axis: Any, curves: Sequence[Curve], column: int, label: str, color: Any, style: str = "-") -> None:
    """Draw the mean over seeds with a band from lowest to highest; a run that has ended keeps its last value."""
    points = [np.array(curve, float) for curve in curves if curve]
    if not points:
        return
    first, last = min(curve[0, 0] for curve in points), max(curve[-1, 0] for curve in points)
    grid = np.linspace(first, last, 200)
    values = np.stack([np.interp(grid, curve[:, 0], curve[:, column]) for curve in points])
    axis.plot(grid, values.mean(axis=0), color=color, linestyle=style, label=label)
    if len(points) > 1:
        axis.fill_between(grid, values.min(axis=0), values.max(axis=0), color=color, alpha=0.15, linewidth=0)


def save(figure: Any, path: Path) -> Path:
    """Write a figure, with its legend below."""
    import matplotlib.pyplot as plt

    found = {}
    for axis in figure.axes:
        handles, labels = axis.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    if found:
        figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=min(6, len(found)), fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100, metadata={"Software": None})
    plt.close(figure)
    return path
