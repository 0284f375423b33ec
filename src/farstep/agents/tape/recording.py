"""Records one call of a function, below autograd, as a list of operations.

act ── _Escapes (torch functions) ── autograd ── _Recorder (dispatched operations) ── Tape.add ── ATen
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from farstep.agents.tape.errors import Untraceable
from farstep.agents.tape.nested import aliases_of, arrays_of, leaves_of, outline_of, tensors_of
from farstep.agents.tape.op import Op, same_bytes, storage_of
from farstep.agents.tape.unread_array import UnreadArray, tensor_of
from farstep.schema import flat, map_leaves

_MAKES_FROM_SHAPE = {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"}
_REPLACES_MEMORY = {"set_", "resize_", "resize_as_", "_resize_output_"}
_LEAVES_UNSEEN = {
    "tolist", "__array__", "__dlpack__", "untyped_storage", "storage", "__deepcopy__",
    "__reduce_ex__",
}  # fmt: skip
_VALIDATES = {"distribution.py", "geometric.py", "continuous_bernoulli.py", "uniform.py"}


class Tape:
    """The operations of one call, in order; keeps all tensors of the call alive."""

    def __init__(self, function: Callable[..., Any], inputs: tuple[Any, ...]) -> None:
        self.ops: list[Op] = []
        self.inputs = inputs
        self.outside: dict[int, tuple[Tensor, Tensor]] = {}
        """Tensors from before the call (mostly parameters) by storage, each with a copy of its values."""
        self.constants: dict[int, tuple[Tensor, Tensor]] = {}
        """Tensors made from Python values, by storage, each with a copy of its values."""
        self.signature: list[Any] = []
        self._keep: list[Any] = [inputs]
        self._given = {storage_of(leaf): leaf.clone() for _, leaf in leaves_of(inputs)}
        self._numbers = {storage: index for index, storage in enumerate(self._given)}
        self._varies = set(self._given)
        python_random, numpy_random = random.getstate(), str(np.random.get_state())
        self._refusal: Untraceable | None = None
        with _Escapes(self), _Recorder(self):
            self.result = map_leaves(tensor_of, function(*inputs))
        if self._refusal is not None:  # `act` caught the exception
            raise self._refusal
        if random.getstate() != python_random or str(np.random.get_state()) != numpy_random:
            raise Untraceable("act draws from Python's or NumPy's global random generator")
        for _, leaf in leaves_of(self.result):
            self._register(leaf)
        self._encode("the result", self.result)
        self.expected = arrays_of(self.result)
        self._check_unchanged()

    def refuse(self, why: str) -> NoReturn:
        """Raise `Untraceable` now and, in case `act` catches it, again after `act` has returned."""
        self._refusal = Untraceable(why)
        raise self._refusal

    def add(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, record it, and return its result."""
        tensors = list(tensors_of((args, kwargs)))
        if func is torch.ops.aten.lift_fresh.default and storage_of(args[0]) not in self._numbers:
            return self._lift(args[0])
        for tensor in tensors:
            self._register(tensor)
        reads = {storage_of(tensor) for tensor in tensors}
        # Keep aliases, because later operations such as squeeze_ may change the shapes of the tensors themselves.
        op_args, op_kwargs = aliases_of(args), aliases_of(kwargs)
        random_state = torch.get_rng_state()
        result = func(*args, **kwargs)
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        is_random |= not torch.equal(random_state, torch.get_rng_state())
        self._encode(func, (op_args, op_kwargs))
        outputs = list(tensors_of(aliases_of(result)))
        self._keep.append(outputs)
        op = Op(func, op_args, op_kwargs, outputs, reads, set(), is_random=is_random)
        varies = is_random or (bool(reads & self._varies) and op.name not in _MAKES_FROM_SHAPE)
        if varies:
            self._refuse_escape(op, result)
        if outputs or result is None:
            self._write(op, varies)
        return result

    def _write(self, op: Op, varies: bool) -> None:
        """Add an operation to the tape, unless it only makes views."""
        if op.name in _REPLACES_MEMORY:
            self.refuse(f"act runs {op.func}, which replaces a tensor's memory")
        changed = {storage_of(tensor) for tensor in _changed(op)}
        made = {storage_of(tensor) for tensor in op.outputs} - op.reads
        if changed & self._given.keys():
            self.refuse("act changes its input in place")
        if changed & self.outside.keys():
            self.refuse("act changes a parameter or another tensor that outlives the call")
        if made & self._numbers.keys():
            self.refuse(f"{op.func} returned the memory of a tensor that is not among its arguments")
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
        """Record a tensor that torch.tensor or torch.from_numpy just made from Python values."""
        self._check_kind(tensor)
        storage, lift = storage_of(tensor), torch.ops.aten.lift_fresh.default
        self._numbers[storage] = len(self._numbers)
        self._keep.append(tensor)
        self.constants[storage] = (tensor, tensor.clone())
        self._encode(lift, tensor)
        alias = tensor.detach()
        self.ops.append(Op(lift, (alias,), {}, [alias], set(), {storage}, initial=[tensor.clone()]))
        return tensor

    def _register(self, tensor: Tensor) -> None:
        """Register a tensor on its first use. If no recorded operation made the tensor, it existed before the call."""
        self._check_kind(tensor)
        storage = storage_of(tensor)
        if storage not in self._numbers:
            self._numbers[storage] = len(self._numbers)
            self.outside[storage] = (tensor, tensor.detach().clone())
            self._varies.add(storage)

    def varies(self, tensor: Any) -> bool:
        """Return whether a tensor depends on an input, a parameter or a random number."""
        storage = storage_of(tensor)
        return storage in self._varies or storage not in self._numbers

    def _check_kind(self, tensor: Tensor) -> None:
        if tensor.device.type != "cpu":
            self.refuse(f"act uses a tensor on {tensor.device}, and only CPU tensors can be replayed")
        if tensor.layout != torch.strided or type(tensor) not in (Tensor, torch.nn.Parameter):
            self.refuse(f"act uses a {type(tensor).__name__} of layout {tensor.layout}")

    def _refuse_escape(self, op: Op, result: Any) -> None:
        """Raise if the shape of an operation's result depends on data, or if data is read into Python."""
        if torch.Tag.dynamic_output_shape in op.func.tags and not (
            op.name == "index" and all(i.dtype == torch.int64 for i in op.args[1] if i is not None)
        ):
            self.refuse(f"act runs {op.func}, whose result has a shape that depends on data")
        escapes = any(isinstance(leaf, bool | int | float | complex) for leaf in flat(result))
        if escapes and not _is_validation():
            self.refuse(f"act reads a tensor's value into Python, and may branch on it ({_caller()})")

    def _encode(self, func: Any, value: Any) -> None:
        """Append an operation to the signature; a second recording must have the same signature."""
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
            for leaf in flat(value)
        ]
        self.signature.append((func, encoded, outline_of(value)))

    def _check_unchanged(self) -> None:
        """Raise if an operation changed memory that its schema does not declare, as batch norm does."""
        for _, leaf in leaves_of(self.inputs):
            if not same_bytes(leaf, self._given[storage_of(leaf)]):
                self.refuse("act changes its input in place")
        for tensor, copy in self.outside.values():
            if not same_bytes(tensor, copy):
                self.refuse("act changes a parameter or another tensor that outlives the call")

    def check_same(self, other: Tape) -> None:
        """Raise unless a second recording used the same tensors and ran the same operations."""
        for mine, others in zip_longest(self.signature, other.signature):
            if mine != others:
                raise Untraceable(f"two calls ran different operations: {(mine or others)[0]} differs")
        if self.outside.keys() != other.outside.keys():
            raise Untraceable("act uses a tensor that is created in each call without a recorded operation")
        mutated = {storage for op in self.ops if op.mutates for storage in op.writes}
        pairs = zip(self.constants.values(), other.constants.values(), strict=True)
        for (tensor, copy), (again, again_copy) in pairs:
            if not same_bytes(copy, again_copy):
                raise Untraceable("act makes a tensor from Python values that differ between calls")
            if tensor.data_ptr() == again.data_ptr() and tensor.numel() and storage_of(tensor) in mutated:
                raise Untraceable("act changes a NumPy array that outlives the call")


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Passes every operation below autograd to a tape."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = tape

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the default would import torch._dynamo, which takes 1.6 s

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():  # hide the tape's own calls from `_Escapes`
            if torch.is_inference_mode_enabled():
                # In inference mode, torch does not decompose composite operations such as linear.
                with self:
                    result = func.decompose(*args, **kwargs)
                if result is not NotImplemented:
                    return result
            return self.tape.add(func, args, kwargs)


