"""Environments whose steps take or tell a time, so that a benchmark can choose how long sampling takes."""

from __future__ import annotations

import time
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium import spaces

Cost = Literal["compute", "sleep"]
SLOW_PENDULUM = "SlowPendulum-v1"


class Costly(gym.Wrapper[Any, Any, Any, Any]):
    """Takes `step_ms` before each step: CPU time of this thread (`compute`), or time in which it sleeps (`sleep`)."""

    def __init__(self, env: gym.Env[Any, Any], step_ms: float, cost: Cost) -> None:
        super().__init__(env)
        self._step_s, self._wait = step_ms / 1e3, _compute if cost == "compute" else time.sleep

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self._wait(self._step_s)
        return self.env.step(action)


def _compute(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def make(env: str, step_ms: float, cost: Cost = "compute") -> gym.Env[Any, Any]:
    """Make an environment on a worker."""
    return Costly(gym.make(env), step_ms, cost)


def slow_pendulum() -> gym.Env[Any, Any]:
    """Make a Pendulum-v1 that sleeps for 10 ms in each step, like a simulator that runs elsewhere."""
    return make("Pendulum-v1", 10.0, "sleep")


if SLOW_PENDULUM not in gym.registry:
    gym.register(SLOW_PENDULUM, slow_pendulum)


class Clock(gym.Env[Any, Any]):
    """Observations are the wall-clock time of their step.

    The monotonic clock of a process that criu has restored does not count the time on disk.
    """

    observation_space = spaces.Box(0.0, np.inf, (1,), np.float64)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.array([time.time()]), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.array([time.time()]), 0.0, False, False, {}


class FixedAgent:
    """Always takes action 0; has as many weights as a small network."""

    def __init__(self) -> None:
        self.weights = np.zeros(9_000, np.float32)

    def act(self, obs: Any) -> dict[str, Any]:
        return {"action": np.zeros(len(obs), np.int64)}

    def get_parameters(self) -> dict[str, Any]:
        return {"weights": self.weights}
