"""Asynchronous PPO with the decoupled loss (Hilton et al. 2022): workers roll while the learner updates.

A row is at most `staleness_threshold` versions old when the learner uses it. The loss uses three policies. The behavior
policy is the one that acted. The proximal policy is the learner's policy at the start of the update; the ratio is
clipped around it. The third is the policy that is optimized. With a threshold of 0, this is synchronous PPO. The loss
of a minibatch is

    L = policy_loss + value_coef * value_loss - entropy_bonus * entropy

with `losses.decoupled_ppo` as the policy loss and advantages by GAE (`returns.gae`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Literal

from torch import Tensor

from farstep.batch import Batch
from farstep.cluster_env import ClusterEnv
from farstep.config.field_docs import show_fields
from farstep.elastic.scaling import Rule
from farstep.errors import ConfigError
from farstep.learners import losses
from farstep.learners.loop.timing import Timer
from farstep.learners.loop.worker_scaling import check_rule, chosen_rule
from farstep.learners.networks.nets import DEFAULT_NET, ActorCritic, NetConfig
from farstep.learners.on_policy.learner import UNUSABLE_RULES, RolloutLearner, rollouts
from farstep.learners.on_policy.optimizer import Schedule, prefixed
from farstep.learners.on_policy.rollout import Minibatch
from farstep.learners.options.checks import LARGE, check_above, check_choice, check_counts, check_critic, check_numbers


@show_fields
@dataclass(frozen=True, kw_only=True)
class AsyncPPOConfig:
    """Options of asynchronous PPO, with the names that RLinf uses.

    Raises:
        ConfigError: An option is out of range, or options contradict each other.
    """

    staleness_threshold: int = 1
    """Maximum age of a row (one step of one environment) when the learner uses it, in versions (published sets of
    weights); 0: synchronous PPO."""
    num_chunks: int | None = None
    """If set, an update uses the first num_chunks * rollout_epochs chunks (rollouts of one worker) to arrive. None: it
    uses rollout_epochs chunks of every worker."""
    recompute_logprobs: bool = True
    """True: compute proximal log-probabilities with one forward pass over the batch. False: interpolate them by the age
    of each row."""
    behave_weight_threshold: float | None = 1.5
    """Upper bound of a row's weight (RLinf: 2.0); None: no bound. The weight is the probability of the action under
    the proximal policy, divided by that under the policy that acted."""
    behave_weight_lower: float | None = None
    """Lower bound of a row's weight; None: no bound."""
    behave_weight_mode: Literal["mask", "truncate"] = "truncate"
    """What happens to rows whose weight is outside the bounds. mask (as in RLinf): they are excluded. truncate:
    their weight is set to the bound."""
    denominator: Literal["valid", "kept"] = "valid"
    """Which rows count in the mean of the policy loss. valid: all valid rows. kept (as in RLinf): only rows that
    were not excluded."""
    clip_ratio_low: float = 0.2
    """Lower clip range: the probability ratio is clipped below 1 - clip_ratio_low."""
    clip_ratio_high: float = 0.2
    """Upper clip range: the probability ratio is clipped above 1 + clip_ratio_high."""
    clip_ratio_c: float | None = 3.0
    """Dual clip: for a negative advantage, a row's loss is at most clip_ratio_c * |advantage|; None: no dual clip."""
    value_clip: float | None = None
    """Maximum change of a value from its recorded value in the value loss, in units of (normalized) returns (RLinf:
    0.2); None: no clipping."""
    huber_delta: float | None = None
    """Huber loss: value errors above this enter the loss linearly; None: squared error."""
    value_coef: float = 0.5
    """Weight of the value loss in the loss (RLinf: 1)."""
    entropy_bonus: float = 0.01
    """Weight of the entropy bonus in the loss."""
    normalize_advantages: Literal["minibatch", "batch", "no"] = "minibatch"
    """Normalize advantages to mean 0 and standard deviation 1, over each minibatch or over the whole batch; no: do not
    normalize."""
    gamma: float = 0.99
    """Discount factor."""
    gae_lambda: float = 0.95
    """Lambda of generalized advantage estimation (GAE)."""
    num_steps: int | None = None
    """Steps of each environment per rollout. None: 4,096 (2,048 if observations are images) divided by the number of
    environments, at least 16; for a recurrent agent, at most 128."""
    rollout_epochs: int = 1
    """Rollouts per update, collected one after the other with the same weights. Advantages are computed per rollout.
    Raise it to enlarge the updates of a recurrent agent, because its sequences have num_steps steps. For other agents,
    raise num_steps instead."""
    update_epochs: int | None = None
    """Passes over the rows of an update. None: 8; 4 if observations are images."""
    global_batch_size: int | None = None
    """Rows per optimizer step; for a recurrent agent, at least num_steps. None: 128; 256 if observations are images;
    for a recurrent agent, an eighth of an update's rows. Raise it for noisy rewards and large networks; lower it if
    updates change the policy too little."""
    micro_batch_size: int | None = None
    """Rows per forward and backward pass; a smaller number saves memory. For a recurrent agent, at least num_steps.
    None: all rows of an optimizer step."""
    learning_rate: float | None = None
    """Learning rate of Adam. None: 5e-4; 2.5e-4 if observations are images."""
    anneal_lr: bool = False
    """Decrease learning_rate and value_lr linearly to 0 over total_steps."""
    value_lr: float | None = None
    """Learning rate of the critic's own layers; None: learning_rate. Layers shared with the actor (image encoder,
    recurrent core) always use learning_rate. Raise value_lr if explained_variance stays low, or to fine-tune a trained
    policy with a small learning_rate."""
    critic_warmup_updates: int = 0
    """Number of updates at the start of the run that train only the critic's own layers and leave the policy unchanged.
    Use it when a trained policy starts with a new critic, whose first advantages are noise."""
    max_grad_norm: float = 0.5
    """Maximum norm of the gradient; a larger gradient is scaled down to this norm."""
    target_kl: float | None = None
    """Stop an update early: after the epoch in which the policy's mean KL divergence from the start of the update
    exceeds this, in nats. None: run all epochs."""
    scaling: str | None = None
    """Rule that changes the number of workers, and so the rows per update, after each update:
    schedule:FIRST:LAST:ADD:EVERY (workers of the first and the last updates, workers to add, updates between changes),
    or noise[:FACTOR] (rows per update = FACTOR * gradient noise scale; FACTOR 1 by default). num_steps and the
    minibatch size do not change. None: all workers run."""
    net: NetConfig = DEFAULT_NET
    """the agent's network"""

    def __post_init__(self) -> None:
        check_counts(self, "staleness_threshold", minimum=0)
        check_counts(self, "num_steps", "rollout_epochs", "update_epochs", "num_chunks")
        check_counts(self, "global_batch_size", "micro_batch_size")
        check_choice(self, "normalize_advantages", ("minibatch", "batch", "no"))
        check_choice(self, "behave_weight_mode", ("mask", "truncate"))
        check_choice(self, "denominator", ("valid", "kept"))
        check_numbers(self, gamma=(0, 1), gae_lambda=(0, 1), clip_ratio_low=(0, 1), clip_ratio_high=(0, inf))
        check_numbers(self, learning_rate=(0, LARGE), entropy_bonus=(0, LARGE), value_coef=(0, LARGE))
        check_above(self, max_grad_norm=0, target_kl=0, value_clip=0, huber_delta=0, clip_ratio_c=1)
        check_above(self, behave_weight_threshold=0)
        upper = inf if self.behave_weight_threshold is None else self.behave_weight_threshold
        check_numbers(self, behave_weight_lower=(0, upper))
        check_critic(self, "value_coef")
        check_rule(self.scaling, UNUSABLE_RULES)
        if self.scaling is not None and self.num_chunks is not None:
            raise ConfigError(
                f"scaling is {self.scaling!r} with num_chunks={self.num_chunks}, which fixes the rows of an update, so "
                "more workers would not enlarge it. Leave out one of them."
            )
        for name in ("global_batch_size", "micro_batch_size"):
            size = getattr(self, name)
            steps = self.num_steps or 1
            if size is not None and size < steps and self.net.is_recurrent:
                raise ConfigError(
                    f"{name} is {size} with recurrent={self.net.recurrent!r}; sequences of num_steps={steps} rows are "
                    f"not split, so set {name} to at least {steps}, or lower num_steps."
                )
        if self.micro_batch_size and self.global_batch_size and self.micro_batch_size > self.global_batch_size:
            raise ConfigError(
                f"micro_batch_size is {self.micro_batch_size}, more than global_batch_size={self.global_batch_size}. "
                "An optimizer step of global_batch_size rows consists of passes of micro_batch_size rows. Lower "
                "micro_batch_size."
            )
        if self.micro_batch_size and self.denominator == "kept":
            raise ConfigError(
                f"denominator is 'kept' with micro_batch_size={self.micro_batch_size}. 'kept' needs the number of kept "
                "rows of the whole optimizer step, but a micro-batch knows only its own. Use denominator='valid', or "
                "leave out micro_batch_size."
            )


