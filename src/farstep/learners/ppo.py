"""Synchronous proximal policy optimization (Schulman et al. 2017): collect a rollout, update, publish, repeat.

The loss of a minibatch is

    L = policy_loss + vf_coef * value_loss - ent_coef * entropy

with the clipped surrogate of `losses.decoupled_ppo` and advantages by GAE (`returns.gae`).
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
class PPOConfig:
    """Options of synchronous PPO, with the names that CleanRL uses.

    The defaults were tuned with 16 to 128 environments. Those for images were compared only on Pong, with one seed.

    Raises:
        ConfigError: An option is out of range, or `critic_warmup_updates` would have no effect.
    """

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
    num_steps: int | None = None
    """Steps of each environment per rollout. None: 4,096 (2,048 if observations are images) divided by the number of
    environments, at least 16; for a recurrent agent, at most 128."""
    rollout_epochs: int = 1
    """Rollouts per update, collected one after the other with the same weights. Advantages are computed per rollout.
    Raise it to enlarge the updates of a recurrent agent, because its sequences have num_steps steps. For other agents,
    raise num_steps instead."""
    gamma: float = 0.99
    """Discount factor."""
    gae_lambda: float = 0.95
    """Lambda of generalized advantage estimation (GAE)."""
    minibatch_size: int | None = None
    """Rows (steps of one environment) per optimizer step. None: 128; 256 if observations are images; for a recurrent
    agent, whose sequences are not split, an eighth of an update's rows. Raise it for noisy rewards and large networks;
    lower it if updates change the policy too little."""
    update_epochs: int | None = None
    """Passes over the rows of an update. None: 8; 4 if observations are images."""
    normalize_advantages: Literal["minibatch", "batch", "no"] = "minibatch"
    """Normalize advantages to mean 0 and standard deviation 1, over each minibatch or over the whole batch; no: do not
    normalize."""
    clip_coef: float = 0.2
    """Clip range of the probability ratio: [1 - clip_coef, 1 + clip_coef]."""
    decoupled: bool = True
    """True: decoupled loss for rows that were collected with older weights (AAPS). It clips around the learner's policy
    at the start of the update, and weights each row by the ratio of this policy to the policy that acted. Rows of the
    current version are not affected. False: clip around the policy that acted. The learner then stalls when its policy
    differs from the policy that acted by more than the clip range."""
    behave_weight_threshold: float | None = 2.0
    """With --decoupled: upper bound of a row's weight; None: no bound."""
    value_clip: float | None = None
    """Maximum change of a value from its recorded value in the value loss, in units of (normalized) returns; None: no
    clipping."""
    ent_coef: float = 0.01
    """Weight of the entropy bonus in the loss."""
    vf_coef: float = 0.5
    """Weight of the value loss in the loss."""
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
        check_counts(self, "num_steps", "rollout_epochs", "minibatch_size", "update_epochs")
        check_choice(self, "normalize_advantages", ("minibatch", "batch", "no"))
        check_numbers(self, gamma=(0, 1), gae_lambda=(0, 1), clip_coef=(0, 1))
        check_numbers(self, learning_rate=(0, LARGE), ent_coef=(0, LARGE), vf_coef=(0, LARGE))
        check_above(self, max_grad_norm=0, target_kl=0, value_clip=0)
        check_numbers(self, behave_weight_threshold=(1, inf))
        check_critic(self, "vf_coef")
        check_rule(self.scaling, UNUSABLE_RULES)


class PPO(RolloutLearner):
    """Synchronous PPO: updates an agent on rollouts of all environments.

    Args:
        agent: The agent to train; it is moved to `device`.
        config: Options of PPO.
        seed: Seed for the order of rows in minibatches.
        device: Device of the learner, as torch names it.
        scaling: Rule that chooses the number of workers after each update: one of `farstep.elastic`, or a function of
            `Signals`. None: `config.scaling`.

    Example:
        >>> config = PPOConfig(learning_rate=1e-3)
        >>> agent = make_agent(*env.launch(), config.net, config.gamma)
        >>> Training(PPO(agent, config, seed=1), env, Limits(total_steps=100_000)).run()
    """

    synchronous = True

    def __init__(
        self, agent: ActorCritic, config: PPOConfig, seed: int, device: str = "cpu", scaling: Rule | None = None
    ) -> None:
        super().__init__(agent, config, seed, device, chosen_rule(config.scaling, scaling, UNUSABLE_RULES))
        self.config: PPOConfig = config

    def _loss(self, minibatch: Minibatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        config, valid = self.config, minibatch.valid
        evaluation = minibatch.evaluate(self.agent)
        behave_logprob = minibatch["logprob"]
        policy_loss, actor = losses.decoupled_ppo(
            evaluation.logprob,
            behave_logprob,
            minibatch["proximal"] if config.decoupled else behave_logprob,
            minibatch["advantages"],
            valid,
            clip_ratio_low=config.clip_coef,
            clip_ratio_high=config.clip_coef,
            clip_ratio_c=None,
            behave_weight_threshold=config.behave_weight_threshold,
            behave_weight_mode="truncate",
        )
        value_loss, critic = losses.value_loss(
            evaluation.value, minibatch["value"], minibatch["returns"], valid, value_clip=config.value_clip
        )
        entropy = losses.masked_mean(evaluation.entropy, valid)
        loss = policy_loss + config.vf_coef * value_loss - config.ent_coef * entropy
        return loss, prefixed(actor, critic) | {"actor/entropy_loss": entropy, "actor/total_loss": loss}

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
            advantages, returns = rollout.advantages(config.gamma, config.gae_lambda)
            if config.normalize_advantages == "batch":
                advantages = losses.normalize(advantages, rollout.valid)
        columns = rollout.columns() | {"advantages": advantages, "returns": returns}
        schedule = Schedule(
            epochs=config.update_epochs or self.defaults.update_epochs,
            batch_size=self.defaults.minibatch_size(config.minibatch_size, advantages.numel(), config.net.is_recurrent),
            normalize=config.normalize_advantages == "minibatch",
            target_kl=config.target_kl,
        )
        with timer("actor_training"):
            return self.learn(batch, rollout, columns, self._loss, schedule)

    def batches(self, env: ClusterEnv) -> Iterator[Batch]:
        """Collect rollouts from all environments.

        Args:
            env: The environments to collect from.

        Returns:
            An endless iterator of batches, each collected with the newest weights.
        """
        return rollouts(env, self.agent, self.rollout_steps(env), self.config.rollout_epochs)
