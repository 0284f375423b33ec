"""Typical agents of users, and the check that a replay equals the eager call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import (
    AffineTransform,
    Bernoulli,
    Beta,
    Categorical,
    Independent,
    Normal,
    OneHotCategorical,
    TanhTransform,
    TransformedDistribution,
)

from farstep.agents.tape import compile_act, equal_results


def mlp(inputs: int, outputs: int, activation: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    net = nn.Sequential(nn.Linear(inputs, 16), activation(), nn.Linear(16, 16), activation(), nn.Linear(16, outputs))
    for layer in net:
        if isinstance(layer, nn.Linear):
            nn.init.orthogonal_(layer.weight, 2**0.5)
            nn.init.uniform_(layer.bias)
    return net


def check(function: Callable[..., Any], *draw: Callable[[], Any], calls: int = 4, tolerance: float = 1e-5) -> Any:
    """Compile on one set of inputs, then compare with eager on others, from equal seeds."""
    torch.manual_seed(0)
    program = compile_act(function, *(one() for one in draw))
    for seed in range(calls):
        inputs = [one() for one in draw]
        torch.manual_seed(seed)
        with torch.no_grad():
            eager = function(*inputs)
        after = torch.get_rng_state()
        torch.manual_seed(seed)
        replayed = program(*numpy_of(inputs))
        assert equal_results(eager, replayed, tolerance) is None
        assert torch.equal(after, torch.get_rng_state())
    return program


def numpy_of(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: numpy_of(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(numpy_of(item) for item in value)
    return value.numpy()


class Discrete(nn.Module):
    """Separate actor and critic."""

    def __init__(self, activation: type[nn.Module] = nn.Tanh, num_actions: int = 5) -> None:
        super().__init__()
        self.actor, self.critic = mlp(4, num_actions, activation), mlp(4, 1, activation)

    def distribution(self, obs: Tensor) -> Any:
        return Categorical(logits=self.actor(obs))

    def act(self, obs: Tensor) -> dict[str, Tensor]:
        distribution = self.distribution(obs)
        action = distribution.sample()
        logprob = distribution.log_prob(action)
        return {
            "action": action, "logprob": logprob, "entropy": distribution.entropy(),
            "value": self.critic(obs).squeeze(-1),
        }  # fmt: skip


class FromProbabilities(Discrete):
    def distribution(self, obs: Tensor) -> Any:
        return Categorical(probs=self.actor(obs).exp(), validate_args=True)


class OneHot(Discrete):
    def distribution(self, obs: Tensor) -> Any:
        return OneHotCategorical(logits=self.actor(obs))


class Binary(Discrete):
    def distribution(self, obs: Tensor) -> Any:
        return Independent(Bernoulli(logits=self.actor(obs)), 1)


class Masked(Discrete):
    def distribution(self, obs: Tensor) -> Any:
        mask = torch.ones(5, dtype=torch.bool)
        mask[1] = False
        return Categorical(logits=self.actor(obs).masked_fill(~mask, float("-inf")))


class Greedy(Discrete):
    def act(self, obs: Tensor) -> dict[str, Tensor]:
        best = self.actor(obs).max(dim=-1)
        return {"action": self.actor(obs).argmax(-1), "value": best.values, "again": best.indices}


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.ReLU())
        self.policy, self.value = nn.Linear(16, 3), nn.Linear(16, 1)

    def act(self, obs: Tensor) -> dict[str, Tensor]:
        features = self.trunk(obs)
        distribution = Categorical(logits=self.policy(features))
        action = distribution.sample()
        return {
            "action": action,
            "logprob": distribution.log_prob(action),
            "value": self.value(features).flatten(),
        }


class Gaussian(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean, self.critic = mlp(4, 3), mlp(4, 1)
        self.log_std = nn.Parameter(torch.linspace(-1, 0.5, 3)[None])

    def distribution(self, obs: Tensor) -> Any:
        mean = self.mean(obs)
        return Independent(Normal(mean, self.log_std.expand_as(mean).exp()), 1)

    def act(self, obs: Tensor) -> dict[str, Tensor]:
        distribution = self.distribution(obs)
        action = distribution.sample()
        return {
            "action": action,
            "logprob": distribution.log_prob(action),
            "value": self.critic(obs).squeeze(-1),
        }


class Reparametrized(Gaussian):
    def act(self, obs: Tensor) -> dict[str, Tensor]:
        distribution = self.distribution(obs)
        action = distribution.rsample() + 0.1 * torch.randn_like(obs[:, :3]) + torch.rand(3)
        return {"action": action, "logprob": distribution.log_prob(action)}


class Squashed(Gaussian):
    def distribution(self, obs: Tensor) -> Any:
        mean = self.mean(obs)
        base = Normal(mean, self.log_std.clamp(-5, 2).expand_as(mean).exp())
        return Independent(
            TransformedDistribution(base, [TanhTransform(1), AffineTransform(1.0, 2.0, cache_size=1)]), 1
        )


class BetaPolicy(Gaussian):
    def distribution(self, obs: Tensor) -> Any:
        raw = nn.functional.softplus(self.mean(obs)) + 1
        return Independent(Beta(raw, raw.flip(-1)), 1)


class MultiDiscrete(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor = mlp(4, 9)

    def act(self, obs: Tensor) -> dict[str, Tensor]:
        parts = [Categorical(logits=part) for part in torch.split(self.actor(obs), [2, 3, 4], dim=1)]
        action = torch.stack([part.sample() for part in parts])
        logprob = torch.stack([part.log_prob(a) for a, part in zip(action, parts, strict=True)])
        return {"action": action.T, "logprob": logprob.sum(0)}


AGENTS = [
    Discrete, FromProbabilities, OneHot, Binary, Masked, Greedy, Shared, Gaussian, Reparametrized, Squashed,
    BetaPolicy, MultiDiscrete,
]  # fmt: skip
