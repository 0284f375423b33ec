"""Clipped PPO in NumPy, for networks that are so small that the overhead of a framework would dominate."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import farstep

Array = np.ndarray
_LOG_2PI = float(np.log(2 * np.pi))


class MLP:
    """Linear layers with tanh between them; parameters are views of `flat`, gradients views of `grad`."""

    def __init__(self, sizes: Sequence[int], flat: Array, grad: Array, gain: float, rng: np.random.Generator) -> None:
        self._weights, self._grads, at = [], [], 0
        for k, (rows, columns) in enumerate(itertools.pairwise(sizes)):
            views = []
            for block in (flat, grad):
                weight = block[at : at + rows * columns].reshape(rows, columns)
                views.append((weight, block[at + rows * columns : at + (rows + 1) * columns]))
            at += (rows + 1) * columns
            (weight, _), gradient = views
            weight[:] = _orthogonal(rows, columns, rng) * (gain if k == len(sizes) - 2 else 2**0.5)
            self._weights.append(views[0])
            self._grads.append(gradient)

    @staticmethod
    def size(sizes: Sequence[int]) -> int:
        return sum((rows + 1) * columns for rows, columns in itertools.pairwise(sizes))

    def __call__(self, x: Array) -> Array:
        self._inputs = [x]
        for k, (weight, bias) in enumerate(self._weights):
            x = x @ weight + bias
            if k < len(self._weights) - 1:
                x = np.tanh(x)
                self._inputs.append(x)
        return x

    def backward(self, out: Array) -> None:
        """Backpropagate the gradient of the last call's output; adds to the gradients of the parameters."""
        for k in reversed(range(len(self._weights))):
            inputs, (weight, bias) = self._inputs[k], self._grads[k]
            weight += inputs.T @ out
            bias += out.sum(0)
            if k:
                out = (out @ self._weights[k][0].T) * (1 - inputs * inputs)


def _orthogonal(rows: int, columns: int, rng: np.random.Generator) -> Array:
    q, r = np.linalg.qr(rng.normal(size=(max(rows, columns), min(rows, columns))))
    q = q * np.sign(np.diag(r))
    return q if rows >= columns else q.T


class ActorCritic:
    """Actor and critic with two layers of 64; discrete actions, or one number from a Gaussian."""

    def __init__(self, obs_size: int, num_actions: int | None, seed: int) -> None:
        rng = np.random.default_rng([seed, 0])
        self._obs_size, self.num_actions, self._rng = obs_size, num_actions, np.random.default_rng([seed, 1])
        layers = [[obs_size, 64, 64, num_actions or 1], [obs_size, 64, 64, 1]]
        border = MLP.size(layers[0])
        self.flat = np.zeros(border + MLP.size(layers[1]) + 1, np.float32)
        self.grad = np.zeros_like(self.flat)
        self.actor = MLP(layers[0], self.flat[:border], self.grad[:border], 0.01, rng)
        self.critic = MLP(layers[1], self.flat[border:-1], self.grad[border:-1], 1.0, rng)
        self.greedy = False

    def __getstate__(self) -> dict[str, Any]:
        sizes = {"obs_size": self._obs_size, "num_actions": self.num_actions}
        return {**sizes, "rng": self._rng, "flat": self.flat, "greedy": self.greedy}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["obs_size"], state["num_actions"], 0)  # views of one array do not survive pickling
        self._rng, self.greedy = state["rng"], state["greedy"]
        self.flat[:] = state["flat"]

    def log_probs(self, out: Array) -> Array:
        """Log-probabilities of all actions, from the actor's output."""
        out = out - out.max(-1, keepdims=True)
        return out - np.log(np.exp(out).sum(-1, keepdims=True))

    def act(self, obs: Array) -> dict[str, Array]:
        out = self.actor(obs)
        if not self.num_actions:
            noise = 0.0 if self.greedy else self._rng.standard_normal(out.shape, np.float32)
            action = out + noise * np.exp(self.flat[-1])
            return {"action": action.astype(np.float32), "logprob": self.gaussian(out, action)[:, 0]}
        log_probs = self.log_probs(out)
        chance = np.exp(log_probs).cumsum(1)
        action = (self._rng.random((len(obs), 1)) * chance[:, -1:] > chance).sum(1)
        return {"action": action, "logprob": log_probs[np.arange(len(obs)), action]}

    def gaussian(self, mean: Array, action: Array) -> Array:
        return (-0.5 * np.square((action - mean) / np.exp(self.flat[-1])) - self.flat[-1] - 0.5 * _LOG_2PI).astype("f4")

    def get_parameters(self) -> dict[str, Array]:
        return {"flat": self.flat}


