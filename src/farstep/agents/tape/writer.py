"""Builds the text of a program line by line."""

from __future__ import annotations

import keyword
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from farstep.agents.tape.errors import Unsupported
from farstep.agents.tape.op import Op, storage_of

FLOATS = (torch.float32, torch.float64)
NUMBERS = (*FLOATS, torch.int64, torch.int32)


class Writer:
    """The lines of a program so far, and the objects that its names refer to."""

    def __init__(
        self, ops: Sequence[Op], labels: dict[int, str], names: Mapping[str, Any], reserved: Sequence[str]
    ) -> None:
        self.ops = ops
        self.labels = labels
        self.lines: list[str] = []
        self.names: dict[str, Any] = dict(names)
        self._reserved = {"act", "made", "tensors", *reserved}
        self._known: dict[Any, str] = {}

    def line(self, text: str) -> None:
        """Append a line."""
        self.lines.append(text)

    def bind(self, name: str, value: Any) -> str:
        """Bind an object to a new name based on `name`, and return the new name."""
        unique, count = name, 1
        while unique in self.names or unique in self._reserved:
            count += 1
            unique = f"{name}_{count}"
        self.names[unique] = value
        return unique

    def tensor(self, tensor: Tensor) -> str:
        """Return the name of a tensor, as an argument of torch operations."""
        return self._named(tensor, "torch", lambda alias: alias)

    def array(self, tensor: Tensor) -> str:
        """Return the name of a NumPy array that shares the tensor's memory."""
        return self._named(tensor, "numpy", as_array)

    def _named(self, tensor: Tensor, kind: str, view: Callable[[Tensor], Any]) -> str:
        key = (kind, tensor.data_ptr(), storage_of(tensor), tensor.dtype, tensor.shape, tensor.stride())
        if key not in self._known:
            storage = storage_of(tensor)
            label = self.labels.setdefault(storage, f"v{len(self.labels)}")
            # Detach, because an operation on a parameter that requires grad would build a graph. Outside inference
            # mode, torch refuses to write to a tensor that was made inside it, but allows another tensor over the same
            # memory.
            alias = from_dlpack(tensor) if tensor.is_inference() else tensor.detach()
            self._known[key] = self.bind(label + ("_t" if kind == "torch" else ""), view(alias))
        return self._known[key]

    def scratch(self, shape: Sequence[int], dtype: torch.dtype) -> str:
        """Return the name of a new array for intermediate results."""
        return self.bind("scratch", as_array(torch.empty(tuple(shape), dtype=dtype)))

    def number(self, value: Any, dtype: torch.dtype) -> str:
        """Bind a Python number as a 0-d array and return its name; ufuncs are faster with arrays than with numbers."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise Unsupported
        if isinstance(value, float) and dtype not in FLOATS:
            raise Unsupported
        key = ("number", repr(value), dtype)
        if key not in self._known:
            try:
                with np.errstate(all="ignore"):
                    constant = np.array(value, as_array(torch.empty(0, dtype=dtype)).dtype)
            except OverflowError:
                raise Unsupported from None
            self._known[key] = self.bind(identifier(f"c_{value:.5g}"), constant)
        return self._known[key]

    def operand(self, value: Any, dtype: torch.dtype) -> str:
        """Return the name of a tensor or number as an operand of exactly this dtype, to avoid type promotion in
        NumPy."""
        if not isinstance(value, Tensor):
            return self.number(value, dtype)
        if value.dtype != dtype:
            raise Unsupported
        return self.array(value)


def as_array(tensor: Tensor) -> np.ndarray[Any, Any]:
    try:
        return tensor.numpy()
    except (TypeError, RuntimeError):
        raise Unsupported from None


def identifier(text: str) -> str:
    """Return a valid Python identifier for the text."""
    name = "".join(c if c.isalnum() else "_" for c in text)
    return f"p_{name}" if name[:1].isdigit() or keyword.iskeyword(name) else name
