"""Elementwise operations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from farstep.agents.tape.lowering.table import LARGE, argument, lowers, need
from farstep.agents.tape.op import Op
from farstep.agents.tape.writer import FLOATS, NUMBERS, Writer

UNARY = {
    "tanh": "tanh", "exp": "exp", "log": "log", "sqrt": "sqrt", "sin": "sin", "cos": "cos", "log1p": "log1p",
    "expm1": "expm1", "reciprocal": "reciprocal", "floor": "floor", "ceil": "ceil", "neg": "negative",
    "abs": "absolute",
}  # fmt: skip
BINARY = {"add": "add", "sub": "subtract", "mul": "multiply", "div": "divide", "true_divide": "divide"}
COMPARE = {
    "eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal", "gt": "greater",
    "ge": "greater_equal",
}  # fmt: skip
LOGIC = {"bitwise_and": "logical_and", "bitwise_or": "logical_or", "logical_and": "logical_and"}


@lowers(*UNARY)
def unary(w: Writer, op: Op) -> None:
    x, name = op.args[0], op.name.rstrip("_")
    need(x.dtype == op.out.dtype and x.dtype in (NUMBERS if name in ("neg", "abs") else FLOATS))
    w.line(f"{UNARY[name]}({w.array(x)}, {w.array(op.out)})")


@lowers(*BINARY)
def binary(w: Writer, op: Op) -> None:
    name, dtype = op.name.rstrip("_"), op.out.dtype
    need(op.kwargs.get("alpha", 1) == 1 and len(op.args) == 2 and op.kwargs.get("rounding_mode") is None)
    need(dtype in (FLOATS if name in ("div", "true_divide") else NUMBERS))
    a, b = (w.operand(value, dtype) for value in op.args)
    w.line(f"{BINARY[name]}({a}, {b}, {w.array(op.out)})")


@lowers("rsub")
def rsub(w: Writer, op: Op) -> None:
    need(argument(op, 2, "alpha", 1) == 1 and op.out.dtype in NUMBERS)
    a, b = (w.operand(value, op.out.dtype) for value in op.args[:2])
    w.line(f"subtract({b}, {a}, {w.array(op.out)})")


@lowers(*COMPARE)
def compare(w: Writer, op: Op) -> None:
    x = op.args[0]
    need(x.dtype in NUMBERS and op.out.dtype == torch.bool)
    name, other = COMPARE[op.name.rstrip("_")], w.operand(op.args[1], x.dtype)
    w.line(f"{name}({w.array(x)}, {other}, {w.array(op.out)})")


@lowers(*LOGIC)
def logic(w: Writer, op: Op) -> None:
    need(all(isinstance(x, Tensor) and x.dtype == torch.bool for x in op.args))
    a, b = (w.array(x) for x in op.args)
    w.line(f"{LOGIC[op.name.rstrip('_')]}({a}, {b}, {w.array(op.out)})")


@lowers("logical_not", "bitwise_not")
def logical_not(w: Writer, op: Op) -> None:
    need(op.args[0].dtype == torch.bool == op.out.dtype)
    w.line(f"logical_not({w.array(op.args[0])}, {w.array(op.out)})")


@lowers("relu", "clamp", "clamp_min", "clamp_max", "hardtanh", "maximum", "minimum")
def clip(w: Writer, op: Op) -> None:
    name, dtype, x = op.name.rstrip("_"), op.out.dtype, op.args[0]
    need(dtype in NUMBERS)
    low: Any = None
    high: Any = None
    if name == "relu":
        low = 0
    elif name == "hardtanh":
        low, high = argument(op, 1, "min_val", -1.0), argument(op, 2, "max_val", 1.0)
    elif name == "clamp":
        low, high = argument(op, 1, "min"), argument(op, 2, "max")
    elif name in ("clamp_min", "maximum"):
        low = argument(op, 1, "min")
    else:
        high = argument(op, 1, "max")
    need(low is not None or high is not None)
    source, out = w.operand(x, dtype), w.array(op.out)
    if low is not None:
        w.line(f"maximum({source}, {w.operand(low, dtype)}, out={out})")
        source = out
    if high is not None:
        w.line(f"minimum({source}, {w.operand(high, dtype)}, out={out})")


@lowers("sigmoid", "silu")
def sigmoid(w: Writer, op: Op) -> None:
    x, dtype, out = w.array(op.args[0]), op.out.dtype, w.array(op.out)
    need(dtype in FLOATS and op.args[0].dtype == dtype)
    gate = out if op.name.startswith("sigmoid") else w.scratch(op.out.shape, dtype)
    w.line(f"negative({x}, {gate})")
    w.line(f"exp({gate}, {gate})")
    w.line(f"add({gate}, {w.number(1, dtype)}, {gate})")
    w.line(f"divide({w.number(1, dtype) if gate == out else x}, {gate}, {out})")


@lowers("softplus")
def softplus(w: Writer, op: Op) -> None:
    dtype = op.out.dtype
    need(dtype in FLOATS and len(op.args) == 1 and not op.kwargs and op.out.numel() < LARGE)
    w.line(f"logaddexp({w.array(op.args[0])}, {w.number(0, dtype)}, {w.array(op.out)})")


@lowers("elu")
def elu(w: Writer, op: Op) -> None:
    dtype, out = op.out.dtype, w.array(op.out)
    need(dtype in FLOATS and all(a == 1 for a in op.args[1:]) and not op.kwargs and op.out.numel() < LARGE)
    x, below, zero = w.array(op.args[0]), w.scratch(op.out.shape, dtype), w.number(0, dtype)
    w.line(f"minimum({x}, {zero}, out={below})")
    w.line(f"expm1({below}, {below})")
    w.line(f"maximum({x}, {zero}, out={out})")
    w.line(f"add({out}, {below}, {out})")


@lowers("leaky_relu")
def leaky_relu(w: Writer, op: Op) -> None:
    dtype, slope = op.out.dtype, argument(op, 1, "negative_slope", 0.01)
    need(dtype in FLOATS and 0 < slope <= 1)
    x, scaled = w.array(op.args[0]), w.scratch(op.out.shape, dtype)
    w.line(f"multiply({x}, {w.number(slope, dtype)}, {scaled})")
    w.line(f"maximum({x}, {scaled}, out={w.array(op.out)})")


@lowers("pow")
def power(w: Writer, op: Op) -> None:
    x, exponent = op.args
    need(isinstance(x, Tensor) and x.dtype == op.out.dtype in FLOATS and not isinstance(exponent, Tensor))
    name = {2: "square", 0.5: "sqrt", -1: "reciprocal"}.get(exponent)
    # pow(-inf, 0.5) is inf, but sqrt(-inf) is nan. torch also uses sqrt here.
    need(name is not None)
    w.line(f"{name}({w.array(x)}, {w.array(op.out)})")


@lowers("where")
def where(w: Writer, op: Op) -> None:
    need(len(op.args) == 3 and all(isinstance(x, Tensor) for x in op.args) and op.args[0].dtype == torch.bool)
    mask, out = w.array(op.args[0]), w.array(op.out)
    yes, no = (w.operand(x, op.out.dtype) for x in op.args[1:])
    w.line(f"{out}[...] = {no}")
    w.line(f"copyto({out}, {yes}, where={mask})")


@lowers("masked_fill")
def masked_fill(w: Writer, op: Op) -> None:
    x, mask, value = op.args
    need(mask.dtype == torch.bool and x.dtype in NUMBERS)
    fill, out = w.operand(value, x.dtype), w.array(op.out)
    if not op.mutates:
        w.line(f"{out}[...] = {w.array(x)}")
    w.line(f"copyto({out}, {fill}, where={w.array(mask)})")
