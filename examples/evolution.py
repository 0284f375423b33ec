"""Evolution strategies (Salimans et al. 2017) on CartPole-v1 in NumPy, without gradients or a framework.

Each environment is played with differently perturbed weights, and the weights move towards the perturbations with high
returns. A generation plays two episodes from the same seed, with the noise and with its negative (antithetic sampling):
equal seeds give equal start states and equal noise. A worker draws a seed for the noise from the random generator of
each environment, and sends back only this seed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import tyro

import farstep

EPISODE = 500
"""Largest number of steps of an episode."""


@dataclass(kw_only=True)
class Args:
    """Evolution strategies on CartPole-v1."""

    workers: int = 2
    """number of worker processes"""
    population: int = 32
    """number of environments, each with different noise"""
    sigma: float = 0.5
    """standard deviation of the noise"""
    learning_rate: float = 1.0
    """step size of the weights"""
    generations: int = 60
    """largest number of generations"""
    solved_return: float = 475.0
    """stop when the mean return without noise reaches this value"""
    seed: int = 1
    """seed of the first generation"""


class Population:
    """A recurrent agent: its state is the noise of each environment."""

    def __init__(self) -> None:
        self.center = np.zeros((4, 2))  # a linear policy is enough for CartPole
        self.sigma = np.zeros(1)  # negative in the second half of a generation

    def get_parameters(self) -> dict[str, np.ndarray]:
        return {"center": self.center, "sigma": self.sigma}

    def noise(self, seed: int) -> np.ndarray:
        return np.random.default_rng(seed).normal(size=self.center.shape)

    def initial_state(self, num_envs: int) -> dict[str, np.ndarray]:
        return {"noise_seed": np.zeros(num_envs, np.int64), "noise": np.zeros((num_envs, *self.center.shape))}

    def act(self, obs: np.ndarray, state: dict[str, Any], episode_start: np.ndarray, rng: list) -> dict[str, Any]:
        noise_seed, noise = state["noise_seed"].copy(), state["noise"].copy()
        for i in np.flatnonzero(episode_start):
            noise_seed[i] = rng[i].integers(2**62)
            noise[i] = self.noise(noise_seed[i])
        weights = self.center + self.sigma * noise
        action = np.einsum("ni,nia->na", obs, weights).argmax(axis=1)
        return {"action": action, "noise_seed": noise_seed, "state": {"noise_seed": noise_seed, "noise": noise}}


def play(env: farstep.ClusterEnv, agent: Population, sigma: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Play one episode in every environment; return the returns and the seeds of the noise."""
    agent.sigma[:] = sigma
    env.reset(seed=seed)
    batch = env.collect(agent, EPISODE)
    ended = batch["terminated"] | batch["truncated"]
    first_episode = np.cumsum(ended, axis=0) - ended == 0
    return (batch["reward"] * first_episode).sum(axis=0), batch["noise_seed"][0].copy()


def centered_ranks(values: np.ndarray) -> np.ndarray:
    """Return ranks scaled to -0.5 ... 0.5, equal for equal values; the update depends only on the order of returns."""
    ordered = np.sort(values)
    below, upto = np.searchsorted(ordered, values), np.searchsorted(ordered, values, side="right")
    return (below + upto - 1) / 2 / (len(values) - 1) - 0.5


def main(args: Args) -> float:
    """Train; return the mean return of the weights without noise."""
    agent = Population()
    start = time.monotonic()
    env_config = {"env_name": "CartPole-v1", "envs_per_node": args.population}
    with farstep.ClusterEnv(env_config, {"workers_per_node": args.workers}) as env:
        for generation in range(args.generations):
            seed = args.seed + generation
            plus, noise_seeds = play(env, agent, args.sigma, seed)
            minus, same_seeds = play(env, agent, -args.sigma, seed)
            assert (noise_seeds == same_seeds).all()
            ranks = centered_ranks(np.concatenate([plus, minus]))
            advantage = ranks[: len(plus)] - ranks[len(plus) :]
            noise = np.stack([agent.noise(noise_seed) for noise_seed in noise_seeds])
            agent.center += args.learning_rate * np.einsum("n,nia->ia", advantage, noise) / args.population
            mean = play(env, agent, 0.0, seed)[0].mean()
            print(
                f"generation {generation:3}  return {mean:5.1f}, with noise {np.mean([plus, minus]):5.1f}  "
                f"{time.monotonic() - start:4.0f} s",
                flush=True,
            )
            if mean >= args.solved_return:
                break
    return float(mean)


if __name__ == "__main__":
    main(tyro.cli(Args))
