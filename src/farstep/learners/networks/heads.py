"""Action distributions: one head for each array of the action space.

This module implements the distributions itself, because `torch.distributions` takes longer than a small network.
"""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional

from farstep.core import Array
from farstep.errors import SpaceError
from farstep.learners.networks.encoders import orthogonal

Space = gymnasium.spaces.Space[Any]
_GAIN = 0.01
"""Gain of the last layer. It is small, so that a new policy gives all actions about the same probability."""


class Head(nn.Module):
    """Distribution over one array of the action space; samples are `[n, *shape]`, features `[n, width]`."""

    def sample(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Draw samples; return them and their log-probabilities `[n]`."""
        raise NotImplementedError

    def evaluate(self, features: Tensor, sample: Tensor) -> tuple[Tensor, Tensor]:
        """Compute log-probabilities of samples and entropies, each `[n]`, in nats."""
        raise NotImplementedError

    def mode(self, features: Tensor) -> Tensor:
        """Return the most likely sample."""
        raise NotImplementedError

    def describe(self, features: Tensor) -> dict[str, Any]:
        """Return the parameters of the distribution; AAPS computes the divergence from them."""
        raise NotImplementedError

    def action(self, sample: Tensor) -> Tensor:
        """Convert a sample to the action for the environment."""
        return sample


class CategoricalHead(Head):
    """Discrete and MultiDiscrete spaces: one categorical distribution per component."""

    start: Tensor

    def __init__(self, width: int, counts: tuple[int, ...], shape: tuple[int, ...], start: Any) -> None:
        super().__init__()
        self._counts, self._shape = counts, shape
        self.logits = orthogonal(nn.Linear(width, sum(counts)), _GAIN)
        self.register_buffer("start", torch.as_tensor(np.asarray(start, np.int64).reshape(shape)), persistent=False)

    def _logprobs(self, features: Tensor) -> list[Tensor]:
        parts = self.logits(features).split(self._counts, -1)
        return [functional.log_softmax(part, -1) for part in parts]

    def sample(self, features: Tensor) -> tuple[Tensor, Tensor]:
        parts = self._logprobs(features)
        chosen = [torch.multinomial(part.exp(), 1) for part in parts]
        logprob = sum(part.gather(-1, index).squeeze(-1) for part, index in zip(parts, chosen, strict=True))
        return self._merge(chosen), logprob  # type: ignore[return-value]

    def evaluate(self, features: Tensor, sample: Tensor) -> tuple[Tensor, Tensor]:
        parts = self._logprobs(features)
        chosen = (sample - self.start).reshape(len(features), len(parts), 1).unbind(1)
        logprob = sum(part.gather(-1, index).squeeze(-1) for part, index in zip(parts, chosen, strict=True))
        entropy = sum(-(part.exp() * part).sum(-1) for part in parts)
        return logprob, entropy  # type: ignore[return-value]

    def mode(self, features: Tensor) -> Tensor:
        return self._merge([part.argmax(-1, keepdim=True) for part in self._logprobs(features)])

    def describe(self, features: Tensor) -> dict[str, Any]:
        parts = self._logprobs(features)
        return {"logits": parts[0]} if len(parts) == 1 else {str(i): {"logits": p} for i, p in enumerate(parts)}

    def _merge(self, chosen: list[Tensor]) -> Tensor:
        joined = chosen[0] if len(chosen) == 1 else torch.cat(chosen, -1)
        return joined.reshape(len(joined), *self._shape) + self.start


class BernoulliHead(Head):
    """MultiBinary spaces: one Bernoulli distribution per component."""

    def __init__(self, width: int, shape: tuple[int, ...]) -> None:
        super().__init__()
        self._shape = shape
        self.logits = orthogonal(nn.Linear(width, math.prod(shape)), _GAIN)

    def sample(self, features: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.logits(features)
        drawn = torch.bernoulli(torch.sigmoid(logits))
        return drawn.to(torch.int8).reshape(-1, *self._shape), _bernoulli_logprob(logits, drawn)

    def evaluate(self, features: Tensor, sample: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.logits(features)
        drawn = sample.reshape(len(features), -1).to(logits.dtype)
        probability = torch.sigmoid(logits)
        entropy = functional.softplus(logits) - logits * probability
        return _bernoulli_logprob(logits, drawn), entropy.sum(-1)

    def mode(self, features: Tensor) -> Tensor:
        likely: Tensor = self.logits(features) > 0
        return likely.to(torch.int8).reshape(-1, *self._shape)

    def describe(self, features: Tensor) -> dict[str, Any]:
        return {"bernoulli": self.logits(features)}


class GaussianHead(Head):
    """Box spaces: independent normal distributions.

    If the space is bounded, samples are scaled from [-1, 1] to the bounds and then clipped to them. The environment
    gets the clipped action, but log-probabilities refer to the unclipped sample.
    """

    low: Tensor
    high: Tensor
    center: Tensor
    scale: Tensor

    def __init__(self, width: int, space: spaces.Box) -> None:
        super().__init__()
        self._shape = space.shape
        self.bounded = bool(np.isfinite(space.low).all() and np.isfinite(space.high).all())
        low, high = (np.asarray(bound, np.float32) for bound in (space.low, space.high))
        center: Array = np.zeros(self._shape, np.float32)
        scale: Array = np.ones(self._shape, np.float32)
        if self.bounded:
            center, scale = (low + high) / 2, (high - low) / 2
        for name, array in (("low", low), ("high", high), ("center", center), ("scale", scale)):
            self.register_buffer(name, torch.as_tensor(array), persistent=False)
        size = math.prod(self._shape)
        self.mean = orthogonal(nn.Linear(width, size), _GAIN)
        self.log_std = nn.Parameter(torch.zeros(size))

    def sample(self, features: Tensor) -> tuple[Tensor, Tensor]:
        mean = self.mean(features)
        drawn = mean + self.log_std.exp() * torch.randn_like(mean)
        return drawn.reshape(-1, *self._shape), self._logprob(mean, drawn)

    def evaluate(self, features: Tensor, sample: Tensor) -> tuple[Tensor, Tensor]:
        logprob = self._logprob(self.mean(features), sample.reshape(len(features), -1))
        entropy = (self.log_std + 0.5 * math.log(2 * math.pi * math.e)).sum()
        return logprob, entropy.expand(len(features))

    def mode(self, features: Tensor) -> Tensor:
        mean: Tensor = self.mean(features)
        return mean.reshape(-1, *self._shape)

    def describe(self, features: Tensor) -> dict[str, Any]:
        mean = self.mean(features)
        return {"mean": mean, "log_std": self.log_std.expand_as(mean)}

    def action(self, sample: Tensor) -> Tensor:
        scaled = sample * self.scale + self.center
        return torch.minimum(torch.maximum(scaled, self.low), self.high) if self.bounded else scaled

    def _logprob(self, mean: Tensor, sample: Tensor) -> Tensor:
        standardized = (sample - mean) / self.log_std.exp()
        return (-0.5 * standardized.square() - self.log_std - 0.5 * math.log(2 * math.pi)).sum(-1)


def head_for(space: Space, width: int) -> Head:
    """Make the head for one array of an action space.

    Args:
        space: The space of the array.
        width: Number of features.

    Returns:
        The head.

    Raises:
        SpaceError: The space is not supported.
    """
    match space:
        case spaces.Discrete():
            return CategoricalHead(width, (int(space.n),), (), int(space.start))
        case spaces.MultiDiscrete():
            return CategoricalHead(width, tuple(int(n) for n in space.nvec.reshape(-1)), space.shape, space.start)
        case spaces.MultiBinary():
            return BernoulliHead(width, tuple(space.shape))
        case spaces.Box() if np.issubdtype(space.dtype, np.floating):
            return GaussianHead(width, space)
        case _:
            raise SpaceError(
                f"farstep's learners have no policy for the action space {space}; expected Discrete, MultiDiscrete, "
                "MultiBinary, Box of floats, or Dict and Tuple of these. Wrap the environment, or pass your "
                "own agent."
            )


def _bernoulli_logprob(logits: Tensor, drawn: Tensor) -> Tensor:
    return -functional.binary_cross_entropy_with_logits(logits, drawn, reduction="none").sum(-1)
