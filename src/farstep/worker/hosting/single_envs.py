"""The single environments of a worker, one per slot, and checks of their results. The hosts use them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from farstep.core import Array
from farstep.errors import SpaceError, described
from farstep.rollout.progress import COUNT, PHASE, RESET, SLOT, Phase
from farstep.rollout.sources import Source
from farstep.schema import Schema, Structure, leaf_names, leaves, nest, space_schema


class SingleEnvs:
    """Builds, resets, replaces and closes environments, and converts rows of actions for them."""

    def __init__(self, source: Source, count: int, progress: memoryview, first: int = 0) -> None:
        self._source, self._progress, self._first = source, progress, first
        self.envs = [self._build(i) for i in range(count)]
        self.spaces = self.envs[0].observation_space, self.envs[0].action_space
        self._obs, self._obs_schema = space_schema(self.spaces[0], "obs")
        self._action, _ = space_schema(self.spaces[1], "action")
        self._shape = self._obs_schema[self._obs].shape if isinstance(self._obs, str) else None
        """Shape of an observation that is a single array; otherwise None."""
        self._checked = [False] * count
        """Whether the dtypes of a slot's first observation were checked."""

    def _build(self, i: int) -> gymnasium.Env[Any, Any]:
        self._progress[PHASE], self._progress[SLOT] = Phase.CONSTRUCT, i
        self._progress[COUNT] += 1
        return self._source.build(self._first + i)

    def replace(self, i: int) -> None:
        """Close environment `i`, ignoring errors, and build it again."""
        with contextlib.suppress(Exception, SystemExit):
            self.envs[i].close()
        self.envs[i] = self._build(i)

    def reset(self, i: int, seed: int | None, options: dict[str, Any] | None, target: dict[str, Array]) -> Any:
        """Reset environment `i` and write its observation to `target[...][i]`; returns its info."""
        self._progress[PHASE], self._progress[SLOT] = RESET, i
        self._progress[COUNT] += 1
        try:
            result: Any = self.envs[i].reset(seed=seed, options=options)
        except TypeError as error:
            explain_reset(error)
            raise
        if not isinstance(result, (tuple, list)) or len(result) != 2:
            raise TypeError(f"reset returned a {type(result).__name__}; expected the pair (obs, info).")
        obs, info = result
        (self.check_obs if self._checked[i] else self.check_first_obs)(obs)
        self._checked[i] = True
        for name, leaf in leaves(self._obs, obs):
            target[name][i] = leaf
        return as_info(info)

    def check_obs(self, obs: Any) -> None:
        """Raise `SpaceError` if an observation does not have the keys or the shape of its space. NumPy would broadcast
        silently."""
        if self._shape is not None and getattr(obs, "shape", None) == self._shape:
            return  # the usual case
        check_keys(self._obs, obs)
        for name, leaf in leaves(self._obs, obs):
            if np.shape(leaf) != self._obs_schema[name].shape:
                raise SpaceError(
                    f"{name}: the environment returned shape {list(np.shape(leaf))}, but its observation space says "
                    f"{list(self._obs_schema[name].shape)}."
                )

    def check_first_obs(self, obs: Any) -> None:
        """Check shapes, as `check_obs` does, and dtypes.

        A check in every step would be slow, and a wrong dtype is already visible in the first observation.
        """
        self.check_obs(obs)
        check_dtypes(leaves(self._obs, obs), self._obs_schema, self.envs[0])

    def actions(self, rows: dict[str, Array], t: int) -> Any:
        """The actions of row `t`, one per environment. These are copies, because an environment may modify its
        action."""
        if isinstance(self._action, str):
            return rows[self._action][t].copy()
        arrays = {name: rows[name][t].copy() for name in leaf_names(self._action)}
        return [nest(self._action, {n: a[i] for n, a in arrays.items()}) for i in range(len(self.envs))]

    def action(self, arrays: Mapping[str, Array], t: int) -> Any:
        """The action of row `t` from arrays of a single environment."""
        return nest(self._action, {name: arrays[name][t].copy() for name in leaf_names(self._action)})

    def close(self) -> None:
        self._progress[PHASE] = Phase.CLOSE
        for i, env in enumerate(self.envs):
            self._progress[SLOT] = i
            env.close()


