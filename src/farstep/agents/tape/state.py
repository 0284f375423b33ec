"""Python state that a function keeps between calls. A replay would neither read nor change it."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor


def python_state(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the state of a function, by path: attributes of its owner and variables of its closure."""
    state: dict[str, Any] = {}
    seen: set[int] = set()

    def walk(path: str, value: Any, depth: int) -> None:
        if len(state) > 20_000:
            return
        state[path] = repr(value) if isinstance(value, bool | int | float | str | bytes) else id(value)
        if id(value) in seen or depth > 8:
            return
        seen.add(id(value))
        inside: Iterable[tuple[str, Any]] = ()
        if isinstance(value, np.random.Generator):
            state[path] = str(value.bit_generator.state)
        elif isinstance(value, random.Random):
            state[path] = value.getstate()
        elif isinstance(value, np.ndarray):
            state[path] = (id(value), value.tobytes() if value.nbytes < 1 << 20 else None)
        elif isinstance(value, dict):
            inside = [(f"{path}.{key}" if path else str(key), item) for key, item in value.items()]
        elif isinstance(value, list | tuple | set | deque):
            state[path] = (id(value), len(value))
            inside = [(f"{path}[{index}]", item) for index, item in enumerate(islice(value, 256))]
        elif isinstance(value, MethodType):
            inside = [(path, value.__self__), (path, value.__func__)]
        elif isinstance(value, partial):
            inside = [(path, value.func), (path, value.args), (path, value.keywords)]
        elif isinstance(value, FunctionType):
            cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=False)
            inside = [(name, cell.cell_contents) for name, cell in cells if _is_full(cell)]
        elif not isinstance(value, Tensor | type | ModuleType) and hasattr(value, "__dict__"):
            inside = [(path, value.__dict__)]
        for deeper, item in inside:
            walk(deeper, item, depth + 1)

    walk("", function, 0)
    state.pop("", None)
    return state


def _is_full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def difference(before: dict[str, Any], after: dict[str, Any]) -> str | None:
    """Return the path of a value that was changed, added or removed; None if there is none."""
    for path in before.keys() | after.keys():
        if before.get(path) != after.get(path):
            return path
    return None
