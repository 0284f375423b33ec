"""Encoders from observations to features, for vectors, images and discrete values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional

from farstep.core import Nested
from farstep.errors import SpaceError
from farstep.learners.networks.normalizers import RunningMoments
from farstep.schema import leaf_spaces, leaves, space_schema

Space = gymnasium.spaces.Space[Any]
_NATURE = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
_SMALL = ((16, 3, 1), (32, 3, 1))
"""Filters, kernel size and stride of each convolution: three of Nature DQN, or two for small images."""
_MAX_ONE_HOT_WIDTH = 20_000
_IMAGE_SIDE = 8
"""A Box with three dimensions is an image if both sides have at least this many pixels."""


class VectorEncoder(nn.Module):
    """Flattens a Box of numbers. It normalizes the numbers by running moments, or divides bytes by their upper bound.

    Args:
        space: The observation space.
        normalize: Normalize by running mean and standard deviation.
    """

    def __init__(self, space: spaces.Box, normalize: bool) -> None:
        super().__init__()
        self.width = math.prod(space.shape)
        self._scale = 1 / max(1.0, float(space.high.max())) if space.dtype == np.uint8 else 1.0
        self.moments = RunningMoments((self.width,)) if normalize else None

    def forward(self, obs: Tensor) -> Tensor:
        flat = obs.reshape(len(obs), self.width).float()
        return flat * self._scale if self.moments is None else self.moments(flat)

    def update(self, obs: Tensor) -> None:
        """Update the moments with observations `[n, ...]`."""
        if self.moments is not None:
            self.moments.update(obs.reshape(len(obs), self.width))


class ImageEncoder(nn.Module):
    """Convolutions over an image, channels first or last. Uses the layers of Nature DQN, or two small layers below 36
    pixels.

    Args:
        space: The observation space, `[channels, height, width]` or `[height, width, channels]`.
        width: Number of features.
    """

    def __init__(self, space: spaces.Box, width: int = 512) -> None:
        super().__init__()
        self._last = space.shape[-1] < space.shape[0]
        channels, *sides = np.roll(space.shape, 1) if self._last else space.shape
        self._scale = 1 / 255 if space.dtype == np.uint8 else 1.0
        layers: list[nn.Module] = []
        for filters, kernel, stride in _NATURE if min(sides) >= 36 else _SMALL:
            layers += [orthogonal(nn.Conv2d(int(channels), filters, kernel, stride)), nn.ReLU()]
            channels, sides = filters, [(side - kernel) // stride + 1 for side in sides]
        size = int(channels * math.prod(sides))
        self.layers = nn.Sequential(*layers, nn.Flatten(), orthogonal(nn.Linear(size, width)), nn.ReLU())
        self.width = width

    def forward(self, obs: Tensor) -> Tensor:
        image = obs.permute(0, 3, 1, 2) if self._last else obs
        features: Tensor = self.layers(image.float() * self._scale)
        return features

    def update(self, obs: Tensor) -> None:
        """Do nothing: images have no running moments."""


class OneHotEncoder(nn.Module):
    """One-hot encoding of Discrete and MultiDiscrete observations.

    Args:
        counts: Number of values of each component.
        start: Smallest value of each component.

    Raises:
        SpaceError: The encoding would need more than 20,000 inputs.
    """

    start: Tensor

    def __init__(self, counts: Sequence[int], start: Any) -> None:
        super().__init__()
        self._counts = tuple(counts)
        self.width = sum(counts)
        if self.width > _MAX_ONE_HOT_WIDTH:
            raise SpaceError(
                f"the one-hot encoding of this observation would need {self.width:,} inputs; expected at most "
                f"{_MAX_ONE_HOT_WIDTH:,}. Encode the observation in a wrapper, e.g. by its digits."
            )
        self.register_buffer("start", torch.as_tensor(np.asarray(start, np.int64).reshape(-1)), persistent=False)

    def forward(self, obs: Tensor) -> Tensor:
        numbers = obs.reshape(len(obs), -1).long() - self.start
        parts = [functional.one_hot(numbers[:, i], count) for i, count in enumerate(self._counts)]
        return torch.cat(parts, -1).float()

    def update(self, obs: Tensor) -> None:
        """Do nothing: one-hot features have no running moments."""


Encoder = VectorEncoder | ImageEncoder | OneHotEncoder


def is_image(space: Space) -> bool:
    """Return whether observations of this space are encoded by convolutions."""
    return isinstance(space, spaces.Box) and len(space.shape) == 3 and sorted(space.shape)[1] >= _IMAGE_SIDE


def encoder_for(space: Space, normalize: bool) -> Encoder:
    """Make the encoder for one array of an observation space.

    Args:
        space: The space of the array.
        normalize: Normalize a Box that is not an image by running moments.

    Returns:
        The encoder; `width` is its number of features.

    Raises:
        SpaceError: The space is not supported.
    """
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
            raise SpaceError(
                f"farstep's learners have no encoder for the observation space {space}; expected Box, Discrete, "
                "MultiDiscrete, MultiBinary, or Dict and Tuple of these. Wrap the environment, or pass your "
                "own agent."
            )


class Features(Protocol):
    """A module from observations to features: the first layers of an actor-critic network."""

    width: int
    """Number of features."""
    sees_images: bool
    """Whether it has convolutions."""

    def __call__(self, obs: Nested) -> Tensor:
        """Return the features `[n, width]` of observations `[n, ...]`."""

    def update_moments(self, obs: Nested) -> None:
        """Update running moments with observations `[n, ...]`; called only with `NetConfig.normalize_obs`."""


class Encoders(nn.ModuleDict):
    """One encoder for each array of an observation space; their features are concatenated.

    Args:
        space: The observation space.
        normalize: Normalize Boxes that are not images by running moments.

    Raises:
        SpaceError: The space is not supported.
    """

    def __init__(self, space: Space, normalize: bool) -> None:
        spaces_by_name = leaf_spaces(space, "obs")
        super().__init__({module_key(name): encoder_for(leaf, normalize) for name, leaf in spaces_by_name.items()})
        self._structure, _ = space_schema(space, "obs")
        widths: list[Any] = [encoder.width for encoder in self.values()]
        self.width: int = sum(widths)
        """Number of features."""
        self.sees_images = any(is_image(leaf) for leaf in spaces_by_name.values())
        """Whether an encoder has convolutions."""

    def forward(self, obs: Nested) -> Tensor:
        """Return the features `[n, width]` of observations `[n, ...]`."""
        parts = [self[module_key(name)](array) for name, array in leaves(self._structure, obs)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def update_moments(self, obs: Nested) -> None:
        """Update running moments with observations `[n, ...]`."""
        for name, array in leaves(self._structure, obs):
            self[module_key(name)].update(array)  # type: ignore[operator]


def module_key(name: str) -> str:
    """Return the name of an array without dots, which torch does not allow in module names."""
    return name.replace(".", "/")


def hidden_layers(width: int, hidden: tuple[int, ...], activation: str) -> tuple[nn.Sequential, int]:
    """Return linear layers of these widths, each with its activation, and the width of their output."""
    layers: list[nn.Module] = []
    between = {"tanh": nn.Tanh, "relu": nn.ReLU, "silu": nn.SiLU}[activation]
    for size in hidden:
        layers += [orthogonal(nn.Linear(width, size)), between()]
        width = size
    return nn.Sequential(*layers), width


def orthogonal(layer: nn.Linear | nn.Conv2d, gain: float = math.sqrt(2)) -> nn.Module:
    """Initialize a layer with orthogonal weights and zero bias, as is usual for PPO."""
    nn.init.orthogonal_(layer.weight, gain)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer
