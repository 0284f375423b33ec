"""Checks of the arguments of `make_vec` and of the methods of the vector environment that it returns."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode

from farstep.config.env import check_count
from farstep.config.launch import LaunchConfig, LocalConfig
from farstep.core import Array, Nested
from farstep.errors import ConfigError, unknown_name
from farstep.schema import leaves, space_schema

Space = gymnasium.spaces.Space[Any]


def check_env_name(env_name: object) -> None:
    """Check an `env_name` that is not a list."""
    if isinstance(env_name, (str, EnvSpec)) or callable(env_name):
        return
    hint = " Call list() on it first." if isinstance(env_name, Iterable) else ""
    if isinstance(env_name, Mapping):
        hint = " Instead of a mapping pass a callable, e.g. functools.partial(Grid, size=4), or a list of callables."
    if isinstance(env_name, gymnasium.Env):
        hint = " Pass a function that makes the environment: each worker calls it."
    raise ConfigError(
        f"make_vec's env_name is {reprlib.repr(env_name)}; expected a Gymnasium id, an EnvSpec, a callable that "
        f"returns an environment, or a list of such callables.{hint}"
    )


def checked_thunks(thunks: Sequence[Any], num_envs: int | None) -> Sequence[Callable[..., Any]]:
    """Return a list of callables that make one environment each, as a tuple."""
    if not thunks or not all(callable(thunk) for thunk in thunks):
        raise ConfigError(
            f"make_vec got {reprlib.repr(thunks)}; expected a list of callables, one per environment, at least one."
        )
    if num_envs is not None and num_envs != len(thunks):
        raise ConfigError(f"num_envs is {num_envs!r} with a list of {len(thunks)} callables; leave num_envs out.")
    return tuple(thunks)


def check_launch(launch: LaunchConfig, num_envs: int) -> None:
    """Check that all environments can be stepped together."""
    if num_envs % launch.nodes:
        raise ConfigError(f"num_envs={num_envs} is not a multiple of nodes={launch.nodes}.")
    if not launch.fewest_nodes == launch.nodes == launch.most_nodes:
        raise ConfigError(
            f"make_vec steps all of its {num_envs} environments together, so it needs all nodes at all times; "
            f"{type(launch).__name__} has min_nodes={launch.fewest_nodes}, nodes={launch.nodes} and "
            f"max_nodes={launch.most_nodes}. Leave min_nodes and max_nodes out."
        )
    if launch.coordinator is not None:
        raise ConfigError(
            f"make_vec steps all of its {num_envs} environments together, so no coordinator can park its workers. "
            "Leave coordinator out, or use a farstep.ClusterEnv."
        )


def checked_batch_size(batch_size: int | None, num_envs: int, launch: LaunchConfig) -> int:
    """Return the number of environments that `recv` returns; None: all."""
    size = num_envs if batch_size is None else check_count("batch_size", batch_size)
    if size > num_envs:
        raise ConfigError(f"batch_size={size} is larger than num_envs={num_envs}.")
    if size < num_envs and not (isinstance(launch, LocalConfig) and launch.transport == "shm"):
        raise ConfigError(
            f"batch_size={size} is less than num_envs={num_envs}, which needs local workers with shared memory; use "
            'farstep.LocalConfig(transport="shm"), or leave batch_size out.'
        )
    return size


def checked_mode(value: AutoresetMode | str) -> AutoresetMode:
    """Return the autoreset mode for a mode, its name or its value."""
    for mode in AutoresetMode:
        if value in (mode, mode.name, mode.value):
            return mode
    raise ConfigError(unknown_name("autoreset_mode", str(value), [mode.name for mode in AutoresetMode]))


def checked_seeds(seed: int | Sequence[int | None] | None, num_envs: int) -> list[int | None] | None:
    """Return one seed per environment; None: do not seed."""
    if seed is None:
        return None
    if isinstance(seed, (int, np.integer)):
        return [int(seed) + i for i in range(num_envs)]
    seeds = [None if entry is None else int(entry) for entry in seed]
    if len(seeds) != num_envs:
        raise ValueError(f"seed has {len(seeds)} entries; expected num_envs={num_envs}, one for each.")
    return seeds


def checked_mask(mask: object, num_envs: int) -> Array:
    """Apply Gymnasium's rules for a reset mask."""
    if not isinstance(mask, np.ndarray):
        raise TypeError(f"options['reset_mask'] is a {type(mask).__name__}; it must be a NumPy array.")
    if mask.shape != (num_envs,):
        raise ValueError(f"options['reset_mask'] has shape {list(mask.shape)}; expected [{num_envs}].")
    if mask.dtype != np.bool_:
        raise TypeError(f"options['reset_mask'] has dtype {mask.dtype}; expected bool.")
    if not mask.any():
        raise ValueError("options['reset_mask'] selects no environment; leave it out, or set at least one.")
    return mask


def checked_ids(env_id: Array | Sequence[int], num_envs: int) -> Array:
    """Return the numbers of some environments as an array."""
    chosen = np.atleast_1d(np.asarray(env_id))
    valid = chosen.ndim == 1 and chosen.size and chosen.dtype.kind in "iu"
    if not valid or chosen.min() < 0 or chosen.max() >= num_envs or len(np.unique(chosen)) < len(chosen):
        raise ConfigError(f"env_id is {reprlib.repr(env_id)}; expected different integers from 0 to {num_envs - 1}.")
    return chosen


class ActionChecks:
    """Checks batches of actions against an action space.

    Args:
        single_space: The action space of one environment.
        space: The action space of all environments, for messages.
    """

    def __init__(self, single_space: Space, space: Space) -> None:
        self._space = space
        self._structure, self._schema = space_schema(single_space, "action")

    def checked(self, actions: Nested, count: int) -> dict[str, Array]:
        """Return the arrays of `count` actions by name."""
        if isinstance(self._structure, str):  # the usual case
            array = np.asarray(actions)
            if array.shape == (count, *self._schema[self._structure].shape) and not array.dtype.hasobject:
                return {self._structure: array}
        try:
            arrays = {name: np.asarray(leaf) for name, leaf in leaves(self._structure, actions)}
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ConfigError(f"actions do not have the structure of {self._space}: {error!r}") from error
        for name, array in arrays.items():
            expected = (count, *self._schema[name].shape)
            if array.shape != expected:
                raise ConfigError(f"{name} has shape {list(array.shape)}; expected {list(expected)}.")
            if array.dtype.hasobject:
                raise ConfigError(f"{name} is an array of Python objects; an array of numbers is expected.")
        return arrays
