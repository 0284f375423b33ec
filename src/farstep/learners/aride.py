"""A-RIDE, the learner of DistRL (Wang et al. 2024): off-policy actor-critic on replayed episodes.

With rho_t = pi(a_t|s_t) / mu(a_t|s_t), where mu acted and pi is the current policy, and with the advantages Delta_t of
Retrace on state values (`returns.retrace_delta`), the losses of a batch of episodes are means over steps of

    actor    -weight * min(rho_bar, rho_t) * gate(Delta_t) * log pi(a_t|s_t) - entropy_bonus * H(pi(.|s_t))
    critic   weight * (V(s_t) - target_t) ** 2 / 2
    target   V(s_t) + min(rho_bar, rho_t) * Delta_t     mode "vtrace", the target of V-trace
             V(s_t) + Delta_t                           mode "paper", the target of DistRL; biased towards mu
             1 if sum_k gamma^(k-t) r_k > 0, else 0     mode "bce": V is the probability of success, with cross-entropy

Episodes are sampled in proportion to priority ** priority_alpha (DPER), and `weight` corrects for it:

    priority = w1 * mean |r_t + gamma V(s_{t+1}) - V(s_t)| + w2 * mean min(rho_t, 10) - w3 * mean log pi(a_t|s_t)

DistRL puts a FIFO queue of trajectories before a circular buffer. `ReplayLoop` gives the same: `Workflow` inserts the
workers' chunks in order of arrival, each exactly once (the queue), into a `Buffer` that evicts its oldest rows (the
circular buffer); `DPER` samples an episode as soon as its last row is there. Here the queue is bounded: the limiter
makes workers wait when they are too far ahead of the learner.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from farstep.batch import info_array
from farstep.buffer.samplers import DPER, Sampler
from farstep.cluster_env import ClusterEnv
from farstep.config.field_docs import show_fields
from farstep.core import Array, Nested
from farstep.elastic.scaling import Rule
from farstep.errors import ConfigError
from farstep.learners import losses
from farstep.learners.episodes.episode_filter import EpisodeFilter
from farstep.learners.episodes.estimates import Estimates, critic_targets, estimate, evaluate
from farstep.learners.episodes.padded_episodes import Episodes, episodes_of
from farstep.learners.episodes.penalties import INVALID_ACTION
from farstep.learners.loop.iteration import Loop
from farstep.learners.networks.agent import check_kind
from farstep.learners.networks.nets import ActorCritic, Evaluation, NetConfig
from farstep.learners.networks.normalizers import RewardScale
from farstep.learners.options.checks import LARGE, check_above, check_choice, check_counts, check_numbers
from farstep.learners.replay.batches import ReplayBatch
from farstep.learners.replay.config import EpisodeReplayConfig
from farstep.learners.replay.learner import ReplayLearner
from farstep.learners.replay.optimizer import FlatAdam
from farstep.learners.replay.saved_parts import SavedPart, UnusedPart
from farstep.learners.returns import ratio_statistics

Mode = Literal["vtrace", "paper", "bce"]
Gate = Literal["none", "normalize", "positive"]
DEFAULT_NET = NetConfig()
ARIDE_REPLAY = EpisodeReplayConfig(buffer_size=50_000, publish_every=1)


@show_fields
@dataclass(frozen=True, kw_only=True)
class ArideConfig:
    """Options of A-RIDE.

    Raises:
        ConfigError: An option is out of range.
    """

    mode: Mode = "vtrace"
    """Target of the critic: V-trace's (vtrace); DistRL's, biased towards the policy that acted (paper); or whether
    the return is above 0, for environments that reward only success (bce)."""
    gate: Gate = "normalize"
    """How advantages weight the policy gradient: unchanged (none), with mean 0 and standard deviation 1 over each batch
    (normalize), or 1 if positive and 0 otherwise, as in DistRL's code (positive)."""
    learning_rate: float = 1e-3
    """Learning rate of Adam, for actor and critics."""
    gamma: float = 0.99
    """Discount factor."""
    retrace_lambda: float = 0.95
    """Lambda of Retrace; below 1, TD errors propagate back over fewer rows: less variance, more bias."""
    rho_bar: float = 1.0
    """Clip of the importance ratio in the policy gradient and in the critic's target."""
    value_coef: float = 0.5
    """Weight of the value loss in the loss."""
    entropy_bonus: float = 0.01
    """Weight of the policy's entropy in the loss."""
    invalid_penalty: float = 0.0
    """Subtracted from the reward of a step whose info has a true entry `invalid_action`; 0: infos are not recorded."""
    repeat_penalty: float = 0.0
    """Subtracted from the reward of a step that repeats the previous action: once for the first repetition, twice for
    the second, and so on; another action resets the count."""
    filter_quantile: float | None = None
    """Train the actor only on episodes that went better than expected: those whose return minus the value predicted
    at the start reaches this quantile over recent episodes, e.g. 0.9. The critic learns from all episodes. None: no
    filter."""
    w1: float = 50.0
    """Weight of the mean absolute TD error in an episode's priority."""
    w2: float = 1.0
    """Weight of the mean importance ratio in an episode's priority."""
    w3: float = 0.01
    """Weight of the mean surprisal of actions in an episode's priority."""
    priority_alpha: float = 0.5
    """Exponent of priorities; 0 samples all episodes equally often."""
    priority_beta: float = 0.4
    """Exponent of the weights that correct for sampling by priority; 1 corrects fully, 0 not at all."""
    refresh_every: int | None = 100
    """Updates between two recomputations of the priorities of all episodes in the buffer; None: an episode's priority
    changes only when it is sampled."""
    max_grad_norm: float = 0.5
    """Largest norm of the gradient; larger gradients are scaled down to it."""
    net: NetConfig = DEFAULT_NET
    """the agent's network"""
    replay: EpisodeReplayConfig = ARIDE_REPLAY
    """the replay buffer and the loop"""

    def __post_init__(self) -> None:
        check_choice(self, "mode", ("vtrace", "paper", "bce"))
        check_choice(self, "gate", ("none", "normalize", "positive"))
        check_numbers(self, gamma=(0, 1), retrace_lambda=(0, 1), filter_quantile=(0, 1), learning_rate=(0, LARGE))
        check_numbers(self, value_coef=(0, LARGE), entropy_bonus=(0, LARGE))
        check_numbers(self, invalid_penalty=(0, LARGE), repeat_penalty=(0, LARGE))
        check_numbers(self, w1=(0, LARGE), w2=(0, LARGE), w3=(0, LARGE))
        check_numbers(self, priority_alpha=(0, LARGE), priority_beta=(0, LARGE))
        check_counts(self, "refresh_every")
        check_above(self, max_grad_norm=0, rho_bar=0)

    @property
    def info_keys(self) -> tuple[str, ...]:
        """Entries of infos that environments must record (`EnvConfig.info_keys`)."""
        return (INVALID_ACTION,) if self.invalid_penalty else ()


