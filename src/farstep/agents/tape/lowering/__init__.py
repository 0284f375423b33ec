"""Rules that write recorded torch operations as NumPy.

A lowering writes lines that store the result of an operation in the memory of the recorded tensor. If it raises
`Unsupported`, the program calls the recorded ATen overload instead. Lowerings only make a replay faster: a ufunc that
writes to a buffer costs about 1 us, an ATen call 3 to 15 us.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from farstep.agents.tape.lowering import copies, elementwise, reductions, sampling  # noqa: F401  each adds to the table
from farstep.agents.tape.lowering.elementwise import BINARY, COMPARE, LOGIC, UNARY
from farstep.agents.tape.lowering.table import LOWERINGS

__all__ = ["FUNCTIONS", "LOWERINGS"]

FUNCTIONS: dict[str, Any] = {
    name: getattr(np, name)
    for name in (
        *UNARY.values(), *BINARY.values(), *COMPARE.values(), *LOGIC.values(), "logical_not", "maximum",
        "minimum", "logaddexp", "square", "copyto", "dot", "matmul", "inf",
    )
}  # fmt: skip
FUNCTIONS |= {"total": np.add.reduce, "largest": np.maximum.reduce, "smallest": np.minimum.reduce}
"""NumPy functions by the names that the lines of a program use."""
