"""Policies of 10 thousand to 269 million parameters, and environments whose steps cost almost nothing."""

from __future__ import annotations

import itertools
from typing import Any

import gymnasium
import numpy as np
import torch

SIZES = {"10k": (96, 2), "4M": (1408, 3), "67M": (4096, 5), "269M": (8192, 5)}
"""Width and number of hidden layers. A policy of 8 observations and 4 actions then has this many parameters."""
VISUAL_SIZES = {"ViT-S": (384, 12, 6, 8), "ViT-tiny": (32, 2, 2, 16)}
"""Width, number of layers, attention heads and side of a patch. ViT-S has 21 million parameters."""
SIDE, CHANNELS = 64, 3
"""Side of an image in pixels, and its channels."""


class LargePolicy(torch.nn.Module):
    """A multi-layer perceptron that samples its actions."""

    def __init__(self, num_inputs: int, num_actions: int, width: int, depth: int) -> None:
        super().__init__()
        sizes = [num_inputs, *[width] * depth]
        pairs = itertools.pairwise(sizes)
        layers = [layer for a, b in pairs for layer in (torch.nn.Linear(a, b), torch.nn.ReLU())]
        self.net = torch.nn.Sequential(*layers, torch.nn.Linear(width, num_actions))

    def act(self, obs: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.logits(obs)
        noise = -torch.log(-torch.log(torch.rand_like(logits)))
        action = torch.argmax(logits + noise, -1)
        return {"action": action, "logprob": torch.log_softmax(logits, -1).gather(-1, action[:, None])[:, 0]}

    def distribution(self, obs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.logits(obs)}

    def logits(self, obs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.net(obs)
        return logits

    def get_parameters(self) -> dict[str, torch.Tensor]:
        return dict(self.named_parameters())


class VisualPolicy(LargePolicy):
    """A vision transformer that samples its actions."""

    def __init__(self, num_actions: int, width: int, depth: int, heads: int, patch: int) -> None:
        super().__init__(width, num_actions, width, 0)
        self.patches = torch.nn.Conv2d(CHANNELS, width, patch, patch)
        self.positions = torch.nn.Parameter(0.02 * torch.randn((SIDE // patch) ** 2, width))
        layer = torch.nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = torch.nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)

    def logits(self, obs: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(obs.float() / 255).flatten(2).transpose(1, 2) + self.positions
        logits: torch.Tensor = self.net(self.encoder(tokens).mean(1))
        return logits


def make_policy(size: str, num_inputs: int, num_actions: int) -> LargePolicy:
    """Make a policy of a named size, always with the same weights. Visual policies take images instead of inputs."""
    torch.manual_seed(0)
    if size in VISUAL_SIZES:
        return VisualPolicy(num_actions, *VISUAL_SIZES[size])
    return LargePolicy(num_inputs, num_actions, *SIZES[size])


class RandomPolicy:
    """Chooses random actions at almost no cost: environments alone."""

    def __init__(self, num_actions: int) -> None:
        self._num_actions, self._rng = num_actions, np.random.default_rng(0)

    def act(self, obs: Any) -> Any:
        return self._rng.integers(self._num_actions, size=len(obs))

    def get_parameters(self) -> dict[str, Any]:
        return {}


class NoiseEnv(gymnasium.Env[Any, Any]):
    """Returns the same bytes as observation of every step, at almost no cost."""

    def __init__(self, shape: tuple[int, ...] = (CHANNELS, SIDE, SIDE)) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 255, tuple(shape), np.uint8)
        self.action_space = gymnasium.spaces.Discrete(4)
        self._obs = np.random.default_rng(0).integers(0, 256, shape, np.uint8)

    def reset(self, **options: Any) -> Any:
        return self._obs, {}

    def step(self, action: Any) -> Any:
        return self._obs, 0.0, False, False, {}
