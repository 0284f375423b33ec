"""Operations that only copy elements."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from farstep.agents.tape.lowering.table import argument, lowers, need
from farstep.agents.tape.op import Op, producer
from farstep.agents.tape.writer import NUMBERS, Writer


@lowers("_to_copy", "clone", "copy", "fill", "zero")
def copy(w: Writer, op: Op) -> None:
    name = op.name
    source = 0 if name == "zero_" else op.args[1] if op.mutates else op.args[0]
    need(op.mutates or name in ("_to_copy", "clone"))
    if not isinstance(source, Tensor):
        need(op.out.dtype in NUMBERS)
        w.line(f"{w.array(op.out)}[...] = {w.number(source, op.out.dtype)}")
        return
    # Converting out-of-range floats to small integers depends on the platform, so it is left to torch.
    from_float = source.is_floating_point() and not op.out.is_floating_point()
    need(source.dtype == op.out.dtype or not from_float or op.out.dtype == torch.int64)
    w.line(f"{w.array(op.out)}[...] = {w.array(source)}")


@lowers("cat", "stack")
def join(w: Writer, op: Op) -> None:
    parts, dim = op.args[0], argument(op, 1, "dim", 0)
    need(not op.mutates and all(part.dtype == op.out.dtype for part in parts))
    start = 0
    for index, part in enumerate(parts):
        if op.name == "stack":
            target = op.out.select(dim, index)
        elif part.dim() != op.out.dim():
            continue  # torch.cat accepts empty 1-d tensors
        else:
            target = op.out.narrow(dim, start, part.shape[dim])
            start += part.shape[dim]
        w.line(f"{w.array(target)}[...] = {w.array(part)}")


@lowers("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")
def nothing(w: Writer, op: Op) -> None:
    """Write no line: the recorded buffer serves as uninitialized memory."""


@lowers("gather")
def gather(w: Writer, op: Op) -> None:
    x, dim, index = op.args[:3]
    source = producer(w.ops, index)
    # Only for an index that is always in range: for other indices torch raises, and take would not.
    safe = source is not None and source.name in ("multinomial", "argmax") and source.args[0].shape == x.shape
    need(safe and x.dim() == 2 and dim in (1, -1) and index.shape == (x.shape[0], 1) and x.is_contiguous())
    rows = w.bind("rows", np.arange(x.shape[0]) * x.shape[1])
    flat = w.scratch((x.shape[0],), torch.int64)
    w.line(f"add({rows}, {w.array(index.squeeze(1))}, {flat})")
    w.line(f"{w.array(x.view(-1))}.take({flat}, None, {w.array(op.out.view(-1))}, 'clip')")
