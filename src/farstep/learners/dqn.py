"""Deep Q-learning (Mnih et al. 2015) with its usual extensions, and Ape-X (Horgan et al. 2018).

The loss of a batch is the mean over rows of

    weight * h(Q(s, a) - target)        target = reward + discount * Q_target(s', argmax_a Q(s', a))

where reward and discount span `n_step` steps, weights correct for sampling by priority, and h(x) = x ** 2 / 2, linear
beyond `huber_delta`.

Ape-X is the same learner with other defaults: a fixed epsilon for each environment slot, and initial priorities that
workers compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from farstep.buffer.samplers import NStep, Prioritized, Sampler, Uniform
from farstep.config.field_docs import show_fields
from farstep.elastic.scaling import Rule
from farstep.learners.losses import half_square
from farstep.learners.networks.agent import check_kind
from farstep.learners.networks.encoders import Space
from farstep.learners.networks.q_network import PrioritizingQAgent, QAgent, QNetConfig
from farstep.learners.options.checks import LARGE, check_above, check_choice, check_counts, check_numbers
from farstep.learners.replay.batches import ReplayBatch
from farstep.learners.replay.config import ReplayConfig
from farstep.learners.replay.learner import ReplayLearner
from farstep.learners.replay.optimizer import FlatAdam, TargetNetwork
from farstep.learners.replay.saved_parts import SavedPart, UpdateCount

_MIN_PRIORITY = 1e-6
DEFAULT_NET = QNetConfig()
DQN_REPLAY = ReplayConfig()
APEX_REPLAY = ReplayConfig(batch_size=512, updates_per_step=0.25, learning_starts=2_000)


@show_fields
@dataclass(frozen=True, kw_only=True)
class DQNConfig:
    """Options of DQN.

    Raises:
        ConfigError: An option is out of range.
    """

    learning_rate: float = 5e-4
    """Learning rate of Adam."""
    gamma: float = 0.99
    """Discount factor."""
    n_step: int = 3
    """Number of rewards in a target, before it bootstraps from the network's own values. With more, rewards propagate
    faster, but targets depend on more actions that the current policy might not take."""
    double: bool = True
    """Double DQN: the network chooses the action that the target network evaluates, which reduces overestimation."""
    tau: float = 0.01
    """Fraction by which the target network moves towards the network when it is updated; 1 copies it."""
    target_update_every: int = 1
    """Updates between two updates of the target network. The Ape-X paper uses --tau 1 --target-update-every 2500."""
    prioritized: bool = False
    """Sample rows in proportion to the TD error that they had when last sampled, instead of uniformly."""
    priority_alpha: float = 0.6
    """Exponent of priorities; 0 is uniform."""
    priority_beta: float = 0.4
    """Exponent of the weights that correct for sampling by priority; 1 corrects fully."""
    worker_priorities: bool = False
    """With --prioritized: workers compute the initial priorities of rows; otherwise new rows get the highest so far."""
    exploration: Literal["annealed", "ladder"] = "annealed"
    """Probability of random actions: the same in all environments, decreasing from epsilon to epsilon_end during the
    first exploration_steps steps (annealed); or constant, and different in each environment, from epsilon to
    epsilon ** (1 + epsilon_alpha) (ladder)."""
    epsilon: float = 1.0
    """Probability of a random action at the start (annealed), or in the first environment (ladder)."""
    epsilon_end: float = 0.05
    """Probability of a random action after exploration_steps steps (annealed)."""
    exploration_steps: int = 10_000
    """Environment steps, over all environments, during which epsilon decreases (annealed)."""
    epsilon_alpha: float = 7.0
    """Exponent of the ladder."""
    huber_delta: float | None = 10.0
    """Huber loss: TD errors above this enter the loss linearly. If it is far below the returns, rare failures count
    little, and the return can collapse again and again. None: squared error."""
    max_grad_norm: float = 10.0
    """Largest norm of the gradient; larger gradients are scaled down to it."""
    net: QNetConfig = DEFAULT_NET
    """the agent's network"""
    replay: ReplayConfig = DQN_REPLAY
    """the replay buffer and the loop"""

    def __post_init__(self) -> None:
        check_counts(self, "n_step", "target_update_every", "exploration_steps")
        check_choice(self, "exploration", ("annealed", "ladder"))
        check_numbers(self, gamma=(0, 1), epsilon=(0, 1), epsilon_end=(0, 1))
        check_numbers(self, learning_rate=(0, LARGE), priority_alpha=(0, LARGE), priority_beta=(0, LARGE))
        check_numbers(self, epsilon_alpha=(0, LARGE), tau=(0, 1))
        check_above(self, max_grad_norm=0, tau=0, huber_delta=0)


@show_fields
@dataclass(frozen=True, kw_only=True)
class ApexConfig(DQNConfig):
    """Options of Ape-X: those of DQN, with other defaults.

    Raises:
        ConfigError: An option is out of range.
    """

    prioritized: bool = True
    """Sample rows in proportion to the TD error that they had when last sampled, instead of uniformly."""
    worker_priorities: bool = True
    """With --prioritized: workers compute the initial priorities of rows; otherwise new rows get the highest so far."""
    exploration: Literal["annealed", "ladder"] = "ladder"
    """Probability of random actions: the same in all environments, decreasing from epsilon to epsilon_end during the
    first exploration_steps steps (annealed); or constant, and different in each environment, from epsilon to
    epsilon ** (1 + epsilon_alpha) (ladder)."""
    epsilon: float = 0.4
    """Probability of a random action at the start (annealed), or in the first environment (ladder)."""
    huber_delta: float | None = 1.0
    """Huber loss: TD errors above this enter the loss linearly. If it is far below the returns, rare failures count
    little, and the return can collapse again and again. None: squared error."""
    replay: ReplayConfig = APEX_REPLAY
    """the replay buffer and the loop"""


