"""Helpers for the nested mappings, lists and tuples that `act` takes and returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from farstep.agents.tape.errors import Untraceable
from farstep.schema import flat, map_leaves


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Return the leaves that are tensors."""
    return (leaf for leaf in flat(value) if isinstance(leaf, Tensor))


def aliases_of(value: Any) -> Any:
    """Return a copy of a nested value, with new tensors over the same memory."""
    return map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, value)


def outline_of(value: Any) -> str:
    """Return the structure as text: containers, keys and the types of the leaves."""
    return repr(map_leaves(lambda leaf: type(leaf).__name__, value))


def leaves_of(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a nested value, each with its path of subscripts."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves_of(item, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from leaves_of(item, f"{path}[{index}]")
    elif isinstance(value, Tensor):
        yield path, value


def static_inputs(examples: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return contiguous copies of the examples. A recording reads its inputs from them."""

    def own(leaf: Any) -> Any:
        return leaf if leaf is None else torch.as_tensor(leaf).clone(memory_format=torch.contiguous_format)

    return tuple(map_leaves(own, example) for example in examples)


def arrays_of(value: Any) -> Any:
    """Return a nested value with its tensors copied to NumPy arrays."""

    def convert(leaf: Any) -> Any:
        try:
            return leaf.detach().numpy().copy() if isinstance(leaf, Tensor) else leaf
        except (TypeError, RuntimeError):
            raise Untraceable(f"act returns {leaf.dtype}, which NumPy does not have") from None

    return map_leaves(convert, value)


def equal_results(a: Any, b: Any, tolerance: float = 1e-5) -> str | None:
    """Compare two nested results. Return None if they agree, otherwise a clause about the first difference.

    Floats agree within the tolerance (relative plus absolute), and NaN agrees with NaN; other values must be equal.
    """
    return _unequal(a, b, tolerance, "the result")


def _unequal(a: Any, b: Any, tolerance: float, name: str) -> str | None:
    if isinstance(a, Mapping) or isinstance(b, Mapping):
        if not (isinstance(a, Mapping) and isinstance(b, Mapping) and a.keys() == b.keys()):
            return f"{name} has other keys"
        pairs = [(str(key), a[key], b[key]) for key in a]
    elif isinstance(a, list | tuple) or isinstance(b, list | tuple):
        if not (isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b)):
            return f"{name} has another length"
        pairs = [(str(index), *pair) for index, pair in enumerate(zip(a, b, strict=True))]
    else:
        return _unequal_leaves(a, b, tolerance, name)
    prefix = "" if name == "the result" else name + "."
    return next((why for key, x, y in pairs if (why := _unequal(x, y, tolerance, prefix + key))), None)


def _unequal_leaves(a: Any, b: Any, tolerance: float, name: str) -> str | None:
    if a is None or b is None:
        return None if a is b else f"{name} is None on one side"
    x, y = (_comparable(leaf) for leaf in (a, b))
    if x.shape != y.shape or x.dtype != y.dtype:
        return f"{name} is {x.dtype}{list(x.shape)} and {y.dtype}{list(y.shape)}"
    if x.dtype.kind not in "fc":
        count = int(np.count_nonzero(x != y))
        return f"{name} differs in {count} of {x.size} elements" if count else None
    with np.errstate(all="ignore"):
        wrong = ~np.isclose(x, y, rtol=tolerance, atol=tolerance, equal_nan=True)
        gap = float(np.max(np.abs(x - y), where=wrong, initial=0.0))
    return f"{name} differs by {gap:.3g} in {int(wrong.sum())} of {x.size} elements" if wrong.any() else None


def _comparable(leaf: Any) -> np.ndarray[Any, Any]:
    if isinstance(leaf, Tensor):
        return (leaf.detach().float() if leaf.dtype == torch.bfloat16 else leaf.detach()).cpu().numpy()
    return np.asarray(leaf)
