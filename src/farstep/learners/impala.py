"""IMPALA (Espeholt et al. 2018): one gradient step per batch of chunks, corrected for staleness by V-trace.

The loss of a batch is

    L = mean(-A * log pi(a|s)) + value_coef * value_loss - entropy_bonus * entropy

with V-trace's advantages A and value targets (`returns.vtrace`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from farstep.agents.distributions import kl_estimate
from farstep.batch import Batch
from farstep.buffer.replay import Buffer
from farstep.buffer.samplers import FullBatch
from farstep.cluster_env import ClusterEnv
from farstep.config.field_docs import show_fields
from farstep.elastic.scaling import Fill, NoiseScale, Rule
from farstep.errors import ConfigError
from farstep.learners import losses
from farstep.learners.loop.iteration import Loop
from farstep.learners.loop.timing import Timer
from farstep.learners.loop.worker_scaling import chosen_rule
from farstep.learners.networks.nets import DEFAULT_NET, ActorCritic, NetConfig
from farstep.learners.on_policy.learner import OnPolicy
from farstep.learners.on_policy.optimizer import Schedule, prefixed
from farstep.learners.on_policy.rollout import Minibatch, Rollout
from farstep.learners.options.checks import LARGE, check_above, check_counts, check_critic, check_numbers
from farstep.learners.options.task_defaults import chunk_steps
from farstep.learners.returns import fold_ends, ratio_statistics, vtrace
from farstep.workflow.triggers import DataKeyTrigger
from farstep.workflow.triggers.messages import Message
from farstep.workflow.workflow import Workflow

UNUSABLE_RULES: dict[type, str] = {
    NoiseScale: "IMPALA makes one optimizer step per update, so the noise of its gradient cannot be measured; and "
    "num_chunks, not the number of workers, sets the rows of an update. Use schedule:FIRST:LAST:ADD:EVERY or fill."
}
"""Scaling rules that IMPALA cannot follow, and why."""


@show_fields
@dataclass(frozen=True, kw_only=True)
class ImpalaConfig:
    """Options of IMPALA, which uses every row once.

    Raises:
        ConfigError: An option is out of range, or `critic_warmup_updates` would have no effect.
    """

    num_steps: int | None = None
    """Steps of each environment per chunk (rollout of one worker); None: 512 divided by the number of environments, at
    least 8."""
    num_chunks: int | None = None
    """Chunks per update, in order of arrival; None: half the number of workers, rounded up, from 2 to 8. Never more
    than the number of workers."""
    max_staleness: int | None = None
    """Largest age of a row (one step of one environment) when the learner uses it, in versions (published sets of
    weights). At most (max_staleness + 1) * num_chunks workers collect at the same time. None: the smallest number, at
    least 1, with which all workers can do so."""
    learning_rate: float = 2e-3
    """Learning rate of Adam."""
    anneal_lr: bool = False
    """Decrease learning_rate and value_lr linearly to 0 over total_steps."""
    value_lr: float | None = None
    """Learning rate of the critic's own layers; None: learning_rate. Layers shared with the actor (image encoder,
    recurrent core) always use learning_rate. Raise it if explained_variance stays low, or to fine-tune a trained policy
    with a small learning_rate."""
    critic_warmup_updates: int = 0
    """Number of updates at the start of the run that train only the critic's own layers and leave the policy unchanged.
    Use it when a trained policy starts with a new critic, whose first advantages are noise."""
    gamma: float = 0.99
    """Discount factor."""
    rho_bar: float = 1.0
    """Clip of the importance ratio that weights each row's TD error; it determines which policy's values the critic
    converges to."""
    c_bar: float = 1.0
    """Clip of the importance ratio in the trace; it determines how fast the critic converges."""
    pg_rho_bar: float = 1.0
    """Clip of the importance ratio that weights each row in the policy gradient."""
    vtrace_lambda: float = 1.0
    """Lambda of V-trace; below 1, TD errors propagate back over fewer rows: less variance, more bias."""
    value_coef: float = 0.5
    """Weight of the value loss in the loss."""
    entropy_bonus: float = 0.01
    """Weight of the entropy bonus in the loss."""
    normalize_advantages: bool = False
    """Normalize advantages to mean 0 and standard deviation 1 over each batch."""
    max_grad_norm: float = 0.5
    """Largest norm of the gradient; larger gradients are scaled down to it."""
    scaling: str | None = None
    """Rule that changes the number of workers after each update; the number of rows per update does not change.
    schedule:FIRST:LAST:ADD:EVERY (workers of the first and the last updates, workers to add, updates between changes),
    or fill[:LOW:HIGH] (the fill is the number of chunks that wait for the learner, divided by the largest number that
    max_staleness allows; add a worker while it is below LOW, remove one while it is above HIGH; 0.25 and 0.75 by
    default). None: all workers run."""
    net: NetConfig = DEFAULT_NET
    """the agent's network"""

    def __post_init__(self) -> None:
        check_counts(self, "num_steps", "num_chunks")
        check_counts(self, "max_staleness", minimum=0)
        check_numbers(self, gamma=(0, 1), vtrace_lambda=(0, 1), learning_rate=(0, LARGE))
        check_numbers(self, value_coef=(0, LARGE), entropy_bonus=(0, LARGE))
        check_above(self, max_grad_norm=0, rho_bar=0, c_bar=0, pg_rho_bar=0)
        check_critic(self, "value_coef")
        if isinstance(chosen_rule(self.scaling, None, UNUSABLE_RULES), Fill) and self.max_staleness == 0:
            raise ConfigError(
                f"scaling is {self.scaling!r} with max_staleness=0, so no chunk ever waits for the learner. Raise "
                "max_staleness, or use schedule:FIRST:LAST:ADD:EVERY."
            )


