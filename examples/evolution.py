"""Evolution strategies (Salimans et al. 2017) on CartPole-v1 in NumPy: no gradients, no framework.

Every environment is played with weights of its own, the present ones and some noise; those that do well pull the
weights towards their noise. A generation plays twice from the same seed, with the noise and with its opposite: equal
seeds give each environment equal starts and equal noise, so that only the sign differs. Workers draw the noise from the
generator that they have for each environment, and send back the number that it can be drawn from again.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import tyro

import farstep

EPISODE = 500
"""Steps of the longest one."""


@dataclass(kw_only=True)
class Args:
    """Evolution strategies on CartPole-v1."""

    workers: int = 2
    """worker processes"""
    population: int = 32
    """environments, each with noise of its own"""
    sigma: float = 0.5
    """size of the noise"""
    learning_rate: float = 1.0
    generations: int = 60
    """at most; it ends when the weights without noise reach solved_return"""
    solved_return: float = 475.0
    seed: int = 1


class Population:
    """An agent with memory: it remembers, for each environment, which noise it is played with."""

    def __init__(self) -> None:
        self.center = np.zeros((4, 2))  # a linear policy is enough for CartPole
        self.sigma = np.zeros(1)  # signed: the second half of a generation plays the opposite

    def get_parameters(self) -> dict[str, np.ndarray]:
        return {"center": self.center, "sigma": self.sigma}

    def noise(self, number: int) -> np.ndarray:
        return np.random.default_rng(number).normal(size=self.center.shape)

    def initial_state(self, num_envs: int) -> dict[str, np.ndarray]:
        return {"number": np.zeros(num_envs, np.int64), "noise": np.zeros((num_envs, *self.center.shape))}

    def act(self, obs: np.ndarray, state: dict[str, Any], episode_start: np.ndarray, rng: list) -> dict[str, Any]:
        number, noise = state["number"].copy(), state["noise"].copy()
        for i in np.flatnonzero(episode_start):
            number[i] = rng[i].integers(2**62)
            noise[i] = self.noise(number[i])
        weights = self.center + self.sigma * noise
        action = np.einsum("ni,nia->na", obs, weights).argmax(axis=1)
        return {"action": action, "number": number, "state": {"number": number, "noise": noise}}


def play(env: farstep.ClusterEnv, agent: Population, sigma: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """One episode in every environment: what it came to, and the number of its noise."""
    agent.sigma[:] = sigma
    env.reset(seed=seed)
    batch = env.collect(agent, EPISODE)
    ended = batch["terminated"] | batch["truncated"]
    first_episode = np.cumsum(ended, axis=0) - ended == 0
    return (batch["reward"] * first_episode).sum(axis=0), batch["number"][0].copy()


def centered_ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from -0.5 to 0.5, equal ones for equal values: how much better does not matter, only that it was."""
    ordered = np.sort(values)
    below, upto = np.searchsorted(ordered, values), np.searchsorted(ordered, values, side="right")
    return (below + upto - 1) / 2 / (len(values) - 1) - 0.5


def main(args: Args) -> float:
    """Evolve; the mean return of the weights without noise."""
    agent = Population()
    began = time.monotonic()
    env_config = {"env_name": "CartPole-v1", "envs_per_node": args.population}
    with farstep.ClusterEnv(env_config, {"workers_per_node": args.workers}) as env:
        for generation in range(args.generations):
            seed = args.seed + generation
            plus, numbers = play(env, agent, args.sigma, seed)
            minus, again = play(env, agent, -args.sigma, seed)
            assert (numbers == again).all()
            ranks = centered_ranks(np.concatenate([plus, minus]))
            better = ranks[: len(plus)] - ranks[len(plus) :]
            noise = np.stack([agent.noise(number) for number in numbers])
            agent.center += args.learning_rate * np.einsum("n,nia->ia", better, noise) / args.population
            mean = play(env, agent, 0.0, seed)[0].mean()
            print(
                f"generation {generation:3}  return {mean:5.1f}, with noise {np.mean([plus, minus]):5.1f}  "
                f"{time.monotonic() - began:4.0f} s",
                flush=True,
            )
            if mean >= args.solved_return:
                break
    return float(mean)


if __name__ == "__main__":
    main(tyro.cli(Args))
