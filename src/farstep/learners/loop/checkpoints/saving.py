"""Converts nested state to named arrays and plain data for a checkpoint, and checks loaded state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from farstep.agents.base_weights import base_hash
from farstep.checkpoint.checks import check_array, check_finite, check_keys
from farstep.checkpoint.files import Refused
from farstep.checkpoint.folder import Loaded
from farstep.core import Array
from farstep.learners.networks.agent import NetworkAgent
from farstep.learners.networks.normalizers import RunningMoments

_ARRAY, _TENSOR, _ITEMS = "array", "tensor", "items"


def split_state(state: Any) -> tuple[dict[str, Array], Any]:
    """Split nested state into arrays and plain data.

    Args:
        state: Numbers, text, arrays and tensors, or mappings and lists of these.

    Returns:
        The arrays by name, and the state with references in place of the arrays.
    """
    arrays: dict[str, Array] = {}
    return arrays, _split(state, "", arrays)


def _split(value: Any, name: str, arrays: dict[str, Array]) -> Any:
    match value:
        case torch.Tensor():
            arrays[name] = value.numpy(force=True)
            return {_TENSOR: name}
        case np.ndarray():
            arrays[name] = value
            return {_ARRAY: name}
        case Mapping():  # store pairs, because JSON would convert numeric keys to text
            return {
                _ITEMS: [
                    [key, _split(sub, f"{name}.{key}" if name else str(key), arrays)] for key, sub in value.items()
                ]
            }
        case list() | tuple():
            return [_split(sub, f"{name}.{i}", arrays) for i, sub in enumerate(value)]
        case _:
            return value


def join_state(loaded: Loaded) -> dict[str, Any]:
    """Restore the state that was passed to `split_state`; tuples become lists.

    Args:
        loaded: A checkpoint.

    Returns:
        The state of the run.

    Raises:
        Refused: The plain data does not match the arrays.
    """
    try:
        state = _join(loaded.arrays, loaded.meta["state"])
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise Refused(f"meta.json does not describe the state of a run: {type(error).__name__}: {error}") from None
    if not isinstance(state, dict):
        raise Refused(f"meta.json describes {type(state).__name__}; expected the state of a run")
    return state


def _join(arrays: Mapping[str, Array], plain: Any) -> Any:
    match plain:
        case {"tensor": name}:
            return torch.from_numpy(np.array(arrays[name]))
        case {"array": name}:
            return np.array(arrays[name])
        case {"items": pairs}:
            return {key: _join(arrays, sub) for key, sub in pairs}
        case list():
            return [_join(arrays, sub) for sub in plain]
        case _:
            return plain


def check_tensor(where: str, value: object, like: torch.Tensor) -> Array:
    """Raise `Refused` unless a tensor is finite and has the shape and dtype of `like`; `where` names it in the
    message."""
    numbers = value.numpy(force=True) if isinstance(value, torch.Tensor) else value
    array = check_array(where, numbers, tuple(like.shape), like.detach().cpu().numpy().dtype)
    check_finite(where, array)
    return array


def saved_parameters(agent: NetworkAgent) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers that a checkpoint has: all, or without the base if the agent has one."""
    return agent.get_parameters() if agent.base_parameters() else agent.state_dict()


def check_base(agent: NetworkAgent, saved: str) -> None:
    """Raise `Refused` if the base of an agent has another content hash than `saved`, the hash in a checkpoint."""
    if (own := base_hash(agent)) != saved:
        raise Refused(
            f"it continues {_base_text(saved)}, but this agent has {_base_text(own)}; adapters fit only the base that "
            "they were trained with. Load the same base weights into the agent before add_adapters"
        )


def _base_text(content_hash: str) -> str:
    return f"adapters of the base sha256:{content_hash}" if content_hash else "no adapters"


def check_agent(agent: NetworkAgent, saved: object) -> None:
    """Check that saved parameters and running statistics fit an agent.

    Args:
        agent: The agent that will load them.
        saved: The parameters by name.

    Raises:
        Refused: The parameters do not fit.
    """
    if not isinstance(saved, dict):
        raise Refused(f"agent is {type(saved).__name__}; expected a mapping of parameters")
    expected = saved_parameters(agent)
    check_keys("agent", saved, expected)
    for name, tensor in expected.items():
        check_tensor(f"agent.{name}", saved[name], tensor)
    for name, module in agent.named_modules():
        if isinstance(module, RunningMoments) and not (saved[f"{name}.std"] > 0).all():
            raise Refused(f"agent.{name}.std has numbers of 0 or below; expected numbers above 0")
        if isinstance(module, RunningMoments) and saved[f"{name}.count"] < 0:
            raise Refused(f"agent.{name}.count is {float(saved[f'{name}.count'])}; expected at least 0")
