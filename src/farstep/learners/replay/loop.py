"""The loop of all replay learners, over a `Workflow`: rolling, inserting and learning at the same time.

    workers ─chunks─► Workflow.run (caller's thread) ─insert─► Buffer ◄─limiter─► learner's thread ─publish─► workers

Only the caller's thread inserts. Only the learner's thread touches the agent: updates, published versions, evaluations
and checkpoints all happen there, between two optimizer steps, so none of them sees half an update.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Mapping
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from farstep.batch import Batch
from farstep.buffer.limiter import RateLimiter
from farstep.buffer.replay import Buffer
from farstep.buffer.samplers import DPER, Sampler
from farstep.cluster_env import ClusterEnv
from farstep.config.launch import InProcessConfig
from farstep.errors import CheckpointError, ConfigError, counted
from farstep.learners.loop.iteration import Iteration, Loop
from farstep.learners.loop.statistics import check_rewards
from farstep.learners.loop.worker_scaling import WorkerScaling
from farstep.learners.networks.agent import NetworkAgent
from farstep.learners.optimizing import Means, onednn_for_images
from farstep.learners.replay.batches import DeviceBatches, ReplayBatch
from farstep.learners.replay.buffer_checkpoints import BufferCheckpoints
from farstep.learners.replay.collected import Collected
from farstep.learners.replay.complete_episodes import CompleteEpisodes
from farstep.learners.replay.config import EpisodeReplayConfig, LoopConfig
from farstep.learners.replay.frame_stacks import frame_stack_of
from farstep.learners.replay.recorded_episodes import RecordedEpisodes
from farstep.workflow.triggers import DataKeyTrigger, ObjectKeyTrigger, TimeTrigger
from farstep.workflow.triggers.messages import Message
from farstep.workflow.workflow import Workflow

_ROUNDS_AHEAD = 2
"""Rounds of chunks that workers may be ahead of the learner."""
_REFRESH_BATCHES = 4
"""Number of batches whose items are read together to recompute their priorities."""
_REPORT_S = 10.0
"""Longest time between two rows of metrics, in seconds, if rows arrive slowly."""


class ReplayAlgorithm(Protocol):
    """What the loop needs of a replay learner."""

    @property
    def agent(self) -> NetworkAgent:
        """The agent that acts on workers and is updated here."""
        ...

    @property
    def device(self) -> torch.device:
        """Device of the learner."""
        ...

    @property
    def sampler(self) -> Sampler:
        """How rows are sampled."""
        ...

    @property
    def names(self) -> Collection[str]:
        """The arrays of a batch that `step` needs."""
        ...

    def step(self, batch: ReplayBatch) -> tuple[Mapping[str, Tensor], Tensor | None]:
        """Update the agent on a batch.

        Args:
            batch: The rows to learn from.

        Returns:
            Metrics by name, and the new priorities of the rows, `[batch]`; None: rows have no priorities.
        """
        ...

    def explore(self, steps: int, num_envs: int) -> None:
        """Set how the agent explores, before it is published.

        Args:
            steps: Environment steps so far.
            num_envs: Number of environments.
        """
        ...


@runtime_checkable
class RefreshesPriorities(Protocol):
    """What the loop needs of a learner that recomputes the priorities of all items from time to time."""

    @property
    def refresh_every(self) -> int | None:
        """Updates between two refreshes; None: never."""
        ...

    def priorities(self, batch: ReplayBatch) -> Tensor:
        """Compute the priorities of items under the current agent, `[batch]`, without an update."""
        ...


class ReplayLoop:
    """Runs a replay learner.

    Args:
        algorithm: The learner.
        config: Options of the buffer and the loop.
        seed: Seed of the sampler.
        resumed: Whether the run continues from a checkpoint; the buffer then continues from its own.
        scaling: Changes the number of workers; None: it does not change.
    """

    def __init__(
        self,
        algorithm: ReplayAlgorithm,
        config: LoopConfig,
        seed: int,
        resumed: bool = False,
        scaling: WorkerScaling | None = None,
    ) -> None:
        self._algorithm, self._config, self._seed, self._resumed = algorithm, config, seed, resumed
        self._scaling = scaling

    def run(self, env: ClusterEnv, loop: Loop) -> None:
        """Collect and learn until the run is done, or `loop` stops it.

        Args:
            env: The environments to train in.
            loop: The training loop.

        Raises:
            RewardError: A reward is not finite.
            ConfigError: The file with recorded episodes does not fit.
            FarstepError: A worker, an environment or the agent failed and could not be replaced.
        """
        checkpoints = BufferCheckpoints(self._config, env.emit_event, loop)
        with contextlib.closing(checkpoints), contextlib.ExitStack() as stack:
            session = self._resume(env, loop, checkpoints, stack) if self._resumed else None
            if session is None:
                buffer = make_buffer(self._config, self._algorithm.sampler, env, self._seed)
                session = self._open(env, loop, stack.enter_context(buffer), checkpoints, stack)
                if not self._resumed:
                    session.warm_up()
            session.run()

    def _open(
        self, env: ClusterEnv, loop: Loop, buffer: Buffer, checkpoints: BufferCheckpoints, stack: contextlib.ExitStack
    ) -> _Session:
        session = _Session(self._algorithm, self._config, env, loop, buffer, checkpoints, self._scaling)
        stack.callback(session.close)
        with loop.collecting():  # a signal ends the wait for workers that import the agent's modules
            session.bind()
        return session

    def _resume(
        self, env: ClusterEnv, loop: Loop, checkpoints: BufferCheckpoints, stack: contextlib.ExitStack
    ) -> _Session | None:
        """Return a session that continues with the rows of the buffer's checkpoint; None if it cannot be used."""
        limiter = make_limiter(self._config, self._config.chunk_steps(env.num_envs) * env.num_envs)
        with contextlib.ExitStack() as opened:
            try:
                buffer = opened.enter_context(checkpoints.restore(self._algorithm.sampler, limiter))
                self._check_pooling(buffer, env)
                session = self._open(env, loop, buffer, checkpoints, opened)
            except (CheckpointError, ConfigError) as error:
                reason = " ".join(str(error).split())  # it may have one line per checkpoint
                env.emit_event(
                    "warned",
                    f"the replay buffer starts empty: {reason} Learning continues after "
                    f"{self._config.learning_starts:,} new rows (--learning-starts).",
                )
                return None
            stack.push(opened.pop_all())
        return session

    def _check_pooling(self, restored: Buffer, env: ClusterEnv) -> None:
        """Raise `CheckpointError` if a concurrent run saved the buffer and this one alternates, or vice versa."""
        with make_buffer(self._config, self._algorithm.sampler, env, seed=0) as wanted:
            if wanted.options.is_pooled == restored.options.is_pooled:
                return
        now, then = ("without", "with") if is_concurrent(self._config, env) else ("with", "without")
        raise CheckpointError(
            f"it was saved {then} --no-concurrent (or --launcher in-process), and the run continues {now} it, so "
            f"environments share its rows in another way. Resume {then} this option to keep the rows."
        )


