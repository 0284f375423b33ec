"""When a training run ends, writes checkpoints and evaluates."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from farstep.config.field_docs import show_fields
from farstep.learners.loop.progress import Progress
from farstep.observe.run_status import EPISODES, RETURN, reached_target


@show_fields
@dataclass(frozen=True, kw_only=True)
class Limits:
    """When a run ends, and how often it writes checkpoints and evaluates."""

    total_steps: int
    """Environment steps to train for."""
    target_return: float | None = None
    """Stop when the mean return of the last 100 episodes reaches this; None: no target."""
    checkpoint_every: int | None = None
    """Updates between checkpoints; None: 10, or more if writing would otherwise take over 2 % of the time."""
    eval_every: int | None = None
    """Environment steps between evaluations; None: no evaluations."""

    def reached(self, progress: Progress) -> list[str]:
        """Find the limits that end a run.

        Args:
            progress: The counters of the run.

        Returns:
            A clause for each limit that was reached, with how to raise it; empty if the run continues.
        """
        found = []
        if progress.steps >= self.total_steps:
            found.append(f"{progress.steps:,} of {self.total_steps:,} steps (raise --total-steps)")
        mean = float(np.mean(progress.returns)) if progress.returns else None
        if reached_target(self.target_return, {RETURN: mean, EPISODES: progress.episodes}):
            found.append(f"--target-return {self.target_return:g} (raise it, or pass --target-return None)")
        return found
