"""State that all on-policy learners share: the agent, its optimizer and its running statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

from farstep.batch import Batch
from farstep.checkpoint.checks import Count, converted
from farstep.cluster_env import ClusterEnv
from farstep.config.env import WeightsConfig
from farstep.elastic.scaling import Fill, Rule
from farstep.learners.loop.iteration import Iteration, Loop
from farstep.learners.loop.statistics import Statistics, check_rewards
from farstep.learners.loop.timing import Timer
from farstep.learners.loop.worker_scaling import WorkerScaling, check_scaling
from farstep.learners.networks.agent import check_kind
from farstep.learners.networks.nets import ActorCritic, NetConfig, RecurrentActorCritic
from farstep.learners.on_policy.device_lease import DeviceLease
from farstep.learners.on_policy.optimizer import Loss, Optimizer, Schedule
from farstep.learners.on_policy.rollout import Rollout, prepare
from farstep.learners.optimizing import onednn_for_images
from farstep.learners.options.task_defaults import defaults_for, rollout_steps

BufferFill = Callable[[], float | None]


class OptimizerOptions(Protocol):
    """Options that all on-policy learners have."""

    @property
    def learning_rate(self) -> float | None: ...

    @property
    def value_lr(self) -> float | None: ...

    @property
    def critic_warmup_updates(self) -> int: ...

    @property
    def max_grad_norm(self) -> float: ...

    @property
    def anneal_lr(self) -> bool: ...


class _Saved(msgspec.Struct, forbid_unknown_fields=True):
    optimizer: dict[str, Any]
    statistics: dict[str, Any]
    updates: Count = 0
    """Number of updates so far; missing in checkpoints of versions without critic warm-up."""
    scaling: dict[str, Any] | None = None
    """None if the run had no scaling rule."""


class OnPolicy:
    """Optimizes an agent with a given loss, and saves and restores the optimizer. Contains no algorithm.

    A subclass defines `update`, and `batches` or its own `run`. The loop, without logging and checkpoints:

        for batch in learner.batches(env):
            metrics = learner.update(batch, env.version, progress, timer)
            env.publish(learner.agent)

    Args:
        agent: The agent to train; it is moved to `device`.
        config: Learning rates, gradient norm and critic warm-up.
        seed: Seed for the order of rows in minibatches.
        device: Device of the learner, as torch names it.
        scaling: Rule that chooses the number of workers after each update; None: it does not change.

    Attributes:
        has_minibatches: Whether updates consist of several minibatches, so that a rule can use the noise scale.
    """

    has_minibatches = True

    def __init__(
        self, agent: ActorCritic, config: OptimizerOptions, seed: int, device: str, scaling: Rule | None = None
    ) -> None:
        check_kind(agent, ActorCritic, type(self).__name__, adapters=True)
        self.device = torch.device(device)
        self.agent = agent.to(self.device)
        self.defaults = defaults_for(agent.sees_images)
        """Defaults of options that are None."""
        rate = self.defaults.learning_rate if config.learning_rate is None else config.learning_rate
        self._optimizer = Optimizer(agent, rate, config.max_grad_norm, seed, config.value_lr)
        self._lease: DeviceLease | None = None
        """None if the learner keeps its device for the whole run."""
        self._values_are_current = True
        """Whether workers get new weights of the critic, so that the values in a batch are those of its version."""
        self._statistics = Statistics(agent)
        self._anneal_lr = config.anneal_lr
        self._critic_warmup_updates = config.critic_warmup_updates
        self._updates = 0
        self._scaling = None if scaling is None else WorkerScaling(scaling, has_minibatches=self.has_minibatches)
        self._had_scaling = False
        """Whether the loaded checkpoint is from a run with a scaling rule, so that workers may be parked."""

    def release_device(self) -> None:
        """From now on, hold the device only during updates, so that learners of other runs can use it in between.

        With a coordinator that has devices, each update first waits for one of them (`ClusterEnv.device_token`).
        """
        self._lease = DeviceLease(self.agent, self._optimizer, self.device)

    def batches(self, env: ClusterEnv) -> Iterator[Batch]:
        """Return an endless iterator of batches.

        Args:
            env: The environments to collect from.

        Returns:
            The iterator.
        """
        raise NotImplementedError

    def update_rows(self, env: ClusterEnv) -> int:
        """Return the rows of an update in which all workers take part. Only learners with a scaling rule need it.

        Args:
            env: The environments to collect from.

        Returns:
            The number of rows.
        """
        raise NotImplementedError

    def update(self, batch: Batch, version: int, progress: float, timer: Timer) -> dict[str, float]:
        """Update the agent on a batch.

        Args:
            batch: The rows to learn from.
            version: Version of the agent's weights.
            progress: Fraction of the run that is done, from 0 to 1.
            timer: Measures phases of the update.

        Returns:
            Metrics by name; they are logged with the prefix `train/`.
        """
        raise NotImplementedError

    def run(self, env: ClusterEnv, loop: Loop) -> None:
        """Update the agent on one batch after another, and publish it after each, until `loop.report` returns False.

        Args:
            env: The environments to train in.
            loop: The training loop.
        """
        self.start_scaling(env)
        batches, going = self.batches(env), True
        while going:
            with loop.collecting():
                batch = next(batches)
            going = self.iterate(batch, env, loop)

    def start_scaling(self, env: ClusterEnv, buffer_fill: BufferFill = lambda: None) -> None:
        """Let the scaling rule choose the number of workers before the first rollout.

        Args:
            env: The environments to train in.
            buffer_fill: Returns `Signals.buffer_fill` for the scaling rule.
        """
        if self._scaling is not None:
            sequences = env.num_envs if isinstance(self.agent, RecurrentActorCritic) else None
            self._scaling.start(env, self._updates, self.update_rows(env), buffer_fill(), sequences)
        elif self._had_scaling:
            env.scale(workers=env.num_workers)

    def iterate(self, batch: Batch, env: ClusterEnv, loop: Loop, buffer_fill: BufferFill = lambda: None) -> bool:
        """Update the agent on a batch, publish it and report.

        Args:
            batch: The rows to learn from.
            env: The environments that the rows are from.
            loop: The training loop.
            buffer_fill: Returns `Signals.buffer_fill` for the scaling rule, after the update.

        Returns:
            Whether to continue.
        """
        version, self._values_are_current = env.version, sends_critic(self.agent, env.env_config.weights)
        lags = version - batch["version"][batch["valid"]].astype(np.int64)
        with self._on_device(env, loop.timer):
            metrics = self.update(batch, version, loop.fraction_done, loop.timer)
        with loop.timer("publish"):
            env.publish(self.agent)
        counters = None
        if self._scaling is not None:
            counters = self._scaling.metrics  # of the workers that rolled for this update
            self._scaling.apply(env, self._updates, buffer_fill())
        return loop.report(
            Iteration(
                metrics=metrics,
                updates=1,
                steps=int(batch["valid"].sum()),
                returns=batch.episodes["return"].tolist(),
                lengths=batch.episodes["length"].tolist(),
                lags=lags,
                batch=batch,
                counters=counters,
            )
        )

    @contextmanager
    def _on_device(self, env: ClusterEnv, timer: Timer) -> Iterator[None]:
        """Context manager: inside, the learner is on its device."""
        if self._lease is None:
            yield
            return
        with self._lease.update(env, timer) as self.device:
            yield

    def prepare(self, batch: Batch, version: int, progress: float) -> Rollout:
        """Start an update: set the learning rates and convert the batch to tensors.

        Args:
            batch: The rows to learn from.
            version: Version of the agent's weights.
            progress: Fraction of the run that is done, from 0 to 1. With `anneal_lr`, it determines the learning rates.

        Returns:
            The rollout to pass to `learn`.

        Raises:
            RewardError: A reward is not finite.
        """
        if self._anneal_lr:
            self._optimizer.anneal(1 - progress)
        check_rewards(batch)
        self._statistics.observe_rewards(batch)
        return prepare(self.agent, batch, version, self.device, values_are_current=self._values_are_current)

    def learn(
        self, batch: Batch, rollout: Rollout, columns: dict[str, Tensor], loss: Loss, schedule: Schedule
    ) -> dict[str, float]:
        """Optimize the agent on a rollout, then update the observation statistics.

        During critic warm-up the policy does not change: this method then updates neither the actor's layers nor the
        observation statistics.

        Args:
            batch: The batch that the rollout was prepared from.
            rollout: The result of `prepare`.
            columns: Further `[T, N]` tensors that the loss needs.
            loss: Loss of a minibatch.
            schedule: Epochs, minibatch sizes and early stopping.

        Returns:
            Metrics by name, without the prefix `train/`.
        """
        warmup = self._updates < self._critic_warmup_updates
        noise = None if self._scaling is None or warmup else self._scaling.noise
        with onednn_for_images(self.agent):
            metrics = self._optimizer.learn(rollout, columns, loss, schedule, critic_only=warmup, noise=noise)
            if not warmup:
                self._statistics.observe(batch)
        self._updates += 1
        if self._scaling is not None and not warmup:
            metrics |= self._scaling.end_update()
        return metrics | ({"critic/warmup": 1.0} if warmup else {})

    def state(self) -> dict[str, object]:
        """Return the learner's state for a checkpoint. The agent's parameters are saved separately.

        Returns:
            The optimizer, running statistics and counters, by name.
        """
        scaling = None if self._scaling is None else self._scaling.state()
        return {
            "optimizer": self._optimizer.state(),
            "statistics": self._statistics.state(),
            "updates": self._updates,
            **({} if scaling is None else {"scaling": scaling}),
        }

    def load(self, state: Mapping[str, object]) -> None:
        """Restore a saved state.

        Args:
            state: The result of `state`.

        Raises:
            Refused: The state does not fit this learner. The learner is unchanged.
        """
        saved = converted("learner", state, _Saved)
        optimizer, statistics = self._optimizer.check(saved.optimizer), self._statistics.check(saved.statistics)
        scaling = check_scaling(saved.scaling)
        self._optimizer.load(optimizer)
        self._statistics.load(statistics)
        self._updates = saved.updates
        self._had_scaling = scaling is not None
        if self._scaling is not None and scaling is not None:
            self._scaling.load(scaling)


def sends_critic(agent: ActorCritic, weights: WeightsConfig) -> bool:
    """Return whether workers get new parameters of the critic."""
    return all(weights.travels(f"critic.{name}") for name, _ in agent.critic.named_parameters())


UNUSABLE_RULES: dict[type, str] = {
    Fill: "this learner has no buffer that fills. Use schedule:FIRST:LAST:ADD:EVERY or noise here; fill is for impala, "
    "replay learners and workflows."
}
"""Scaling rules that learners of whole rollouts cannot follow, and why."""


class RolloutOptions(Protocol):
    """Options of learners whose updates use whole rollouts."""

    @property
    def num_steps(self) -> int | None: ...

    @property
    def rollout_epochs(self) -> int: ...

    @property
    def net(self) -> NetConfig: ...


class RolloutLearner(OnPolicy):
    """An on-policy learner whose updates use whole rollouts: it knows their length. Contains no algorithm."""

    config: RolloutOptions

    def rollout_steps(self, env: ClusterEnv) -> int:
        """Return the steps of each environment per rollout.

        Args:
            env: The environments to collect from.

        Returns:
            The number of steps.
        """
        config = self.config
        return rollout_steps(config.num_steps, env.num_envs, config.net.is_recurrent, self.defaults)

    def update_rows(self, env: ClusterEnv) -> int:
        """Return the rows of an update in which all workers take part.

        Args:
            env: The environments to collect from.

        Returns:
            The number of rows.
        """
        return self.rollout_steps(env) * self.config.rollout_epochs * env.num_envs


def rollouts(env: ClusterEnv, agent: ActorCritic, steps: int, epochs: int) -> Iterator[Batch]:
    """Collect batches of `epochs` rollouts of all environments, each batch with the newest weights."""
    while True:
        yield env.collect(agent, steps, epochs)
