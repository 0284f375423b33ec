"""A policy's `act`, recorded once as a tape of operations and replayed by one straight-line function.

For a small network on CPU an eager call is almost all framework: 560 us where the arithmetic takes 60. Here
one call is recorded below autograd as a list of ATen operations; those that only fed validation are dropped,
the rest become the lines of a generated function (`Program.source`): NumPy where `lowering` knows how, else
the recorded operation itself.

The tensors that were recorded are kept, and are the buffers of the replay. So a view needs no line at all,
being a view of the same memory still; aliasing and in-place writes are those of the eager call; and a
parameter is read where it lives, so that new weights loaded in place are seen without recording again.

Eager is always right, so whatever could make a replay differ raises `Untraceable`: values that leave for
Python, inputs or parameters that are changed, state or random numbers of Python's, two calls that do not run
the same operations, and at last a replay that does not give what the eager calls gave. What cannot be seen is
a Python attribute (a temperature, train or eval) that someone changes later: it is part of the recording.
"""

from __future__ import annotations

import inspect
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from itertools import islice, zip_longest
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from farstep.agents.lowering import (
    FUNCTIONS,
    LOWERINGS,
    Op,
    Unsupported,
    Writer,
    identifier,
    producer,
    storage_of,
)


class Untraceable(Exception):
    """Why a function cannot be replayed: one clause, shown to the user after 'eager inference: '."""


class Program:
    """A recorded call as one function from NumPy arrays to NumPy arrays.

    Results are views of buffers that the next call overwrites, so one thread at a time.
    """

    __slots__ = ("_context", "_function", "_outside", "source")

    def __init__(self, source: str, names: dict[str, Any], outside: list[Tensor]) -> None:
        exec(compile(source, "<farstep program>", "exec"), names)
        self.source = source
        self._function = names["act"]
        # Buffers may hold anything, and torch does not warn: neither may NumPy. From 2.0 its error state is a
        # context variable, set once for all calls here; to enter errstate in each costs 8 us.
        self._context = copy_context()
        if np.lib.NumpyVersion(np.__version__) < "2.0.0":
            self._function = np.errstate(all="ignore")(self._function)
        else:
            self._context.run(np.seterr, all="ignore")
        self._outside = [(tensor, tensor.data_ptr()) for tensor in outside]

    def __call__(self, *args: Any) -> Any:
        return self._context.run(self._function, *args)

    def is_current(self) -> bool:
        """Whether the parameters it reads are still where they were: False once `p.data = ...` moved one."""
        return all(tensor.data_ptr() == address for tensor, address in self._outside)


def compile_act(function: Callable[..., Any], *examples: Any) -> Program:
    """Record `function` on tensors (or arrays) of fixed shapes, and return the program that replays it.

    The function is called four times, without grad; torch's random state is afterwards what it was before.
    """
    start = torch.get_rng_state()
    with torch.inference_mode(False), torch.no_grad():
        try:
            function(*_static(examples))  # whatever is made on first use is now made
            seeds = [torch.get_rng_state()]
            expected = [_arrays(function(*_static(examples)))]
            tapes, before = [], _python_state(function)
            with _untraceable_if_failing("a recording"):
                for _ in range(2):
                    seeds.append(torch.get_rng_state())
                    tapes.append(Tape(function, _static(examples)))
                    expected.append(tapes[-1].expected)
                if changed := _difference(before, _python_state(function)):
                    raise Untraceable(f"act changes {changed}, which a replay would not")
                tapes[0].check_same(tapes[1])
                program = _compile(tapes[0], function)
            for seed, result in zip(seeds, expected, strict=True):
                torch.set_rng_state(seed)
                with _untraceable_if_failing("a replay"):
                    replayed = program(*_arrays(_static(examples)))
                # Loose: a density near the edge of its support magnifies a rounding; a wrong line is far off.
                if why := equal_results(result, replayed, tolerance=1e-3):
                    raise Untraceable(f"a replay does not give what the eager call gives: {why}")
        finally:
            torch.set_rng_state(start)
    return program


@contextmanager
def _untraceable_if_failing(what: str) -> Iterator[None]:
    """Take an error where eager calls had none as a reason to stay eager."""
    try:
        yield
    except Untraceable:
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise Untraceable(f"{what} fails with {type(error).__name__}: {reason}") from error