class _Escapes(TorchFunctionMode):
    """Refuses calls that read a tensor's values without an ATen operation. `numpy` is allowed for arrays that `act`
    only returns."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "numpy" and self.tape.varies(args[0]):
            func(*args, **(kwargs or {}))  # raises if the eager call would
            with torch._C.DisableTorchFunction():
                return UnreadArray(aliases_of(args[0]), self._refuse_read)
        if name in _LEAVES_UNSEEN and isinstance(args[0], Tensor) and self.tape.varies(args[0]):
            self.tape.refuse(f"act reads a tensor outside torch with {name} ({_caller()})")
        if name == "__set__":
            self.tape.refuse(f"act assigns to a tensor's attribute ({_caller()})")
        return func(*args, **(kwargs or {}))

    def _refuse_read(self, name: str) -> NoReturn:
        self.tape.refuse(f"act reads an array that it made with numpy(): {name} ({_caller()})")


def _user_frame() -> Any:
    """Return the innermost frame outside farstep's recording and torch's dispatch."""
    frame, package = sys._getframe(1), Path(torch.__file__).parent
    ours = (f"{Path(__file__).parent}/", str(package / "_tensor.py"), str(package / "_ops.py"))
    while frame.f_back is not None and frame.f_code.co_filename.startswith(ours):
        frame = frame.f_back
    return frame


def _caller() -> str:
    frame = _user_frame()
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _is_validation() -> bool:
    """Return whether only torch's own validation of arguments reads the value."""
    frame = _user_frame()
    path, function = Path(frame.f_code.co_filename), frame.f_code.co_name
    if path.parent == Path(torch.distributions.__file__).parent and path.name in _VALIDATES:
        return function in ("__init__", "_validate_sample")
    inner = sys._getframe(1)
    while inner.f_code is not _Escapes.__torch_function__.__code__:
        if inner is frame or inner.f_back is None:
            return False
        inner = inner.f_back
    # If the number of classes is given, one_hot reads the smallest and largest index only to check them.
    name, given = getattr(inner.f_locals["func"], "__name__", ""), inner.f_locals["args"][1:]
    classes = [*given, *(inner.f_locals["kwargs"] or {}).values()]
    return name == "one_hot" and len(classes) == 1 and classes[0] > 0


def _changed(op: Op) -> Iterator[Tensor]:
    """Yield the arguments of an operation that it writes to, according to its schema."""
    for position, argument in enumerate(op.func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = op.args[position] if position < len(op.args) else op.kwargs.get(argument.name)
            yield from tensors_of(given)
