"""Stable-Baselines3's ReplayBuffer: one row for each of ``n_envs`` at a time, uniform sampling only."""

from typing import Any

import _setup  # noqa: F401

# isort: split
import gymnasium as gym
import numpy as np
import torch
from replay import Rows, Store, Task, parse_arguments, run
from stable_baselines3.common.buffers import ReplayBuffer

torch.set_num_threads(1)


class Sb3Buffer(Store):
    fixed_inserts = True

    def __init__(self, task: Task, rows_per_insert: int) -> None:
        high = 255 if task.dtype == np.uint8 else 1
        # Without the timeouts, an additional column that needs a loop over all infos; nobody else stores them here.
        self.buffer = ReplayBuffer(
            task.capacity,
            gym.spaces.Box(0, high, task.shape, task.dtype),
            gym.spaces.Discrete(4),
            device="cpu",
            n_envs=rows_per_insert,
            optimize_memory_usage=task.mode == "optimized",
            handle_timeout_termination=False,
        )
        self.infos: list[dict[str, Any]] = [{} for _ in range(rows_per_insert)]
        # The pages of fresh arrays come into being when they are written to, which is not to be timed.
        for name in ("observations", "next_observations", "actions", "rewards", "dones"):
            if hasattr(self.buffer, name):
                getattr(self.buffer, name).fill(0)

    def native(self, rows: Rows) -> tuple[Any, ...]:
        return (rows["obs"], rows["next_obs"], rows["action"], rows["reward"], rows["terminated"], self.infos)

    def insert(self, rows: tuple[Any, ...]) -> None:
        self.buffer.add(*rows)

    def sample(self, batch_size: int) -> Any:
        return self.buffer.sample(batch_size)

    def arrays(self, batch: Any) -> Rows:
        return {
            "obs": batch.observations.numpy(),
            "action": batch.actions.numpy(),
            "reward": batch.rewards.numpy(),
            "next_obs": batch.next_observations.numpy(),
            "terminated": batch.dones.numpy().astype(np.bool_),
        }


class OptimizedSb3Buffer(Sb3Buffer):
    next_obs = "read from the next row"


if __name__ == "__main__":
    task = parse_arguments(modes=("plain", "optimized"))
    optimized = task.mode == "optimized"
    run(
        "sb3-optimized" if optimized else "sb3",
        task,
        OptimizedSb3Buffer if optimized else Sb3Buffer,
        packages=("torch", "stable-baselines3"),
    )
