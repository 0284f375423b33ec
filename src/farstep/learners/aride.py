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

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from farstep.batch import info_array
from farstep.buffer.samplers import DPER, Sampler, trajectory_priority
from farstep.checkpoint.checks import converted
from farstep.cluster_env import ClusterEnv
from farstep.config.field_docs import show_fields
from farstep.core import Array, Nested
from farstep.errors import ConfigError
from farstep.learners import losses
from farstep.learners.loop.iteration import Loop
from farstep.learners.networks.encoders import hidden_layers
from farstep.learners.networks.nets import ActorCritic, Evaluation, NetConfig, RecurrentActorCritic
from farstep.learners.networks.normalizers import RewardScale, RunningMoments
from farstep.learners.options.checks import LARGE, check_above, check_choice, check_counts, check_numbers
from farstep.learners.replay.batches import ReplayBatch
from farstep.learners.replay.config import EpisodeReplayConfig
from farstep.learners.replay.loop import ReplayLoop
from farstep.learners.replay.optimizer import FlatAdam, check_parameters
from farstep.learners.returns import LOG_RATIO_LIMIT, fold_ends, ratio_statistics, retrace_delta
from farstep.schema import map_leaves

Mode = Literal["vtrace", "paper", "bce"]
Gate = Literal["none", "normalize", "positive"]
INVALID_ACTION = "invalid_action"
"""Entry of an environment's info that marks an invalid action."""
_SCORES = 1_000
"""Number of recent episodes among which `filter_quantile` is computed."""
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
    """Train the actor only on episodes whose return exceeds the value predicted at their start by at least this
    quantile of recent episodes, e.g. 0.9; the critic learns from all. None: no filter."""
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


# ---- targets ----


def penalties(
    actions: Sequence[Array], invalid: Array | None, *, invalid_penalty: float, repeat_penalty: float
) -> Array:
    """Return what is added to the rewards of the steps of episodes: 0 or a negative number each.

    Args:
        actions: Arrays `[T, N, ...]` with the actions of N episodes; several if the action space is nested.
        invalid: Not 0 where an action is invalid, `[T, N]`; None: all are valid.
        invalid_penalty: Penalty of an invalid action.
        repeat_penalty: Penalty of the first repetition of an action; the k-th in a row costs k times this.

    Returns:
        Numbers `[T, N]`.
    """
    length, count = actions[0].shape[:2]
    found: Array = np.zeros((length, count))
    for t in range(1, length):
        is_same = np.logical_and.reduce([(a[t] == a[t - 1]).reshape(count, -1).all(-1) for a in actions])
        found[t] = np.where(is_same, found[t - 1] - repeat_penalty, 0.0)
    return found if invalid is None else found - invalid_penalty * (invalid != 0)


def critic_targets(
    values: Array, deltas: Array, rhos: Array, mode: Literal["vtrace", "paper"], rho_bar: float
) -> Array:
    """Return the critic's targets of steps, all arrays of the same shape.

        V + min(rho_bar, rho) * Delta   mode "vtrace"       V + Delta   mode "paper"

    Args:
        values: Values V.
        deltas: Advantages Delta of Retrace.
        rhos: Importance ratios.
        mode: Which target.
        rho_bar: Clip of the ratios.
    """
    return values + (deltas if mode == "paper" else np.minimum(rho_bar, rhos) * deltas)


@dataclass(frozen=True)
class Episodes:
    """N episodes of up to T steps; arrays and tensors are time-major `[T, N, ...]`, padded where `valid` is False."""

    obs: Nested
    sample: Nested
    """What the policy sampled; actions may be clipped."""
    final_obs: Nested
    """Observations after the last step, `[N, ...]`."""
    logprob: Array
    """Log-probabilities of the samples under the policy that acted."""
    reward: Array
    """Rewards of the environment."""
    penalty: Array
    """Penalties, 0 or negative."""
    terminated: Array
    truncated: Array
    valid: Array

    @property
    def steps(self) -> Tensor:
        """Indices of the valid steps among all `T * N`."""
        return torch.from_numpy(np.flatnonzero(self.valid))

    @property
    def length(self) -> Array:
        """Length of each episode, `[N]`."""
        return np.asarray(self.valid.sum(0))

    @property
    def ended(self) -> Array:
        """Whether the episode ends with the step."""
        return np.asarray((self.terminated | self.truncated) & self.valid)


