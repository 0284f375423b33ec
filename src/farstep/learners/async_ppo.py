"""Asynchronous PPO with the decoupled loss: rollouts and learning go on at the same time.

Workers roll while the learner learns; a row is at most `staleness_threshold` versions old when it is learned from.
Three policies meet in the loss (Hilton et al. 2022): the one that acted; the proximal one, which is the learner's when
it took the batch, and which clipping is measured from; and the one that is learned. With a threshold of 0 this is
synchronous PPO.
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
from farstep.errors import ConfigError
from farstep.learners import losses
from farstep.learners.loop.checks import LARGE, TINY, check_choice, check_counts, check_critic, check_numbers
from farstep.learners.loop.sizes import minibatch_rows, rollout_steps
from farstep.learners.loop.timing import Timer
from farstep.learners.networks.nets import DEFAULT_NET, ActorCritic, NetConfig
from farstep.learners.on_policy import OnPolicy, rollouts
from farstep.learners.optimizing import Schedule, named
from farstep.learners.rollout import Minibatch


@show_fields
@dataclass(frozen=True, kw_only=True)
class AsyncPPOConfig:
    """Asynchronous PPO; names are RLinf's."""

    staleness_threshold: int = 1
    """versions that a row may be old when it is learned from; 0 is synchronous PPO"""
    num_chunks: int | None = None
    """an update learns from the first num_chunks * rollout_epochs chunks to arrive; None: from rollout_epochs chunks of
    every worker"""
    recompute_logprobs: bool = True
    """proximal log-probabilities by one forward over the batch; otherwise interpolated by the age of a row"""
    behave_weight_threshold: float | None = 1.5
    """largest weight of a row, the ratio of the proximal policy to the one that acted (published: 2.0)"""
    behave_weight_lower: float | None = None
    """rows that it likes this much less, likewise; None: none are"""
    behave_weight_mode: Literal["mask", "truncate"] = "truncate"
    """rows beyond these bounds are left out (mask, the published rule) or weighted by the bound (truncate)"""
    denominator: Literal["valid", "kept"] = "valid"
    """what a mean is taken over: all rows, or those that were not left out (the published rule)"""
    clip_ratio_low: float = 0.2
    """how far below 1 the ratio may go before it no longer pays"""
    clip_ratio_high: float = 0.2
    """how far above 1"""
    clip_ratio_c: float | None = 3.0
    """dual clip: a bad action's loss grows to this many times its advantage at most"""
    value_clip: float | None = None
    """how far a value may go from the recorded one before it no longer pays (published: 0.2); None: no bound"""
    huber_delta: float | None = None
    """value errors beyond this count linearly; None: squared however large"""
    value_coef: float = 0.5
    """weight of the value loss (published: 1)"""
    entropy_bonus: float = 0.01
    """weight of the entropy"""
    normalize_advantages: Literal["minibatch", "batch", "no"] = "minibatch"
    """over what advantages get mean 0 and deviation 1"""
    gamma: float = 0.99
    """discount"""
    gae_lambda: float = 0.95
    """of generalised advantage estimation"""
    num_steps: int | None = None
    """steps of each environment per rollout; None: 4,096 divided by the number of environments, at least 16, at most
    128 for a recurrent agent"""
    rollout_epochs: int = 1
    """rollouts per update, collected one after the other with the same weights; advantages are computed per rollout.
    Use more to enlarge updates of a recurrent agent, whose sequences have num_steps steps; otherwise raise num_steps
    instead"""
    update_epochs: int = 8
    """passes over the rows of an update"""
    global_batch_size: int | None = None
    """rows per optimizer step, for a recurrent agent at least num_steps; None: 128, or an eighth of an update's rows
    for a recurrent agent. Use more for noisy rewards and large networks, fewer if updates change the policy too
    little"""
    micro_batch_size: int | None = None
    """rows per forward and backward, to save memory, of a recurrent agent num_steps at least; None: all of a step's"""
    learning_rate: float = 5e-4
    """of Adam"""
    anneal_lr: bool = False
    """decrease learning_rate and value_lr linearly to zero over total_steps"""
    value_lr: float | None = None
    """learning rate of the critic's own layers; None: learning_rate. Layers shared with the actor (image encoder,
    recurrent core) always use learning_rate. Use a higher one if explained_variance stays low, or to fine-tune a
    trained policy in small steps with a critic that learns faster"""
    critic_warmup_updates: int = 0
    """number of updates at the start of the run that train only the critic's own layers and leave the policy unchanged.
    Use it when a trained policy starts with a new critic, whose first advantages are noise"""
    max_grad_norm: float = 0.5
    """gradients are scaled down to this norm"""
    target_kl: float | None = None
    """stop learning from a rollout when the policy has moved this far, in nats"""
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
        check_numbers(
            self, learning_rate=(0, LARGE), entropy_bonus=(0, LARGE), value_coef=(0, LARGE), clip_ratio_c=(1, inf)
        )
        check_numbers(self, max_grad_norm=(TINY, inf), target_kl=(TINY, inf), value_clip=(TINY, inf))
        check_critic(self, "value_coef")
        for name in ("global_batch_size", "micro_batch_size"):
            size = getattr(self, name)
            steps = self.num_steps or 1
            if size is not None and size < steps and self.net.is_recurrent:
                raise ConfigError(
                    f"{name} is {size} with recurrent={self.net.recurrent!r}, whose sequences of num_steps="
                    f"{steps} rows are learned whole; give at least {steps}, or fewer num_steps."
                )
        if self.micro_batch_size and self.global_batch_size and self.micro_batch_size > self.global_batch_size:
            raise ConfigError(
                f"micro_batch_size {self.micro_batch_size} is more than global_batch_size {self.global_batch_size}; it "
                "is the part of a step's rows that goes through the network at a time."
            )
        if self.micro_batch_size and self.denominator == "kept":
            raise ConfigError(
                "denominator='kept' counts the rows that are kept of a whole step, and micro_batch_size shows some "
                "of them at a time; use denominator='valid', or leave micro_batch_size out."
            )


