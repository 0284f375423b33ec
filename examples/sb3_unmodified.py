"""PPO and DQN of Stable-Baselines3, unmodified, with environments on farstep's workers.

`farstep.make_vec` returns a Gymnasium vector environment. Stable-Baselines3 has its own interface for vector
environments, `VecEnv`; `Adapter` implements it with any Gymnasium vector environment in SAME_STEP mode. With
`env_kwargs={"render_mode": "rgb_array"}` in `make_vec`, `VecVideoRecorder(Adapter(envs), ...)` records videos.
Needs `pip install stable-baselines3`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import tyro
from gymnasium.vector import VectorEnv
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecEnv, VecMonitor

import farstep


@dataclass(kw_only=True)
class Args:
    """Stable-Baselines3 on CartPole-v1, with farstep.make_vec."""

    learner: Literal["ppo", "dqn"] = "ppo"
    """algorithm"""
    workers: int = 2
    """number of worker processes"""
    num_envs: int = 16
    """number of environments, divided among the workers"""
    total_timesteps: int = 40_000
    """environment steps to train for"""
    seed: int = 1
    """seed of environments and networks"""


class Adapter(VecEnv):
    """Makes a Gymnasium vector environment usable by Stable-Baselines3."""

    def __init__(self, envs: VectorEnv) -> None:
        self._envs = envs
        self._actions: Any = None
        super().__init__(envs.num_envs, envs.single_observation_space, envs.single_action_space)
        self.metadata = {**envs.metadata, **self.metadata}  # VecVideoRecorder looks for render_fps

    def reset(self) -> np.ndarray:
        if any(options != self._options[0] for options in self._options):
            raise NotImplementedError("a Gymnasium vector environment needs the same options for all environments")
        seeds = self._seeds if any(seed is not None for seed in self._seeds) else None
        obs, info = self._envs.reset(seed=seeds, options=self._options[0] or None)
        self.reset_infos = split(info, self.num_envs)
        self._reset_seeds()
        self._reset_options()
        return obs

    def step_async(self, actions: np.ndarray) -> None:
        self._actions = actions

    def step_wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        obs, reward, terminated, truncated, info = self._envs.step(self._actions)
        done = terminated | truncated
        infos = split(info, self.num_envs)
        for i in np.flatnonzero(done):  # SAME_STEP has reset these; the end of the episode is in final_obs, final_info
            last = infos[i].pop("final_info", {})
            last["terminal_observation"] = infos[i].pop("final_obs")
            self.reset_infos[i], infos[i] = infos[i], last
        for i, cut in enumerate((truncated & ~terminated).tolist()):
            infos[i]["TimeLimit.truncated"] = cut
        return obs, reward, done, infos

    def get_images(self) -> Sequence[np.ndarray | None]:
        return list(self._envs.render() or [None] * self.num_envs)

    def close(self) -> None:
        self._envs.close()

    def get_attr(self, attr_name: str, indices: int | Iterable[int] | None = None) -> list[Any]:
        return self._some(self._envs.get_attr(attr_name), indices)

    def set_attr(self, attr_name: str, value: Any, indices: int | Iterable[int] | None = None) -> None:
        values = list(self._envs.get_attr(attr_name)) if indices is not None else [None] * self.num_envs
        for i in self._get_indices(indices):
            values[i] = value
        self._envs.set_attr(attr_name, values)

    def env_method(
        self, method_name: str, *method_args: Any, indices: int | Iterable[int] | None = None, **method_kwargs: Any
    ) -> list[Any]:
        if indices is not None:
            raise NotImplementedError("a Gymnasium vector environment calls methods of all environments together")
        return list(self._envs.call(method_name, *method_args, **method_kwargs))

    def env_is_wrapped(self, wrapper_class: type, indices: int | Iterable[int] | None = None) -> list[bool]:
        return self._some([False] * self.num_envs, indices)  # wrappers on workers are not visible here

    def _some(self, values: Sequence[Any], indices: int | Iterable[int] | None) -> list[Any]:
        return [values[i] for i in self._get_indices(indices)]


def split(infos: dict[str, Any], num_envs: int) -> list[dict[str, Any]]:
    """Return the infos of each environment; the mask `_key` marks the environments that have `key`."""
    parts: list[dict[str, Any]] = [{} for _ in range(num_envs)]
    for key, value in infos.items():
        if (owners := infos.get(f"_{key}")) is not None:
            entries = split(value, num_envs) if isinstance(value, dict) else value
            for i in np.flatnonzero(owners):
                parts[i][key] = entries[i]
    return parts


class Progress(BaseCallback):
    """Prints the mean return every `every` steps."""

    def __init__(self, every: int) -> None:
        super().__init__()
        self._every, self._next, self._start = every, every, time.monotonic()

    def _on_step(self) -> bool:
        if self.num_timesteps >= self._next:
            self._next += self._every
            rate = self.num_timesteps / (time.monotonic() - self._start)
            print(f"{self.num_timesteps:>8,} steps  return {mean_return(self.model):5.1f}  {rate:>6,.0f} steps/s")
        return True


def mean_return(model: PPO | DQN) -> float:
    """Return the mean return of the last 100 episodes."""
    return float(np.mean([episode["r"] for episode in model.ep_info_buffer or [{"r": 0.0}]]))


def main(args: Args) -> float:
    """Train; return the mean return of the last 100 episodes."""
    torch.set_num_threads(1)
    envs = farstep.make_vec("CartPole-v1", args.num_envs, {"workers_per_node": args.workers}, "SAME_STEP")
    env = VecMonitor(Adapter(envs))
    if args.learner == "ppo":
        model: PPO | DQN = PPO(
            "MlpPolicy", env, n_steps=128, batch_size=256, n_epochs=4, gamma=0.98, gae_lambda=0.9,
            learning_rate=1e-3, seed=args.seed, device="cpu",
        )  # fmt: skip
    else:
        model = DQN(
            "MlpPolicy", env, learning_rate=2.3e-3, batch_size=64, buffer_size=100_000, learning_starts=1000,
            gamma=0.99, target_update_interval=500, train_freq=16, gradient_steps=32, exploration_fraction=0.16,
            exploration_final_eps=0.04, policy_kwargs={"net_arch": [256, 256]}, seed=args.seed, device="cpu",
        )  # fmt: skip
    model.learn(args.total_timesteps, Progress(max(args.total_timesteps // 10, 1)))
    env.close()
    print(f"mean return of the last 100 episodes: {mean_return(model):.1f}")
    return mean_return(model)


if __name__ == "__main__":
    main(tyro.cli(Args))
