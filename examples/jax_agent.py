"""PPO on CartPole-v1 in JAX, both in the learner and on farstep's workers.

Each worker compiles the jitted forward pass once, when it receives the agent. Actions are sampled with the random
generator of each environment, so that a run is reproducible from its seed.
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
    """number of worker processes"""
    num_envs: int = 32
    """number of environments, divided among the workers"""
    num_steps: int = 64
    """steps of each environment per rollout"""
    total_steps: int = 200_000
    """stop after this many environment steps in any case"""
    solved_return: float = 475.0
    """stop when the mean return of the last 100 episodes reaches this value"""
    learning_rate: float = 3e-3
    """initial learning rate of Adam; decreases linearly to zero over total_steps"""
    update_epochs: int = 4
    """passes over the rows of a rollout"""
    num_minibatches: int = 4
    """minibatches per pass"""
    gamma: float = 0.98
    """discount factor"""
    gae_lambda: float = 0.9
    """lambda of generalized advantage estimation"""
    clip_coef: float = 0.2
    """clip range of the probability ratio"""
    seed: int = 1
    """seed of environments and networks"""


def init(key: jax.Array, widths: list[int]) -> list[dict[str, jax.Array]]:
    """Return layers with orthogonal weights, and small ones in the last layer."""
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
    """The agent; every worker gets a copy and loads published parameters with `set_parameters`."""

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
    """Return the clipped PPO loss plus a quarter of the critic's mean squared error."""
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
    """Make one step of Adam (Kingma and Ba 2015), with gradients clipped to norm 0.5."""
    norm = jnp.sqrt(sum(jnp.square(leaf).sum() for leaf in jax.tree.leaves(gradients)))
    gradients = jax.tree.map(lambda g: g * jnp.minimum(1.0, 0.5 / (norm + 1e-6)), gradients)
    count = state["count"] + 1
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mean"], gradients)
    square = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, state["square"], gradients)
    size = rate * jnp.sqrt(1 - 0.999**count) / (1 - 0.9**count)
    moved = jax.tree.map(lambda p, m, v: p - size * m / (jnp.sqrt(v) + 1e-5), parameters, mean, square)
    return moved, {"count": count, "mean": mean, "square": square}


def advantages(parameters: Parameters, batch: farstep.Batch, args: Args) -> np.ndarray:
    """Return advantages (GAE); truncated episodes are bootstrapped from their final observation."""
    values = batch["value"]
    following = np.concatenate([values[1:], logits_and_value(parameters, batch.last_obs)[1][None]])
    final = batch.final_obs
    following[final.row, final.slot] = forward(parameters["critic"], final.obs)[:, 0]
    ended = batch["terminated"] | batch["truncated"]
    delta = batch["reward"] + args.gamma * following * ~batch["terminated"] - values
    advantage, running = np.zeros_like(delta), np.zeros(delta.shape[1], np.float32)
    for t in reversed(range(len(delta))):
        advantage[t] = running = delta[t] + args.gamma * args.gae_lambda * ~ended[t] * running
    return advantage


def main(args: Args) -> float:
    """Train; return the mean return of the last 100 episodes."""
    actor_key, critic_key = jax.random.split(jax.random.key(args.seed))
    agent = JaxAgent({"actor": init(actor_key, [4, 64, 64, 2]), "critic": init(critic_key, [4, 64, 64, 1])})
    zeros = jax.tree.map(jnp.zeros_like, agent.parameters)
    state = {"count": jnp.zeros(()), "mean": zeros, "square": zeros}
    gradient, order = jax.jit(jax.grad(loss)), np.random.default_rng(args.seed)
    env_config = {"env_name": "CartPole-v1", "envs_per_node": args.num_envs, "seed": args.seed}
    with farstep.ClusterEnv(env_config, {"workers_per_node": args.workers}) as env:
        start, steps, update, mean = time.monotonic(), 0, 0, 0.0
        while steps < args.total_steps and mean < args.solved_return:
            batch = env.collect(agent, args.num_steps)
            advantage = advantages(agent.parameters, batch, args)
            columns = {key: batch[key] for key in ("obs", "action", "logprob")}
            columns |= {"advantage": advantage, "returns": advantage + batch["value"]}
            rows = {key: column.reshape(advantage.size, *column.shape[2:]) for key, column in columns.items()}
            rate = args.learning_rate * (1 - steps / args.total_steps)
            for _ in range(args.update_epochs):
                for chosen in np.split(order.permutation(advantage.size), args.num_minibatches):
                    part = {key: column[chosen] for key, column in rows.items()}
                    gradients = gradient(agent.parameters, part, args.clip_coef)
                    agent.parameters, state = adam(agent.parameters, state, gradients, rate)
            steps, update = steps + advantage.size, update + 1
            mean = env.stats()["episodes"]["return_mean"] or 0.0
            if update % 10 == 0 or mean >= args.solved_return:
                print(f"{steps:>8,} steps  return {mean:5.1f}  {time.monotonic() - start:4.0f} s", flush=True)
    return mean


if __name__ == "__main__":
    main(tyro.cli(Args))
