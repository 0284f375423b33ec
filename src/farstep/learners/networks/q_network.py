"""Action values of a discrete action space, and the agent that acts on them: epsilon-greedy, with an epsilon per slot.

obs ── encoders ── hidden layers ──┬── advantages [n, actions] ──┐
                                   └── value [n, 1] (dueling) ───┴──► Q = value + advantage - mean(advantage)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional

from farstep.config.env import check_count
from farstep.config.field_docs import show_fields
from farstep.core import Nested
from farstep.errors import SpaceError
from farstep.learners.networks.agent import NetworkAgent
from farstep.learners.networks.encoders import Encoders, Space, hidden_layers, orthogonal
from farstep.learners.options.checks import check_choice

_MIN_PRIORITY = 1e-6
_MIN_EPSILON = 0.01


@show_fields
@dataclass(frozen=True, kw_only=True)
class QNetConfig:
    """Options of a network of action values.

    Raises:
        ConfigError: An option is unknown or out of range.
    """

    hidden: tuple[int, ...] = (128, 128)
    """Widths of the hidden layers. Ignored for images."""
    activation: Literal["tanh", "relu", "silu"] = "relu"
    """Activation function between layers; relu is the fastest."""
    dueling: bool = True
    """Two outputs, the value of the observation and the advantage of each action, instead of one value per action: the
    value is then learned from all actions."""

    def __post_init__(self) -> None:
        check_choice(self, "activation", ("tanh", "relu", "silu"))
        for width in self.hidden:
            check_count("hidden", width)


class QAgent(NetworkAgent):
    """Agent with action values; explores by random actions.

    In slot `i` an action is random with probability `epsilon ** (1 + ladder * i)`. Both numbers are buffers, and are
    published with the weights.

    Args:
        observation_space: Space of single observations.
        action_space: Space of single actions; Discrete.
        config: Options of the network.

    Raises:
        SpaceError: A space is not supported.
    """

    epsilon: Tensor
    ladder: Tensor

    def __init__(self, observation_space: Space, action_space: Space, config: QNetConfig, *further: Any) -> None:
        super().__init__(observation_space, action_space, config, *further)
        if not isinstance(action_space, spaces.Discrete):
            raise SpaceError(
                f"DQN needs an action space of type Discrete, got {action_space}; use another learner (ppo, sac), or "
                "enumerate the actions in a wrapper."
            )
        self.num_actions, self._start = int(action_space.n), int(action_space.start)
        self.encoders = Encoders(observation_space, normalize=False)
        self.sees_images = self.encoders.sees_images
        self.layers, width = hidden_layers(
            self.encoders.width, () if self.sees_images else config.hidden, config.activation
        )
        self.advantage = orthogonal(nn.Linear(width, self.num_actions), 1.0)
        self.value = orthogonal(nn.Linear(width, 1), 1.0) if config.dueling else None
        self.register_buffer("epsilon", torch.ones(()))
        self.register_buffer("ladder", torch.zeros(()))

    def forward(self, obs: Nested) -> Tensor:
        """Compute the values of all actions.

        Args:
            obs: Observations `[n, ...]`.

        Returns:
            Action values `[n, actions]`.
        """
        hidden = self.layers(self.encoders(obs))
        advantage: Tensor = self.advantage(hidden)
        if self.value is None:
            return advantage
        value: Tensor = self.value(hidden)
        return value + advantage - advantage.mean(-1, keepdim=True)

    def act(self, obs: Nested, slots: Tensor) -> dict[str, Tensor]:
        """Take the best actions, or random ones.

        Args:
            obs: Observations `[n, ...]`.
            slots: Environment slot of each observation, `[n]`.

        Returns:
            `action` `[n]`.
        """
        return {"action": self._choose(self(obs), slots) + self._start}

    def _choose(self, values: Tensor, slots: Tensor) -> Tensor:
        """Return the index of the best action, or of a random one."""
        best = action = values.argmax(-1)
        if not self.greedy:
            explores = torch.rand(len(values), device=values.device) < self.epsilons(slots)
            drawn = (torch.rand(len(values), device=values.device) * self.num_actions).long()
            action = torch.where(explores, drawn.clamp(max=self.num_actions - 1), best)
        return action

    def epsilons(self, slots: Tensor) -> Tensor:
        """Compute the probability of a random action in each slot.

        Args:
            slots: Environment slots `[n]`.

        Returns:
            Probabilities `[n]`: `epsilon ** (1 + ladder * slot)`.
        """
        return self.epsilon ** (1 + self.ladder * slots)

    def actions_of(self, action: Tensor) -> Tensor:
        """Convert recorded actions to indices of action values.

        Args:
            action: Actions `[n]`, as `act` returns them. The first one is `start` of the action space.

        Returns:
            Indices `[n]`, from 0.
        """
        return action.long() - self._start

    def distribution(self, obs: Nested) -> Mapping[str, Tensor]:
        """Return the policy of slot 0 as logits, with an epsilon of at least 0.01, for AAPS.

        Args:
            obs: Observations `[n, ...]`.

        Returns:
            `logits` `[n, actions]`.
        """
        epsilon = self.epsilon.clamp(_MIN_EPSILON, 1.0)
        best = functional.one_hot(self(obs).argmax(-1), self.num_actions)
        return {"logits": torch.log((1 - epsilon) * best + epsilon / self.num_actions)}


class PrioritizingQAgent(QAgent):
    """Agent that also computes the initial priorities of rows, on workers (Ape-X).

    Args:
        observation_space: Space of single observations.
        action_space: Space of single actions; Discrete.
        config: Options of the network.
        n_step: Number of steps of the TD errors.
        gamma: Discount factor.

    Raises:
        SpaceError: A space is not supported.
    """

    def __init__(
        self, observation_space: Space, action_space: Space, config: QNetConfig, n_step: int, gamma: float
    ) -> None:
        super().__init__(observation_space, action_space, config, n_step, gamma)
        self._n_step, self._gamma = n_step, gamma

    def act(self, obs: Nested, slots: Tensor) -> dict[str, Tensor]:
        """Take the best actions, or random ones.

        Args:
            obs: Observations `[n, ...]`.
            slots: Environment slot of each observation, `[n]`.

        Returns:
            `action`; `q`, the value of this action; and `best_q`, the value of the best action; each `[n]`.
        """
        values = self(obs)
        action = self._choose(values, slots)
        q = values.gather(-1, action[:, None])[:, 0]
        return {"action": action + self._start, "q": q, "best_q": values.amax(-1)}

    def priorities(self, rows: Mapping[str, Any]) -> Tensor:
        """Return initial priorities: absolute TD errors over `n_step` steps, from the values recorded while acting.

        Where an episode was truncated, the value after its last row is estimated by that of the last row.

        Args:
            rows: The arrays of a chunk, `[steps, n, ...]`, and `last_obs` `[n, ...]`.

        Returns:
            One priority per row, `[steps, n]`.
        """
        last = self(rows["last_obs"]).amax(-1)
        errors = td_errors(
            rows["q"],
            torch.cat([rows["best_q"], last[None]]),
            rows["reward"],
            rows["terminated"],
            rows["truncated"],
            self._n_step,
            self._gamma,
        )
        return errors.abs() + _MIN_PRIORITY


def td_errors(
    q: Tensor, best_q: Tensor, reward: Tensor, terminated: Tensor, truncated: Tensor, steps: int, gamma: float
) -> Tensor:
    """Return the TD error of each row of a chunk, over up to `steps` steps of its episode and of the chunk.

        error_t = r_t + gamma r_(t+1) + ... + gamma ** k best_q_(t+k) - q_t

    Args:
        q: Value of each action, `[T, n]`.
        best_q: Value of the best action in each row and after the last one, `[T + 1, n]`.
        reward: Rewards, `[T, n]`.
        terminated: Whether the episode terminated in a row, `[T, n]`: nothing follows.
        truncated: Whether it was truncated: the value after the row is estimated by that of the row.
        steps: Largest number of steps k.
        gamma: Discount per step.

    Returns:
        The errors, `[T, n]`.
    """
    ended = terminated | truncated
    after = torch.where(truncated, best_q[:-1], best_q[1:]) * (~terminated)  # the value after each row
    total = reward.float() + gamma * after
    result = total
    for _ in range(steps - 1):  # extend each row's return by one step, unless its episode or the chunk ends there
        extended = reward.float() + gamma * torch.cat([result[1:], result[-1:]])
        is_last = torch.zeros_like(ended)
        is_last[-1] = True
        result = torch.where(ended | is_last, total, extended)
    return result - q