class AsyncPPO(RolloutLearner):
    """Asynchronous PPO: updates an agent while workers continue to roll.

    Args:
        agent: The agent to train; it is moved to `device`.
        config: Options of asynchronous PPO.
        seed: Seed for the order of rows in minibatches.
        device: Device of the learner, as torch names it.
        scaling: Rule that chooses the number of workers after each update: one of `farstep.elastic`, or a function of
            `Signals`. None: `config.scaling`.
    """

    def __init__(
        self, agent: ActorCritic, config: AsyncPPOConfig, seed: int, device: str = "cpu", scaling: Rule | None = None
    ) -> None:
        super().__init__(agent, config, seed, device, chosen_rule(config.scaling, scaling, UNUSABLE_RULES))
        self.config: AsyncPPOConfig = config
        self._version = 0

    @property
    def synchronous(self) -> bool:
        """Whether workers wait during updates. True if the threshold is 0 and every update uses chunks of all
        workers."""
        return self.config.staleness_threshold == 0 and self.config.num_chunks is None

    def _loss(self, minibatch: Minibatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        config, valid = self.config, minibatch.valid
        evaluation = minibatch.evaluate(self.agent)
        behave_logprob, proximal = minibatch["logprob"], minibatch["proximal"]
        if not config.recompute_logprobs:
            proximal = losses.interpolate_proximal(
                evaluation.logprob, behave_logprob, minibatch["version"], self._version + 1
            )
        policy_loss, actor = losses.decoupled_ppo(
            evaluation.logprob,
            behave_logprob,
            proximal,
            minibatch["advantages"],
            valid,
            clip_ratio_low=config.clip_ratio_low,
            clip_ratio_high=config.clip_ratio_high,
            clip_ratio_c=config.clip_ratio_c,
            behave_weight_threshold=config.behave_weight_threshold,
            behave_weight_mode=config.behave_weight_mode,
            behave_weight_lower=config.behave_weight_lower,
            denominator=config.denominator,
            versions=minibatch["version"],
        )
        value_loss, critic = losses.value_loss(
            evaluation.value,
            minibatch["value"],
            minibatch["returns"],
            valid,
            value_clip=config.value_clip,
            huber_delta=config.huber_delta,
        )
        entropy = losses.masked_mean(evaluation.entropy, valid)
        loss = policy_loss + config.value_coef * value_loss - config.entropy_bonus * entropy
        return loss, prefixed(actor, critic) | {"actor/entropy_loss": entropy, "actor/total_loss": loss}

    def update(self, batch: Batch, version: int, progress: float, timer: Timer) -> dict[str, float]:
        """Update the agent on a batch.

        Args:
            batch: The rows to learn from.
            version: Version of the agent's weights.
            progress: Fraction of the run that is done, from 0 to 1.
            timer: Measures `recompute_logprobs`, `advantages` and `actor_training`.

        Returns:
            Metrics by name, without the prefix `train/`.

        Raises:
            RewardError: A reward is not finite.
        """
        config, self._version = self.config, version
        with timer("recompute_logprobs"):
            rollout = self.prepare(batch, version, progress)
        with timer("advantages"):
            advantages, returns = rollout.advantages(config.gamma, config.gae_lambda)
            if config.normalize_advantages == "batch":
                advantages = losses.normalize(advantages, rollout.valid)
        columns = rollout.columns() | {"advantages": advantages, "returns": returns, "version": rollout.version}
        schedule = Schedule(
            epochs=config.update_epochs or self.defaults.update_epochs,
            batch_size=self.defaults.minibatch_size(
                config.global_batch_size, advantages.numel(), config.net.is_recurrent
            ),
            micro_batch_size=config.micro_batch_size,
            normalize=config.normalize_advantages == "minibatch",
            target_kl=config.target_kl,
        )
        with timer("actor_training"):
            return self.learn(batch, rollout, columns, self._loss, schedule)

    def batches(self, env: ClusterEnv) -> Iterator[Batch]:
        """Collect rollouts from all workers; with `num_chunks`, from the first workers that finish.

        Args:
            env: The environments to collect from.

        Returns:
            An endless iterator of batches. No row is older than `staleness_threshold` versions.
        """
        config = self.config
        steps = self.rollout_steps(env)
        if self.synchronous:
            return rollouts(env, self.agent, steps, config.rollout_epochs)
        return env.stream(
            self.agent, steps, config.staleness_threshold, config.num_chunks, rollout_epochs=config.rollout_epochs
        )
