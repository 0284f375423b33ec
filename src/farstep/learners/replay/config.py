"""Options that all replay learners share; a field's docstring is its `--help`."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from pathlib import Path

from farstep.config.env import is_number
from farstep.config.field_docs import show_fields
from farstep.elastic.scaling import NoiseScale
from farstep.errors import ConfigError
from farstep.learners.loop.worker_scaling import check_rule
from farstep.learners.options.checks import check_above, check_counts, check_numbers

_CHUNK_ROWS = 64
UNUSABLE_RULES: dict[type, str] = {
    NoiseScale: "a replay learner samples batch_size items per update, however many workers run, so the noise scale "
    "says nothing about the number of workers. Use schedule:FIRST:LAST:ADD:EVERY or fill."
}
"""Scaling rules that replay learners cannot follow, and why."""


@show_fields
@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """Options of the replay buffer and of the loop around it, for items of any kind.

    Raises:
        ConfigError: An option is out of range, or options contradict each other.
    """

    buffer_size: int = 100_000
    """Rows (transitions) that the replay buffer holds; the oldest are evicted. Memory is allocated before training."""
    frame_stack: int | None = None
    """Frames per stacked image observation. The buffer stores each frame once, so that a row takes the memory of one
    frame; samples stay the same. None: the number that FrameStackObservation or EnvPool uses; 0: store whole
    observations."""
    learning_starts: int = 1_000
    """Rows in the buffer before the first update."""
    batch_size: int = 128
    """Items per update."""
    num_steps: int | None = None
    """Steps of each environment per chunk (rollout of one worker); None: 64 divided by the number of environments, at
    least 1. Workers get new weights only between chunks."""
    publish_every: int = 16
    """Updates between two published versions of the weights."""
    report_every: int = 1_000
    """Environment steps between two lines of metrics."""
    buffer_checkpoint_s: float = 600.0
    """Seconds between checkpoints of the replay buffer; one more is written at the end of the run. 0: none, and a
    resumed run starts with an empty buffer. An event at the start says how many bytes one takes."""
    concurrent: bool = True
    """Learn while workers roll. --no-concurrent: alternate; workers roll one chunk each, then wait while the learner
    makes its updates. This is reproducible, but slower unless updates take most of the time; --launcher in-process
    always alternates."""
    scaling: str | None = None
    """Rule that changes the number of workers when weights are published; the ratio of updates to steps
    does not change. schedule:FIRST:LAST:ADD:EVERY (workers at the start and at the end, workers to add, updates between
    changes), or fill[:LOW:HIGH] (the fill is 0 if the learner waits for rows and 1 if the limiter admits no more; add a
    worker while it is below LOW, remove one while it is above HIGH; 0.25 and 0.75 by default). None: all workers
    run."""

    def __post_init__(self) -> None:
        check_counts(self, "buffer_size", "learning_starts", "batch_size", "num_steps", "publish_every", "report_every")
        check_numbers(self, buffer_checkpoint_s=(0, inf))
        check_rule(self.scaling, UNUSABLE_RULES)
        stack = self.frame_stack
        if stack is not None and not (is_number(stack) and stack % 1 == 0 and (stack == 0 or stack >= 2)):
            raise ConfigError(
                f"frame_stack is {stack!r}; expected the number of frames of a stack, at least 2, or 0 to "
                "store whole observations."
            )
        if self.learning_starts > self.buffer_size:
            raise ConfigError(
                f"learning_starts is {self.learning_starts}, more than the {self.buffer_size} rows that the buffer "
                "holds (buffer_size), so learning would never start. Lower learning_starts, or raise buffer_size."
            )

    @property
    def samples_per_row(self) -> float:
        """Rows sampled per row inserted."""
        raise NotImplementedError

    def measured_ratio(self, samples: int, inserts: int) -> dict[str, float]:
        """Return the ratio so far, as a metric.

        Args:
            samples: Rows sampled.
            inserts: Rows inserted after the first `learning_starts`.

        Returns:
            One metric by name; 0 before rows were inserted.
        """
        raise NotImplementedError

    def chunk_steps(self, num_envs: int) -> int:
        """Choose the length of chunks.

        Args:
            num_envs: Number of environments of the run.

        Returns:
            Steps of each environment per chunk: `num_steps`, or a default that depends on `num_envs`; at least 1.
        """
        return self.num_steps or max(1, _CHUNK_ROWS // num_envs)


@show_fields
@dataclass(frozen=True, kw_only=True)
class ReplayConfig(LoopConfig):
    """Options of the replay buffer and of the loop around it, for learners that sample single rows.

    Raises:
        ConfigError: An option is out of range, or options contradict each other.
    """

    batch_size: int = 128
    """Rows per update."""
    updates_per_step: float = 0.5
    """Updates per environment step, after learning_starts rows. The learner or the workers wait if they are ahead."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_above(self, updates_per_step=0)
        check_numbers(self, updates_per_step=(0, inf))

    @property
    def samples_per_row(self) -> float:
        """Rows sampled per row inserted."""
        return self.updates_per_step * self.batch_size

    def measured_ratio(self, samples: int, inserts: int) -> dict[str, float]:
        """Compute updates per environment step so far.

        Args:
            samples: Rows sampled.
            inserts: Rows inserted after the first `learning_starts`.

        Returns:
            `replay/updates_per_step`; 0 before rows were inserted.
        """
        return {"replay/updates_per_step": samples / self.batch_size / inserts if inserts else 0.0}


@show_fields
@dataclass(frozen=True, kw_only=True)
class EpisodeReplayConfig(LoopConfig):
    """Options of the replay buffer and of the loop around it, for learners that sample whole episodes.

    Raises:
        ConfigError: An option is out of range, or options contradict each other.
    """

    batch_size: int = 4
    """Episodes per update."""
    samples_per_step: float = 4.0
    """How often each row is sampled on average: rows sampled per row that arrives, after learning_starts rows.
    The learner or the workers wait if they are ahead."""
    warmup: Path | None = None
    """File with recorded episodes, which are inserted into the replay buffer before workers roll ('farstep eval RUN
    --sample --record FILE' writes one). Their rows count as rows that arrive, but not as environment steps. None:
    the buffer starts empty."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_above(self, samples_per_step=0)
        check_numbers(self, samples_per_step=(0, inf))

    @property
    def samples_per_row(self) -> float:
        """Rows sampled per row inserted."""
        return self.samples_per_step

    def measured_ratio(self, samples: int, inserts: int) -> dict[str, float]:
        """Compute how often each row was sampled so far.

        Args:
            samples: Rows sampled.
            inserts: Rows inserted after the first `learning_starts`.

        Returns:
            `replay/samples_per_step`; 0 before rows were inserted.
        """
        return {"replay/samples_per_step": samples / inserts if inserts else 0.0}
