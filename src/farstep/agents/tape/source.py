"""Writes the source of the function that replays a tape: one or a few lines per operation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from farstep.agents.tape.errors import Unsupported, Untraceable
from farstep.agents.tape.lowering import FUNCTIONS, LOWERINGS
from farstep.agents.tape.nested import leaves_of, tensors_of
from farstep.agents.tape.op import Op, same_bytes, storage_of
from farstep.agents.tape.passes import live, simplify
from farstep.agents.tape.recording import Tape
from farstep.agents.tape.writer import Writer, identifier


def write_source(tape: Tape, function: Callable[..., Any]) -> tuple[str, dict[str, Any]]:
    """Return the source of a function `act`, and the objects that its names refer to."""
    ops = live(simplify(tape.ops), [leaf for _, leaf in leaves_of(tape.result)])
    arguments = _argument_names(function, len(tape.inputs))
    w = Writer(ops, _labels(tape, function), names=FUNCTIONS, reserved=arguments)
    inputs = set()
    for name, value in zip(arguments, tape.inputs, strict=True):
        for path, leaf in leaves_of(value):
            buffer = w.array(leaf)
            inputs.add(storage_of(leaf))
            given, check = name + path, w.bind("check", _checker(name + path, w.names[buffer]))
            shape, dtype = w.names[buffer].shape, w.bind("dtype", w.names[buffer].dtype)
            w.line(f"if {given}.shape != {shape} or {given}.dtype != {dtype}: {check}({given})")
            w.line(f"{buffer}[...] = {given}")
    mutated = {storage for op in ops if op.mutates for storage in op.writes}
    for op in ops:
        begin = len(w.lines)
        if op.initial is not None:
            for output, initial in zip(op.outputs, op.initial, strict=True):
                if op.writes & mutated:
                    w.line(f"{w.tensor(output)}.copy_({w.bind('initial', initial)})")
                elif not same_bytes(output, initial):  # the eager call changed the tensor after its last use
                    w.names[w.tensor(output)].copy_(initial)
        else:
            _write_op(w, op)
        if len(w.lines) > begin:
            shape = ", ".join(f"{str(t.dtype)[6:]}{list(t.shape)}" for t in op.outputs)
            w.lines[begin] += f"  # {op.name} {shape}".rstrip() if "#" not in w.lines[begin] else ""

    def leaf_name(leaf: Any) -> str:
        if not isinstance(leaf, Tensor):
            return w.bind("constant", leaf)
        # Copy: the next call overwrites the input buffers, and this result may be its argument.
        return w.array(leaf) + (".copy()" if storage_of(leaf) in inputs else "")

    try:
        result = _written(tape.result, leaf_name, w)
    except Unsupported:
        raise Untraceable("act returns a dtype that NumPy does not have") from None
    body = "".join(f"    {line}\n" for line in [*w.lines, f"return {result}"])
    return f"def act({', '.join(arguments)}):\n{body}", w.names


def _write_op(w: Writer, op: Op) -> None:
    """Write the lines of an operation: its lowering, or a call of the recorded operation."""
    begin = len(w.lines)
    if all(tensor.numel() == 0 for tensor in op.outputs) and op.outputs and not op.is_random:
        return
    try:
        if op.name in LOWERINGS:
            LOWERINGS[op.name](w, op)
            return
    except (Unsupported, RuntimeError, ValueError, TypeError, IndexError, AttributeError):
        del w.lines[begin:]  # the lowering does not support these arguments
    args = [_written(arg, lambda leaf: _literal(w, leaf), w) for arg in op.args]
    args += [f"{key}={_written(arg, lambda leaf: _literal(w, leaf), w)}" for key, arg in op.kwargs.items()]
    out = None if op.mutates or op.is_random else _out_overload(op)
    func = w.bind(f"aten_{op.name}", out[0] if out else op.func)
    if out:
        args += [f"{key}={w.tensor(tensor)}" for key, tensor in zip(out[1], op.outputs, strict=True)]
    call = f"{func}({', '.join(args)})"
    fresh = [(i, t) for i, t in enumerate(op.outputs) if storage_of(t) not in op.reads and t.numel()]
    if out or not fresh:
        w.line(call)
        return
    w.line(f"made = tensors({call})")
    for index, tensor in fresh:
        w.line(f"{w.tensor(tensor)}.copy_(made[{index}])")
    w.names["tensors"] = lambda result: list(tensors_of(result))


def _out_overload(op: Op) -> tuple[Any, list[str]] | None:
    """Return the overload of an operation that writes into given tensors, and the names of its output arguments."""
    packet, schema = op.func.overloadpacket, op.func._schema
    plain = [(a.name, str(a.type)) for a in schema.arguments]
    if len(op.outputs) != len(schema.returns) or not all(str(r.type) == "Tensor" for r in schema.returns):
        return None
    for name in packet.overloads():
        candidate = getattr(packet, name)
        arguments = candidate._schema.arguments
        outs = [a.name for a in arguments if a.is_out]
        rest = [(a.name, str(a.type)) for a in arguments if not a.is_out]
        if len(outs) == len(op.outputs) and rest == plain:
            return candidate, outs
    return None


def _labels(tape: Tape, function: Callable[..., Any]) -> dict[int, str]:
    """Return the names of parameters in their module, by storage."""
    owner = function if isinstance(function, torch.nn.Module) else getattr(function, "__self__", None)
    named: list[tuple[str, Tensor]] = []
    if isinstance(owner, torch.nn.Module):
        named = [*owner.named_parameters(), *owner.named_buffers()]
    labels = {storage_of(tensor): identifier(name) for name, tensor in named}
    return {s: labels.get(s, f"p{i}") for i, s in enumerate(tape.outside)}


def _argument_names(function: Callable[..., Any], count: int) -> list[str]:
    try:
        parameters = list(inspect.signature(function).parameters.values())[:count]
    except (TypeError, ValueError):
        parameters = []
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    usable = len(names) == count and not FUNCTIONS.keys() & set(names)
    return names if usable else [f"arg{i}" for i in range(count)]


def _checker(name: str, buffer: np.ndarray[Any, Any]) -> Callable[[Any], None]:
    shape, dtype = buffer.shape, buffer.dtype

    def check(given: Any) -> None:
        raise ValueError(
            f"{name} is {given.dtype}{list(given.shape)}, but was recorded with {dtype}{list(shape)}; "
            "a program supports only one shape: compile another program for this one"
        )

    return check


def _literal(w: Writer, leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return w.tensor(leaf)
    if leaf is None or isinstance(leaf, bool | int | str) or (isinstance(leaf, float) and np.isfinite(leaf)):
        return repr(leaf)
    return w.bind("constant", leaf)


def _written(value: Any, leaf: Callable[[Any], str], w: Writer) -> str:
    """Return a nested value as a Python expression."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_written(item, leaf, w)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_written(item, leaf, w) for item in value) + "]"
    if isinstance(value, tuple):
        items = "".join(f"{_written(item, leaf, w)}, " for item in value)
        maker = w.bind(type(value).__name__, type(value)) if hasattr(value, "_fields") else ""
        return f"{maker}({items})"
    return leaf(value)
