"""Stands for the NumPy array of a recorded tensor, which `act` may return but not read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
from torch import Tensor

_READS = (
    "array", "array_interface", "array_ufunc", "array_function", "bool", "int", "float", "complex", "index", "len",
    "iter", "contains", "getitem", "setitem", "delitem", "hash", "eq", "ne", "lt", "le", "gt", "ge", "neg", "pos",
    "abs", "invert", "round", "copy", "deepcopy", "reduce_ex", "str", "repr", "format", "dlpack",
    *(
        prefix + name
        for prefix in ("", "r", "i")
        for name in ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift",
                     "rshift")
    ),
)  # fmt: skip
"""Special methods, without underscores, that would read the array."""


class UnreadArray:
    """What `tensor.numpy()` returns while `act` is recorded. Any use but returning it refuses the recording.

    Args:
        tensor: The recorded tensor.
        refuse: Refuses the recording; the argument is how the array was read.
    """

    __slots__ = ("refuse", "tensor")

    def __init__(self, tensor: Tensor, refuse: Callable[[str], NoReturn]) -> None:
        self.tensor, self.refuse = tensor, refuse

    def __getattribute__(self, name: str) -> Any:
        if name == "__class__":
            return np.ndarray  # `act` may check the type
        return object.__getattribute__(self, name)

    def __getattr__(self, name: str) -> NoReturn:
        self.refuse(name)


def _refusing(name: str) -> Callable[..., NoReturn]:
    def refuse(self: UnreadArray, *_: Any, **__: Any) -> NoReturn:
        self.refuse(name)

    return refuse


for _name in _READS:
    setattr(UnreadArray, f"__{_name}__", _refusing(f"__{_name}__"))


def tensor_of(leaf: Any) -> Any:
    """Return the tensor of an unread array, and any other leaf as it is."""
    return leaf.tensor if type(leaf) is UnreadArray else leaf