def check_keys(structure: Structure, obs: Any, name: str = "obs") -> None:
    """Raise `SpaceError` if an observation of a Dict or Tuple space does not have the entries of the space."""
    if isinstance(structure, dict):
        if not hasattr(obs, "keys"):
            raise SpaceError(f"{name}: the environment returned a {type(obs).__name__}, but its space is a Dict.")
        if set(obs.keys()) != structure.keys():
            raise SpaceError(
                f"{name}: the environment returned the keys {_listed(obs.keys())}, but its space has "
                f"{_listed(structure)}."
            )
        for key, sub in structure.items():
            check_keys(sub, obs[key], f"{name}.{key}")
    elif isinstance(structure, tuple):
        if not hasattr(obs, "__len__") or len(obs) != len(structure):
            got = f"{len(obs)} entries" if hasattr(obs, "__len__") else f"a {type(obs).__name__}"
            raise SpaceError(
                f"{name}: the environment returned {got}, but its space is a Tuple with {len(structure)} entries."
            )
        for i, (sub, entry) in enumerate(zip(structure, obs, strict=True)):
            check_keys(sub, entry, f"{name}.{i}")


def _listed(keys: Iterable[Any]) -> str:
    return f"[{', '.join(sorted(map(str, keys)))}]"


def check_dtypes(arrays: Iterable[tuple[str, Any]], schema: Schema, env: Any) -> None:
    """Raise `SpaceError` for values that the space's dtype cannot represent. NumPy would convert them silently."""
    for name, leaf in arrays:
        array, expected = np.asarray(leaf), np.dtype(schema[name].dtype)
        if array.dtype == expected:
            continue
        if array.dtype.kind in "biu" and expected.kind in "biu":
            fits = np.array_equal(array.astype(expected), array)
        else:
            fits = np.can_cast(
                array.dtype, expected, "same_kind"
            )  # many environments return float64 for a float32 space
        if not fits:
            raise SpaceError(
                f"{name}: {type(getattr(env, 'unwrapped', env)).__name__} returned {array.dtype}, but its observation "
                f"space says {expected}, which cannot represent these values. Give the space the dtype {array.dtype}, "
                "or convert observations in the environment or a wrapper."
            )


def as_info(info: Any) -> Any:
    """Return the info, or {} for None. Raise `TypeError` if it is not a mapping."""
    if info is None:
        return {}
    if not isinstance(info, Mapping):
        raise TypeError(f"the environment returned the info {info!r}; a dictionary is expected.")
    return info


def explain_reset(error: TypeError) -> None:
    """Add an explanation to the error of a `reset` that does not take the arguments of Gymnasium."""
    if re.search(r"reset\(\) got an unexpected keyword argument '(seed|options)'", str(error)):
        error.args = (
            f"{error}. farstep passes seed and options, as Gymnasium does: declare def reset(self, *, seed=None, "
            "options=None).",
        )


def explain_step(error: Exception) -> None:
    """Add an explanation to the error of a step that follows the old Gym API."""
    if isinstance(error, ValueError) and "unpack (expected 5, got 4)" in described(error):
        error.args = (
            f"{error}: a step returned 4 values, as in the old Gym API; Gymnasium expects 5: obs, reward, terminated, "
            "truncated, info. Split done into terminated and truncated.",
        )


def outside(space: spaces.Space[Any], action: Any, name: str = "action") -> Iterator[tuple[spaces.Space[Any], str]]:
    """The parts of an action that lie outside the space; for each, its space and a clause that explains it."""
    if isinstance(space, spaces.Dict):
        for key, sub in space.spaces.items():
            yield from outside(sub, action[key], f"{name}.{key}")
    elif isinstance(space, spaces.Tuple):
        for i, sub in enumerate(space.spaces):
            yield from outside(sub, action[i], f"{name}.{i}")
    else:
        array = np.asarray(action)
        assert space.dtype is not None  # true for all spaces that farstep supports
        fits = np.can_cast(array.dtype, space.dtype, "same_kind")  # a wider float is fine
        if not fits or not space.contains(array.astype(space.dtype)[()]):
            yield space, f"{name} {action}{'' if fits else f' of type {array.dtype}'} is outside {space}"
