"""Proximal policy optimisation (Schulman et al. 2017), synchronous: collect, learn, publish, again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Literal

from torch import Tensor

from farstep.batch import Batch
from farstep.cluster_env import ClusterEnv
from farstep.config.field_docs import show_fields
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
class PPOConfig:
    """Synchronous PPO; names are CleanRL's, defaults were tuned with 16 to 128 environments."""

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
    num_steps: int | None = None
    """steps of each environment per rollout; None: 4,096 divided by the number of environments, at least 16, at most
    128 for a recurrent agent"""
    rollout_epochs: int = 1
    """rollouts per update, collected one after the other with the same weights; advantages are computed per rollout.
    Use more to enlarge updates of a recurrent agent, whose sequences have num_steps steps; otherwise raise num_steps
    instead"""
    gamma: float = 0.99
    """discount"""
    gae_lambda: float = 0.95
    """of generalised advantage estimation"""
    minibatch_size: int | None = None
    """rows per optimizer step; None: 128, or an eighth of an update's rows for a recurrent agent, whose sequences are
    not split. Use more for noisy rewards and large networks, fewer if updates change the policy too little"""
    update_epochs: int = 8
    """passes over the rows of an update"""
    normalize_advantages: Literal["minibatch", "batch", "no"] = "minibatch"
    """over what advantages get mean 0 and deviation 1"""
    clip_coef: float = 0.2
    """how far the ratio of probabilities may go from 1 before it no longer pays"""
    decoupled: bool = True
    """where older weights acted (AAPS), clip around the learner's policy at the start of the update and weight rows by
    its ratio to the policy that acted; rows of the current version are not affected. False: clip around the policy that
    acted; the learner stalls once it is the clip range away from it"""
    behave_weight_threshold: float | None = 2.0
    """largest weight of a row with --decoupled; None: no bound"""
    value_clip: float | None = None
    """how far a value may go from the recorded one before it no longer pays; None: as far as it likes"""
    ent_coef: float = 0.01
    """weight of the entropy"""
    vf_coef: float = 0.5
    """weight of the value loss"""
    max_grad_norm: float = 0.5
    """gradients are scaled down to this norm"""
    target_kl: float | None = None
    """stop learning from a rollout when the policy has moved this far, in nats"""
    net: NetConfig = DEFAULT_NET
    """the agent's network"""

    def __post_init__(self) -> None:
        check_counts(self, "num_steps", "rollout_epochs", "minibatch_size", "update_epochs")
        check_choice(self, "normalize_advantages", ("minibatch", "batch", "no"))
        check_numbers(self, gamma=(0, 1), gae_lambda=(0, 1), clip_coef=(0, 1))
        check_numbers(self, learning_rate=(0, LARGE), ent_coef=(0, LARGE), vf_coef=(0, LARGE))
        check_numbers(self, max_grad_norm=(TINY, inf), target_kl=(TINY, inf), value_clip=(TINY, inf))
        check_numbers(self, behave_weight_threshold=(1, inf))
        check_critic(self, "vf_coef")


class PPO(OnPolicy):
    """Learns from one rollout of all environments at a time."""

    synchronous = True

    def __init__(self, agent: ActorCritic, config: PPOConfig, seed: int, device: str = "cpu") -> None:
        super().__init__(agent, config, seed, device)
        self.config = config

    def batches(self, env: ClusterEnv) -> Iterator[Batch]:
        config = self.config
        steps = rollout_steps(config.num_steps, env.num_envs, config.net.is_recurrent)
        return rollouts(env, self.agent, steps, config.rollout_epochs)

    def update(self, batch: Batch, version: int, progress: float, timer: Timer) -> dict[str, float]:
        """Learn from a batch; `version` is that of the agent's weights, `progress` goes from 0 to 1."""
        config = self.config
        with timer("advantages"):
            rollout = self.prepare(batch, version, progress)
            advantages, returns = rollout.advantages(config.gamma, config.gae_lambda)
            if config.normalize_advantages == "batch":
                advantages = losses.normalize(advantages, rollout.valid)
        columns = rollout.columns() | {"advantages": advantages, "returns": returns}
        schedule = Schedule(
            epochs=config.update_epochs,
            batch_size=minibatch_rows(config.minibatch_size, advantages.numel(), config.net.is_recurrent),
            normalize=config.normalize_advantages == "minibatch",
            target_kl=config.target_kl,
        )
        with timer("train"):
            return self.learn(batch, rollout, columns, self._loss, schedule)

    def _loss(self, part: Minibatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        config, valid = self.config, part.valid
        now = part.evaluate(self.agent)
        acted = part["logprob"]
        policy_loss, actor = losses.decoupled_ppo(
            now.logprob,
            acted,
            part["proximal"] if config.decoupled else acted,
            part["advantages"],
            valid,
            clip_ratio_low=config.clip_coef,
            clip_ratio_high=config.clip_coef,
            clip_ratio_c=None,
            behave_weight_threshold=config.behave_weight_threshold,
            behave_weight_mode="truncate",
        )
        value_loss, critic = losses.value_loss(
            now.value, part["value"], part["returns"], valid, value_clip=config.value_clip
        )
        entropy = losses.masked_mean(now.entropy, valid)
        loss = policy_loss + config.vf_coef * value_loss - config.ent_coef * entropy
        return loss, named(actor, critic) | {"actor/entropy_loss": entropy, "actor/total_loss": loss}
