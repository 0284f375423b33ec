"""Reads the curves of runs, groups runs that differ only in their seed, and averages them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farstep.errors import ConfigError, RunError
from farstep.observe.files import read_rows
from farstep.observe.run_folder import RunFolder
from farstep.observe.run_status import EVALUATION, EVALUATION_STEP

Numbers = NDArray[np.float64]
Curve = tuple[Numbers, Numbers]
"""x in ascending order, and y."""

_IGNORED = frozenset({"seed", "name", "run_name", "root", "folder", "resume", "run_id", "wandb_run_id"})
"""Options that may differ between runs of the same group."""
_SELF_EXPLANATORY = ("algorithm", "learner", "env_name", "env_id", "env")
"""Options whose values appear in labels without their names, most important first."""
_LABEL_OPTIONS = 3


@dataclass(frozen=True)
class Run:
    """The options and metrics of one run."""

    name: str
    config: dict[str, object]
    """A flat mapping; names of nested options are joined by dots."""
    rows: list[dict[str, Any]]

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Run:
        """Read the run in a folder. Raise `RunError` if it has no metrics."""
        folder = RunFolder.open(path)
        config = _flat(folder.read_config())
        try:
            rows = read_rows(folder.metrics_file)
        except FileNotFoundError:
            raise RunError(f"{folder.metrics_file} does not exist; the run has not reached its first update.") from None
        except OSError as error:
            raise RunError(f"{folder.metrics_file} cannot be read: {error}.") from error
        if not rows:
            raise RunError(f"{folder.metrics_file} has no metrics; the run has not reached its first update.")
        return cls(folder.path.resolve().name, config, rows)

    def curve(self, y: str, x: str = "step") -> Curve:
        """Return one metric as a function of another, at the updates that have both."""
        points = [(row[x], row[y]) for row in self.rows if row.get(x) is not None and row.get(y) is not None]
        xs, ys = np.array(points, np.float64).reshape(-1, 2).T
        return (_without_restarts(xs) if x == "seconds" else xs), ys

    def evaluations(self, x: str = "step") -> Curve:
        """Return the mean return of evaluations by `step` or `seconds`, each where it started."""
        rows = [row for row in self.rows if row.get(EVALUATION) is not None]
        points = [(row.get(EVALUATION_STEP, row["step"]), row[EVALUATION]) for row in rows]
        starts, returns = np.array(points, np.float64).reshape(-1, 2).T
        if x == "step":
            return starts, returns
        steps, seconds = self.curve("seconds")
        if not len(steps):  # no time was logged
            return starts[:0], returns[:0]
        return np.interp(starts, steps, _without_restarts(seconds)), returns

    def speed(self, updates: int) -> Curve:
        """Return the steps per second over the latest `updates` updates, at each update."""
        steps, seconds = self.curve("seconds", "step")
        seconds = _without_restarts(seconds)
        steps, seconds = np.concatenate([[0.0], steps]), np.concatenate([[0.0], seconds])
        best = np.maximum.accumulate(steps)
        latest = np.maximum.accumulate(seconds)
        later = np.concatenate([[True], (steps[1:] > best[:-1]) & (seconds[1:] > latest[:-1])])
        steps, seconds = steps[later], seconds[later]  # skip rows that only report an evaluation
        at = np.arange(1, len(steps))
        before = np.maximum(at - updates, 0)
        return steps[at], (steps[at] - steps[before]) / (seconds[at] - seconds[before])

    def increase(self, prefix: str) -> Curve:
        """Return the increase with each update, summed over all counters with this prefix."""
        latest: dict[str, float] = {}
        totals = [0.0]
        for row in self.rows:
            latest |= {name: value for name, value in row.items() if name.startswith(prefix) and value is not None}
            totals.append(sum(latest.values()))
        grown = np.maximum(np.diff(np.array(totals)), 0.0)  # a resumed run counts from zero again
        return np.array([row["step"] for row in self.rows], np.float64), grown

    def option(self, names: Sequence[str]) -> str:
        """Return the value of the first of these options that the run has, at any depth; "" if it has none of them."""
        for name in names:
            for key, value in self.config.items():
                if key.rpartition(".")[2] == name and isinstance(value, (str, int)):
                    return str(value)
        return ""


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed."""

    label: str
    runs: list[Run]

    def curves(self, y: str, x: str = "step") -> list[Curve]:
        """Return the curves of the runs that have at least one point."""
        found = [run.evaluations(x) if y == EVALUATION else run.curve(y, x) for run in self.runs]
        return [curve for curve in found if len(curve[0])]

    def increases(self, prefix: str) -> list[Curve]:
        """Return for each run the increase with each update, summed over all counters with this prefix."""
        return [run.increase(prefix) for run in self.runs]


