"""Delays changes of the number of workers until their reason persists, so that the number settles."""

from __future__ import annotations

_FIRST_CALLS, _MOST_CALLS = 8, 256


class Damping:
    """Admits a change only if `_FIRST_CALLS` calls in a row request it.

    The count restarts if the fill moves closer to the range between its bounds. A change that reverses the last one
    doubles the required calls, up to `_MOST_CALLS`; any other halves them. So the number of workers settles if one
    worker less is too few and one more is too many, and still follows a lasting change of the load.
    """

    def __init__(self) -> None:
        self._calls = _FIRST_CALLS
        """Calls in a row that have to request a change."""
        self._last = 0
        """Direction of the last change: 1 (more workers), -1 (fewer), or 0 before the first."""
        self._direction, self._count, self._fill = 0, 0, 0.0
        """The change that the latest calls request, their number, and the fill at the first of them."""

    def admits(self, change: int, fill: float) -> bool:
        """Return whether to make a change now.

        Args:
            change: Number of workers to add; if negative, to remove.
            fill: The buffer fill on which the change is based (see `Signals.buffer_fill`).
        """
        direction = (change > 0) - (change < 0)
        if direction != self._direction or direction * (fill - self._fill) > 0:  # it recovers by itself
            self._direction, self._count, self._fill = direction, 0, fill
        self._count += 1
        if not direction or self._count < self._calls:
            return False
        if direction == -self._last:
            self._calls = min(2 * self._calls, _MOST_CALLS)
        else:
            self._calls = max(self._calls // 2, _FIRST_CALLS)
        self._last, self._direction = direction, 0
        return True
