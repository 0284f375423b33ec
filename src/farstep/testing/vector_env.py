"""Contract check of vector environments: they must give the same results as Gymnasium's `SyncVectorEnv`."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import closing
from copy import deepcopy
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from farstep.testing.envs import CountingEnv, SpacesEnv

MakeVector = Callable[[Callable[[], Any], int, AutoresetMode], VectorEnv[Any, Any, Any]]
"""Makes a vector environment, given a function that makes an environment, their number and the autoreset mode."""


def check_vector_env(make_vector: MakeVector) -> None:
    """Check that a vector environment behaves like `SyncVectorEnv`.

    The check does random resets (seeds, masks, options) and steps, with flat and nested spaces, in all three autoreset
    modes.

    Args:
        make_vector: Makes a vector environment; see `MakeVector`.

    Raises:
        AssertionError: A result differs; the message says where.
    """
    factories: list[Callable[[], Any]] = [CountingEnv, _nested_env]
    for mode in AutoresetMode:
        for seed, factory in enumerate(factories):
            theirs = SyncVectorEnv([factory] * 3, autoreset_mode=mode)
            with closing(theirs), closing(make_vector(factory, 3, mode)) as ours:
                Parity(ours, theirs, seed).run(40)


def _nested_env() -> SpacesEnv:
    arms = spaces.Tuple([spaces.Box(-1, 1, (2,), np.float64), spaces.MultiBinary(2)])
    return SpacesEnv(spaces.Dict(camera=spaces.Box(0, 255, (4, 4), np.uint8), arms=arms), spaces.Discrete(3, start=5))


def assert_same(ours: Any, theirs: Any, where: str = "result") -> None:
    """Raise an AssertionError unless two results are equal in structure, types, dtypes and values."""
    assert type(ours) is type(theirs), f"{where}: {type(ours)} is not {type(theirs)}"
    if isinstance(theirs, dict):
        assert list(ours) == list(theirs), f"{where}: keys {list(ours)} are not {list(theirs)}"
        for key in theirs:
            assert_same(ours[key], theirs[key], f"{where}[{key!r}]")
    elif isinstance(theirs, (tuple, list)):
        assert len(ours) == len(theirs), where
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(a, b, f"{where}[{i}]")
    elif isinstance(theirs, np.ndarray):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape, f"{where}: {ours!r} is not {theirs!r}"
        if theirs.dtype == object:
            assert_same(list(ours.ravel()), list(theirs.ravel()), where)
        else:
            np.testing.assert_array_equal(ours, theirs, where)
    else:
        assert ours == theirs or (ours != ours and theirs != theirs), f"{where}: {ours!r} is not {theirs!r}"


class Parity:
    """Applies a random sequence of resets and steps to two vector environments."""

    def __init__(self, ours: VectorEnv[Any, Any, Any], theirs: SyncVectorEnv, seed: int) -> None:
        self.ours, self.theirs = ours, theirs
        self.rng = random.Random(seed)
        theirs.action_space.seed(seed)
        self.done = np.zeros(theirs.num_envs, bool)
        self.dones = 0

    def run(self, steps: int) -> None:
        assert_same(self.ours.num_envs, self.theirs.num_envs)
        for name in ("observation_space", "action_space", "single_observation_space", "single_action_space"):
            assert getattr(self.ours, name) == getattr(self.theirs, name), name
        self.reset(seed=self.rng.randrange(1000))
        for _ in range(steps):
            if self.rng.random() < 0.1:
                self.any_reset()
            if self.done.any() and self.theirs.autoreset_mode == AutoresetMode.DISABLED:
                self.reset(options={"reset_mask": self.done.copy(), "why": "ended"})
            self.step()
        assert self.dones > 3, "too few episodes ended for a meaningful check"

    def any_reset(self) -> None:
        """Reset at any time, even directly after the end of an episode. The next step must not be skipped."""
        n = self.theirs.num_envs
        mask = np.array([self.rng.random() < 0.5 for _ in range(n)])
        mask[self.rng.randrange(n)] = True
        seeds = [self.rng.choice([None, self.rng.randrange(1000)]) for _ in range(n)]
        kinds: list[dict[str, Any]] = [
            {},
            {"seed": self.rng.randrange(1000)},
            {"seed": seeds},
            {"options": {"level": 3}},
            {"options": {"reset_mask": mask}},
            {"options": {"reset_mask": mask, "level": 3}, "seed": seeds},
            {"options": {"reset_mask": mask}, "seed": self.rng.randrange(1000)},
        ]
        self.reset(**self.rng.choice(kinds))

    def reset(self, **kwargs: Any) -> None:
        mine = deepcopy(kwargs)
        assert_same(self.ours.reset(**mine), self.theirs.reset(**deepcopy(kwargs)), f"reset({kwargs})")
        assert_same(mine, kwargs, "the caller's arguments")
        mask = (kwargs.get("options") or {}).get("reset_mask")
        self.done[slice(None) if mask is None else mask] = False

    def step(self) -> None:
        actions = self.theirs.action_space.sample()
        mine = deepcopy(actions)
        ours, theirs = self.ours.step(mine), self.theirs.step(actions)
        assert_same(ours, theirs, f"step({actions})")
        assert_same(mine, actions, "the caller's actions")
        self.done = theirs[2] | theirs[3]
        self.dones += int(self.done.sum())