@dataclass(kw_only=True)
class PPO:
    """Clipped PPO with GAE; hyper-parameters of spec 2.4."""

    gamma: float = 0.95
    gae_lambda: float = 0.9
    learning_rate: float = 1e-3
    entropy: float = 0.02
    epochs: int = 4
    minibatches: int = 4
    reward_scale: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        self._rng, self._count = np.random.default_rng([self.seed, 2]), 0

    def update(self, model: ActorCritic, batch: farstep.Batch) -> None:
        obs, action = batch["obs"], batch["action"]
        values, last = model.critic(obs)[..., 0], model.critic(batch.last_obs)[:, 0]
        finals = model.critic(batch.final_obs.obs)[:, 0]
        advantages = self.advantages(batch, values, last, finals)
        flat = [x.reshape(-1, *x.shape[2:]) for x in (obs, action, batch["logprob"], advantages, advantages + values)]
        for _ in range(self.epochs):
            for chosen in np.array_split(self._rng.permutation(len(flat[0])), self.minibatches):
                model.grad[:] = 0
                self._backward(model, *(x[chosen] for x in flat))
                self._adam(model)

    def advantages(self, batch: farstep.Batch, values: Array, last: Array, finals: Array) -> Array:
        following = np.concatenate([values[1:], last[None]])
        following[batch.final_obs.row, batch.final_obs.slot] = finals
        following[batch["terminated"]] = 0.0
        ended = batch["terminated"] | batch["truncated"]
        deltas = batch["reward"] * np.float32(self.reward_scale) + self.gamma * following - values
        advantages, carry = np.zeros_like(values), np.zeros_like(last)
        for t in reversed(range(len(values))):
            carry = deltas[t] + self.gamma * self.gae_lambda * np.where(ended[t], 0.0, carry)
            advantages[t] = carry
        return advantages

    def _backward(self, model: ActorCritic, obs: Array, action: Array, old: Array, advantage: Array, to: Array) -> None:
        count, rows = len(obs), np.arange(len(obs))
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        out = model.actor(obs)
        if model.num_actions:
            log_probs = model.log_probs(out)
            probs, logprob = np.exp(log_probs), log_probs[rows, action]
        else:
            logprob = model.gaussian(out, action)[:, 0]
        ratio = np.exp(logprob - old)
        clipped = np.where(advantage > 0, ratio > 1.2, ratio < 0.8)
        weight = np.where(clipped, 0.0, -advantage * ratio / count)[:, None].astype(np.float32)
        if model.num_actions:
            grad = -probs * weight
            grad[rows, action] += weight[:, 0]
            mean_log = (probs * log_probs).sum(1, keepdims=True)
            grad += self.entropy / count * probs * (log_probs - mean_log)
            model.actor.backward(grad)
        else:
            away = (action - out) / np.exp(model.flat[-1])
            model.actor.backward(weight * away / np.exp(model.flat[-1]))
            model.grad[-1] += (weight * (np.square(away) - 1)).sum()
        model.critic.backward((model.critic(obs) - to[:, None]) / count)

    def _adam(self, model: ActorCritic) -> None:
        if not self._count:
            self._m, self._v = np.zeros_like(model.flat), np.zeros_like(model.flat)
        self._count += 1
        grad = model.grad * min(1.0, 0.5 / (float(np.linalg.norm(model.grad)) + 1e-6))
        self._m += 0.1 * (grad - self._m)
        self._v += 0.001 * (grad * grad - self._v)
        scale = self.learning_rate / (1 - 0.9**self._count)
        model.flat -= scale * self._m / (np.sqrt(self._v / (1 - 0.999**self._count)) + 1e-5)
