"""The status of a run for the terminal, computed from the metrics of its updates."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

from farstep.observe.glossary import METRICS

_HISTORY = 256
_RECENT_UPDATES = 20

RETURN, EVALUATION, SPEED, STALENESS = (
    "env/return_mean",
    "eval/return_mean",
    "rate/steps_per_second",
    "lag/versions_mean",
)
EVALUATION_STEP = "eval/step"
"""Environment steps of training when the evaluation started; training continued until the evaluation was logged."""
RESTARTS, EPISODES = "workers/restarts", "env/episodes"
LAST_EPISODES = 100
"""Number of last episodes whose mean return is reported, and compared with the target return."""


def reached_target(target_return: float | None, latest: Mapping[str, float | None]) -> bool:
    """Return whether the mean return of the last episodes is at least the target.

    Args:
        target_return: The target; None: the run has none.
        latest: The latest value of each metric; None if it was not finite.

    Returns:
        Whether the target is reached; False before the first 100 episodes have ended.
    """
    mean, episodes = latest.get(RETURN), latest.get(EPISODES) or 0
    return target_return is not None and mean is not None and mean >= target_return and episodes >= LAST_EPISODES


class RunStatus:
    """The latest value of each metric, the history of the return, the remaining time, and the time of each phase."""

    def __init__(self, total_steps: int, target_return: float | None = None) -> None:
        self.total_steps, self.target_return = total_steps, target_return
        self.step = 0
        self.updates = 0
        self.latest: dict[str, float] = {}
        self.returns: list[float] = []
        """The history of the return, at most 256 points. When the list is full, pairs of points are averaged."""
        self._updates_per_point = 1
        self._pending: list[float] = []
        """Returns that will be averaged to the next point of `returns`."""
        self._times: deque[dict[str, float]] = deque(maxlen=_RECENT_UPDATES)
        self._steps: deque[tuple[float, int]] = deque(maxlen=_RECENT_UPDATES + 1)
        """Time and step of the latest updates."""

    def update(self, step: int, metrics: Mapping[str, float], now_s: float) -> None:
        """Add the metrics of an update. Ignore values that are not finite.

        Args:
            step: Environment steps so far.
            metrics: Values by name, e.g. `env/return_mean`.
            now_s: Time in seconds, of any monotonic clock.
        """
        known = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        self.step, self.updates = step, self.updates + 1
        self.latest |= known
        self._steps.append((now_s, step))
        times = {name.removeprefix("time/"): s for name, s in known.items() if name.startswith("time/")}
        self._times.append({name: s for name, s in times.items() if "/" not in name})  # skip the times of workers
        if RETURN in known:
            self._add_return(known[RETURN])

    def _add_return(self, value: float) -> None:
        self._pending.append(value)
        if len(self._pending) == self._updates_per_point:
            self.returns.append(sum(self._pending) / self._updates_per_point)
            self._pending = []
        if len(self.returns) == _HISTORY:
            pairs = zip(self.returns[::2], self.returns[1::2], strict=True)
            self.returns = [(a + b) / 2 for a, b in pairs]
            self._updates_per_point *= 2

    @property
    def reached_target(self) -> bool:
        """Whether the run has ended because it reached its target return."""
        return reached_target(self.target_return, self.latest)

    @property
    def fraction(self) -> float:
        """The fraction of the run that is done."""
        if self.reached_target:
            return 1.0
        return min(self.step / self.total_steps, 1.0) if self.total_steps > 0 else 1.0

    def seconds_left(self, now_s: float) -> float | None:
        """Return the remaining seconds at the speed of the latest updates; None if the speed is unknown."""
        if len(self._steps) < 2:
            return None
        (then_s, then), (last_s, last) = self._steps[0], self._steps[-1]
        if last <= then or last_s <= then_s:
            return None
        left = (self.total_steps - last) * (last_s - then_s) / (last - then)
        return max(left - (now_s - last_s), 0.0)

    def shares(self) -> dict[str, float]:
        """Return the share of each phase in the time of the latest updates, in order. The sum is one."""
        sums: dict[str, float] = {}
        for times in self._times:
            for name, seconds in times.items():
                sums[name] = sums.get(name, 0.0) + max(seconds, 0.0)
        whole = sums.pop("step", 0.0)
        parts = {phase_label(name): seconds for name, seconds in sums.items()}
        if whole > sum(parts.values()):
            parts["other"] = whole - sum(parts.values())
        total = sum(parts.values())
        return {name: seconds / total for name, seconds in parts.items() if seconds > 0} if total else {}

    def dropped(self) -> dict[str, int]:
        """Return the number of dropped chunks by cause. Causes with zero chunks are left out, and so are chunks that
        were cancelled because the run ended: these are no losses."""
        prefix = "dropped/"
        names = [name for name in self.latest if name.startswith(prefix) and name != "dropped/cancelled"]
        return {name.removeprefix(prefix): int(count) for name in names if (count := self.latest[name])}


def line(status: RunStatus, now_s: float, diagnosis: str | None = None) -> str:
    """Return the status in one line, for logs and terminals without cursor control.

    Args:
        status: The status to show.
        now_s: Current time, from the same clock as `RunStatus.update`.
        diagnosis: A sentence that says what the run is waiting for; None: show no diagnosis.

    Returns:
        The line.
    """
    latest = status.latest
    parts = [f"steps {status.step:,} of {status.total_steps:,} ({percent(status.fraction)})"]
    if status.reached_target:
        parts = [f"{target_text(status)} after {status.step:,} of {status.total_steps:,} steps"]
    if status.fraction < 1 and (left := status.seconds_left(now_s)) is not None:
        parts.append(f"{duration(left)} left")
    parts += [f"{label(name)} {number(latest[name])}" for name in (RETURN, EVALUATION) if name in latest]
    if SPEED in latest:
        parts.append(f"mean {latest[SPEED]:,.0f} {METRICS[SPEED].unit}")
    if STALENESS in latest:
        parts.append(f"{label(STALENESS)} {latest[STALENESS]:.1f}")
    if restarts := int(latest.get(RESTARTS, 0)):
        parts.append(f"{label(RESTARTS)} {restarts}")
    if dropped := sum(status.dropped().values()):
        parts.append(f"dropped {dropped:,}")
    if shares := " ".join(f"{name} {percent(share)}" for name, share in status.shares().items() if share >= 0.02):
        parts.append(shares)
    if diagnosis:
        parts.append(" ".join(diagnosis.split()))
    return " · ".join(parts)


def target_text(status: RunStatus) -> str:
    """Return the text for a run that has reached its target return."""
    assert status.target_return is not None
    return f"target return {status.target_return:g} reached"


def label(name: str) -> str:
    """Return the short name of a metric of farstep."""
    return METRICS[name].short_name


def phase_label(phase: str) -> str:
    """Return the short name of a phase of an update, which may be one of a user's learner."""
    metric = METRICS.get(f"time/{phase}")
    return metric.short_name if metric is not None else phase


def number(value: float) -> str:
    """Format an episode return with three or four significant digits; more from 10,000 on."""
    size = abs(value)
    if size >= 1e6 or 0 < size < 1e-3:
        return f"{value:.3g}"
    return f"{value:,.0f}" if size >= 10_000 else f"{value:.1f}" if size >= 10 else f"{value:#.3g}"


def percent(fraction: float) -> str:
    """Format a fraction in percent. Show 100 % only if it is exactly one."""
    return f"{min(round(100 * fraction), 99 if fraction < 1 else 100)} %"


def duration(seconds: float) -> str:
    """Format seconds as days, hours, minutes and seconds, e.g. `1:01:01`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    clock = f"{hours}:{minutes:02}:{rest:02}"
    return f"{days} d {clock}" if days else clock


def data_size(nbytes: float) -> str:
    """Format a number of bytes with its decimal unit, e.g. `1.5 kB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" or nbytes >= 100 else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:,.1f} TB"
