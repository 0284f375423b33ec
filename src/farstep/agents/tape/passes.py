"""Passes over the operations of a tape before code generation: simplification and removal of dead code."""

from __future__ import annotations

import torch
from torch import Tensor

from farstep.agents.tape.op import Op, producer, storage_of


def simplify(ops: list[Op]) -> list[Op]:
    """Replace the sequences that torch.distributions.Categorical runs by single ATen operations."""
    ops = list(ops)
    for index, op in enumerate(ops):
        if op.func is torch.ops.aten.sub.Tensor and len(op.args) == 2 and not op.kwargs:
            x, peak = op.args
            norm = producer(ops, peak) if isinstance(peak, Tensor) and isinstance(x, Tensor) else None
            if norm is None or norm.name != "logsumexp" or not _settled(ops, x):
                continue
            if not _same_view(norm.args[0], x) or x.dtype != op.out.dtype or x.dim() == 0:
                continue
            if norm.args[2:] == (True,) and len(norm.args[1]) == 1 and _same_view(norm.out, peak):
                args = (x, norm.args[1][0], False)
                log_softmax = torch.ops.aten._log_softmax.default
                ops[index] = Op(log_softmax, args, {}, op.outputs, {storage_of(x)}, op.writes)
        elif op.func is torch.ops.aten._softmax.default and _settled(ops, op.args[0]):
            source = producer(ops, op.args[0])
            if source is None or source.name != "_log_softmax" or not _same_view(source.out, op.args[0]):
                continue
            if (source.args[1] - op.args[1]) % max(1, op.out.dim()) == 0:
                exp = torch.ops.aten.exp.default
                ops[index] = Op(exp, (op.args[0],), {}, op.outputs, op.reads, op.writes)
    return ops


def _same_view(a: Tensor, b: Tensor) -> bool:
    where = [(x.data_ptr(), storage_of(x), x.shape, x.stride(), x.dtype) for x in (a, b)]
    return where[0] == where[1]


def _settled(ops: list[Op], tensor: Tensor) -> bool:
    return not any(op.mutates and storage_of(tensor) in op.writes for op in ops)


def live(ops: list[Op], results: list[Tensor]) -> list[Op]:
    """Return the operations to keep: operations that results depend on, random draws, and checks (without outputs)."""
    wanted = {storage_of(tensor) for tensor in results}
    live = []
    for op in reversed(ops):
        if op.is_random or not op.outputs or op.writes & wanted:
            wanted |= op.reads | op.writes
            live.append(op)
    return live[::-1]
