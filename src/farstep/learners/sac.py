"""Soft actor-critic (Haarnoja et al. 2018; for discrete actions Christodoulou 2019).

With the temperature alpha, two critics Q and their targets Q', the losses of a batch are the means over rows of

    critics      (Q(s, a) - target) ** 2 / 2, for both      target = reward + discount * V(s')
    V(s')        min Q'(s', a') - alpha * log pi(a'|s'),  a' ~ pi
    actor        alpha * log pi(a|s) - min Q(s, a),  a ~ pi
    temperature  log(alpha) * (entropy of pi - target entropy)

For discrete actions the expectations over actions are sums instead of samples, and the mean of both critics replaces
the minimum, as in the double average of Zhou et al. (2024): with the minimum, policies of LunarLander-v3 hovered.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from farstep.buffer.samplers import NStep, Sampler
from farstep.config.field_docs import show_fields
from farstep.elastic.scaling import Rule
from farstep.errors import ConfigError
from farstep.learners.networks.agent import check_kind
from farstep.learners.networks.encoders import Space
from farstep.learners.networks.soft_actor import SACNetConfig, SoftActor, TwinCritics
from farstep.learners.options.checks import LARGE, check_above, check_counts, check_numbers
from farstep.learners.replay.batches import ReplayBatch
from farstep.learners.replay.config import ReplayConfig
from farstep.learners.replay.learner import ReplayLearner
from farstep.learners.replay.optimizer import FlatAdam, TargetNetwork
from farstep.learners.replay.saved_parts import SavedNetwork, SavedPart, SavedTensor

DEFAULT_NET = SACNetConfig()
SAC_REPLAY = ReplayConfig(batch_size=256, updates_per_step=0.5)


@show_fields
@dataclass(frozen=True, kw_only=True)
class SACConfig:
    """Options of SAC.

    Raises:
        ConfigError: An option is out of range.
    """

    policy_lr: float = 1e-3
    """Learning rate of the actor."""
    q_lr: float = 1e-3
    """Learning rate of the critics."""
    alpha_lr: float = 1e-3
    """Learning rate of the automatic temperature."""
    gamma: float = 0.99
    """Discount factor."""
    n_step: int = 1
    """Number of rewards in a target, before it bootstraps from the critics."""
    tau: float = 0.005
    """Fraction by which the target critics move towards the critics in each update."""
    alpha: float | None = None
    """Temperature, the weight of the entropy; None: adjusted automatically, so that the policy keeps target_entropy."""
    target_entropy: float | None = None
    """Entropy of the policy, in nats, that the automatic temperature aims at; None: minus the number of action
    dimensions, or for discrete actions 0.3 times the largest possible entropy."""
    max_grad_norm: float | None = None
    """Largest norm of the gradients of actor and critics; larger ones are scaled down to it. None: no bound."""
    net: SACNetConfig = DEFAULT_NET
    """the networks"""
    replay: ReplayConfig = SAC_REPLAY
    """the replay buffer and the loop"""

    def __post_init__(self) -> None:
        check_counts(self, "n_step")
        check_numbers(self, gamma=(0, 1), tau=(0, 1), target_entropy=(-LARGE, LARGE))
        check_numbers(self, policy_lr=(0, LARGE), q_lr=(0, LARGE), alpha_lr=(0, LARGE), alpha=(0, LARGE))
        check_above(self, max_grad_norm=0, tau=0)


def make_soft_actor(observation_space: Space, action_space: Space, config: SACConfig) -> SoftActor:
    """Make an agent for the spaces of an environment.

    Args:
        observation_space: Space of single observations, as `env.launch()` returns it.
        action_space: Space of single actions, as `env.launch()` returns it.
        config: Options of SAC.

    Returns:
        The agent; its weights are drawn from torch's global generator.

    Raises:
        SpaceError: A space is not supported.
    """
    return SoftActor(observation_space, action_space, config.net)


# ---- losses ----


def soft_value(q: Tensor, logprob: Tensor, alpha: Tensor) -> Tensor:
    """Return the soft value of observations, `[n]`.

    Args:
        q: Values of both critics: `[2, n]` for one sampled action, or `[2, n, actions]`.
        logprob: Log-probabilities of these actions, `[n]` or `[n, actions]`.
        alpha: Temperature.
    """
    if logprob.dim() == 1:
        return q.amin(0) - alpha * logprob
    return (logprob.exp() * (q.mean(0) - alpha * logprob)).sum(-1)


def critic_loss(q: Tensor, target: Tensor) -> Tensor:
    """Return the mean over rows of half the squared errors of both critics, given values `[2, n]` and targets `[n]`."""
    return 0.5 * (q - target).square().mean(-1).sum()


def actor_loss(q: Tensor, logprob: Tensor, alpha: Tensor) -> Tensor:
    """Return the actor's loss: minus the mean soft value; arguments as those of `soft_value`."""
    return -soft_value(q, logprob, alpha).mean()


def temperature_loss(log_alpha: Tensor, entropy: Tensor, target_entropy: float) -> Tensor:
    """Return the loss of the temperature, whose gradient raises it while the entropy is below the target."""
    return (log_alpha * (entropy.detach() - target_entropy)).mean()


# ---- learner ----


