"""Networks of soft actor-critic: the actor, which is the agent, and two critics as one batched network.

obs ── encoders ── hidden layers ──► mean and log_std (Box: normal, squashed by tanh), or logits (Discrete)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
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

_LOG_STD = (-5.0, 2.0)
_GAIN = 0.01
"""Gain of the actor's last layer: small, so that a new policy is close to uniform, or centered."""


@show_fields
@dataclass(frozen=True, kw_only=True)
class SACNetConfig:
    """Options of the networks of SAC.

    Raises:
        ConfigError: An option is unknown or out of range.
    """

    hidden: tuple[int, ...] = (128, 128)
    """Widths of the hidden layers of the actor and of each critic. Ignored for images."""
    activation: Literal["tanh", "relu", "silu"] = "relu"
    """Activation function between layers."""

    def __post_init__(self) -> None:
        check_choice(self, "activation", ("tanh", "relu", "silu"))
        for width in self.hidden:
            check_count("hidden", width)


class SoftActor(NetworkAgent):
    """Stochastic policy over a bounded Box or a Discrete space.

    Args:
        observation_space: Space of single observations.
        action_space: Space of single actions.
        config: Options of the network.

    Raises:
        SpaceError: A space is not supported.
    """

    center: Tensor
    scale: Tensor

    def __init__(self, observation_space: Space, action_space: Space, config: SACNetConfig) -> None:
        super().__init__(observation_space, action_space, config)
        self.observation_space = observation_space
        self.encoders = Encoders(observation_space, normalize=False)
        self.sees_images = self.encoders.sees_images
        hidden = () if self.sees_images else config.hidden
        self.layers, width = hidden_layers(self.encoders.width, hidden, config.activation)
        self.is_discrete = isinstance(action_space, spaces.Discrete)
        self._shape = tuple(action_space.shape or ())
        self.num_actions = _num_actions(action_space)
        """Number of actions of a Discrete space, or of dimensions of a Box."""
        self._start = int(action_space.start) if isinstance(action_space, spaces.Discrete) else 0
        self.head = orthogonal(nn.Linear(width, self.num_actions * (1 if self.is_discrete else 2)), _GAIN)
        low, high = np.zeros(0, np.float32), np.zeros(0, np.float32)
        if isinstance(action_space, spaces.Box):
            low, high = (np.asarray(bound, np.float32).reshape(-1) for bound in (action_space.low, action_space.high))
        self.register_buffer("center", torch.as_tensor((low + high) / 2), persistent=False)
        self.register_buffer("scale", torch.as_tensor((high - low) / 2), persistent=False)

    # ---- on a worker ----

    def act(self, obs: Nested) -> dict[str, Tensor]:
        """Sample actions, or take the most likely ones.

        Args:
            obs: Observations `[n, ...]`.

        Returns:
            `action` `[n, ...]`.
        """
        if self.is_discrete:
            logprobs = self.logprobs(obs)
            if self.greedy:
                return {"action": logprobs.argmax(-1) + self._start}
            return {"action": torch.multinomial(logprobs.exp(), 1)[:, 0] + self._start}
        mean, log_std = self._normal(obs)
        drawn = mean if self.greedy else mean + log_std.exp() * torch.randn_like(mean)
        return {"action": (torch.tanh(drawn) * self.scale + self.center).reshape(-1, *self._shape)}

    def distribution(self, obs: Nested) -> Mapping[str, Tensor]:
        """Return the parameters of the action distributions, from which AAPS computes the divergence.

        The divergence of squashed distributions is that of the distributions before squashing.

        Args:
            obs: Observations `[n, ...]`.

        Returns:
            `logits`, or `mean` and `log_std` before squashing.
        """
        if self.is_discrete:
            return {"logits": self.logprobs(obs)}
        mean, log_std = self._normal(obs)
        return {"mean": mean, "log_std": log_std}

    # ---- on the head ----

    def logprobs(self, obs: Nested) -> Tensor:
        """Compute the log-probabilities of all actions of a Discrete space, with gradients.

        Args:
            obs: Observations `[n, ...]`.

        Returns:
            Log-probabilities in nats, `[n, actions]`.
        """
        return functional.log_softmax(self.head(self.layers(self.encoders(obs))), -1)

    def sample(self, obs: Nested) -> tuple[Tensor, Tensor]:
        """Sample actions of a Box, with gradients.

        Args:
            obs: Observations `[n, ...]`.

        Returns:
            Actions, scaled to [-1, 1], `[n, dimensions]`, and the logarithms of their densities, `[n]`.
        """
        mean, log_std = self._normal(obs)
        noise = torch.randn_like(mean)
        return squashed(mean + log_std.exp() * noise, noise, log_std)

    def scaled(self, action: Tensor) -> Tensor:
        """Convert recorded actions to what critics take.

        Args:
            action: Actions `[n, ...]`, as `act` returns them.

        Returns:
            Actions scaled to [-1, 1], `[n, dimensions]` (Box), or indices from 0, `[n]` (Discrete).
        """
        if self.is_discrete:
            return action.long() - self._start
        return (action.reshape(len(action), -1).float() - self.center) / self.scale

    def _normal(self, obs: Nested) -> tuple[Tensor, Tensor]:
        """Return mean and log of the standard deviation before squashing."""
        mean, log_std = self.head(self.layers(self.encoders(obs))).chunk(2, -1)
        low, high = _LOG_STD
        return mean, low + 0.5 * (high - low) * (torch.tanh(log_std) + 1)


