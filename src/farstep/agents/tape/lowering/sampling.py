"""Random numbers, drawn from torch's generator in the order of the eager call."""

from __future__ import annotations

import torch
from torch import Tensor

from farstep.agents.tape.lowering.table import LARGE, lowers, need
from farstep.agents.tape.op import Op, producer
from farstep.agents.tape.writer import FLOATS, Writer, as_array


def _is_softmax(w: Writer, probabilities: Tensor) -> bool:
    """Return whether each row is the result of a softmax."""
    source = producer(w.ops, probabilities)
    if source is not None and source.name == "exp":
        source = producer(w.ops, source.args[0])
    if source is None or source.name not in ("_softmax", "_log_softmax"):
        return False
    return source.args[1] % source.out.dim() == source.out.dim() - 1 and (
        source.out.shape[-1] == probabilities.shape[-1]
    )


@lowers("multinomial")
def multinomial(w: Writer, op: Op) -> None:
    probabilities, count = op.args[:2]
    need(count == 1 and len(op.args) <= 3 and not op.kwargs and probabilities.dtype in FLOATS)
    need(probabilities.is_contiguous() and 0 < probabilities.numel() < LARGE)
    p, drawn = w.array(probabilities), torch.empty_like(probabilities)
    flat = w.array(probabilities.view(-1))
    # The result of a softmax is a distribution or NaN; other values may also be negative, infinite or all zero.
    bad = f"not {flat}.dot({flat}) >= 0"
    if not _is_softmax(w, probabilities):
        some = f"smallest(total({p}, -1), None) > 0"
        bad = f"not (smallest({p}, None) >= 0 and {flat}.dot({flat}) < inf and {some})"
    rule = w.bind("aten_multinomial", op.func)
    w.line(f"if {bad}:  # torch raises the error")
    w.line(f"    {w.tensor(op.out)}.copy_({rule}({w.tensor(probabilities)}, 1, True))")
    w.line("else:  # torch's algorithm for one sample: the argmax of p / Exponential(1)")
    w.line(f"    {w.bind('draw', drawn.exponential_)}()")
    q, last = w.bind("clocks", as_array(drawn)), probabilities.dim() - 1
    w.line(f"    divide({p}, {q}, {q})")
    w.line(f"    {q}.argmax({last}, {w.array(op.out.squeeze(last))})")


@lowers("normal")
def normal(w: Writer, op: Op) -> None:
    mean, std = op.args
    need(isinstance(mean, Tensor) and isinstance(std, Tensor) and not op.kwargs and not op.mutates)
    need(mean.dtype == std.dtype == op.out.dtype and op.out.dtype in FLOATS and op.out.is_contiguous())
    need(0 < op.out.numel() < LARGE)
    rule, out = w.bind("aten_normal", op.func), w.array(op.out)
    w.line(f"if not smallest({w.array(std)}, None) >= 0:  # torch raises the error")
    w.line(f"    {rule}({w.tensor(mean)}, {w.tensor(std)})")
    w.line(f"{w.tensor(op.out)}.normal_()")
    w.line(f"multiply({out}, {w.array(std)}, {out})")
    w.line(f"add({out}, {w.array(mean)}, {out})")


@lowers("bernoulli")
def bernoulli(w: Writer, op: Op) -> None:
    need(len(op.args) == 1 and not op.kwargs and not op.mutates)
    w.line(f"{w.tensor(op.out)}.bernoulli_({w.tensor(op.args[0])})")


@lowers("randn", "randn_like", "rand", "rand_like")
def standard(w: Writer, op: Op) -> None:
    need(op.kwargs.get("generator") is None and op.out.dtype in FLOATS)
    w.line(f"{w.tensor(op.out)}.{'normal_' if 'randn' in op.name else 'uniform_'}()")
