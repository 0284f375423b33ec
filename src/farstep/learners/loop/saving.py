"""Nested state as a checkpoint stores it, named arrays and plain data for the rest; and checks when it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from farstep.checkpoint.checks import check_array, check_finite, check_keys
from farstep.checkpoint.files import Refused
from farstep.checkpoint.folder import Loaded
from farstep.core import Array
from farstep.learners.networks.nets import ActorCritic
from farstep.learners.networks.normalizers import RunningMoments

_ARRAY, _TENSOR, _ITEMS = "array", "tensor", "items"


def taken_apart(state: Any) -> tuple[dict[str, Array], Any]:
    """Arrays by name, and plain data that says where they belong."""
    arrays: dict[str, Array] = {}
    return arrays, _apart(state, "", arrays)


def _apart(value: Any, name: str, arrays: dict[str, Array]) -> Any:
    match value:
        case torch.Tensor():
            arrays[name] = value.numpy(force=True)
            return {_TENSOR: name}
        case np.ndarray():
            arrays[name] = value
            return {_ARRAY: name}
        case Mapping():  # as pairs: an optimizer's keys are numbers, which JSON would make text of
            return {
                _ITEMS: [
                    [key, _apart(sub, f"{name}.{key}" if name else str(key), arrays)] for key, sub in value.items()
                ]
            }
        case list() | tuple():
            return [_apart(sub, f"{name}.{i}", arrays) for i, sub in enumerate(value)]
        case _:
            return value


def put_together(loaded: Loaded) -> dict[str, Any]:
    """The state of a run from a checkpoint, with lists for tuples; raises `Refused` if its parts do not match."""
    try:
        state = _together(loaded.arrays, loaded.meta["state"])
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise Refused(f"meta.json does not describe the state of a run: {type(error).__name__}: {error}") from None
    if not isinstance(state, dict):
        raise Refused(f"meta.json describes {type(state).__name__}, the state of a run expected")
    return state


def _together(arrays: Mapping[str, Array], plain: Any) -> Any:
    match plain:
        case {"tensor": name}:
            return torch.from_numpy(np.array(arrays[name]))
        case {"array": name}:
            return np.array(arrays[name])
        case {"items": pairs}:
            return {key: _together(arrays, sub) for key, sub in pairs}
        case list():
            return [_together(arrays, sub) for sub in plain]
        case _:
            return plain


def check_tensor(where: str, value: object, like: torch.Tensor) -> Array:
    """The tensor's numbers, if it has the shape and dtype of `like` and all are finite."""
    found = value.numpy(force=True) if isinstance(value, torch.Tensor) else value
    array = check_array(where, found, tuple(like.shape), like.detach().cpu().numpy().dtype)
    check_finite(where, array)
    return array


def check_agent(agent: ActorCritic, saved: object) -> None:
    """Raise `Refused` if these are not parameters and running statistics that the agent can act with."""
    if not isinstance(saved, dict):
        raise Refused(f"agent is {type(saved).__name__}, a mapping of parameters expected")
    expected = agent.state_dict()
    check_keys("agent", saved, expected)
    for name, tensor in expected.items():
        check_tensor(f"agent.{name}", saved[name], tensor)
    for name, module in agent.named_modules():
        if isinstance(module, RunningMoments) and not (saved[f"{name}.std"] > 0).all():
            raise Refused(f"agent.{name}.std holds numbers that are not above 0")
        if isinstance(module, RunningMoments) and saved[f"{name}.count"] < 0:
            raise Refused(f"agent.{name}.count is {float(saved[f'{name}.count'])}, at least 0 expected")