def squashed(drawn: Tensor, noise: Tensor, log_std: Tensor) -> tuple[Tensor, Tensor]:
    """Return `tanh(drawn)` and the logarithm of its density.

        log p(tanh(x)) = log N(x) - sum log(1 - tanh(x) ** 2)

    Args:
        drawn: Samples of a normal distribution, `mean + exp(log_std) * noise`, `[n, k]`.
        noise: The standard normal noise in them.
        log_std: Log of the standard deviation.
    """
    normal = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
    correction = 2 * (math.log(2) - drawn - functional.softplus(-2 * drawn))  # log(1 - tanh(x) ** 2), without overflow
    return torch.tanh(drawn), (normal - correction).sum(-1)


class TwinCritics(nn.Module):
    """Two critics with separate weights, evaluated together.

    Args:
        actor: The actor whose actions they evaluate.
        config: Options of the network.
    """

    def __init__(self, actor: SoftActor, config: SACNetConfig) -> None:
        super().__init__()
        self.encoders = Encoders(actor.observation_space, normalize=False)
        width = self.encoders.width + (0 if actor.is_discrete else actor.num_actions)
        layers: list[nn.Module] = []
        between = {"tanh": nn.Tanh, "relu": nn.ReLU, "silu": nn.SiLU}[config.activation]
        for size in () if self.encoders.sees_images else config.hidden:
            layers += [_PairedLinear(width, size), between()]
            width = size
        self.layers = nn.Sequential(*layers, _PairedLinear(width, actor.num_actions if actor.is_discrete else 1))

    def forward(self, obs: Nested, action: Tensor | None = None) -> Tensor:
        """Return the values of both critics.

        Args:
            obs: Observations `[n, ...]`.
            action: Actions of a Box, scaled to [-1, 1], `[n, dimensions]`; None for a Discrete space.

        Returns:
            `[2, n]` for a Box; the values of all actions, `[2, n, actions]`, for a Discrete space.
        """
        features: Tensor = self.encoders(obs)
        if action is not None:
            features = torch.cat([features, action], -1)
        values: Tensor = self.layers(features.expand(2, *features.shape))
        return values if action is None else values[..., 0]


class _PairedLinear(nn.Module):
    """Two linear layers on two inputs `[2, n, width]`."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(width)
        self.weight = nn.Parameter(torch.empty(2, width, size).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(2, 1, size).uniform_(-bound, bound))

    def forward(self, value: Tensor) -> Tensor:
        return torch.baddbmm(self.bias, value, self.weight)


def _num_actions(space: Space) -> int:
    if isinstance(space, spaces.Discrete):
        return int(space.n)
    if not isinstance(space, spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        raise SpaceError(
            f"SAC needs an action space of type Box of floats, or Discrete; got {space}. Use ppo, or wrap the "
            "environment."
        )
    if not space.is_bounded():
        raise SpaceError(f"SAC needs bounded actions, got {space}; clip them with gymnasium.wrappers.RescaleAction.")
    return math.prod(space.shape)