def make_q_agent(observation_space: Space, action_space: Space, config: DQNConfig) -> QAgent:
    """Make an agent for the spaces of an environment.

    Args:
        observation_space: Space of single observations, as `env.launch()` returns it.
        action_space: Space of single actions, as `env.launch()` returns it.
        config: Options of DQN or Ape-X.

    Returns:
        The agent; its weights are drawn from torch's global generator.

    Raises:
        SpaceError: A space is not supported.
    """
    if config.prioritized and config.worker_priorities:
        return PrioritizingQAgent(observation_space, action_space, config.net, config.n_step, config.gamma)
    return QAgent(observation_space, action_space, config.net)


def q_targets(reward: Tensor, discount: Tensor, target_q: Tensor, online_q: Tensor | None = None) -> Tensor:
    """Return the targets of Q-learning, `[n]`.

        target = reward + discount * target_q[argmax(online_q)]

    Args:
        reward: Discounted sum of rewards, `[n]`.
        discount: Discount of the value after them, 0 if the episode terminated, `[n]`.
        target_q: Action values of the target network after them, `[n, actions]`.
        online_q: Action values of the network that choose the action (double DQN); None: `target_q` chooses.
    """
    chosen = (target_q if online_q is None else online_q).argmax(-1, keepdim=True)
    return reward + discount * target_q.gather(-1, chosen)[:, 0]


class DQN(ReplayLearner[QAgent]):
    """Learner that updates an agent with DQN or Ape-X, while workers roll.

    Args:
        agent: The agent to train; it is moved to `device`.
        config: Options.
        seed: Seed of the sampler.
        device: Device of the learner, as torch names it.
        scaling: Rule that chooses the number of workers whenever weights are published: one of `farstep.elastic`, or a
            function of `Signals`. None: `config.replay.scaling`.

    Raises:
        AgentError: The learner cannot train this agent.

    Example:
        >>> config = DQNConfig(learning_rate=1e-3)
        >>> agent = make_q_agent(*env.launch(), config)
        >>> Training(DQN(agent, config, seed=1), env, Limits(total_steps=100_000)).run()
    """

    names = ("obs", "action", "reward", "discount", "next_obs")

    def __init__(
        self, agent: QAgent, config: DQNConfig, seed: int, device: str = "cpu", scaling: Rule | None = None
    ) -> None:
        check_kind(agent, QAgent, "DQN", adapters=False)
        super().__init__(agent, config.replay, seed, device, scaling)
        self.config = config
        self._optimizer = FlatAdam(agent.parameters(), config.learning_rate, config.max_grad_norm)
        self._target = TargetNetwork(agent, self._optimizer)
        self._updates = UpdateCount()

    @property
    def parts(self) -> Mapping[str, SavedPart]:
        """Optimizer, target network and number of updates."""
        return {"optimizer": self._optimizer, "target": self._target.saved, "updates": self._updates}

    @property
    def sampler(self) -> Sampler:
        """Transitions over `n_step` steps, uniform or by priority."""
        config = self.config
        by = Prioritized(config.priority_alpha, config.priority_beta) if config.prioritized else Uniform()
        return NStep(config.n_step, config.gamma, by=by)

    def step(self, batch: ReplayBatch) -> tuple[Mapping[str, Tensor], Tensor | None]:
        """Update the agent on a batch.

        Args:
            batch: The rows to learn from.

        Returns:
            Metrics by name, and the new priorities of the rows; None if they are sampled uniformly.
        """
        config, rows = self.config, batch.rows
        with torch.no_grad():
            online = self.agent(rows["next_obs"]) if config.double else None
            target = q_targets(rows["reward"], rows["discount"].float(), self._target.network(rows["next_obs"]), online)
        q = self.agent(rows["obs"]).gather(-1, self.agent.actions_of(rows["action"])[:, None])[:, 0]
        loss = (batch.weights * half_square(q - target, config.huber_delta)).mean()
        step = self._optimizer.minimize(loss)
        self._updates.count += 1
        if self._updates.count % config.target_update_every == 0:
            self._target.follow(config.tau)
        errors = (target - q.detach()).abs()
        metrics = {
            "value_loss": loss,
            "q_mean": q.mean(),
            "td_error": errors.mean(),
            "target_mean": target.mean(),
            **step,
        }
        found = {f"critic/{name}": value.detach() for name, value in metrics.items()}
        found["actor/epsilon"] = self.agent.epsilon.clone()
        return found, errors + _MIN_PRIORITY if config.prioritized else None

    def explore(self, steps: int, num_envs: int) -> None:
        """Set the probability of random actions, before the agent is published.

        Args:
            steps: Environment steps so far.
            num_envs: Number of environments.
        """
        config = self.config
        if config.exploration == "ladder":
            self.agent.epsilon.fill_(config.epsilon)
            self.agent.ladder.fill_(config.epsilon_alpha / max(1, num_envs - 1))
        else:
            left = max(0.0, 1 - steps / config.exploration_steps)
            self.agent.epsilon.fill_(config.epsilon_end + (config.epsilon - config.epsilon_end) * left)