class AsyncPPO(OnPolicy):
    """Learns from rollouts that go on meanwhile."""

    def __init__(self, agent: ActorCritic, config: AsyncPPOConfig, seed: int, device: str = "cpu") -> None:
        super().__init__(agent, config, seed, device)
        self.config = config
        self._version = 0

    @property
    def synchronous(self) -> bool:
        return self.config.staleness_threshold == 0 and self.config.num_chunks is None

    def batches(self, env: ClusterEnv) -> Iterator[Batch]:
        """Rollouts of all workers, or the first to arrive, none older than the bound."""
        config = self.config
        steps = rollout_steps(config.num_steps, env.num_envs, config.net.is_recurrent)
        if self.synchronous:
            return rollouts(env, self.agent, steps, config.rollout_epochs)
        return env.stream(
            self.agent, steps, config.staleness_threshold, config.num_chunks, rollout_epochs=config.rollout_epochs
        )

    def update(self, batch: Batch, version: int, progress: float, timer: Timer) -> dict[str, float]:
        """Learn from a batch; `version` is that of the agent's weights, `progress` goes from 0 to 1."""
        config, self._version = self.config, version
        with timer("recompute_logprobs"):
            rollout = self.prepare(batch, version, progress)
        with timer("advantages"):
            advantages, returns = rollout.advantages(config.gamma, config.gae_lambda)
            if config.normalize_advantages == "batch":
                advantages = losses.normalize(advantages, rollout.valid)
        columns = rollout.columns() | {"advantages": advantages, "returns": returns, "version": rollout.version}
        schedule = Schedule(
            epochs=config.update_epochs,
            batch_size=minibatch_rows(config.global_batch_size, advantages.numel(), config.net.is_recurrent),
            micro_batch_size=config.micro_batch_size,
            normalize=config.normalize_advantages == "minibatch",
            target_kl=config.target_kl,
        )
        with timer("train"):
            return self.learn(batch, rollout, columns, self._loss, schedule)

    def _loss(self, part: Minibatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        config, valid = self.config, part.valid
        now = part.evaluate(self.agent)
        acted, proximal = part["logprob"], part["proximal"]
        if not config.recompute_logprobs:
            proximal = losses.interpolate_proximal(now.logprob, acted, part["version"], self._version + 1)
        policy_loss, actor = losses.decoupled_ppo(
            now.logprob,
            acted,
            proximal,
            part["advantages"],
            valid,
            clip_ratio_low=config.clip_ratio_low,
            clip_ratio_high=config.clip_ratio_high,
            clip_ratio_c=config.clip_ratio_c,
            behave_weight_threshold=config.behave_weight_threshold,
            behave_weight_mode=config.behave_weight_mode,
            behave_weight_lower=config.behave_weight_lower,
            denominator=config.denominator,
            versions=part["version"],
            current_version=self._version + 1,
        )
        value_loss, critic = losses.value_loss(
            now.value,
            part["value"],
            part["returns"],
            valid,
            value_clip=config.value_clip,
            huber_delta=config.huber_delta,
        )
        entropy = losses.masked_mean(now.entropy, valid)
        loss = policy_loss + config.value_coef * value_loss - config.entropy_bonus * entropy
        return loss, named(actor, critic) | {"actor/entropy_loss": entropy, "actor/total_loss": loss}
