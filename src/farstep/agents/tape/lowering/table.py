"""The table of lowerings, and what each of them may ask of an operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from farstep.agents.tape.errors import Unsupported
from farstep.agents.tape.op import Op
from farstep.agents.tape.writer import Writer

LARGE = 1 << 16
"""Elements from which a naive NumPy sum loses digits and torch's own loops win."""

Lowering = Callable[[Writer, Op], None]
LOWERINGS: dict[str, Lowering] = {}


def lowers(*names: str) -> Callable[[Lowering], Lowering]:
    """Enter a function in the table for these operations and, where it exists, their in-place form."""

    def enter(function: Lowering) -> Lowering:
        for name in names:
            LOWERINGS[name] = LOWERINGS[name + "_"] = function
        return function

    return enter


def need(condition: bool) -> None:
    """Leave the operation to torch unless the condition holds."""
    if not condition:
        raise Unsupported


def argument(op: Op, position: int, name: str, default: Any = None) -> Any:
    """An argument of an operation, given by position, by name or not at all."""
    return op.args[position] if len(op.args) > position else op.kwargs.get(name, default)