def _without_restarts(seconds: Numbers) -> Numbers:
    """Return continuous times, although the clock of a resumed run restarts at zero."""
    lost: Numbers = np.maximum(-np.diff(seconds, prepend=seconds[:1]), 0)
    return seconds + np.cumsum(lost)


def read_groups(paths: Sequence[str | os.PathLike[str]]) -> list[Group]:
    """Read runs in the order of `paths`, and group runs that differ only in their seed."""
    if not paths:
        raise ConfigError("there is no run to plot; expected the folders of one or several runs.")
    alike: dict[str, list[Run]] = {}
    for path in paths:
        run = Run.read(path)
        alike.setdefault(repr(sorted(_compared(run).items())), []).append(run)
    found = list(alike.values())
    return [Group(label, runs) for label, runs in zip(_labels(found), found, strict=True)]


def smoothed(curve: Curve, updates: int) -> Curve:
    """Return the moving average over `updates` points; at both ends, over fewer points."""
    xs, ys = curve
    half = min(updates, len(ys)) // 2
    if not half:
        return curve
    sums = np.concatenate([[0.0], np.cumsum(ys)])
    at = np.arange(len(ys))
    low, high = np.maximum(at - half, 0), np.minimum(at + half + 1, len(ys))
    return xs, (sums[high] - sums[low]) / (high - low)


def common_range(curves: Sequence[Curve]) -> tuple[float, float]:
    """Return the range of x in which all curves have values. If start exceeds end, the range is empty."""
    return max(float(xs[0]) for xs, _ in curves), min(float(xs[-1]) for xs, _ in curves)


def stacked(curves: Sequence[Curve]) -> tuple[Numbers, Numbers]:
    """Interpolate the curves at common x within their common range. Return x and the values [n, points]."""
    start, end = common_range(curves)
    grid = max((xs for xs, _ in curves), key=len)
    grid = (
        np.unique(np.concatenate([[start], grid[(grid > start) & (grid < end)], [end]])) if start <= end else grid[:0]
    )
    return grid, np.stack([np.interp(grid, xs, ys) for xs, ys in curves])


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for name, value in config.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat


def _compared(run: Run) -> dict[str, object]:
    return {name: value for name, value in run.config.items() if name.rpartition(".")[2] not in _IGNORED}


def _labels(groups: Sequence[Sequence[Run]]) -> list[str]:
    """Return a label per group: the options that differ if there are few, otherwise the name of the first run."""
    names = [runs[0].name for runs in groups]
    if len(groups) == 1 and len(groups[0]) > 1:
        return [f"mean of {_number(groups[0])}"]
    if len(groups) > 1:
        configs = [_compared(runs[0]) for runs in groups]
        shared = [name for name in configs[0] if all(name in config for config in configs)]
        differing = [name for name in shared if len({repr(config[name]) for config in configs}) > 1]
        differing.sort(key=lambda name: (_rank(name), name))
        # Different algorithms also have different options; then the name of the algorithm suffices.
        chosen = next(
            (differing[:n] for n in range(1, _LABEL_OPTIONS + 1) if _tell_apart(configs, differing[:n])), None
        )
        if chosen and (len(differing) <= _LABEL_OPTIONS or _rank(chosen[0]) < len(_SELF_EXPLANATORY)):
            names = [", ".join(_described(name, config[name]) for name in chosen) for config in configs]
    return [f"{name} ({_number(runs)})" if len(runs) > 1 else name for name, runs in zip(names, groups, strict=True)]


def _tell_apart(configs: Sequence[Mapping[str, object]], options: Sequence[str]) -> bool:
    return len({repr([config[name] for name in options]) for config in configs}) == len(configs)


def _rank(option: str) -> int:
    name = option.rpartition(".")[2]
    return _SELF_EXPLANATORY.index(name) if name in _SELF_EXPLANATORY else len(_SELF_EXPLANATORY)


def _described(option: str, value: object) -> str:
    return str(value) if _rank(option) < len(_SELF_EXPLANATORY) else f"{option.rpartition('.')[2]}={value}"


def _number(runs: Sequence[Run]) -> str:
    seeds = sorted(run.option(["seed"]) for run in runs)
    different = "" not in seeds and all(a != b for a, b in pairwise(seeds))
    return f"{len(runs)} {'seeds' if different else 'runs'}"