@dataclass(frozen=True)
class Estimates:
    """What the current networks say about episodes; arrays `[T, N]`, 0 on padding."""

    log_rho: Array
    logprob: Array
    value: Array
    delta: Array
    """Advantages of Retrace."""
    td_error: Array
    """One-step TD errors."""

    @property
    def rho(self) -> Array:
        """Importance ratios."""
        return np.exp(self.log_rho)

    def priorities(self, length: Array, w1: float, w2: float, w3: float) -> Array:
        """Return the priority of each episode for DPER, `[N]`."""
        columns = zip(length, self.td_error.T, self.rho.T, self.logprob.T, strict=True)
        return np.array(
            [trajectory_priority(td[:n], rho[:n], log[:n], w1=w1, w2=w2, w3=w3) for n, td, rho, log in columns]
        )


# ---- trajectory-level value ----


class TrajectoryCritic(nn.Module):
    """Predicts the outcome of an episode from its first observation, to find episodes that went better than expected.

    The outcome is the return, normalized by its running mean and standard deviation; or success, as a logit.

    Args:
        agent: The agent; its encoders make the features, and do not learn from this critic.
        config: Options of the network.
    """

    def __init__(self, agent: ActorCritic, config: NetConfig) -> None:
        super().__init__()
        layers, width = hidden_layers(agent.encoders.width, config.hidden, config.activation)
        self.layers = nn.Sequential(layers, nn.Linear(width, 1))
        self.returns = RunningMoments(())

    def forward(self, agent: ActorCritic, first_obs: Nested) -> Tensor:
        """Return the predictions `[N]` for first observations `[N, ...]`."""
        with torch.no_grad():
            features = agent.encoders(first_obs)
        prediction: Tensor = self.layers(features)
        return prediction.squeeze(-1)


# ---- learner ----


class _Saved(msgspec.Struct, forbid_unknown_fields=True):
    optimizer: dict[str, Any]
    trajectory_critic: dict[str, Any] | None
    trajectory_optimizer: dict[str, Any] | None


