"""How a recorded torch operation is written as NumPy: a table of operations.

A lowering writes lines that put an operation's result into the memory of the tensor that was recorded, or
raises `Unsupported`, and then the recorded ATen overload itself is called. Nothing here is needed for a
replay to be right, only for it to be quick: a ufunc that writes to a buffer costs about 1 us, an ATen call 3
to 15 us.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from farstep.agents.tape.lowering import copies, elementwise, reductions, sampling  # noqa: F401  each fills the table
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
"""NumPy's functions under the names by which the lines of a program call them."""
