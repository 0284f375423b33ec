"""Stable-Baselines3's SAC and DQN, with the tuned hyper-parameters of RL Baselines3 Zoo."""

from __future__ import annotations

import argparse
from typing import Any

import _setup  # noqa: F401

# isort: split
import torch
from _learning import Curve, Task, parse_arguments, report
from stable_baselines3 import DQN, SAC
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm

TUNED: dict[str, tuple[type[OffPolicyAlgorithm], dict[str, Any]]] = {
    "Pendulum-v1": (SAC, {"learning_rate": 1e-3}),
    "HalfCheetah-v5": (SAC, {"learning_starts": 10_000}),
    "LunarLander-v3": (
        DQN,
        {
            "learning_rate": 6.3e-4,
            "batch_size": 128,
            "buffer_size": 50_000,
            "learning_starts": 0,
            "gamma": 0.99,
            "target_update_interval": 250,
            "train_freq": 4,
            "gradient_steps": -1,
            "exploration_final_eps": 0.1,
            "policy_kwargs": {"net_arch": [256, 256]},
        },
    ),
}
"""Algorithm and hyper-parameters for each task (HalfCheetah-v5: those of v4); all others are the library's defaults."""
EXPLORATION_STEPS = 12_000
"""Steps during which DQN's probability of random actions decreases: 12 % of the Zoo's 100,000 steps."""


class Listener(BaseCallback):
    """Adds every finished episode to the curve, and stops training at the threshold."""

    def __init__(self, curve: Curve) -> None:
        super().__init__()
        self._curve = curve

    def _on_training_start(self) -> None:
        self._curve.begin()

    def _on_step(self) -> bool:
        returns = [info["episode"]["r"] for info in self.locals["infos"] if "episode" in info]
        return not any(self._curve.episode(self.num_timesteps, float(value)) for value in returns)


def hyper_parameters(task: Task) -> tuple[type[OffPolicyAlgorithm], dict[str, Any]]:
    """The algorithm of a task and its hyper-parameters."""
    algorithm, tuned = TUNED[task.env]
    # The fraction refers to the limit of steps, which is not the Zoo's.
    extra = {"exploration_fraction": min(1.0, EXPLORATION_STEPS / task.max_steps)} if algorithm is DQN else {}
    return algorithm, {**tuned, **extra}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--contender", default="sb3")
    task, options = parse_arguments(parser)
    torch.set_num_threads(1)
    algorithm, settings = hyper_parameters(task)
    model = algorithm("MlpPolicy", task.env, seed=task.seed, device="cpu", **settings)
    curve = Curve(task)
    model.learn(task.max_steps, callback=Listener(curve))
    report(
        options.contender,
        task,
        curve,
        {"algorithm": algorithm.__name__, **settings},
        ("stable-baselines3", "torch", "numpy", "gymnasium"),
        updates=model._n_updates,
    )


if __name__ == "__main__":
    main()
