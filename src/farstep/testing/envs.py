"""Deterministic environments for tests, and an agent whose actions do not depend on the batch size."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class CountingEnv(gymnasium.Env[Any, Any]):
    """Environment with observations `[episode id, step, last action]`. The reward is the step.

    The episode id, 0 to 999, is drawn from the seed.

    Args:
        length: Steps of an episode. 0: 1 to 9 steps, drawn from the seed; None: episodes never end. Default 0.
        truncate: Whether episodes are truncated instead of terminated; default False.
    """

    def __init__(self, length: int | None = 0, truncate: bool = False) -> None:
        self.observation_space = spaces.Box(-1.0, 1e9, (3,), np.float32)
        self.action_space = spaces.Discrete(3)
        self._length, self._truncate = length, truncate

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode = int(self.np_random.integers(1000))
        self.limit = int(self.np_random.integers(1, 10)) if self._length == 0 else self._length
        self.count = 0
        return np.array([self.episode, 0, -1], np.float32), {"episode_id": self.episode}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        self.count += 1
        over = self.limit is not None and self.count >= self.limit
        obs = np.array([self.episode, self.count, action], np.float32)
        return obs, float(self.count), over and not self._truncate, over and self._truncate, {"count": self.count}


class SpacesEnv(gymnasium.Env[Any, Any]):
    """Environment with any spaces. Its observations are random samples.

    Args:
        observation_space: Space of the observations.
        action_space: Space of the actions.
        p_end: Probability that an episode ends in a step; half of the ends are truncations. Default 0.2.
    """

    def __init__(
        self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any], p_end: float = 0.2
    ) -> None:
        self.observation_space, self.action_space, self._p_end = observation_space, action_space, p_end

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.count = 0
        return self.observation_space.sample(), {"reset": True, "options": str(options)}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), (action, self.action_space)
        self.count += 1
        draw = self.np_random.random()
        info = {"count": self.count, "draw": float(draw), "array": np.full(2, self.count), "text": f"step {self.count}"}
        return self.observation_space.sample(), float(draw), draw < self._p_end / 2, draw > 1 - self._p_end / 2, info


class FaultyEnv(CountingEnv):
    """Environment that fails in a given phase, for tests of recovery.

    Args:
        fault: `raise`, `sigkill`, `sigsegv`, `exit`, `sigstop`, `hang`, `hang-gil` (holds the interpreter's lock) or
            `slow`.
        phase: `construct`, `reset`, `step` or `close`.
        at: In phase `step`, the first step that fails; default 3.
        marker: Path of a file that the first fault creates. If the file exists, no further fault occurs. Empty: always
            fail.
        slow_s: Delay of the fault `slow`, in seconds; default 0.05.
    """

    def __init__(self, fault: str, phase: str, at: int = 3, marker: str = "", slow_s: float = 0.05) -> None:
        super().__init__(length=None)
        self._fault, self._phase, self._at, self._marker, self._slow_s = fault, phase, at, marker, slow_s
        self._calls = 0
        self._maybe("construct", 0)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._maybe("reset", 0)
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._calls += 1
        self._maybe("step", self._at)
        return super().step(action)

    def close(self) -> None:
        self._maybe("close", 0)

    def _maybe(self, phase: str, at: int) -> None:
        if phase != self._phase or self._calls < at:
            return
        if self._marker:
            try:
                os.close(os.open(self._marker, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return
        do_fault(self._fault, self._slow_s)


def do_fault(fault: str, slow_s: float = 0.05) -> None:
    """Make this process fail.

    Args:
        fault: As in `FaultyEnv`.
        slow_s: Delay of the fault `slow`, in seconds; default 0.05.

    Raises:
        UnpicklableError: The fault is `raise`.
        ValueError: The fault is unknown.
    """
    match fault:
        case "raise":
            raise UnpicklableError(f"deliberate, in {Path(__file__).name}")
        case "sigkill" | "sigsegv" | "sigstop":
            os.kill(os.getpid(), getattr(signal, fault.upper()))
        case "exit":
            os._exit(3)
        case "hang":
            time.sleep(3600)
        case "hang-gil":
            ctypes.PyDLL(None).sleep(3600)  # PyDLL does not release the interpreter's lock
        case "slow":
            time.sleep(slow_s)
        case _:
            raise ValueError(f"unknown fault {fault!r}")


class UnpicklableError(Exception):
    """An exception that cannot be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("this exception cannot be pickled")


class TableAgent:
    """Agent that looks up actions in a table, by the first two entries of an observation.

    The actions do not depend on the batch size, so they are the same for any number of workers.

    Args:
        num_actions: Number of actions; default 3.
        size: Size of the table; default 97.
    """

    def __init__(self, num_actions: int = 3, size: int = 97) -> None:
        self.table = np.arange(size) * 7 % num_actions

    def act(self, obs: Any) -> dict[str, Any]:
        """Look up the actions for a batch of observations.

        Args:
            obs: Observations `[n, ...]` with at least two entries each.

        Returns:
            `action`, and twice the first entry of each observation as `value`.
        """
        index = (obs[:, 0].astype(np.int64) * 31 + obs[:, 1].astype(np.int64)) % len(self.table)
        return {"action": self.table[index].astype(np.int64), "value": obs[:, 0] * 2}

    def get_parameters(self) -> dict[str, Any]:
        """Return what is published.

        Returns:
            The table, as `table`.
        """
        return {"table": self.table}
