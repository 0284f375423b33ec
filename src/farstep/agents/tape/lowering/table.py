"""The table of lowerings, and helpers for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from farstep.agents.tape.errors import Unsupported
from farstep.agents.tape.op import Op
from farstep.agents.tape.writer import Writer

LARGE = 1 << 16
"""With at least this many elements, NumPy sums less exactly than torch, and its loops are slower."""

Lowering = Callable[[Writer, Op], None]
LOWERINGS: dict[str, Lowering] = {}


def lowers(*names: str) -> Callable[[Lowering], Lowering]:
    """Register a function as the lowering of these operations and of their in-place forms."""

    def enter(function: Lowering) -> Lowering:
        for name in names:
            LOWERINGS[name] = LOWERINGS[name + "_"] = function
        return function

    return enter


def need(condition: bool) -> None:
    """Raise `Unsupported` if the condition is false; torch then runs the operation."""
    if not condition:
        raise Unsupported


def argument(op: Op, position: int, name: str, default: Any = None) -> Any:
    """Return an argument of an operation, given by position or by name, or its default."""
    return op.args[position] if len(op.args) > position else op.kwargs.get(name, default)
