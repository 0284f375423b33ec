"""Nested state as a checkpoint has it: named arrays, and plain data for the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from farstep.core import Array

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


def put_together(arrays: Mapping[str, Array], plain: Any) -> Any:
    """What was taken apart; tuples are lists now."""
    match plain:
        case {"tensor": name}:
            return torch.from_numpy(np.array(arrays[name]))
        case {"array": name}:
            return np.array(arrays[name])
        case {"items": pairs}:
            return {key: put_together(arrays, sub) for key, sub in pairs}
        case list():
            return [put_together(arrays, sub) for sub in plain]
        case _:
            return plain
