"""Matrix products, and reductions: sums, extremes and softmax."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from farstep.agents.tape.lowering.table import LARGE, argument, lowers, need
from farstep.agents.tape.op import Op
from farstep.agents.tape.writer import FLOATS, NUMBERS, Writer

# Matrix products --------------------------------------------------------------------------------------


def product(w: Writer, a: Tensor, b: Tensor, out: Tensor) -> None:
    need(a.dtype == b.dtype == out.dtype and out.dtype in FLOATS and a.numel() > 0 and b.numel() > 0)
    # dot is 0.7 us faster than matmul, but needs a contiguous output.
    name = "dot" if a.dim() == b.dim() == 2 and out.is_contiguous() else "matmul"
    w.line(f"{name}({w.array(a)}, {w.array(b)}, {w.array(out)})")


@lowers("mm", "bmm", "mv")
def matmul(w: Writer, op: Op) -> None:
    need(not op.mutates and not op.kwargs and len(op.args) == 2)
    product(w, op.args[0], op.args[1], op.out)


@lowers("addmm", "baddbmm")
def addmm(w: Writer, op: Op) -> None:
    bias, a, b = op.args
    need(not op.mutates and not op.kwargs and bias.dtype == op.out.dtype)
    product(w, a, b, op.out)
    out = w.array(op.out)
    w.line(f"add({out}, {w.array(bias)}, {out})")


# Reductions -------------------------------------------------------------------------------------------


def axes_of(op: Op, dims: Any) -> tuple[tuple[int, ...], Tensor, int]:
    """Return the axes of a reduction, its output with these axes kept, and the number of elements per result."""
    x: Tensor = op.args[0]
    dims = list(range(x.dim())) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
    axes = tuple(sorted(d % max(x.dim(), 1) for d in dims)) if x.dim() else ()
    need(x.numel() > 0 and x.dim() > 0 and x.numel() < LARGE)
    kept = tuple(1 if axis in axes else size for axis, size in enumerate(x.shape))
    return axes, op.outputs[0].view(kept), math.prod(x.shape[axis] for axis in axes)


def written(axes: tuple[int, ...]) -> str:
    return str(axes[0]) if len(axes) == 1 else str(axes)


@lowers("sum", "mean", "amax", "amin", "max", "min")
def reduce(w: Writer, op: Op) -> None:
    x, dtype = op.args[0], op.out.dtype
    need(dtype == x.dtype and dtype in NUMBERS and op.kwargs.get("dtype") in (None, dtype))
    need(len(op.args) < 2 or not isinstance(op.args[1], Tensor))
    axes, kept, count = axes_of(op, argument(op, 1, "dim"))
    reducer = {"sum": "total", "mean": "total", "amax": "largest", "max": "largest"}.get(op.name, "smallest")
    out = w.array(kept)
    w.line(f"{reducer}({w.array(x)}, {written(axes)}, None, {out}, True)")
    if op.name == "mean":
        w.line(f"divide({out}, {w.number(count, dtype)}, {out})")
    if len(op.outputs) == 2:
        indices = op.outputs[1].view(kept.shape).squeeze(axes[0])
        w.line(f"{w.array(x)}.arg{op.name}({axes[0]}, {w.array(indices)})")


@lowers("argmax", "argmin")
def argmax(w: Writer, op: Op) -> None:
    x, dim = op.args[0], argument(op, 1, "dim")
    need(x.dtype in NUMBERS)
    axes, kept, _ = axes_of(op, dim)
    target = kept.view(()) if dim is None else kept.squeeze(axes[0])
    w.line(f"{w.array(x)}.{op.name}({None if dim is None else axes[0]}, {w.array(target)})")


@lowers("logsumexp")
def logsumexp(w: Writer, op: Op) -> None:
    x, dtype = op.args[0], op.out.dtype
    need(dtype == x.dtype and dtype in FLOATS)
    axes, kept, _ = axes_of(op, op.args[1])
    source, out = w.array(x), w.array(kept)
    terms, peak = w.scratch(x.shape, dtype), w.scratch(kept.shape, dtype)
    limit = torch.finfo(dtype).max
    # Keep the peak finite, so that rows of -inf give -inf and rows with inf give inf, as in torch.
    w.line(f"largest({source}, {written(axes)}, None, {peak}, True, {w.number(-limit, dtype)})")
    w.line(f"minimum({peak}, {w.number(limit, dtype)}, out={peak})")
    w.line(f"subtract({source}, {peak}, {terms})")
    w.line(f"exp({terms}, {terms})")
    w.line(f"total({terms}, {written(axes)}, None, {out}, True)")
    w.line(f"log({out}, {out})")
    w.line(f"add({out}, {peak}, {out})")


@lowers("_softmax", "_log_softmax")
def softmax(w: Writer, op: Op) -> None:
    x, dim, half_to_float = op.args
    need(x.dim() > 0 and not half_to_float and x.dtype == op.out.dtype)
    # torch's Python binding is faster than six ufuncs, and faster than the overload in torch.ops.
    function = w.bind(op.name[1:], getattr(torch, op.name[1:])) if op.name[1:] not in w.names else op.name[1:]
    w.line(f"{function}({w.tensor(x)}, {dim}, out={w.tensor(op.out)})")
