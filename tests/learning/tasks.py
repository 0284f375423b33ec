"""Small tasks that a learner must solve, and training in them without a run folder."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import farstep
from farstep.cli.options.algorithms import agent_for
from farstep.learners.aride import Aride, ArideConfig
from farstep.learners.async_ppo import AsyncPPO, AsyncPPOConfig
from farstep.learners.dqn import DQN, ApexConfig, DQNConfig
from farstep.learners.impala import Impala, ImpalaConfig
from farstep.learners.loop.training import Limits, Stopped, Training
from farstep.learners.networks.agent import NetworkAgent
from farstep.learners.ppo import PPO, PPOConfig
from farstep.learners.sac import SAC, SACConfig

OnPolicyConfig = PPOConfig | AsyncPPOConfig | ImpalaConfig
Config = OnPolicyConfig | DQNConfig | SACConfig | ArideConfig
DEFAULTS: dict[str, OnPolicyConfig] = {"ppo": PPOConfig(), "async-ppo": AsyncPPOConfig(), "impala": ImpalaConfig()}
"""Each on-policy learner with its default options."""
LEARNERS: dict[type, Any] = {
    PPOConfig: PPO,
    AsyncPPOConfig: AsyncPPO,
    ImpalaConfig: Impala,
    DQNConfig: DQN,
    ApexConfig: DQN,
    SACConfig: SAC,
    ArideConfig: Aride,
}


class Identity(gymnasium.Env[Any, Any]):
    """Rewards the action that equals the observation, which is drawn from the action space; ten steps long."""

    def __init__(self, kind: str = "discrete", length: int = 10) -> None:
        self.action_space = {
            "discrete": spaces.Discrete(4, start=-1),
            "multi-discrete": spaces.MultiDiscrete([3, 2]),
            "binary": spaces.MultiBinary(3),
            "continuous": spaces.Box(-1, 1, (2,), np.float32),
            "dict": spaces.Dict(a=spaces.Discrete(3), b=spaces.Box(-1, 1, (1,), np.float32)),
        }[kind]
        self.observation_space = self.action_space
        self._length = length

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.action_space.seed(seed)
        self._left, self._shown = self._length, self.action_space.sample()
        return self._shown, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = _alike(self.action_space, self._shown, action)
        self._left -= 1
        self._shown = self.action_space.sample()
        return self._shown, reward, False, self._left == 0, {}


def _alike(space: Any, shown: Any, done: Any) -> float:
    """1 for doing exactly what was shown, falling with the distance."""
    if isinstance(space, spaces.Dict):
        return float(np.mean([_alike(sub, shown[key], done[key]) for key, sub in space.spaces.items()]))
    if isinstance(space, spaces.Box):
        return 1.0 - float(np.abs(np.asarray(shown) - np.asarray(done)).mean())
    return float(np.mean(np.asarray(shown) == np.asarray(done)))


class Recall(gymnasium.Env[Any, Any]):
    """Shows a bit at the first step and asks for it at the last: without memory, no policy exceeds one half."""

    def __init__(self, length: int = 5) -> None:
        self.observation_space = spaces.Box(-1, 1, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._length = length

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._step, self._bit = 0, int(self.np_random.integers(2))
        return self._obs(), {}

    def _obs(self) -> Any:
        last = self._step == self._length - 1
        return np.array([2 * self._bit - 1 if self._step == 0 else 0, last], np.float32)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        ended = self._step == self._length - 1
        reward = float(int(action) == self._bit) if ended else 0.0
        self._step += 1
        return self._obs(), reward, ended, False, {}


class Rows:
    """Keeps logged rows; sends this process a signal after `stop_at` of them."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.rows: list[dict[str, float]] = []
        self._stop_at = stop_at

    def log(self, step: int, metrics: Any) -> None:
        self.rows.append({"step": step, **metrics})
        if len(self.rows) == self._stop_at:
            signal.raise_signal(signal.SIGTERM)


class Solved(Exception):
    """Raised by `Evaluations` to end a training whose greedy policy has reached the target return."""