def make_buffer(config: LoopConfig, sampler: Sampler, env: ClusterEnv, seed: int) -> Buffer:
    """Make the buffer of a run, without its arrays.

    Args:
        config: Options of the loop.
        sampler: How items are sampled.
        env: The launched environments.
        seed: Seed of the sampler.
    """
    return Buffer(
        config.buffer_size,
        sampler,
        limiter=make_limiter(config, config.chunk_steps(env.num_envs) * env.num_envs),
        pooled=is_concurrent(config, env),
        frame_stack=frame_stack_of(config, env),
        seed=seed,
    )


def make_limiter(config: LoopConfig, round_rows: int) -> RateLimiter:
    """Return the limiter that holds the ratio of samples to steps, in rows after the first `learning_starts`.

    The learner is never ahead of the ratio, with one exception: if items are episodes, whose length is known only after
    sampling, it may be ahead by one batch. Workers may be ahead by two rounds of chunks and a batch.

    Args:
        config: Options of the loop.
        round_rows: Rows of one chunk of every worker.
    """
    ratio = config.samples_per_row
    first = config.learning_starts * ratio
    ahead = config.batch_size + _ROUNDS_AHEAD * round_rows * ratio
    return RateLimiter(ratio, config.learning_starts, first, first + ahead)


def is_concurrent(config: LoopConfig, env: ClusterEnv) -> bool:
    """Return whether to learn while workers roll. Workers in this process cannot."""
    return config.concurrent and not isinstance(env.config, InProcessConfig)