class Impala(OnPolicy):
    """Learner that makes one gradient step on the first `num_chunks` chunks to arrive.

    Args:
        agent: The agent to train; it is moved to `device`.
        config: Options of IMPALA.
        seed: Seed for the order of rows.
        device: Device of the learner, as torch names it.
        scaling: Rule that chooses the number of workers after each update: one of `farstep.elastic`, or a function of
            `Signals`. None: `config.scaling`.
    """

    synchronous = False
    has_minibatches = False

    def __init__(
        self, agent: ActorCritic, config: ImpalaConfig, seed: int, device: str = "cpu", scaling: Rule | None = None
    ) -> None:
        super().__init__(agent, config, seed, device, chosen_rule(config.scaling, scaling, UNUSABLE_RULES))
        self.config = config

    def _targets(self, rollout: Rollout) -> tuple[Tensor, Tensor, dict[str, float]]:
        """Return V-trace targets, advantages, and metrics of the importance ratios."""
        config = self.config
        valid = rollout.valid.numpy(force=True)
        proximal, behave = rollout.proximal.numpy(force=True), rollout.logprob.numpy(force=True)
        log_rhos = proximal - behave
        ends = rollout.terminated, rollout.truncated, rollout.final_value
        rewards, discounts, _ = fold_ends(rollout.reward, *ends, config.gamma)
        arrays = vtrace(
            log_rhos,
            rewards,
            rollout.value,
            rollout.last_value,
            discounts,
            config.rho_bar,
            config.c_bar,
            config.pg_rho_bar,
            config.vtrace_lambda,
            valid=valid,
        )
        targets, advantages = (torch.from_numpy(array).to(self.device) for array in arrays)
        statistics = ratio_statistics(log_rhos[valid], config.rho_bar)
        if statistics:
            statistics["behave_k3"] = float(kl_estimate(behave[valid], proximal[valid]).mean())
        return targets, advantages, {f"actor/{name}": number for name, number in statistics.items()}

    def _loss(self, minibatch: Minibatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        config, valid = self.config, minibatch.valid
        evaluation = minibatch.evaluate(self.agent)
        policy_loss = losses.masked_mean(-minibatch["advantages"] * evaluation.logprob, valid)
        value_loss, critic = losses.value_loss(
            evaluation.value, evaluation.value.detach(), minibatch["targets"], valid, value_clip=None
        )
        entropy = losses.masked_mean(evaluation.entropy, valid)
        loss = policy_loss + config.value_coef * value_loss - config.entropy_bonus * entropy
        actor = {"policy_loss": policy_loss, "entropy_loss": entropy, "total_loss": loss}
        return loss, prefixed(actor, critic)

    def update(self, batch: Batch, version: int, progress: float, timer: Timer) -> dict[str, float]:
        """Update the agent on a batch.

        Args:
            batch: The rows to learn from.
            version: Version of the agent's weights.
            progress: Fraction of the run that is done, from 0 to 1.
            timer: Measures `advantages` and `actor_training`.

        Returns:
            Metrics by name, without the prefix `train/`.

        Raises:
            RewardError: A reward is not finite.
        """
        config = self.config
        with timer("advantages"):
            rollout = self.prepare(batch, version, progress)
            targets, advantages, metrics = self._targets(rollout)
            if config.normalize_advantages:
                advantages = losses.normalize(advantages, rollout.valid)
        columns = {"targets": targets, "advantages": advantages, **rollout.mask()}
        schedule = Schedule(epochs=1, batch_size=advantages.numel())
        with timer("actor_training"):
            return self.learn(batch, rollout, columns, self._loss, schedule) | metrics

    def _num_chunks(self, env: ClusterEnv) -> int:
        """Return the number of chunks per update."""
        return min(self.config.num_chunks or min(max(2, math.ceil(env.num_workers / 2)), 8), env.num_workers)

    def update_rows(self, env: ClusterEnv) -> int:
        """Return the mean number of rows of an update.

        Args:
            env: The environments to collect from.

        Returns:
            The number of rows.
        """
        rows = chunk_steps(self.config.num_steps, env.num_envs) * env.num_envs
        return rows * self._num_chunks(env) // env.num_workers

    def run(self, env: ClusterEnv, loop: Loop) -> None:
        """Update the agent on chunks in order of arrival, without waiting for the slowest worker.

        An update takes at most as many chunks as there are workers. By default, all workers collect at the same time.

        Args:
            env: The environments to train in.
            loop: The training loop.

        Raises:
            RewardError: A reward is not finite.
            FarstepError: A worker, an environment or the agent failed and could not be replaced.
        """
        config = self.config
        steps = chunk_steps(config.num_steps, env.num_envs)
        chunks = self._num_chunks(env)
        staleness = config.max_staleness
        if staleness is None:
            staleness = max(1, math.ceil(env.num_workers / chunks) - 1)
        # One worker may send all chunks of an update, so they must fit. No chunk is inserted during an update.
        with Buffer(chunks * steps * env.num_envs, FullBatch()) as buffer, ExitStack() as waiting:
            flow = Workflow(env, self.agent, buffer, max_staleness=staleness)

            def fill() -> float | None:
                if not staleness:
                    return None
                most = min(staleness * chunks, flow.max_unread_chunks or 1)
                return min(1.0, flow.num_unread_chunks / most)

            def update(message: Message) -> None:
                waiting.close()
                if not self.iterate(flow.batch(message), env, loop, fill):
                    flow.stop()
                waiting.enter_context(loop.timer("collect"))

            flow.on(DataKeyTrigger(n=chunks, size=steps, of="windows"), update, name="update")
            with loop.collecting():  # a signal ends the wait for workers that import the agent's modules
                flow.bind()
            self.start_scaling(env, fill)
            waiting.enter_context(loop.timer("collect"))
            flow.run(until=lambda: loop.stopping)
