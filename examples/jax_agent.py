"""A JAX agent that learns CartPole-v1 by PPO: `jax.numpy` on workers and in the learner, farstep between them.

Workers act with a jitted forward, compiled on each when the agent arrives. Actions are drawn with the generator that
a worker has for each environment, so that a run is repeated exactly by its seed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import farstep

Parameters = dict[str, Any]


@dataclass(kw_only=True)
class Args:
    """PPO in JAX on CartPole-v1."""

    workers: int = 2
    """worker processes"""
    num_envs: int = 32
    num_steps: int = 64
    """steps of each environment per rollout"""
    total_steps: int = 200_000
    """at most; it ends when the mean return of the last 100 episodes reaches solved_return"""
    solved_return: float = 475.0
    learning_rate: float = 3e-3
    update_epochs: int = 4
    num_minibatches: int = 4
    gamma: float = 0.98
    gae_lambda: float = 0.9
    clip_coef: float = 0.2
    seed: int = 1


def init(key: jax.Array, widths: list[int]) -> list[dict[str, jax.Array]]:
    """Layers with orthogonal weights, the last one's small."""
    orthogonal = jax.nn.initializers.orthogonal
    layers = []
    for i, (inputs, outputs) in enumerate(pairwise(widths)):
        gain = 0.01 if i == len(widths) - 2 else 2**0.5
        key, now = jax.random.split(key)
        layers.append({"w": orthogonal(gain)(now, (inputs, outputs)), "b": jnp.zeros(outputs)})
    return layers


def forward(layers: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
    for layer in layers[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x @ layers[-1]["w"] + layers[-1]["b"]


@jax.jit
def logits_and_value(parameters: Parameters, obs: jax.Array) -> tuple[jax.Array, jax.Array]:
    logits = jax.nn.log_softmax(forward(parameters["actor"], obs))
    return logits, forward(parameters["critic"], obs)[:, 0]


class JaxAgent:
    """What travels: `act` on workers, parameters from the head."""

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters

    def act(self, obs: np.ndarray, rng: list[np.random.Generator]) -> dict[str, np.ndarray]:
        logits, value = (np.asarray(array) for array in logits_and_value(self.parameters, obs))
        gumbel = np.stack([generator.gumbel(size=logits.shape[1]) for generator in rng])
        action = (logits + gumbel).argmax(axis=1)
        return {"action": action, "logprob": logits[np.arange(len(action)), action], "value": value}

    def get_parameters(self) -> Parameters:
        return self.parameters

    def set_parameters(self, parameters: Parameters) -> None:
        self.parameters = jax.tree.map(jnp.asarray, parameters)


@jax.jit
def loss(parameters: Parameters, rows: dict[str, jax.Array], clip_coef: float) -> jax.Array:
    """PPO's clipped loss and half the squared error of the critic."""
    logits, value = logits_and_value(parameters, rows["obs"])
    logprob = jnp.take_along_axis(logits, rows["action"][:, None], axis=1)[:, 0]
    ratio = jnp.exp(logprob - rows["logprob"])
    weight = (rows["advantage"] - rows["advantage"].mean()) / (rows["advantage"].std() + 1e-8)
    clipped = jnp.clip(ratio, 1 - clip_coef, 1 + clip_coef)
    policy_loss = -jnp.minimum(ratio * weight, clipped * weight).mean()
    return policy_loss + 0.25 * jnp.square(value - rows["returns"]).mean()


@jax.jit
def adam(
    parameters: Parameters, state: Parameters, gradients: Parameters, rate: float
) -> tuple[Parameters, Parameters]:
    """One step of Adam (Kingma and Ba 2015), the gradients scaled down to norm 0.5."""
    norm = jnp.sqrt(sum(jnp.square(leaf).sum() for leaf in jax.tree.leaves(gradients)))
    gradients = jax.tree.map(lambda g: g * jnp.minimum(1.0, 0.5 / (norm + 1e-6)), gradients)
    count = state["count"] + 1
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mean"], gradients)
    square = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, state["square"], gradients)
    size = rate * jnp.sqrt(1 - 0.999**count) / (1 - 0.9**count)
    moved = jax.tree.map(lambda p, m, v: p - size * m / (jnp.sqrt(v) + 1e-5), parameters, mean, square)
    return moved, {"count": count, "mean": mean, "square": square}


def advantages(parameters: Parameters, batch: farstep.Batch, args: Args) -> np.ndarray:
    """GAE; an episode cut by its time limit is worth what the critic says of its final observation."""
    values = batch["value"]
    following = np.concatenate([values[1:], logits_and_value(parameters, batch.last_obs)[1][None]])
    final = batch.final_obs
    following[final.row, final.slot] = forward(parameters["critic"], final.obs)[:, 0]
    ended = batch["terminated"] | batch["truncated"]
    delta = batch["reward"] + args.gamma * following * ~batch["terminated"] - values
    found, running = np.zeros_like(delta), np.zeros(delta.shape[1], np.float32)
    for t in reversed(range(len(delta))):
        found[t] = running = delta[t] + args.gamma * args.gae_lambda * ~ended[t] * running
    return found


def main(args: Args) -> float:
    """Train; the mean return of the last 100 episodes."""
    actor_key, critic_key = jax.random.split(jax.random.key(args.seed))
    agent = JaxAgent({"actor": init(actor_key, [4, 64, 64, 2]), "critic": init(critic_key, [4, 64, 64, 1])})
    zeros = jax.tree.map(jnp.zeros_like, agent.parameters)
    state = {"count": jnp.zeros(()), "mean": zeros, "square": zeros}
    gradient, order = jax.jit(jax.grad(loss)), np.random.default_rng(args.seed)
    env_config = {"env_name": "CartPole-v1", "envs_per_node": args.num_envs, "seed": args.seed}
    with farstep.ClusterEnv(env_config, {"workers_per_node": args.workers}) as env:
        began, steps, update, mean = time.monotonic(), 0, 0, 0.0
        while steps < args.total_steps and mean < args.solved_return:
            batch = env.collect(agent, args.num_steps)
            found = advantages(agent.parameters, batch, args)
            columns = {key: batch[key] for key in ("obs", "action", "logprob")}
            columns |= {"advantage": found, "returns": found + batch["value"]}
            rows = {key: column.reshape(found.size, *column.shape[2:]) for key, column in columns.items()}
            rate = args.learning_rate * (1 - steps / args.total_steps)
            for _ in range(args.update_epochs):
                for chosen in np.split(order.permutation(found.size), args.num_minibatches):
                    part = {key: column[chosen] for key, column in rows.items()}
                    gradients = gradient(agent.parameters, part, args.clip_coef)
                    agent.parameters, state = adam(agent.parameters, state, gradients, rate)
            steps, update = steps + found.size, update + 1
            mean = env.stats()["episodes"]["return_mean"] or 0.0
            if update % 10 == 0 or mean >= args.solved_return:
                print(f"{steps:>8,} steps  return {mean:5.1f}  {time.monotonic() - began:4.0f} s", flush=True)
    return mean


if __name__ == "__main__":
    main(tyro.cli(Args))