class Aride(ReplayLearner[ActorCritic]):
    """Learner that updates an agent with A-RIDE, while workers roll.

    Args:
        agent: The agent to train; it is moved to `device`.
        config: Options of A-RIDE.
        seed: Seed of the sampler; the trajectory critic's initial weights are drawn from torch's global generator.
        device: Device of the learner, as torch names it.
        scaling: Rule that chooses the number of workers whenever weights are published: one of `farstep.elastic`, or a
            function of `Signals`. None: `config.replay.scaling`.

    Raises:
        AgentError: The learner cannot train this agent.

    Example:
        >>> config = ArideConfig()
        >>> agent = make_agent(*env.launch(), config.net, config.gamma)
        >>> Training(Aride(agent, config, seed=1), env, Limits(total_steps=100_000)).run()
    """

    def __init__(
        self, agent: ActorCritic, config: ArideConfig, seed: int, device: str = "cpu", scaling: Rule | None = None
    ) -> None:
        check_kind(agent, ActorCritic, "A-RIDE", adapters=True)
        super().__init__(agent, config.replay, seed, device, scaling)
        self.config = config
        self._optimizer = FlatAdam(agent.parameters(), config.learning_rate, config.max_grad_norm)
        self._filter: EpisodeFilter | None = None
        if config.filter_quantile is not None:
            success_gamma = config.gamma if config.mode == "bce" else None
            optimizer = config.learning_rate, config.max_grad_norm
            self._filter = EpisodeFilter(self.agent, config.net, config.filter_quantile, success_gamma, optimizer)

    @property
    def parts(self) -> Mapping[str, SavedPart]:
        """Optimizer, and the filter with its critic and optimizer."""
        kept = self._filter
        return {
            "optimizer": self._optimizer,
            "trajectory_critic": UnusedPart() if kept is None else kept,
            "trajectory_optimizer": UnusedPart() if kept is None else kept.optimizer,
        }

    def run(self, env: ClusterEnv, loop: Loop) -> None:
        """Learn until `loop.report` returns False.

        Args:
            env: The environments to train in.
            loop: The training loop.

        Raises:
            ConfigError: `invalid_penalty` is set, but the environments do not record `invalid_action`.
        """
        if missing := set(self.config.info_keys) - set(env.env_config.info_keys):
            raise ConfigError(
                f"invalid_penalty={self.config.invalid_penalty} needs the info {missing.pop()!r} of every step, which "
                "the environments do not record; set EnvConfig.info_keys=config.info_keys."
            )
        super().run(env, loop)

    # ---- for the loop (`ReplayAlgorithm` and `RefreshesPriorities`) ----

    @property
    def sampler(self) -> Sampler:
        """Whole episodes, by priority."""
        return DPER(self.config.priority_alpha, self.config.priority_beta)

    @property
    def names(self) -> tuple[str, ...]:
        """The arrays of a batch that `step` needs."""
        recorded = ("sample",) if self.agent.keeps_samples else ()
        infos = tuple(info_array(key) for key in self.config.info_keys)
        flags = ("terminated", "truncated", "valid")
        return ("obs", "next_obs", "action", "logprob", "reward", *flags, *recorded, *infos)

    @property
    def refresh_every(self) -> int | None:
        """Updates between two recomputations of all priorities; None: never."""
        return self.config.refresh_every

    def step(self, batch: ReplayBatch) -> tuple[Mapping[str, Tensor], Tensor | None]:
        """Update actor and critics on a batch.

        Args:
            batch: The episodes to learn from.

        Returns:
            Metrics by name, and the new priorities of the episodes, from the networks before the update.
        """
        config = self.config
        episodes = self._episodes(batch.rows)
        self._observe_rewards(episodes)
        evaluation, final_value = evaluate(self.agent, episodes)
        estimates = self._estimates(episodes, evaluation, final_value)
        is_kept, trajectory = self._select(episodes)
        weights = batch.weights.expand(episodes.valid.shape).flatten()[episodes.steps.to(self.device)]
        policy_loss, kept_fraction = self._policy_loss(evaluation, estimates, episodes, weights, is_kept)
        value_loss = (weights * self._value_errors(evaluation, estimates, episodes)).mean()
        entropy = evaluation.entropy.mean()
        loss = policy_loss + config.value_coef * value_loss - config.entropy_bonus * entropy
        step = self._optimizer.minimize(loss)
        self.agent.update_moments(episodes.valid_rows(episodes.obs))
        rhos = ratio_statistics(estimates.log_rho[episodes.valid], config.rho_bar)
        actor = {"policy_loss": policy_loss, "total_loss": loss, "entropy_loss": entropy, **step}
        actor |= {"kept_fraction": kept_fraction, "penalty": torch.tensor(-episodes.penalty[episodes.valid].mean())}
        actor |= {name: torch.tensor(number) for name, number in rhos.items()}
        critic = {"value_loss": value_loss, **trajectory}
        critic["td_error"] = torch.tensor(np.abs(estimates.td_error[episodes.valid]).mean())
        metrics = {f"actor/{name}": value.detach().float() for name, value in actor.items()}
        metrics |= {f"critic/{name}": value.detach().float() for name, value in critic.items()}
        return metrics, self._priorities(episodes, estimates)

    @torch.no_grad()
    def priorities(self, batch: ReplayBatch) -> Tensor:
        """Compute the priorities of episodes under the current networks.

        Args:
            batch: The episodes.

        Returns:
            One priority per episode.
        """
        episodes = self._episodes(batch.rows)
        return self._priorities(episodes, self._estimates(episodes, *evaluate(self.agent, episodes)))

    # ---- parts of an update ----

    def _episodes(self, rows: Mapping[str, Nested]) -> Episodes:
        config, sample = self.config, "sample" if self.agent.keeps_samples else "action"
        return episodes_of(rows, sample, invalid_penalty=config.invalid_penalty, repeat_penalty=config.repeat_penalty)

    def _observe_rewards(self, episodes: Episodes) -> None:
        if self._scale is not None:
            running = np.zeros(episodes.valid.shape[1])
            self._scale.update(episodes.reward + episodes.penalty, episodes.ended, episodes.valid, running)

    @property
    def _scale(self) -> RewardScale | None:
        """Scale of rewards; None in mode "bce", in which values are probabilities."""
        return None if self.config.mode == "bce" else self.agent.reward_scale

    def _estimates(self, episodes: Episodes, evaluation: Evaluation, final_value: Tensor) -> Estimates:
        config = self.config
        return estimate(
            episodes,
            evaluation,
            final_value,
            gamma=config.gamma,
            retrace_lambda=config.retrace_lambda,
            scale=self._scale,
            are_logits=config.mode == "bce",
        )

    def _policy_loss(
        self, evaluation: Evaluation, estimates: Estimates, episodes: Episodes, weights: Tensor, is_kept: Array
    ) -> tuple[Tensor, Tensor]:
        """Return the policy loss, and the fraction of steps with an effect on the policy."""
        config, valid = self.config, episodes.valid
        advantages = torch.from_numpy(estimates.delta[valid]).to(self.device)
        rhos = torch.from_numpy(np.minimum(config.rho_bar, estimates.rho)[valid]).to(self.device, torch.float32)
        kept = torch.from_numpy(np.broadcast_to(is_kept, valid.shape)[valid]).to(self.device)
        is_effective = kept
        if config.gate == "normalize":
            advantages = losses.normalize(advantages, kept)
        elif config.gate == "positive":
            is_effective = kept & (advantages > 0)
            advantages = is_effective.float()
        loss = losses.masked_mean(-weights * rhos * advantages * evaluation.logprob, kept)
        return loss, is_effective.float().mean()

    def _value_errors(self, evaluation: Evaluation, estimates: Estimates, episodes: Episodes) -> Tensor:
        """Return the critic's loss of each valid step."""
        config, valid = self.config, episodes.valid
        if config.mode == "bce":
            success = torch.from_numpy(episodes.success(config.gamma)[valid]).to(self.device)
            return functional.binary_cross_entropy_with_logits(evaluation.value, success, reduction="none")
        targets = critic_targets(estimates.value, estimates.delta, estimates.rho, config.mode, config.rho_bar)
        return 0.5 * (evaluation.value - torch.from_numpy(targets[valid]).to(self.device, torch.float32)).square()

    def _priorities(self, episodes: Episodes, estimates: Estimates) -> Tensor:
        config = self.config
        return torch.from_numpy(estimates.priorities(episodes.length, config.w1, config.w2, config.w3))

    def _select(self, episodes: Episodes) -> tuple[Array, dict[str, Tensor]]:
        """Return which episodes train the actor, `[N]`: all without a filter; and metrics of the filter's critic."""
        if self._filter is None:
            return np.ones(episodes.valid.shape[1], bool), {}
        is_kept, loss = self._filter.select(episodes)
        return is_kept, {"trajectory_loss": loss}
