"""From observations of any space to features: vectors, images, one-hot numbers, and mappings of these."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional

from farstep.errors import SpaceError
from farstep.learners.networks.normalizers import RunningMoments

Space = gymnasium.spaces.Space[Any]
_NATURE = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
_SMALL = ((16, 3, 1), (32, 3, 1))
_MOST_NUMBERS = 20_000
_IMAGE_SIDE = 8
"""A Box with three dimensions and sides of at least this is an image."""


class VectorEncoder(nn.Module):
    """A Box of numbers, flat, normalised by running moments if asked; else bytes are divided by their upper bound."""

    def __init__(self, space: spaces.Box, normalize: bool) -> None:
        super().__init__()
        self.width = math.prod(space.shape)
        self._scale = 1 / max(1.0, float(space.high.max())) if space.dtype == np.uint8 else 1.0
        self.moments = RunningMoments((self.width,)) if normalize else None

    def forward(self, obs: Tensor) -> Tensor:
        flat = obs.reshape(len(obs), self.width).float()
        return flat * self._scale if self.moments is None else self.moments(flat)

    def update(self, obs: Tensor) -> None:
        """Take observations `[n, ...]` into the moments."""
        if self.moments is not None:
            self.moments.update(obs.reshape(len(obs), self.width))


class ImageEncoder(nn.Module):
    """Convolutions over an image, channels first or last: Nature DQN's, or two small ones for small images."""

    def __init__(self, space: spaces.Box, width: int = 512) -> None:
        super().__init__()
        self._last = space.shape[-1] < space.shape[0]
        channels, *sides = np.roll(space.shape, 1) if self._last else space.shape
        self._scale = 1 / 255 if space.dtype == np.uint8 else 1.0
        layers: list[nn.Module] = []
        for filters, kernel, stride in _NATURE if min(sides) >= 36 else _SMALL:
            layers += [initialised(nn.Conv2d(int(channels), filters, kernel, stride)), nn.ReLU()]
            channels, sides = filters, [(side - kernel) // stride + 1 for side in sides]
        size = int(channels * math.prod(sides))
        self.layers = nn.Sequential(*layers, nn.Flatten(), initialised(nn.Linear(size, width)), nn.ReLU())
        self.width = width

    def forward(self, obs: Tensor) -> Tensor:
        image = obs.permute(0, 3, 1, 2) if self._last else obs
        features: Tensor = self.layers(image.float() * self._scale)
        return features

    def update(self, obs: Tensor) -> None:
        """Images are scaled by their range; there is nothing to learn from them."""


class OneHotEncoder(nn.Module):
    """Discrete and MultiDiscrete numbers."""

    start: Tensor

    def __init__(self, counts: Sequence[int], start: Any) -> None:
        super().__init__()
        self._counts = tuple(counts)
        self.width = sum(counts)
        if self.width > _MOST_NUMBERS:
            raise SpaceError(
                f"an observation with one of {self.width:,} numbers would need as many inputs; at most "
                f"{_MOST_NUMBERS:,} are taken. Give the network something smaller by a wrapper, e.g. the digits."
            )
        self.register_buffer("start", torch.as_tensor(np.asarray(start, np.int64).reshape(-1)), persistent=False)

    def forward(self, obs: Tensor) -> Tensor:
        numbers = obs.reshape(len(obs), -1).long() - self.start
        parts = [functional.one_hot(numbers[:, i], count) for i, count in enumerate(self._counts)]
        return torch.cat(parts, -1).float()

    def update(self, obs: Tensor) -> None:
        """Nothing to normalise."""


Encoder = VectorEncoder | ImageEncoder | OneHotEncoder


def is_image(space: Space) -> bool:
    """Whether convolutions suit it."""
    return isinstance(space, spaces.Box) and len(space.shape) == 3 and sorted(space.shape)[1] >= _IMAGE_SIDE


def encoder_for(space: Space, normalize: bool) -> Encoder:
    """The encoder of one array of an observation space."""
    match space:
        case spaces.Box() if is_image(space):
            return ImageEncoder(space)
        case spaces.Box():
            return VectorEncoder(space, normalize)
        case spaces.Discrete():
            return OneHotEncoder([int(space.n)], space.start)
        case spaces.MultiDiscrete():
            return OneHotEncoder([int(n) for n in space.nvec.reshape(-1)], space.start)
        case spaces.MultiBinary():
            return VectorEncoder(spaces.Box(0, 1, space.shape, np.int8), normalize=False)
        case _:
            raise SpaceError(f"farstep's learners have no encoder for the observation space {space}.")


def initialised(layer: nn.Linear | nn.Conv2d, gain: float = math.sqrt(2)) -> nn.Module:
    """Orthogonal weights, no bias, as PPO is usually begun."""
    nn.init.orthogonal_(layer.weight, gain)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer
