"""How a recorded torch operation is written as NumPy: the writer of a program and its table of operations.

A lowering writes lines that put an operation's result into the memory of the tensor that was recorded, or
raises `Unsupported`, and then the recorded ATen overload itself is called. Nothing here is needed for a
replay to be right, only for it to be quick: a ufunc that writes to a buffer costs about 1 us, an ATen call 3
to 15 us.
"""

from __future__ import annotations

import keyword
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

FLOATS = (torch.float32, torch.float64)
NUMBERS = (*FLOATS, torch.int64, torch.int32)
LARGE = 1 << 16
"""Elements from which a naive NumPy sum loses digits and torch's own loops win."""


class Unsupported(Exception):
    """This operation, with these arguments, is left to torch."""


@dataclass(eq=False)
class Op:
    """One recorded operation, with the tensors it read and wrote."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[Tensor]
    reads: set[int] = field(default_factory=set)
    """Storages of the tensors among the arguments."""
    writes: set[int] = field(default_factory=set)
    """Storages made or changed."""
    mutates: bool = False
    is_random: bool = False
    initial: list[Tensor] | None = None
    """Copies of the outputs of an operation that depends on no input, parameter or random number."""

    @property
    def name(self) -> str:
        return str(self.func.overloadpacket.__name__)

    @property
    def out(self) -> Tensor:
        return self.outputs[0]


def storage_of(tensor: Tensor) -> int:
    """What two tensors have in common if and only if they may share memory."""
    return int(tensor.untyped_storage()._cdata)


def producer(ops: Iterable[Op], tensor: Tensor) -> Op | None:
    """The only operation that wrote this tensor's memory, if the tensor is all of what it wrote."""
    writers = [op for op in ops if storage_of(tensor) in op.writes]
    if len(writers) != 1 or writers[0].mutates or len(writers[0].outputs) != 1:
        return None
    return writers[0] if writers[0].out.numel() == tensor.numel() else None


def identifier(text: str) -> str:
    """A name that Python takes and no keyword is."""
    name = "".join(c if c.isalnum() else "_" for c in text)
    return f"p_{name}" if name[:1].isdigit() or keyword.iskeyword(name) else name


class Writer:
    """The text of a program as it grows, and the objects its names stand for."""

    def __init__(self, ops: Sequence[Op], labels: dict[int, str], reserved: Sequence[str] = ()) -> None:
        self.ops = ops
        self.labels = labels
        self.lines: list[str] = []
        self.names: dict[str, Any] = dict(FUNCTIONS)
        self._reserved = {"act", "made", "tensors", *reserved}
        self._known: dict[Any, str] = {}

    def line(self, text: str) -> None:
        self.lines.append(text)

    def bind(self, name: str, value: Any) -> str:
        """A name, unused so far, for an object the program holds."""
        unique, count = name, 1
        while unique in self.names or unique in self._reserved:
            count += 1
            unique = f"{name}_{count}"
        self.names[unique] = value
        return unique

    def tensor(self, tensor: Tensor) -> str:
        """The name of a tensor, for torch."""
        return self._named(tensor, "torch", lambda alias: alias)

    def array(self, tensor: Tensor) -> str:
        """The name of a tensor, for NumPy: an array over the same memory."""
        return self._named(tensor, "numpy", _as_array)

    def _named(self, tensor: Tensor, kind: str, view: Callable[[Tensor], Any]) -> str:
        key = (kind, tensor.data_ptr(), storage_of(tensor), tensor.dtype, tensor.shape, tensor.stride())
        if key not in self._known:
            storage = storage_of(tensor)
            label = self.labels.setdefault(storage, f"v{len(self.labels)}")
            # A parameter may require grad, and an operation on it would then build a graph; a tensor made in
            # inference mode may not be written outside it, but other tensors over its memory may.
            alias = from_dlpack(tensor) if tensor.is_inference() else tensor.detach()
            self._known[key] = self.bind(label + ("_t" if kind == "torch" else ""), view(alias))
        return self._known[key]

    def scratch(self, shape: Sequence[int], dtype: torch.dtype) -> str:
        return self.bind("scratch", _as_array(torch.empty(tuple(shape), dtype=dtype)))

    def number(self, value: Any, dtype: torch.dtype) -> str:
        """The name of a Python number as a 0-d array, which a ufunc takes quicker than the number itself."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise Unsupported
        if isinstance(value, float) and dtype not in FLOATS:
            raise Unsupported
        key = ("number", repr(value), dtype)
        if key not in self._known:
            try:
                with np.errstate(all="ignore"):
                    constant = np.array(value, _as_array(torch.empty(0, dtype=dtype)).dtype)
            except OverflowError:
                raise Unsupported from None
            self._known[key] = self.bind(identifier(f"c_{value:.5g}"), constant)
        return self._known[key]

    def operand(self, value: Any, dtype: torch.dtype) -> str:
        """A tensor of this type, or a number: no promotion is left to NumPy, whose rules are not torch's."""
        if not isinstance(value, Tensor):
            return self.number(value, dtype)
        if value.dtype != dtype:
            raise Unsupported
        return self.array(value)


def _as_array(tensor: Tensor) -> np.ndarray[Any, Any]:
    try:
        return tensor.numpy()
    except (TypeError, RuntimeError):
        raise Unsupported from None


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
    if not condition:
        raise Unsupported


def argument(op: Op, position: int, name: str, default: Any = None) -> Any:
    return op.args[position] if len(op.args) > position else op.kwargs.get(name, default)


# Elementwise ------------------------------------------------------------------------------------------

_UNARY = {
    "tanh": "tanh", "exp": "exp", "log": "log", "sqrt": "sqrt", "sin": "sin", "cos": "cos", "log1p": "log1p",
    "expm1": "expm1", "reciprocal": "reciprocal", "floor": "floor", "ceil": "ceil", "neg": "negative",
    "abs": "absolute",
}  # fmt: skip
_BINARY = {"add": "add", "sub": "subtract", "mul": "multiply", "div": "divide", "true_divide": "divide"}
_COMPARE = {
    "eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal", "gt": "greater",
    "ge": "greater_equal",
}  # fmt: skip
_LOGIC = {"bitwise_and": "logical_and", "bitwise_or": "logical_or", "logical_and": "logical_and"}


@lowers(*_UNARY)
def unary(w: Writer, op: Op) -> None:
    x, name = op.args[0], op.name.rstrip("_")
    need(x.dtype == op.out.dtype and x.dtype in (NUMBERS if name in ("neg", "abs") else FLOATS))
    w.line(f"{_UNARY[name]}({w.array(x)}, {w.array(op.out)})")


@lowers(*_BINARY)
def binary(w: Writer, op: Op) -> None:
    name, dtype = op.name.rstrip("_"), op.out.dtype
    need(op.kwargs.get("alpha", 1) == 1 and len(op.args) == 2 and op.kwargs.get("rounding_mode") is None)
    need(dtype in (FLOATS if name in ("div", "true_divide") else NUMBERS))
    a, b = (w.operand(value, dtype) for value in op.args)
    w.line(f"{_BINARY[name]}({a}, {b}, {w.array(op.out)})")


@lowers("rsub")
def rsub(w: Writer, op: Op) -> None:
    need(argument(op, 2, "alpha", 1) == 1 and op.out.dtype in NUMBERS)
    a, b = (w.operand(value, op.out.dtype) for value in op.args[:2])
    w.line(f"subtract({b}, {a}, {w.array(op.out)})")


@lowers(*_COMPARE)
def compare(w: Writer, op: Op) -> None:
    x = op.args[0]
    need(x.dtype in NUMBERS and op.out.dtype == torch.bool)
    name, other = _COMPARE[op.name.rstrip("_")], w.operand(op.args[1], x.dtype)
    w.line(f"{name}({w.array(x)}, {other}, {w.array(op.out)})")


@lowers(*_LOGIC)
def logic(w: Writer, op: Op) -> None:
    need(all(isinstance(x, Tensor) and x.dtype == torch.bool for x in op.args))
    a, b = (w.array(x) for x in op.args)
    w.line(f"{_LOGIC[op.name.rstrip('_')]}({a}, {b}, {w.array(op.out)})")


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
    # sqrt(-inf) is nan where pow(-inf, 0.5) is inf; torch itself takes the square root here.
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


# Copies -----------------------------------------------------------------------------------------------


@lowers("_to_copy", "clone", "copy", "fill", "zero")
def copy(w: Writer, op: Op) -> None:
    name = op.name
    source = 0 if name == "zero_" else op.args[1] if op.mutates else op.args[0]
    need(op.mutates or name in ("_to_copy", "clone"))
    if not isinstance(source, Tensor):
        need(op.out.dtype in NUMBERS)
        w.line(f"{w.array(op.out)}[...] = {w.number(source, op.out.dtype)}")
        return
    # Out of range, a conversion from float to a small integer is the platform's choice: torch's, then.
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
            continue  # torch still lets an empty 1-d tensor be joined to anything
        else:
            target = op.out.narrow(dim, start, part.shape[dim])
            start += part.shape[dim]
        w.line(f"{w.array(target)}[...] = {w.array(part)}")


