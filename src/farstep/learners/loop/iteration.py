"""What passes between the training loop and a learner: one `Iteration` per row of metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from farstep.batch import Batch
from farstep.config.field_docs import show_fields
from farstep.core import Array
from farstep.learners.loop.timing import Timer


@show_fields
@dataclass(frozen=True, kw_only=True)
class Iteration:
    """What a learner did since its last report."""

    metrics: Mapping[str, float]
    """Metrics by name; they are logged with the prefix `train/`."""
    updates: int
    """Updates of the agent."""
    steps: int
    """Environment steps that arrived."""
    returns: Sequence[float]
    """Returns of the episodes that ended."""
    lengths: Sequence[int]
    """Lengths of these episodes, in steps."""
    lags: Array
    """Age of each row that arrived, in versions."""
    batch: Batch | None = None
    """The rows that arrived, if the learner is synchronous: a run can replay its episodes from them."""
    counters: Mapping[str, float] | None = None
    """Further metrics, logged without a prefix."""


@dataclass(frozen=True)
class CheckpointMarker:
    """Names one checkpoint of a learner."""

    number: int
    """Number of its folder."""
    step: int
    """Environment steps of the run when it was written."""


class Loop(Protocol):
    """What a learner needs of the training loop; `Training` implements it."""

    timer: Timer
    """Measures phases: `with loop.timer("advantages"): ...` is logged as `time/advantages`. One thread at a time."""

    @property
    def checkpoints(self) -> Path | None:
        """Folder of the run's checkpoints; None: the run writes none."""
        ...

    @property
    def newest_checkpoint(self) -> CheckpointMarker | None:
        """The newest checkpoint that this process wrote or resumed from."""
        ...

    def save_last(self) -> None:
        """Write the last checkpoint of the run now, before `Learner.run` returns. The agent must not change again."""
        ...

    @property
    def fraction_done(self) -> float:
        """Fraction of the run that is done, from 0 to 1."""
        ...

    @property
    def total_steps(self) -> int:
        """Environment steps of the whole run."""
        ...

    @property
    def steps_left(self) -> int:
        """Environment steps until the run ends."""
        ...

    @property
    def stopping(self) -> bool:
        """Whether a signal has requested the run to stop."""
        ...

    def collecting(self) -> AbstractContextManager[None]:
        """Measure the time in which the learner waits for rows. Meanwhile, a signal may abandon these rows.

        Returns:
            A context manager; waiting belongs inside.

        Raises:
            Stopped: A signal has requested the run to stop; raised at the start or inside.
        """
        ...

    def report(self, iteration: Iteration) -> bool:
        """Log an iteration, start an evaluation and write a checkpoint if they are due.

        The agent must not change during the call. It may be called from any thread, from one at a time.

        Args:
            iteration: What was done since the last report.

        Returns:
            Whether to continue.
        """
        ...
