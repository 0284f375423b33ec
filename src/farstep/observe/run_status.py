"""How a run stands, made of the metrics of its updates; what the terminal shows, without the terminal."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

_HISTORY = 256
_RECENT_UPDATES = 20

RETURN = "env/return_mean"
_PHASES = {"recompute_logprobs": "recompute"}
"""Phases of an update whose names are too long to be shown."""


class RunStatus:
    """The latest of each metric, the history of the return, the time that is left and where time goes."""

    def __init__(self, total_steps: int) -> None:
        self.total_steps = total_steps
        self.step = 0
        self.updates = 0
        self.latest: dict[str, float] = {}
        self.returns: list[float] = []
        """The return from the beginning until now; as it grows, neighbours are joined."""
        self._joined = 1
        self._waiting: list[float] = []
        self._times: deque[dict[str, float]] = deque(maxlen=_RECENT_UPDATES)
        self._reached: deque[tuple[float, int]] = deque(maxlen=_RECENT_UPDATES + 1)

    def update(self, step: int, metrics: Mapping[str, float], now_s: float) -> None:
        """Take the metrics of an update; what is not finite is as if it were not there."""
        known = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        self.step, self.updates = step, self.updates + 1
        self.latest |= known
        self._reached.append((now_s, step))
        self._times.append({name.removeprefix("time/"): s for name, s in known.items() if name.startswith("time/")})
        if RETURN in known:
            self._remember(known[RETURN])

    def _remember(self, value: float) -> None:
        self._waiting.append(value)
        if len(self._waiting) == self._joined:
            self.returns.append(sum(self._waiting) / self._joined)
            self._waiting = []
        if len(self.returns) == _HISTORY:
            pairs = zip(self.returns[::2], self.returns[1::2], strict=True)
            self.returns = [(a + b) / 2 for a, b in pairs]
            self._joined *= 2

    @property
    def fraction(self) -> float:
        """The part of all steps that is done."""
        return min(self.step / self.total_steps, 1.0) if self.total_steps > 0 else 1.0

    def seconds_left(self, now_s: float) -> float | None:
        """Time to the last step at the speed of the latest updates; None while there is no speed."""
        if len(self._reached) < 2:
            return None
        (then_s, then), (last_s, last) = self._reached[0], self._reached[-1]
        if last <= then or last_s <= then_s:
            return None
        left = (self.total_steps - last) * (last_s - then_s) / (last - then)
        return max(left - (now_s - last_s), 0.0)

    def shares(self) -> dict[str, float]:
        """The parts of the latest updates' time that each phase took, in the order of the phases; they sum to one."""
        sums: dict[str, float] = {}
        for times in self._times:
            for name, seconds in times.items():
                sums[name] = sums.get(name, 0.0) + max(seconds, 0.0)
        whole = sums.pop("step", 0.0)
        parts = {_PHASES.get(name, name): seconds for name, seconds in sums.items()}
        if whole > sum(parts.values()):
            parts["other"] = whole - sum(parts.values())
        total = sum(parts.values())
        return {name: seconds / total for name, seconds in parts.items() if seconds > 0} if total else {}

    def dropped(self) -> dict[str, int]:
        """What was thrown away, by cause."""
        prefix = "dropped/"
        return {name.removeprefix(prefix): int(n) for name, n in self.latest.items() if name.startswith(prefix) and n}


def line(standing: RunStatus) -> str:
    """The standing in one line, for logs and terminals that cannot be drawn on."""
    latest = standing.latest
    parts = [f"steps {standing.step:,} of {standing.total_steps:,} ({percent(standing.fraction)})"]
    if RETURN in latest:
        parts.append(f"return {number(latest[RETURN])}")
    if "eval/return_mean" in latest:
        parts.append(f"evaluation {number(latest['eval/return_mean'])}")
    if "rate/steps_per_second" in latest:
        parts.append(f"{latest['rate/steps_per_second']:,.0f} steps/s")
    if "lag/versions_mean" in latest:
        parts.append(f"staleness {latest['lag/versions_mean']:.1f}")
    if restarts := int(latest.get("workers/restarts", 0)):
        parts.append(f"restarts {restarts}")
    if dropped := sum(standing.dropped().values()):
        parts.append(f"dropped {dropped:,}")
    if shares := " ".join(f"{name} {percent(share)}" for name, share in standing.shares().items() if share >= 0.02):
        parts.append(shares)
    return " · ".join(parts)


def number(value: float) -> str:
    """A return: its digits where they matter."""
    size = abs(value)
    if size >= 1e6 or 0 < size < 1e-3:
        return f"{value:.3g}"
    return f"{value:,.0f}" if size >= 10_000 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def percent(fraction: float) -> str:
    """A part of the whole; a hundred only when it is all."""
    return f"{min(round(100 * fraction), 99 if fraction < 1 else 100)} %"


def duration(seconds: float) -> str:
    """A time in hours, minutes and seconds."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    clock = f"{hours}:{minutes:02}:{rest:02}"
    return f"{days} d {clock}" if days else clock


def data_size(nbytes: float) -> str:
    """A number of bytes."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" or nbytes >= 100 else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:,.1f} TB"
