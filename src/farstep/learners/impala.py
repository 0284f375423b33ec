"""IMPALA (Espeholt et al. 2018): chunks first in, first out, corrected for their age by V-trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf

import numpy as np
import torch
from torch import Tensor

from farstep.batch import Batch
from farstep.cluster_env import ClusterEnv
from farstep.config.field_docs import show_fields
from farstep.core import Array
from farstep.learners import losses
from farstep.learners.loop.checks import LARGE, TINY, check_counts, check_critic, check_numbers
from farstep.learners.loop.sizes import chunk_steps
from farstep.learners.loop.timing import Timer
from farstep.learners.networks.nets import DEFAULT_NET, ActorCritic, NetConfig
from farstep.learners.on_policy import OnPolicy
from farstep.learners.optimizing import Schedule, named
from farstep.learners.returns import LOG_RATIO_LIMIT, fold_ends, vtrace
from farstep.learners.rollout import Minibatch, Rollout


@show_fields
@dataclass(frozen=True, kw_only=True)
class ImpalaConfig:
    """IMPALA: every row is learned from once, whoever acted it."""

    num_steps: int | None = None
    """steps of each environment per chunk; None: 512 divided by the number of environments, at least 8"""
    num_chunks: int = 2
    """chunks per update, the first to arrive"""
    max_staleness: int = 1
    """versions that a row may be old when it is learned from"""
    learning_rate: float = 2e-3
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
    gamma: float = 0.99
    """discount"""
    rho_bar: float = 1.0
    """largest weight of a row's own error: what the critic converges to"""
    c_bar: float = 1.0
    """largest weight of the trace: how fast it does"""
    pg_rho_bar: float = 1.0
    """largest weight of a row in the policy's gradient"""
    vtrace_lambda: float = 1.0
    """how far errors travel back"""
    value_coef: float = 0.5
    """weight of the value loss"""
    entropy_bonus: float = 0.01
    """weight of the entropy"""
    normalize_advantages: bool = False
    """give advantages mean 0 and deviation 1"""
    max_grad_norm: float = 0.5
    """gradients are scaled down to this norm"""
    net: NetConfig = DEFAULT_NET
    """the agent's network"""

    def __post_init__(self) -> None:
        check_counts(self, "num_steps", "num_chunks")
        check_counts(self, "max_staleness", minimum=0)
        check_numbers(self, gamma=(0, 1), vtrace_lambda=(0, 1), learning_rate=(0, LARGE), max_grad_norm=(TINY, inf))
        check_numbers(self, rho_bar=(0, inf), c_bar=(0, inf), pg_rho_bar=(0, inf), value_coef=(0, LARGE))
        check_numbers(self, entropy_bonus=(0, LARGE))
        check_critic(self, "value_coef")


class Impala(OnPolicy):
    """Learns from the first chunks to arrive."""

    synchronous = False

    def __init__(self, agent: ActorCritic, config: ImpalaConfig, seed: int, device: str = "cpu") -> None:
        super().__init__(agent, config, seed, device)
        self.config = config

    def batches(self, env: ClusterEnv) -> Iterator[Batch]:
        """Chunks in order of arrival; nobody waits for the slowest worker."""
        config = self.config
        chunks = min(config.num_chunks, env.num_workers)
        return env.stream(self.agent, chunk_steps(config.num_steps, env.num_envs), config.max_staleness, chunks)

    def update(self, batch: Batch, version: int, progress: float, timer: Timer) -> dict[str, float]:
        """Learn from a batch; `version` is that of the agent's weights, `progress` goes from 0 to 1."""
        config = self.config
        with timer("advantages"):
            rollout = self.prepare(batch, version, progress)
            targets, advantages, measured = self._targets(rollout)
            if config.normalize_advantages:
                advantages = losses.normalize(advantages, rollout.valid)
        columns = {"targets": targets, "advantages": advantages, **rollout.mask()}
        schedule = Schedule(epochs=1, batch_size=advantages.numel())
        with timer("train"):
            return self.learn(batch, rollout, columns, self._loss, schedule) | measured

    def _targets(self, rollout: Rollout) -> tuple[Tensor, Tensor, dict[str, float]]:
        """V-trace targets and advantages, and how far off-policy the rows were."""
        config = self.config
        valid = rollout.valid.numpy(force=True)
        log_rhos = (rollout.proximal - rollout.logprob).numpy(force=True)
        ends = rollout.terminated, rollout.truncated, rollout.final_value
        rewards, discounts, _ = fold_ends(rollout.reward, *ends, config.gamma)
        found = vtrace(
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
        targets, advantages = (torch.from_numpy(array).to(self.device) for array in found)
        return targets, advantages, _measured(log_rhos[valid], config.rho_bar)

    def _loss(self, part: Minibatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        config, valid = self.config, part.valid
        now = part.evaluate(self.agent)
        policy_loss = losses.masked_mean(-part["advantages"] * now.logprob, valid)
        value_loss, critic = losses.value_loss(now.value, now.value.detach(), part["targets"], valid, value_clip=None)
        entropy = losses.masked_mean(now.entropy, valid)
        loss = policy_loss + config.value_coef * value_loss - config.entropy_bonus * entropy
        actor = {"policy_loss": policy_loss, "entropy_loss": entropy, "total_loss": loss}
        return loss, named(actor, critic)


def _measured(log_rhos: Array, rho_bar: float) -> dict[str, float]:
    """How far off-policy the rows were: the ratios' mean, the share cut off, and what the rest is worth."""
    if not len(log_rhos):
        return {}
    rhos = np.exp(np.clip(log_rhos.astype(np.float64), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    share = rhos.sum() ** 2 / (len(rhos) * np.square(rhos).sum())
    return {"actor/rho_mean": rhos.mean(), "actor/rho_clip_fraction": (rhos > rho_bar).mean(), "actor/ess": share}