class _Session:
    """One run of a replay learner."""

    def __init__(
        self,
        algorithm: ReplayAlgorithm,
        config: LoopConfig,
        env: ClusterEnv,
        loop: Loop,
        buffer: Buffer,
        checkpoints: BufferCheckpoints,
        scaling: WorkerScaling | None,
    ) -> None:
        self._algorithm, self._config, self._env, self._loop, self._buffer = algorithm, config, env, loop, buffer
        self._checkpoints, self._scaling = checkpoints, scaling
        self._earlier_updates = 0 if scaling is None else scaling.updates
        """Updates of the run before this session, for the scaling rule."""
        are_episodes = isinstance(buffer.sampler, DPER)
        self._episodes = CompleteEpisodes(buffer, partial(env.emit_event, "warned")) if are_episodes else None
        self._batches = DeviceBatches(buffer, config.batch_size, algorithm.names, algorithm.device, self._episodes)
        self._refreshes = algorithm if isinstance(algorithm, RefreshesPriorities) else None
        self._collected = Collected()
        self._means = Means()
        self._updates = self._reported_updates = self._published_updates = 0
        self._reported_at = time.monotonic()
        self._steps_left = loop.steps_left
        """Environment steps of this session."""
        self._going = True

    def bind(self) -> None:
        """Make the workflow, launch the workers and allocate the buffer's arrays.

        Raises:
            ConfigError: The buffer was restored, and does not fit these environments.
        """
        steps = self._config.chunk_steps(self._env.num_envs)
        self._explore()
        flow = self._flow = Workflow(self._env, self._algorithm.agent, self._buffer, steps=steps)
        if is_concurrent(self._config, self._env):
            flow.on_chunk = self._collect
            flow.on(TimeTrigger(1, unit="env_steps"), self._learn, thread=True, name="learn")
        else:
            flow.on(DataKeyTrigger(n="all", size=steps), self._alternate, name="alternate")
            flow.on(ObjectKeyTrigger("parameters"), flow.next_rollout, updates=False)
        flow.bind()

    def warm_up(self) -> None:
        """Insert recorded episodes, if the options name a file. They count as rows, and not as environment steps.

        Raises:
            ConfigError: The file does not fit the environments or the learner.
        """
        path = self._config.warmup if isinstance(self._config, EpisodeReplayConfig) else None
        if path is None:
            return
        recorded = RecordedEpisodes.load(path)
        recorded.check(path, self._buffer.schema, self._algorithm.names, self._env.launch())
        recorded.check_room(path, self._buffer.capacity)
        recorded.insert_into(self._buffer)  # `CompleteEpisodes` does not bound inserts yet
        self._env.emit_event(
            "loaded",
            f"inserted {counted(len(recorded), 'recorded episode')} of {recorded.lengths.sum():,} rows from {path} "
            f"into the replay buffer; their mean return is {recorded.returns.mean():.4g}",
        )

    def run(self) -> None:
        """Run the workflow, then report the rest and write the last checkpoints."""
        self._checkpoints.start(self._buffer)
        if self._scaling is not None:
            rows = self._config.chunk_steps(self._env.num_envs) * self._env.num_envs
            self._scaling.start(self._env, self._earlier_updates, rows, self._fill)
        self._make_updates()  # of the rows that a stopped run left; until then, the limiter may refuse new rows
        self._flow.run(until=self._is_done)
        if self._published_updates < self._updates:
            self._publish()
        if self._going and (self._collected.steps or self._reported_updates < self._updates):
            self._report()
        if not self._updates and self._collected.total_steps and not self._loop.stopping:
            self._warn_of_no_update()
        self._checkpoints.finish()

    def _warn_of_no_update(self) -> None:
        config, steps = self._config, self._collected.total_steps
        self._env.emit_event(
            "warned",
            f"nothing was learned: {steps:,} steps were too few for an update, which needs {config.learning_starts:,} "
            f"rows in the buffer (--learning-starts) and then enough further rows for {config.batch_size:,} items "
            "(--batch-size). Raise --total-steps, or lower these options.",
        )

    def _is_done(self) -> bool:
        """Whether all steps have arrived, without filler rows, or a signal has requested the run to stop."""
        return self._loop.stopping or self._collected.total_steps >= self._steps_left

    def close(self) -> None:
        """End the prefetching thread."""
        self._batches.close()

    # ---- consumers ----

    def _collect(self, batch: Batch) -> None:
        """Record the steps and episodes of a chunk; in the thread that inserts."""
        check_rewards(batch)
        self._collected.add(batch, self._env.version)

    def _learn(self, message: Message) -> None:
        """Make the updates that the limiter allows, and report; in the learner's thread."""
        self._make_updates()
        self._report_if_due()

    def _make_updates(self) -> None:
        with onednn_for_images(self._algorithm.agent):
            while self._going and not self._loop.stopping and self._batches.is_ready:
                self._update()
                if self._updates - self._published_updates >= self._config.publish_every:
                    self._rescale()
                    self._publish()
                self._report_if_due()

    def _alternate(self, message: Message) -> None:
        """Handle the chunks of all workers, make the updates that they allow, and let workers roll again."""
        self._collect(self._flow.batch(message))
        self._learn(message)
        if self._going:
            self._rescale()  # first, so that workers that are unparked take part in the next rollout
            self._publish()

    # ---- the learner's thread ----

    def _update(self) -> None:
        loop = self._loop
        with loop.timer("sample"):
            batch = self._batches.take()
        with loop.timer("actor_training"):
            metrics, priorities = self._algorithm.step(batch)
            if priorities is not None:
                self._buffer.update_priorities(batch.keys, priorities.numpy(force=True))
        self._means.add(metrics, 1.0)
        self._updates += 1
        if self._refreshes is not None and (every := self._refreshes.refresh_every) and self._updates % every == 0:
            with loop.timer("refresh"):
                self._refresh(self._refreshes)

    def _refresh(self, algorithm: RefreshesPriorities) -> None:
        """Recompute the priorities of all items, a few batches at a time, so that memory stays bounded."""
        keys, size = self._buffer.keys(), _REFRESH_BATCHES * self._config.batch_size
        for start in range(0, len(keys), size):
            if self._loop.stopping:
                return
            batch = self._batches.read(keys[start : start + size])
            if len(batch.keys):
                self._buffer.update_priorities(batch.keys, algorithm.priorities(batch).numpy(force=True))

    def _publish(self) -> None:
        with self._loop.timer("publish"):
            self._explore()
            self._flow.publish()
        self._published_updates = self._updates

    def _rescale(self) -> None:
        if self._scaling is not None:
            self._scaling.apply(self._env, self._earlier_updates + self._updates, self._fill)

    @property
    def _fill(self) -> float | None:
        """How far workers are ahead of the learner, for the scaling rule. None: they take turns."""
        return self._buffer.limiter.fill if is_concurrent(self._config, self._env) else None

    def _explore(self) -> None:
        steps = self._loop.total_steps - self._steps_left + self._collected.total_steps
        self._algorithm.explore(steps, self._env.num_envs)

    def _report_if_due(self) -> None:
        steps = self._collected.steps
        if self._collected.total_steps >= self._steps_left:
            return  # all rows have arrived; the last report follows when the learner has made its updates
        late = time.monotonic() - self._reported_at >= _REPORT_S
        if self._going and (steps >= self._config.report_every or (steps and late)):
            self._report()

    def _report(self) -> None:
        arrivals, limiter = self._collected.take(), self._buffer.limiter
        since = max(0, limiter.inserts - self._config.learning_starts)
        counters = {
            "replay/rows": float(len(self._buffer)),
            **self._config.measured_ratio(limiter.samples, since),
            **({} if self._scaling is None else self._scaling.metrics),
        }
        if self._episodes is not None:
            counters["replay/episodes"] = float(self._episodes.count)
        iteration = Iteration(
            metrics=self._means.result(),
            updates=self._updates - self._reported_updates,
            steps=arrivals.steps,
            returns=arrivals.returns,
            lengths=arrivals.lengths,
            lags=arrivals.lags,
            counters=counters,
        )
        self._means, self._reported_updates = Means(), self._updates
        if not self._loop.report(iteration):
            self._going = False
            self._flow.stop()
        self._reported_at = time.monotonic()