class Aride:
    """Learner that updates an agent with A-RIDE, while workers roll.

    Args:
        agent: The agent to train; it is moved to `device`.
        config: Options of A-RIDE.
        seed: Seed of the sampler; the trajectory critic's initial weights are drawn from torch's global generator.
        device: Device of the learner, as torch names it.

    Example:
        >>> config = ArideConfig()
        >>> agent = make_agent(*env.launch(), config.net, config.gamma)
        >>> Training(Aride(agent, config, seed=1), env, Limits(total_steps=100_000)).run()
    """

    synchronous = False

    def __init__(self, agent: ActorCritic, config: ArideConfig, seed: int, device: str = "cpu") -> None:
        self.config, self.device = config, torch.device(device)
        self.agent = agent.to(self.device)
        self._optimizer = FlatAdam(agent.parameters(), config.learning_rate, config.max_grad_norm)
        self._trajectory_critic: TrajectoryCritic | None = None
        self._trajectory_optimizer: FlatAdam | None = None
        if config.filter_quantile is not None:
            self._trajectory_critic = critic = TrajectoryCritic(agent, config.net).to(self.device)
            self._trajectory_optimizer = FlatAdam(critic.parameters(), config.learning_rate, config.max_grad_norm)
        self._scores: deque[float] = deque(maxlen=_SCORES)
        self._seed, self._resumed = seed, False

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
        ReplayLoop(self, self.config.replay, self._seed, self._resumed).run(env, loop)

    # ---- for the loop (`ReplayAlgorithm`, `RefreshesPriorities`) ----

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

    def explore(self, steps: int, num_envs: int) -> None:
        """Do nothing: the policy is stochastic.

        Args:
            steps: Environment steps so far.
            num_envs: Number of environments.
        """

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
        evaluation, final_value = self._evaluate(episodes)
        estimates = self._estimates(episodes, evaluation, final_value)
        is_kept, trajectory = self._filter(episodes)
        weights = batch.weights.expand(episodes.valid.shape).flatten()[episodes.steps.to(self.device)]
        policy_loss, kept_fraction = self._policy_loss(evaluation, estimates, episodes, weights, is_kept)
        value_loss = (weights * self._value_errors(evaluation, estimates, episodes)).mean()
        entropy = evaluation.entropy.mean()
        loss = policy_loss + config.value_coef * value_loss - config.entropy_bonus * entropy
        step = self._optimizer.minimize(loss)
        self.agent.update_moments(self._valid_rows(episodes.obs, episodes))
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
        return self._priorities(episodes, self._estimates(episodes, *self._evaluate(episodes)))

    # ---- parts of an update ----

    def _episodes(self, rows: Mapping[str, Nested]) -> Episodes:
        """Convert a batch `[N, T, ...]` to time-major episodes."""
        config, by_time = self.config, {name: map_leaves(_swap, rows[name]) for name in self.names}
        actions: list[Array] = []
        map_leaves(lambda leaf: actions.append(leaf.numpy(force=True)), by_time["action"])
        flags = {name: by_time[name].numpy(force=True) for name in ("terminated", "truncated", "valid")}
        invalid = by_time[info_array(INVALID_ACTION)].numpy(force=True) if config.invalid_penalty else None
        return Episodes(
            by_time["obs"],
            by_time["sample" if self.agent.keeps_samples else "action"],
            map_leaves(lambda leaf: leaf[-1], by_time["next_obs"]),  # padding repeats the last step
            by_time["logprob"].numpy(force=True),
            by_time["reward"].numpy(force=True),
            penalties(
                actions, invalid, invalid_penalty=config.invalid_penalty, repeat_penalty=config.repeat_penalty
            ).astype(np.float32),
            **flags,
        )

    def _observe_rewards(self, episodes: Episodes) -> None:
        if self._scale is not None:
            running = np.zeros(episodes.valid.shape[1])
            self._scale.update(episodes.reward + episodes.penalty, episodes.ended, episodes.valid, running)

    @property
    def _scale(self) -> RewardScale | None:
        """Scale of rewards; None in mode "bce", in which values are probabilities."""
        return None if self.config.mode == "bce" else self.agent.reward_scale

    def _evaluate(self, episodes: Episodes) -> tuple[Evaluation, Tensor]:
        """Evaluate the valid steps, and the values of final observations `[N]`."""
        agent, steps = self.agent, episodes.steps.to(self.device)
        if isinstance(agent, RecurrentActorCritic):
            starts = torch.zeros(episodes.valid.shape, dtype=torch.bool, device=self.device)
            starts[0] = True
            initial = tuple(part.to(self.device) for part in agent.initial_state(starts.shape[1]))
            features, states = agent.unroll(episodes.obs, initial, starts)
            last = torch.from_numpy(episodes.length - 1).to(self.device)
            columns = torch.arange(starts.shape[1], device=self.device)
            after = tuple(torch.stack(parts)[last, columns] for parts in zip(*states, strict=True))
            evaluation = agent.evaluate_features(features[steps], self._valid_rows(episodes.sample, episodes))
            with torch.no_grad():
                return evaluation, agent.value_after(episodes.final_obs, after)
        obs, sample = (self._valid_rows(rows, episodes) for rows in (episodes.obs, episodes.sample))
        with torch.no_grad():
            final_value = agent.value(episodes.final_obs)
        return agent.evaluate(obs, sample), final_value

    def _valid_rows(self, rows: Nested, episodes: Episodes) -> Nested:
        """Return the valid steps `[n, ...]` of nested tensors `[T, N, ...]`."""
        steps = episodes.steps.to(self.device)
        return map_leaves(lambda leaf: leaf.flatten(0, 1)[steps], rows)

    def _estimates(self, episodes: Episodes, evaluation: Evaluation, final_value: Tensor) -> Estimates:
        config, valid = self.config, episodes.valid

        def on_grid(rows: Tensor) -> Array:
            grid = np.zeros(valid.shape, np.float32)
            grid[valid] = rows.numpy(force=True)
            return grid

        if config.mode == "bce":
            final_value = final_value.sigmoid()
            value = on_grid(evaluation.value.detach().sigmoid())
        else:
            value = on_grid(evaluation.value)
        logprob = on_grid(evaluation.logprob)
        log_rho = np.where(valid, logprob - episodes.logprob, 0.0).clip(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        reward = episodes.reward + episodes.penalty
        if self._scale is not None:
            reward = self._scale(reward)
        final = np.broadcast_to(final_value.numpy(force=True), valid.shape)
        rewards, discounts, _ = fold_ends(reward, episodes.terminated, episodes.truncated, final, config.gamma)
        after = np.zeros(valid.shape[1])
        delta, td_error = (
            retrace_delta(log_rho, rewards, value, after, discounts, lam, valid=valid)
            for lam in (config.retrace_lambda, 0.0)
        )
        return Estimates(log_rho, logprob, value, delta, td_error)

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
            success = torch.from_numpy(self._success(episodes)[valid]).to(self.device)
            return functional.binary_cross_entropy_with_logits(evaluation.value, success, reduction="none")
        targets = critic_targets(estimates.value, estimates.delta, estimates.rho, config.mode, config.rho_bar)
        return 0.5 * (evaluation.value - torch.from_numpy(targets[valid]).to(self.device, torch.float32)).square()

    def _success(self, episodes: Episodes) -> Array:
        """Return for each step 1 if the discounted sum of the environment's rewards from there on is above 0."""
        zeros, valid = np.zeros(episodes.valid.shape), episodes.valid
        discounts = self.config.gamma * ~episodes.ended
        returns = retrace_delta(zeros, episodes.reward, zeros, zeros[0], discounts, valid=valid)
        return (returns > 0).astype(np.float32)

    def _priorities(self, episodes: Episodes, estimates: Estimates) -> Tensor:
        config = self.config
        return torch.from_numpy(estimates.priorities(episodes.length, config.w1, config.w2, config.w3))

    def _filter(self, episodes: Episodes) -> tuple[Array, dict[str, Tensor]]:
        """Return which episodes train the actor, `[N]`, and update the trajectory critic; all without a filter."""
        quantile, critic, optimizer = self.config.filter_quantile, self._trajectory_critic, self._trajectory_optimizer
        if quantile is None or critic is None or optimizer is None:
            return np.ones(episodes.valid.shape[1], bool), {}
        prediction = critic(self.agent, map_leaves(lambda leaf: leaf[0], episodes.obs))
        if self.config.mode == "bce":
            outcome = torch.from_numpy(self._success(episodes)[0]).to(self.device)
            loss = functional.binary_cross_entropy_with_logits(prediction, outcome)
            scores = outcome - prediction.detach().sigmoid()
        else:
            returns = torch.from_numpy(np.where(episodes.valid, episodes.reward + episodes.penalty, 0).sum(0))
            critic.returns.update(returns.to(self.device))
            outcome = critic.returns(returns.to(self.device))
            loss = 0.5 * (prediction - outcome).square().mean()
            scores = outcome - prediction.detach()
        optimizer.minimize(loss)
        found = scores.numpy(force=True)
        self._scores.extend(found.tolist())
        return found >= np.quantile(self._scores, quantile), {"trajectory_loss": loss}

    # ---- checkpoints ----

    def state(self) -> dict[str, object]:
        """Return the learner's state for a checkpoint; the agent's parameters are saved separately."""
        critic, optimizer = self._trajectory_critic, self._trajectory_optimizer
        return {
            "optimizer": self._optimizer.state(),
            "trajectory_critic": None if critic is None else dict(critic.state_dict()),
            "trajectory_optimizer": None if optimizer is None else optimizer.state(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state.

        Args:
            state: What `state` returned.

        Raises:
            Refused: The state does not fit this learner; nothing has changed.
        """
        saved = converted("learner", state, _Saved)
        optimizer = self._optimizer.check("learner.optimizer", saved.optimizer)
        if self._trajectory_critic is not None and self._trajectory_optimizer is not None:
            where, critic = "learner.trajectory_critic", self._trajectory_critic
            parameters = check_parameters(where, saved.trajectory_critic, critic)
            adam = self._trajectory_optimizer.check("learner.trajectory_optimizer", saved.trajectory_optimizer)
            critic.load_state_dict(parameters)
            self._trajectory_optimizer.load(adam)
        self._optimizer.load(optimizer)
        self._resumed = True


def _swap(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, 1)