# Recording --------------------------------------------------------------------------------------------

_MAKES_FROM_SHAPE = {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"}
_REPLACES_MEMORY = {"set_", "resize_", "resize_as_", "_resize_output_"}
_LEAVES_UNSEEN = {
    "numpy", "tolist", "__array__", "__dlpack__", "untyped_storage", "storage", "__deepcopy__",
    "__reduce_ex__",
}  # fmt: skip
_VALIDATES = {"distribution.py", "geometric.py", "continuous_bernoulli.py", "uniform.py"}


class Tape:
    """One call's operations, in order, with every tensor it met kept alive."""

    def __init__(self, function: Callable[..., Any], inputs: tuple[Any, ...]) -> None:
        self.ops: list[Op] = []
        self.inputs = inputs
        self.outside: dict[int, tuple[Tensor, Tensor]] = {}
        """Tensors of someone else's, mostly parameters, by storage, with a copy of what they held."""
        self.constants: dict[int, tuple[Tensor, Tensor]] = {}
        """Tensors made from Python values, likewise."""
        self.signature: list[Any] = []
        self._keep: list[Any] = [inputs]
        self._given = {storage_of(leaf): leaf.clone() for _, leaf in _leaves(inputs)}
        self._numbers = {storage: index for index, storage in enumerate(self._given)}
        self._varies = set(self._given)
        python_random, numpy_random = random.getstate(), str(np.random.get_state())
        self._refusal: Untraceable | None = None
        with _Escapes(self), _Recorder(self):
            self.result = function(*inputs)
        if self._refusal is not None:  # and act went on all the same
            raise self._refusal
        if random.getstate() != python_random or str(np.random.get_state()) != numpy_random:
            raise Untraceable("act draws from Python's or NumPy's global random numbers")
        for _, leaf in _leaves(self.result):
            self._meet(leaf)
        self._encode("the result", self.result)
        self.expected = _arrays(self.result)
        self._check_unchanged()

    def refuse(self, why: str) -> NoReturn:
        """Raise now and, should act catch that, once it has returned."""
        self._refusal = Untraceable(why)
        raise self._refusal

    def add(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = list(_tensors((args, kwargs)))
        if func is torch.ops.aten.lift_fresh.default and storage_of(args[0]) not in self._numbers:
            return self._lift(args[0])
        for tensor in tensors:
            self._meet(tensor)
        reads = {storage_of(tensor) for tensor in tensors}
        # Aliases, since the tensors themselves may yet get another shape from squeeze_ and its like.
        op_args, op_kwargs = _aliases(args), _aliases(kwargs)
        random_state = torch.get_rng_state()
        result = func(*args, **kwargs)
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        is_random |= not torch.equal(random_state, torch.get_rng_state())
        self._encode(func, (op_args, op_kwargs))
        outputs = list(_tensors(_aliases(result)))
        self._keep.append(outputs)
        op = Op(func, op_args, op_kwargs, outputs, reads, set(), is_random=is_random)
        varies = is_random or (bool(reads & self._varies) and op.name not in _MAKES_FROM_SHAPE)
        if varies:
            self._refuse_escape(op, result)
        if outputs or result is None:
            self._write(op, varies)
        return result

    def _write(self, op: Op, varies: bool) -> None:
        """Enter an operation, unless all it made are views."""
        if op.name in _REPLACES_MEMORY:
            self.refuse(f"act runs {op.func}, which replaces a tensor's memory")
        changed = {storage_of(tensor) for tensor in _changed(op)}
        made = {storage_of(tensor) for tensor in op.outputs} - op.reads
        if changed & self._given.keys():
            self.refuse("act changes its input in place")
        if changed & self.outside.keys():
            self.refuse("act changes a parameter or another tensor that outlives the call")
        if made & self._numbers.keys():
            self.refuse(f"{op.func} returned memory that it was not given")
        for tensor in op.outputs:
            self._check_kind(tensor)
        if torch.Tag.inplace_view in op.func.tags:
            return
        op.mutates, op.writes = bool(changed), changed | made
        if op.outputs and not op.writes and not op.is_random:
            return
        for tensor in op.outputs:
            self._numbers.setdefault(storage_of(tensor), len(self._numbers))
        if varies:
            self._varies |= op.writes
        elif made and not changed:
            op.initial = [tensor.clone() for tensor in op.outputs]
        self.ops.append(op)

    def _lift(self, tensor: Tensor) -> Tensor:
        """Take in a tensor just made from Python values, by torch.tensor or torch.from_numpy."""
        self._check_kind(tensor)
        storage, lift = storage_of(tensor), torch.ops.aten.lift_fresh.default
        self._numbers[storage] = len(self._numbers)
        self._keep.append(tensor)
        self.constants[storage] = (tensor, tensor.clone())
        self._encode(lift, tensor)
        alias = tensor.detach()
        self.ops.append(Op(lift, (alias,), {}, [alias], set(), {storage}, initial=[tensor.clone()]))
        return tensor

    def _meet(self, tensor: Tensor) -> None:
        self._check_kind(tensor)
        storage = storage_of(tensor)
        if storage not in self._numbers:
            self._numbers[storage] = len(self._numbers)
            self.outside[storage] = (tensor, tensor.detach().clone())
            self._varies.add(storage)

    def varies(self, tensor: Any) -> bool:
        """Whether a tensor depends on an input, a parameter or a random number."""
        storage = storage_of(tensor)
        return storage in self._varies or storage not in self._numbers

    def _check_kind(self, tensor: Tensor) -> None:
        if tensor.device.type != "cpu":
            self.refuse(f"act uses a tensor on {tensor.device}, and only the CPU is replayed")
        if tensor.layout != torch.strided or type(tensor) not in (Tensor, torch.nn.Parameter):
            self.refuse(f"act uses a {type(tensor).__name__} of layout {tensor.layout}")

    def _refuse_escape(self, op: Op, result: Any) -> None:
        """Raise if an operation's result depends on data in a way that the tape does not hold."""
        if torch.Tag.dynamic_output_shape in op.func.tags and not (
            op.name == "index" and all(i.dtype == torch.int64 for i in op.args[1] if i is not None)
        ):
            self.refuse(f"act runs {op.func}, whose result has a shape that depends on data")
        escapes = any(isinstance(leaf, bool | int | float | complex) for leaf in _flat(result))
        if escapes and not _is_validation():
            self.refuse(f"act reads a tensor's value into Python, and may branch on it ({_caller()})")

    def _encode(self, func: Any, value: Any) -> None:
        """Add to what a second recording must repeat."""
        encoded = [
            (
                self._numbers.get(storage_of(leaf)),
                leaf.storage_offset(),
                leaf.shape,
                leaf.stride(),
                leaf.dtype,
            )
            if isinstance(leaf, Tensor)
            else repr(leaf)
            for leaf in _flat(value)
        ]
        self.signature.append((func, encoded, _outline(value)))

    def _check_unchanged(self) -> None:
        """Raise if an operation changed memory undeclared, as batch norm does with its statistics."""
        for _, leaf in _leaves(self.inputs):
            if not _same_bytes(leaf, self._given[storage_of(leaf)]):
                self.refuse("act changes its input in place")
        for tensor, copy in self.outside.values():
            if not _same_bytes(tensor, copy):
                self.refuse("act changes a parameter or another tensor that outlives the call")

    def check_same(self, other: Tape) -> None:
        """Raise unless a second recording met the same tensors and ran the same operations."""
        for mine, others in zip_longest(self.signature, other.signature):
            if mine != others:
                raise Untraceable(f"two calls did not do the same: {(mine or others)[0]} differs")
        if self.outside.keys() != other.outside.keys():
            raise Untraceable("act uses a tensor that is made anew in each call, unseen by the recording")
        mutated = {storage for op in self.ops if op.mutates for storage in op.writes}
        pairs = zip(self.constants.values(), other.constants.values(), strict=True)
        for (tensor, copy), (again, again_copy) in pairs:
            if not _same_bytes(copy, again_copy):
                raise Untraceable("act makes a tensor of Python values that are not the same in each call")
            if tensor.data_ptr() == again.data_ptr() and tensor.numel() and storage_of(tensor) in mutated:
                raise Untraceable("act changes a NumPy array that outlives the call")


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands every operation below autograd to a tape."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = tape

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the default imports torch._dynamo: 1.6 s

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():  # what the tape itself does is no escape
            if torch.is_inference_mode_enabled():
                # There torch hands over composite operations whole, such as linear.
                with self:
                    result = func.decompose(*args, **kwargs)
                if result is not NotImplemented:
                    return result
            return self.tape.add(func, args, kwargs)


class _Escapes(TorchFunctionMode):
    """Refuses the calls by which values leave torch without an operation."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _LEAVES_UNSEEN and isinstance(args[0], Tensor) and self.tape.varies(args[0]):
            self.tape.refuse(f"act takes a tensor out of torch with {name} ({_caller()})")
        if name == "__set__":
            self.tape.refuse(f"act assigns to a tensor's attribute ({_caller()})")
        return func(*args, **(kwargs or {}))


def _user_frame() -> Any:
    frame, package = sys._getframe(1), Path(torch.__file__).parent
    ours = (__file__, str(package / "_tensor.py"), str(package / "_ops.py"))
    while frame.f_back is not None and frame.f_code.co_filename in ours:
        frame = frame.f_back
    return frame


def _caller() -> str:
    frame = _user_frame()
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _is_validation() -> bool:
    """Whether the value is wanted only to decide if torch raises."""
    frame = _user_frame()
    path, function = Path(frame.f_code.co_filename), frame.f_code.co_name
    if path.parent == Path(torch.distributions.__file__).parent and path.name in _VALIDATES:
        return function in ("__init__", "_validate_sample")
    inner = sys._getframe(1)
    while inner.f_code is not _Escapes.__torch_function__.__code__:
        if inner is frame or inner.f_back is None:
            return False
        inner = inner.f_back
    # one_hot with a given number of classes reads the extremes only to check them.
    name, given = getattr(inner.f_locals["func"], "__name__", ""), inner.f_locals["args"][1:]
    classes = [*given, *(inner.f_locals["kwargs"] or {}).values()]
    return name == "one_hot" and len(classes) == 1 and classes[0] > 0


def _changed(op: Op) -> Iterator[Tensor]:
    """The tensors among an operation's arguments that its schema says it writes."""
    for position, argument in enumerate(op.func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = op.args[position] if position < len(op.args) else op.kwargs.get(argument.name)
            yield from _tensors(given)


# What Python keeps between calls --------------------------------------------------------------------------


def _python_state(function: Callable[..., Any]) -> dict[str, Any]:
    """All that a function can be seen to keep, by path: its owner's attributes, the values it closes over."""
    state: dict[str, Any] = {}
    seen: set[int] = set()

    def walk(path: str, value: Any, depth: int) -> None:
        if len(state) > 20_000:
            return
        state[path] = repr(value) if isinstance(value, bool | int | float | str | bytes) else id(value)
        if id(value) in seen or depth > 8:
            return
        seen.add(id(value))
        inside: Iterable[tuple[str, Any]] = ()
        if isinstance(value, np.random.Generator):
            state[path] = str(value.bit_generator.state)
        elif isinstance(value, random.Random):
            state[path] = value.getstate()
        elif isinstance(value, np.ndarray):
            state[path] = (id(value), value.tobytes() if value.nbytes < 1 << 20 else None)
        elif isinstance(value, dict):
            inside = [(f"{path}.{key}" if path else str(key), item) for key, item in value.items()]
        elif isinstance(value, list | tuple | set | deque):
            state[path] = (id(value), len(value))
            inside = [(f"{path}[{index}]", item) for index, item in enumerate(islice(value, 256))]
        elif isinstance(value, MethodType):
            inside = [(path, value.__self__), (path, value.__func__)]
        elif isinstance(value, partial):
            inside = [(path, value.func), (path, value.args), (path, value.keywords)]
        elif isinstance(value, FunctionType):
            cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=False)
            inside = [(name, cell.cell_contents) for name, cell in cells if _is_full(cell)]
        elif not isinstance(value, Tensor | type | ModuleType) and hasattr(value, "__dict__"):
            inside = [(path, value.__dict__)]
        for deeper, item in inside:
            walk(deeper, item, depth + 1)

    walk("", function, 0)
    state.pop("", None)
    return state


def _is_full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _difference(before: dict[str, Any], after: dict[str, Any]) -> str | None:
    for path in before.keys() | after.keys():
        if before.get(path) != after.get(path):
            return path
    return None


# Compiling --------------------------------------------------------------------------------------------


def _compile(tape: Tape, function: Callable[..., Any]) -> Program:
    ops = _live(_simplify(tape.ops), [leaf for _, leaf in _leaves(tape.result)])
    arguments = _argument_names(function, len(tape.inputs))
    w = Writer(ops, _labels(tape, function), reserved=arguments)
    inputs = set()
    for name, value in zip(arguments, tape.inputs, strict=True):
        for path, leaf in _leaves(value):
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
                elif not _same_bytes(output, initial):  # changed only after its last use
                    w.names[w.tensor(output)].copy_(initial)
        else:
            _write_op(w, op)
        if len(w.lines) > begin:
            shape = ", ".join(f"{str(t.dtype)[6:]}{list(t.shape)}" for t in op.outputs)
            w.lines[begin] += f"  # {op.name} {shape}".rstrip() if "#" not in w.lines[begin] else ""

    def leaf_name(leaf: Any) -> str:
        if not isinstance(leaf, Tensor):
            return w.bind("constant", leaf)
        # An input's buffer is overwritten by the next call's argument, which may be this very result.
        return w.array(leaf) + (".copy()" if storage_of(leaf) in inputs else "")

    try:
        result = _written(tape.result, leaf_name, w)
    except Unsupported:
        raise Untraceable("act returns a type of number that NumPy does not have") from None
    body = "".join(f"    {line}\n" for line in [*w.lines, f"return {result}"])
    outside = [tensor for tensor, _ in tape.outside.values()]
    return Program(f"def act({', '.join(arguments)}):\n{body}", w.names, outside)


def _simplify(ops: list[Op]) -> list[Op]:
    """Write what torch.distributions.Categorical does with fewer operations, each an ATen operation too."""
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
            if (source.args[1] - op.args[1]) % op.out.dim() == 0:
                exp = torch.ops.aten.exp.default
                ops[index] = Op(exp, (op.args[0],), {}, op.outputs, op.reads, op.writes)
    return ops


def _same_view(a: Tensor, b: Tensor) -> bool:
    where = [(x.data_ptr(), storage_of(x), x.shape, x.stride(), x.dtype) for x in (a, b)]
    return where[0] == where[1]


def _settled(ops: list[Op], tensor: Tensor) -> bool:
    return not any(op.mutates and storage_of(tensor) in op.writes for op in ops)


def _live(ops: list[Op], results: list[Tensor]) -> list[Op]:
    """The operations that a result depends on, that move torch's random state, or that only check."""
    wanted = {storage_of(tensor) for tensor in results}
    live = []
    for op in reversed(ops):
        if op.is_random or not op.outputs or op.writes & wanted:
            wanted |= op.reads | op.writes
            live.append(op)
    return live[::-1]


def _write_op(w: Writer, op: Op) -> None:
    begin = len(w.lines)
    if all(tensor.numel() == 0 for tensor in op.outputs) and op.outputs and not op.is_random:
        return
    try:
        if op.name in LOWERINGS:
            LOWERINGS[op.name](w, op)
            return
    except (Unsupported, RuntimeError, ValueError, TypeError, IndexError, AttributeError):
        del w.lines[begin:]  # arguments the lowering does not know
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
    w.names["tensors"] = lambda result: list(_tensors(result))


def _out_overload(op: Op) -> tuple[Any, list[str]] | None:
    """The overload of an operation that writes into given tensors, if all its outputs can be given."""
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
    """Names for the parameters, those they have in their module."""
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
            "a program replays one shape: compile another for this one"
        )

    return check


def _literal(w: Writer, leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return w.tensor(leaf)
    if leaf is None or isinstance(leaf, bool | int | str) or (isinstance(leaf, float) and np.isfinite(leaf)):
        return repr(leaf)
    return w.bind("constant", leaf)


def _written(value: Any, leaf: Callable[[Any], str], w: Writer) -> str:
    """A nested value as an expression."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_written(item, leaf, w)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_written(item, leaf, w) for item in value) + "]"
    if isinstance(value, tuple):
        items = "".join(f"{_written(item, leaf, w)}, " for item in value)
        maker = w.bind(type(value).__name__, type(value)) if hasattr(value, "_fields") else ""
        return f"{maker}({items})"
    return leaf(value)


# Nested values ----------------------------------------------------------------------------------------


def _map(value: Any, leaf: Callable[[Any], Any]) -> Any:
    if isinstance(value, Mapping):
        return {key: _map(item, leaf) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_map(item, leaf) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return leaf(value)


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _flat(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _flat(item)
    else:
        yield value


def _tensors(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in _flat(value) if isinstance(leaf, Tensor))


def _aliases(value: Any) -> Any:
    return _map(value, lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf)


def _outline(value: Any) -> str:
    return repr(_map(value, lambda leaf: type(leaf).__name__))


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a nested value, each with the subscripts that reach it."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    elif isinstance(value, Tensor):
        yield path, value


def _static(examples: tuple[Any, ...]) -> tuple[Any, ...]:
    """Tensors of our own for a recording to read its inputs from."""

    def own(leaf: Any) -> Any:
        return leaf if leaf is None else torch.as_tensor(leaf).clone(memory_format=torch.contiguous_format)

    return tuple(_map(example, own) for example in examples)


def _arrays(value: Any) -> Any:
    """A nested value with its tensors as arrays of their own."""

    def convert(leaf: Any) -> Any:
        try:
            return leaf.detach().numpy().copy() if isinstance(leaf, Tensor) else leaf
        except (TypeError, RuntimeError):
            raise Untraceable(f"act returns {leaf.dtype}, which NumPy does not have") from None

    return _map(value, convert)


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    a, b = a.detach().contiguous(), b.detach().contiguous()
    return a.shape == b.shape and torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))


def equal_results(a: Any, b: Any, tolerance: float = 1e-5) -> str | None:
    """None if nested results agree, else a clause with the first key that differs and by how much.

    Floats agree within the tolerance, relative plus absolute, and NaN with NaN; others must be the same.
    """
    return _unequal(a, b, tolerance, "the result")


def _unequal(a: Any, b: Any, tolerance: float, name: str) -> str | None:
    if isinstance(a, Mapping) or isinstance(b, Mapping):
        if not (isinstance(a, Mapping) and isinstance(b, Mapping) and a.keys() == b.keys()):
            return f"{name} has other keys"
        pairs = [(str(key), a[key], b[key]) for key in a]
    elif isinstance(a, list | tuple) or isinstance(b, list | tuple):
        if not (isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b)):
            return f"{name} has another length"
        pairs = [(str(index), *pair) for index, pair in enumerate(zip(a, b, strict=True))]
    else:
        return _unequal_leaves(a, b, tolerance, name)
    prefix = "" if name == "the result" else name + "."
    return next((why for key, x, y in pairs if (why := _unequal(x, y, tolerance, prefix + key))), None)


def _unequal_leaves(a: Any, b: Any, tolerance: float, name: str) -> str | None:
    if a is None or b is None:
        return None if a is b else f"{name} is None on one side"
    x, y = (_comparable(leaf) for leaf in (a, b))
    if x.shape != y.shape or x.dtype != y.dtype:
        return f"{name} is {x.dtype}{list(x.shape)} and {y.dtype}{list(y.shape)}"
    if x.dtype.kind not in "fc":
        count = int(np.count_nonzero(x != y))
        return f"{name} differs in {count} of {x.size} elements" if count else None
    with np.errstate(all="ignore"):
        wrong = ~np.isclose(x, y, rtol=tolerance, atol=tolerance, equal_nan=True)
        gap = float(np.max(np.abs(x - y), where=wrong, initial=0.0))
    return f"{name} differs by {gap:.3g} in {int(wrong.sum())} of {x.size} elements" if wrong.any() else None


def _comparable(leaf: Any) -> np.ndarray[Any, Any]:
    if isinstance(leaf, Tensor):
        return (leaf.detach().float() if leaf.dtype == torch.bfloat16 else leaf.detach()).cpu().numpy()
    return np.asarray(leaf)