class SAC(ReplayLearner[SoftActor]):
    """Learner that updates an agent with SAC, while workers roll.

    Args:
        agent: The agent to train; it is moved to `device`.
        config: Options of SAC.
        seed: Seed of the sampler; the critics' initial weights are drawn from torch's global generator.
        device: Device of the learner, as torch names it.
        scaling: Rule that chooses the number of workers whenever weights are published: one of `farstep.elastic`, or a
            function of `Signals`. None: `config.replay.scaling`.

    Raises:
        AgentError: The learner cannot train this agent.
        ConfigError: No policy can have the target entropy.

    Example:
        >>> config = SACConfig()
        >>> agent = make_soft_actor(*env.launch(), config)
        >>> Training(SAC(agent, config, seed=1), env, Limits(total_steps=100_000)).run()
    """

    names = ("obs", "action", "reward", "discount", "next_obs")

    def __init__(
        self, agent: SoftActor, config: SACConfig, seed: int, device: str = "cpu", scaling: Rule | None = None
    ) -> None:
        check_kind(agent, SoftActor, "SAC", adapters=False)
        super().__init__(agent, config.replay, seed, device, scaling)
        self.config = config
        self._critics = TwinCritics(agent, config.net).to(self.device)
        self._actor_optimizer = FlatAdam(agent.parameters(), config.policy_lr, config.max_grad_norm)
        self._critic_optimizer = FlatAdam(self._critics.parameters(), config.q_lr, config.max_grad_norm)
        self._target = TargetNetwork(self._critics, self._critic_optimizer)
        start = 1.0 if config.alpha is None else config.alpha
        self._log_alpha = nn.Parameter(torch.full((1,), math.log(max(start, 1e-30)), device=self.device))
        self._alpha_optimizer = FlatAdam([self._log_alpha], config.alpha_lr)
        self._target_entropy = self._default_entropy() if config.target_entropy is None else config.target_entropy
        self._check_entropy()

    def _check_entropy(self) -> None:
        """Raise `ConfigError` if no policy can have the target entropy that the options name."""
        agent, wanted = self.agent, self.config.target_entropy
        if wanted is None or self.config.alpha is not None:
            return
        largest = math.log(agent.num_actions) if agent.is_discrete else agent.num_actions * math.log(2)
        if wanted >= largest:
            raise ConfigError(
                f"target_entropy is {wanted:g}, but a policy for these actions has at most {largest:.3g} nats, so the "
                "temperature would grow without bound. Lower target_entropy, or give a fixed alpha."
            )

    def _default_entropy(self) -> float:
        agent = self.agent
        return 0.3 * math.log(agent.num_actions) if agent.is_discrete else -float(agent.num_actions)

    @property
    def parts(self) -> Mapping[str, SavedPart]:
        """Critics, their target, temperature and optimizers."""
        return {
            "critics": SavedNetwork(self._critics),
            "target": self._target.saved,
            "actor_optimizer": self._actor_optimizer,
            "critic_optimizer": self._critic_optimizer,
            "log_alpha": SavedTensor(self._log_alpha),
            "alpha_optimizer": self._alpha_optimizer,
        }

    @property
    def sampler(self) -> Sampler:
        """Transitions over `n_step` steps, uniform."""
        return NStep(self.config.n_step, self.config.gamma)

    def step(self, batch: ReplayBatch) -> tuple[Mapping[str, Tensor], Tensor | None]:
        """Update critics, actor and temperature on a batch.

        Args:
            batch: The rows to learn from.

        Returns:
            Metrics by name; rows have no priorities.
        """
        config, rows, agent = self.config, batch.rows, self.agent
        alpha = self._log_alpha.detach().exp()
        with torch.no_grad():
            q_next, logprob = self._evaluate(self._target.network, rows["next_obs"])
            target = rows["reward"] + rows["discount"].float() * soft_value(q_next, logprob, alpha)
        action = agent.scaled(rows["action"])
        if agent.is_discrete:
            q = self._critics(rows["obs"]).gather(-1, action.expand(2, -1)[..., None])[..., 0]
        else:
            q = self._critics(rows["obs"], action)
        loss = critic_loss(q, target)
        critic = {"value_loss": loss, "q_mean": q.mean(), **self._critic_optimizer.minimize(loss)}
        self._critics.requires_grad_(False)
        q_actor, logprob = self._evaluate(self._critics, rows["obs"])
        policy_loss = actor_loss(q_actor, logprob, alpha)
        actor = {"policy_loss": policy_loss, **self._actor_optimizer.minimize(policy_loss)}
        self._critics.requires_grad_(True)
        entropy = -(logprob.exp() * logprob).sum(-1) if agent.is_discrete else -logprob
        if config.alpha is None:
            self._alpha_optimizer.minimize(temperature_loss(self._log_alpha, entropy, self._target_entropy))
        self._target.follow(config.tau)
        actor |= {"entropy_loss": entropy.mean(), "alpha": alpha[0]}
        metrics = {f"critic/{name}": value.detach() for name, value in critic.items()}
        return metrics | {f"actor/{name}": value.detach() for name, value in actor.items()}, None

    def _evaluate(self, critics: TwinCritics, obs: Any) -> tuple[Tensor, Tensor]:
        """Return the critics' values of the policy's actions, and their log-probabilities."""
        if self.agent.is_discrete:
            return critics(obs), self.agent.logprobs(obs)
        action, logprob = self.agent.sample(obs)
        return critics(obs, action), logprob