@lowers("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")
def nothing(w: Writer, op: Op) -> None:
    """Memory that nobody has written yet: the recorded buffer is as good as any."""


# Matrix products --------------------------------------------------------------------------------------


def product(w: Writer, a: Tensor, b: Tensor, out: Tensor) -> None:
    need(a.dtype == b.dtype == out.dtype and out.dtype in FLOATS and a.numel() > 0 and b.numel() > 0)
    # dot costs 0.7 us less than matmul, and wants its output contiguous.
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
    """The axes a reduction runs over, its output with these axes kept, and how many elements meet in one."""
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
    # A finite peak, so that rows of -inf or with an inf give -inf and inf, as torch has it.
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
    # torch's Python binding is quicker than six ufuncs, and than the overload called through torch.ops.
    function = w.bind(op.name[1:], getattr(torch, op.name[1:])) if op.name[1:] not in w.names else op.name[1:]
    w.line(f"{function}({w.tensor(x)}, {dim}, out={w.tensor(op.out)})")


@lowers("gather")
def gather(w: Writer, op: Op) -> None:
    x, dim, index = op.args[:3]
    source = producer(w.ops, index)
    # Only an index that is in range by construction: torch raises for others, and take would not.
    safe = source is not None and source.name in ("multinomial", "argmax") and source.args[0].shape == x.shape
    need(safe and x.dim() == 2 and dim in (1, -1) and index.shape == (x.shape[0], 1) and x.is_contiguous())
    rows = w.bind("rows", np.arange(x.shape[0]) * x.shape[1])
    flat = w.scratch((x.shape[0],), torch.int64)
    w.line(f"add({rows}, {w.array(index.squeeze(1))}, {flat})")
    w.line(f"{w.array(x.view(-1))}.take({flat}, None, {w.array(op.out.view(-1))}, 'clip')")


# Random numbers: torch's generator, drawn from in the same order ------------------------------------------


def _is_softmax(w: Writer, probabilities: Tensor) -> bool:
    """Whether each row is what a softmax gave."""
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
    # What a softmax gives is a distribution or NaN; anything else may also be negative, infinite or all zero.
    bad = f"not {flat}.dot({flat}) >= 0"
    if not _is_softmax(w, probabilities):
        some = f"smallest(total({p}, -1), None) > 0"
        bad = f"not (smallest({p}, None) >= 0 and {flat}.dot({flat}) < inf and {some})"
    rule = w.bind("aten_multinomial", op.func)
    w.line(f"if {bad}:  # torch says what is wrong")
    w.line(f"    {w.tensor(op.out)}.copy_({rule}({w.tensor(probabilities)}, 1, True))")
    w.line("else:  # what torch does for one sample: the first arrival of exponential clocks")
    w.line(f"    {w.bind('draw', drawn.exponential_)}()")
    q, last = w.bind("clocks", _as_array(drawn)), probabilities.dim() - 1
    w.line(f"    divide({p}, {q}, {q})")
    w.line(f"    {q}.argmax({last}, {w.array(op.out.squeeze(last))})")


@lowers("normal")
def normal(w: Writer, op: Op) -> None:
    mean, std = op.args
    need(isinstance(mean, Tensor) and isinstance(std, Tensor) and not op.kwargs and not op.mutates)
    need(mean.dtype == std.dtype == op.out.dtype and op.out.dtype in FLOATS and op.out.is_contiguous())
    need(0 < op.out.numel() < LARGE)
    rule, out = w.bind("aten_normal", op.func), w.array(op.out)
    w.line(f"if not smallest({w.array(std)}, None) >= 0:  # torch says what is wrong")
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


FUNCTIONS: dict[str, Any] = {
    name: getattr(np, name)
    for name in (
        *_UNARY.values(), *_BINARY.values(), *_COMPARE.values(), *_LOGIC.values(), "logical_not", "maximum",
        "minimum", "logaddexp", "square", "copyto", "dot", "matmul", "inf",
    )
}  # fmt: skip
FUNCTIONS |= {"total": np.add.reduce, "largest": np.maximum.reduce, "smallest": np.minimum.reduce}