class Evaluations:
    """A sink that evaluates the greedy policy about every 8,000 steps, and ends the training once it is good enough.

    Eight greedy episodes cost less than the training steps after which the mean of the last 100 episodes, which are
    sampled from older policies, reaches the same target.
    """

    def __init__(self, env: Any, target: float) -> None:
        self.returns: list[float] = []
        """Mean return of each evaluation."""
        self.agent: NetworkAgent | None = None
        self._env, self._target, self._next_step = env, target, 8_000

    def log(self, step: int, metrics: Any) -> None:
        if step >= self._next_step and self.agent is not None:
            self._next_step = step + 8_000
            self.returns.append(float(np.mean(greedy_returns(self._env, self.agent))))
            if self.returns[-1] >= self._target:
                raise Solved


def greedy_returns(env: Any, agent: NetworkAgent) -> list[float]:
    """Returns of the first episodes of at most 500 steps, in eight environments, with the most probable actions."""
    agent.greedy = True
    try:
        with make_env(env, 8, seed=2, launcher="in-process") as cluster:
            return cluster.collect(agent, steps=500).episodes["return"].tolist()
    finally:
        agent.greedy = False


def make_env(
    env: Any, num_envs: int, seed: int = 1, launcher: str = "local", workers: int = 2, **options: Any
) -> farstep.ClusterEnv:
    kind = "gymnasium" if isinstance(env, str) else "factory"
    config = {"type": kind, "env_name": env, "envs_per_node": num_envs, "seed": seed, **options}
    launch = farstep.LocalConfig if launcher == "local" else farstep.InProcessConfig
    return farstep.ClusterEnv(config, launch(workers_per_node=workers))


def make_training(
    env: farstep.ClusterEnv, config: Config, total_steps: int, seed: int = 1, **options: Any
) -> tuple[Training, Any]:
    """A training of the learner that the configuration is of."""
    torch.manual_seed(seed)
    agent: NetworkAgent = agent_for(config, *env.launch())
    learner = LEARNERS[type(config)](agent, config, seed)
    if options.pop("releases_device", False):
        learner.release_device()
    limits = Limits(
        total_steps=total_steps,
        target_return=options.pop("target_return", None),
        checkpoint_every=options.pop("checkpoint_every", 1000),
        eval_every=options.pop("eval_every", None),
    )
    return Training(learner, env, limits, **options), agent


def trained(
    env: Any,
    config: Config,
    total_steps: int,
    num_envs: int = 16,
    target: float | None = None,
    seed: int = 1,
    **options: Any,
) -> tuple[float, Any]:
    """The mean return of the last episodes, and the agent."""
    with make_env(env, num_envs, seed, **options) as cluster:
        training, agent = make_training(cluster, config, total_steps, seed, target_return=target)
        progress = training.run()
    return float(np.mean(progress.returns)), agent


def best_evaluation(
    env: str, config: Config, total_steps: int, num_envs: int, target: float, launcher: str = "in-process"
) -> float:
    """Train until the greedy policy reaches the target or the steps are used up; return the best mean return."""
    evaluations = Evaluations(env, target)
    with make_env(env, num_envs, launcher=launcher) as cluster:
        training, evaluations.agent = make_training(cluster, config, total_steps, sink=evaluations)
        with contextlib.suppress(Solved):
            training.run()
    return max(evaluations.returns)


def resumable(
    config: Config, total_steps: int, folder: Path, *, stop_at: int | None = None, resume: bool = False
) -> dict[str, torch.Tensor]:
    """Train with checkpoints, until the end or until a signal after update `stop_at`; returns the parameters."""
    with make_env("CartPole-v1", 4, seed=3, launcher="in-process") as env:
        training, agent = make_training(env, config, total_steps, checkpoints=folder, sink=Rows(stop_at))
        if resume:
            training.resume()
        with pytest.raises(Stopped) if stop_at else contextlib.nullcontext():
            training.run()
    return agent.state_dict()


def assert_resumes_exactly(config: Config, total_steps: int, stop_at: int, folder: Path) -> None:
    """Check that a run that is stopped and resumed ends with the same parameters as an uninterrupted run."""
    whole = resumable(config, total_steps, folder / "whole")
    resumable(config, total_steps, folder / "parts", stop_at=stop_at)
    parts = resumable(config, total_steps, folder / "parts", resume=True)
    assert whole.keys() == parts.keys()
    assert all(torch.equal(tensor, parts[name]) for name, tensor in whole.items())
