"""Checks a state that `ClusterEnv.save` returned before workers resume from it.

Workers trust the head. Without this check, an invalid value (a generator position outside its table, an action outside
its space) would reach native code on a worker.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from gymnasium import spaces

from farstep.agents.parameters import as_array, leaves_of
from farstep.checkpoint.checks import (
    PCG64,
    Count,
    Finite,
    Word,
    check_array,
    check_finite,
    check_keys,
    check_torch_generator,
    converted,
)
from farstep.checkpoint.files import Refused
from farstep.core import Array
from farstep.schema import Schema, leaf_spaces

_Seed = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_MERSENNE_WORDS = 624
_Mersenne = tuple[
    Literal["MT19937"],
    np.ndarray,
    Annotated[int, msgspec.Meta(ge=0, le=_MERSENNE_WORDS)],
    Annotated[int, msgspec.Meta(ge=0, le=1)],
    Finite,
]
_PythonRandom = tuple[Literal[3], list[Word], Finite | None]


class _Generators(msgspec.Struct, forbid_unknown_fields=True):
    """The global generators of a worker's process."""

    random: _PythonRandom
    numpy: _Mersenne
    torch: np.ndarray | None = None


class _Acting(msgspec.Struct, forbid_unknown_fields=True):
    """The agent's state on a worker: its recurrent state, and a generator per slot if it takes `rng`."""

    state: list[np.ndarray]
    generators: list[PCG64]


class _Worker(msgspec.Struct, forbid_unknown_fields=True):
    roots: list[_Seed]
    episodes: list[Count]
    steps: list[Count | None]
    obs: dict[str, np.ndarray]
    agent: dict[str, Any]
    """An `_Acting` as plain data; empty if no agent had been sent."""
    generators: _Generators | None = None
    """None if the worker shared the head's process."""


class _Saved(msgspec.Struct, forbid_unknown_fields=True):
    version: Count
    workers: list[_Worker | None]
    active_workers: Annotated[int, msgspec.Meta(ge=1, le=2**31)] | None = None
    """Number of workers that were not parked; None if none was parked."""
    inference: Literal["local", "local-cpu", "served"] | None = None
    """What `inference="auto"` has chosen; None with another option."""


def check_saved(
    saved: object,
    actions: Sequence[Mapping[str, Array]],
    agent: Any,
    obs_schema: Schema,
    action_space: spaces.Space[Any],
) -> None:
    """Raise `Refused` if the state does not fit the agent and the spaces. The number of workers may differ."""
    found = converted("env", saved, _Saved)
    for i, worker in enumerate(found.workers):
        if worker is not None:
            _check_worker(f"env.workers[{i}]", worker, agent, obs_schema)
    known = [worker for worker in found.workers if worker is not None]
    slots = sum(len(worker.episodes) for worker in known)
    if actions and known and len(known) == len(found.workers) and len(actions) != slots:
        raise Refused(f"actions of {len(actions)} slots were saved, but the saved workers have {slots} slots")
    parts = leaf_spaces(action_space, "action")
    for slot, taken in enumerate(actions):
        if taken:
            _check_actions(f"the actions of slot {slot}", taken, parts)


def _check_worker(where: str, worker: _Worker, agent: Any, obs_schema: Schema) -> None:
    count = len(worker.episodes)
    if not len(worker.roots) == len(worker.steps) == count:
        raise Refused(
            f"{where} has {len(worker.roots)} roots, {count} episodes and {len(worker.steps)} counts of steps"
        )
    check_keys(f"{where}.obs", worker.obs, obs_schema)
    for name, spec in obs_schema.items():
        check_array(f"{where}.obs[{name}]", worker.obs[name], (count, *spec.shape), spec.dtype)
    if worker.generators is not None:
        _check_generators(f"{where}.generators", worker.generators)
    if worker.agent:
        _check_acting(f"{where}.agent", converted(f"{where}.agent", worker.agent, _Acting), agent, count)


def _check_acting(where: str, acting: _Acting, agent: Any, count: int) -> None:
    recurrent = callable(getattr(agent, "initial_state", None))
    leaves = [leaf for _, leaf in leaves_of(agent.initial_state(count), "state")] if recurrent else []
    if len(acting.state) != len(leaves):
        raise Refused(f"{where}.state has {len(acting.state)} arrays, the agent's recurrent state has {len(leaves)}")
    for i, (array, leaf) in enumerate(zip(acting.state, leaves, strict=True)):
        # NumPy agents may start with float64 zeros and continue in float32; torch modules have one dtype.
        loose = isinstance(leaf, np.ndarray) and array.dtype.kind == leaf.dtype.kind
        check_array(f"{where}.state[{i}]", array, as_array(leaf).shape, array.dtype if loose else as_array(leaf).dtype)
        if np.isfinite(as_array(leaf)).all():  # otherwise this agent uses infinity
            check_finite(f"{where}.state[{i}]", array)
    if len(acting.generators) not in (0, count):
        raise Refused(f"{where} has {len(acting.generators)} generators; expected 0 or {count}")
    for i, state in enumerate(acting.generators):
        try:
            np.random.PCG64().state = msgspec.to_builtins(state)
        except OverflowError as error:
            raise Refused(f"{where}.generators[{i}] is no state of a generator: {error}") from None


def _check_generators(where: str, saved: _Generators) -> None:
    version, words, spare = saved.random
    try:
        random.Random().setstate((version, tuple(words), spare))
    except (ValueError, TypeError, OverflowError) as error:
        raise Refused(f"{where}.random is no state of a generator: {error}") from None
    check_array(f"{where}.numpy", saved.numpy[1], (_MERSENNE_WORDS,), np.uint32)
    if saved.torch is not None:
        check_torch_generator(f"{where}.torch", saved.torch)


def _check_actions(where: str, actions: Mapping[str, Array], parts: Mapping[str, spaces.Space[Any]]) -> None:
    check_keys(where, actions, parts)
    steps = len(next(iter(actions.values())))
    for name, space in parts.items():
        array = actions[name]
        check_array(f"{where}, {name},", array, (steps, *(space.shape or ())), array.dtype)
        low, high = _bounds(space)
        # act may return integers for a Box of floats.
        if array.dtype.kind not in ("fiub" if isinstance(space, spaces.Box) and low is None else "iub"):
            raise Refused(f"{where}, {name}, are {array.dtype}; the space is {space}")
        check_finite(f"{where}, {name},", array)
        if low is not None and not ((array >= low) & (array <= high)).all():
            raise Refused(f"{where}, {name}, are not all in the space {space}")


def _bounds(space: spaces.Space[Any]) -> tuple[Any, Any]:
    """The smallest and the largest action; None for floats, because environments may clip them."""
    match space:
        case spaces.Discrete():
            return space.start, space.start + space.n - 1
        case spaces.MultiDiscrete():
            return space.start, space.start + space.nvec - 1
        case spaces.MultiBinary():
            return 0, 1
        case spaces.Box() if np.dtype(space.dtype).kind != "f":
            return space.low, space.high
    return None, None
