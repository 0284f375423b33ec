"""Points of a curve, for a page that is opened at any time of a long run."""

from __future__ import annotations

import math

_MOST = 400


class Series:
    """A curve of at most 400 points. When it is full, pairs of points are averaged."""

    def __init__(self) -> None:
        self.points: list[tuple[float, float]] = []
        self._per_point = 1
        self._pending: list[tuple[float, float]] = []
        """Values that will be averaged to the next point."""

    def add(self, x: float, y: float) -> None:
        """Append a value; ignore it if it is not finite."""
        if not math.isfinite(x) or not math.isfinite(y):
            return
        self._pending.append((x, y))
        if len(self._pending) == self._per_point:
            self.points.append(_mean(self._pending))
            self._pending = []
        if len(self.points) == _MOST:
            self.points = [_mean(self.points[i : i + 2]) for i in range(0, _MOST, 2)]
            self._per_point *= 2

    def rounded(self) -> list[list[float]]:
        """Return the points with six significant digits, as JSON values."""
        return [[float(f"{x:.6g}"), float(f"{y:.6g}")] for x, y in [*self.points, *self._pending[-1:]]]


def _mean(points: list[tuple[float, float]]) -> tuple[float, float]:
    return points[-1][0], sum(y for _, y in points) / len(points)
