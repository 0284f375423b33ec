"""Shared by the contenders of learning.py and offpolicy.py in every environment: arguments, the curve, the report."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from statistics import fmean

from versions import versions_of

LAST_EPISODES = 100
CURVE_POINTS = 200


@dataclass(frozen=True, kw_only=True)
class Task:
    """What to learn, and when that is done."""

    env: str
    seed: int
    threshold: float
    """Mean return of the last 100 training episodes; infinite: train for `max_steps`."""
    max_steps: int
    max_seconds: float = math.inf
    """Seconds of training after which a peer's run ends."""


def parse_arguments(parser: argparse.ArgumentParser | None = None) -> tuple[Task, argparse.Namespace]:
    """The task, and what `parser` knows besides."""
    parser = parser or argparse.ArgumentParser()
    parser.add_argument("--env", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--threshold", type=float, default=math.inf)
    parser.add_argument("--max-steps", type=int, required=True)
    parser.add_argument("--max-seconds", type=float, default=math.inf)
    options = parser.parse_args()
    return Task(**{entry.name: getattr(options, entry.name) for entry in fields(Task)}), options


@dataclass
class Curve:
    """Mean return of the last 100 episodes over seconds of training and steps of environments."""

    task: Task
    points: list[tuple[float, int, float]] = field(default_factory=list)
    reached: bool = False
    _began: float = field(default_factory=time.monotonic)
    _returns: deque[float] = field(default_factory=lambda: deque(maxlen=LAST_EPISODES))

    def begin(self) -> None:
        """Training begins now, not when this was made."""
        self._began = time.monotonic()

    def episode(self, steps: int, value: float) -> bool:
        """Add an episode that has ended. Return whether training is over."""
        self._returns.append(value)
        return self.mean(steps, fmean(self._returns), len(self._returns))

    def mean(self, steps: int, mean: float, episodes: int, seconds: float | None = None) -> bool:
        """The same where a library computes the mean itself, over `episodes` episodes."""
        seconds = time.monotonic() - self._began if seconds is None else seconds
        self.points.append((seconds, steps, mean))
        self.reached = self.reached or (episodes >= LAST_EPISODES and mean >= self.task.threshold)
        return self.reached or seconds >= self.task.max_seconds


def report(
    name: str,
    task: Task,
    curve: Curve,
    settings: dict[str, object] | str,
    packages: Sequence[str],
    notes: str = "",
    updates: int | None = None,
    learner_s: float | None = None,
) -> None:
    """Print what the benchmark reads.

    Args:
        name: Name of the contender.
        task: The task.
        curve: Returns over seconds and steps.
        settings: Hyper-parameters, or the command.
        packages: Packages whose versions are reported.
        notes: How the task differs from that of other contenders.
        updates: Optimizer steps until the end of the curve; None: not counted.
        learner_s: Seconds that the learner spent on sampling and on optimizer steps; None: not measured.
    """
    if not curve.points:
        raise SystemExit(f"RuntimeError: no episode ended within {task.max_steps:,} steps; use a larger --max-steps")
    seconds, steps, mean = curve.points[-1]
    every = max(1, len(curve.points) // CURVE_POINTS)
    kept = [*curve.points[:-1:every], curve.points[-1]]
    found = {
        "contender": name,
        "env": task.env,
        "reached": curve.reached,
        "seconds": round(seconds, 2),
        "steps": steps,
        "last_mean": round(mean, 2),
        "settings": settings,
        "notes": notes,
        **({} if updates is None else {"updates": updates}),
        **({} if learner_s is None else {"learner_s": round(learner_s, 3)}),
        **({"stopped": True} if seconds >= task.max_seconds and not curve.reached else {}),
        "versions": versions_of(*packages),
        "curve": [[round(second, 2), step, round(value, 2)] for second, step, value in kept],
    }
    print(f"\n{json.dumps(found)}", flush=True)
