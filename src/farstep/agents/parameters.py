"""Stores parameters in one flat buffer (named, aligned leaves in a fixed order), and loads them into an agent.

`get_parameters()` may return torch tensors (CPU or GPU), NumPy or JAX arrays, nested in mappings, lists or tuples,
or an iterator over these. This module imports neither torch nor jax: it recognizes leaves by their attributes.
"""

from __future__ import annotations

import difflib
import itertools
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from farstep.config.env import ALL_WEIGHTS, WeightsConfig
from farstep.core import Agent, Array, Nested
from farstep.errors import AgentError, described

_ALIGN = 64
_BFLOAT16 = "<u2"
"""How bfloat16, which NumPy lacks, is stored: as the bits."""
_COMPARED_BYTES = 2**20  # up to this size, contents are compared even if version counters have not changed


def parameters_of(agent: Agent) -> Nested:
    """Call `get_parameters()`. Raise `AgentError` if the result is empty although the torch module has parameters."""
    parameters = given_parameters(agent)
    if is_torch_module(agent) and not leaves_of(parameters) and _has_tensors(agent):
        raise AgentError(
            f"get_parameters() returned nothing, but {type(agent).__name__} has torch parameters: workers would never "
            "get new weights. Return the parameters that act uses, e.g. state_dict()."
        )
    return parameters


def given_parameters(agent: Agent) -> Nested:
    """Call `get_parameters()`; convert an iterator to a list."""
    try:
        parameters = agent.get_parameters()
        return list(parameters) if hasattr(parameters, "__next__") else parameters
    except Exception as error:
        raise AgentError(
            f"get_parameters() of {type(agent).__name__} raised {described(error)}. It must return the policy's "
            "arrays or tensors whenever it is called, since they are sent to workers."
        ) from error


def _has_tensors(agent: Any) -> bool:
    own = sys.modules["torch"].nn.Module.parameters(agent)  # the agent may override parameters()
    return any(True for _ in own)


def leaves_of(parameters: Nested, name: str = "") -> list[tuple[str, Any]]:
    """Return the named leaves of nested parameters, in order."""
    return list(_walk(parameters, name))


def travelling(leaves: list[tuple[str, Any]], config: WeightsConfig) -> list[tuple[str, Any]]:
    """Return the leaves to send to workers. Raise `AgentError` if `weights.only` selects none."""
    found = [(name, leaf) for name, leaf in leaves if config.travels(name)]
    names = [name for name, _ in leaves]
    if names and (idle := config.idle_patterns(names)):
        raise AgentError(
            f"weights.only has the pattern {idle[0]!r}, which matches none of the agent's parameters. "
            f"{_nearest(idle[0], names)} Correct the pattern or remove it."
        )
    if names and not found:
        raise AgentError(
            f"weights.only={config.only!r} selects none of the agent's parameters, so workers would get no weights. "
            f"{_some(names)} Select at least one of them."
        )
    return found


def _nearest(pattern: str, names: list[str]) -> str:
    near = difflib.get_close_matches(pattern.strip("*"), names, n=3, cutoff=0.4)
    return f"The nearest are {', '.join(near)}." if near else _some(names)


def _some(names: list[str]) -> str:
    return f"The agent has {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}."


def _walk(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, sub in value.items():
            yield from _walk(sub, path(name, key))
    elif is_tensor(value) or (hasattr(value, "dtype") and hasattr(value, "shape")):
        yield name or "parameters", value
    elif isinstance(value, (list, tuple)) or hasattr(value, "__next__"):
        for i, sub in enumerate(value):
            yield from _walk(sub, path(name, i))
    elif isinstance(value, (bool, int, float)):
        yield name or "parameters", np.asarray(value)
    else:
        raise AgentError(
            f"get_parameters() returned a {type(value).__name__} at {name or 'the top level'!r}; expected arrays or "
            "tensors in nested mappings, lists or tuples. Return only what the policy needs, e.g. state_dict()."
        )


def path(name: str, key: object) -> str:
    """Return the name of an entry in nested parameters."""
    return f"{name}.{key}" if name else str(key)


def as_array(leaf: Any, name: str = "a value of the agent") -> Array:
    """Return a leaf as a NumPy array on the host, without a copy if it is in host memory."""
    try:
        return leaf.numpy(force=True) if is_tensor(leaf) else np.asarray(leaf)
    except Exception as error:  # sparse, on the meta device, not initialized, or of a dtype that NumPy lacks
        raise AgentError(
            f"{name} is a {type(leaf).__module__}.{type(leaf).__name__} that NumPy cannot represent ({error}); "
            "expected dense numbers. Convert it, e.g. with .float() or .to_dense(), or leave it out."
        ) from error


def as_stored(name: str, leaf: Any) -> Array:
    """Return a parameter in the form that is sent: a dtype that NumPy lacks (bfloat16) as integers with the same
    bits."""
    if is_tensor(leaf):
        return as_array(_bits(leaf), f"parameter {name!r}")
    array = as_array(leaf, f"parameter {name!r}")
    if array.dtype.hasobject or array.dtype.names:
        raise AgentError(
            f"parameter {name!r} is an array of {array.dtype}; expected plain numbers. Leave it out, or return the "
            "numbers in it."
        )
    return array.view(f"u{array.dtype.itemsize}") if array.dtype.kind == "V" else array


def is_tensor(leaf: Any) -> bool:
    """Return whether `leaf` is a torch tensor, without importing torch."""
    return hasattr(leaf, "data_ptr") and hasattr(leaf, "detach")


def is_torch_module(agent: Any) -> bool:
    """Return whether the agent is a torch module, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(agent, torch.nn.Module)


def _bits(tensor: Any) -> Any:
    """Return the tensor itself or, if NumPy lacks its dtype, an integer view of the same memory."""
    import torch

    has_type = tensor.dtype in (torch.float16, torch.float32, torch.float64) or not tensor.dtype.is_floating_point
    if has_type or tensor.layout != torch.strided:
        return tensor
    return tensor.detach().view({1: torch.uint8, 2: torch.int16}[tensor.dtype.itemsize])


def rounded(array: Array, dtype: np.dtype[Any]) -> Array:
    """Convert a parameter to its stored dtype; bfloat16 is stored as its bits. Values that are too large become
    infinite."""
    with np.errstate(over="ignore"):
        if array.dtype.kind == "f" and dtype == _BFLOAT16:
            bits = np.asarray(array, "<f4", order="C").view("<u4")
            upper: Array = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16  # rounded to even
            return upper.astype(dtype)
        return array.astype(dtype, copy=False)


def widened(array: Array, dtype: str) -> Array:
    """Convert a stored parameter back to the agent's dtype; the inverse of `rounded`, except for rounding."""
    if array.dtype == _BFLOAT16 and np.dtype(dtype).kind == "f":
        return (array.astype("<u4") << 16).view("<f4").astype(dtype)
    return array.astype(dtype)


def has_nan(leaf: Any, stored: Array) -> bool:
    """Return whether a parameter has a NaN; `stored` is the result of `as_stored` for this parameter."""
    if is_tensor(leaf) and leaf.dtype.is_floating_point and stored.dtype.kind != "f":
        stored = as_array(leaf.float())
    elif getattr(leaf.dtype, "kind", "") == "V":
        stored = np.asarray(leaf, np.float32)
    return stored.dtype.kind in "fc" and bool(np.isnan(stored).any())


@dataclass(frozen=True)
class ParameterSchema:
    """Names, shapes, dtypes and offsets of an agent's parameters in the flat buffer."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    sources: tuple[str, ...]
    """Dtypes in the agent."""
    dtypes: tuple[str, ...]
    """Dtypes in the buffer."""

    @classmethod
    def of(cls, leaves: list[tuple[str, Any]], half: bool | Literal["bfloat16"] = False) -> ParameterSchema:
        """Return the schema of these leaves; with `half`, floats are stored in 16 bits (see `WeightsConfig`)."""
        arrays = [as_stored(name, leaf) for name, leaf in leaves]
        sources = tuple(a.dtype.str for a in arrays)
        half_dtype = _BFLOAT16 if half == "bfloat16" else "<f2"
        stored = tuple(half_dtype if half and source in ("<f4", "<f8") else source for source in sources)
        return cls(tuple(name for name, _ in leaves), tuple(a.shape for a in arrays), sources, stored)

    @cached_property
    def _sizes(self) -> list[int]:
        return [
            math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        ]

    @cached_property
    def nbytes(self) -> int:
        """Size of the flat buffer in bytes."""
        return sum(-(-size // _ALIGN) * _ALIGN for size in self._sizes)

    @cached_property
    def ranges(self) -> list[tuple[int, int]]:
        """Where each leaf starts and stops in the flat buffer, in bytes."""
        aligned = (-(-size // _ALIGN) * _ALIGN for size in self._sizes)
        starts = itertools.accumulate(aligned, initial=0)
        return [(start, start + size) for start, size in zip(starts, self._sizes, strict=False)]

    def views(self, buffer: Any, offset: int = 0) -> list[Array]:
        """Return the leaves as arrays that view `buffer`."""
        leaves = zip(self.shapes, self.dtypes, self.ranges, strict=True)
        return [np.ndarray(shape, np.dtype(dtype), buffer, offset + start) for shape, dtype, (start, _) in leaves]

    def ordered(self, leaves: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
        """Sort the leaves as in the schema; if the names differ, return the leaves unchanged."""
        got = tuple(name for name, _ in leaves)
        if got == self.names or sorted(got) != sorted(self.names) or len(set(got)) < len(got):
            return leaves
        by_name = dict(leaves)
        return [(name, by_name[name]) for name in self.names]

    def check(self, leaves: list[tuple[str, Any]]) -> None:
        """Raise `AgentError` if a parameter is missing, is new or has another shape."""
        got = [name for name, _ in leaves]
        if tuple(got) != self.names:
            missing, extra = sorted(set(self.names) - set(got)), sorted(set(got) - set(self.names))
            raise AgentError(
                f"get_parameters() changed: missing {missing or 'none'}, new {extra or 'none'}"
                f"{'' if missing or extra else ' (the order differs)'}. Workers keep the old version; return the "
                "same parameters every time."
            )
        for (name, leaf), shape in zip(leaves, self.shapes, strict=True):
            if tuple(leaf.shape) != shape:
                raise AgentError(
                    f"parameter {name!r} changed its shape from {list(shape)} to {list(leaf.shape)}; workers keep the "
                    "old version. Create a new agent object for other shapes."
                )


class ChangeDetector:
    """Detects possible changes of an agent's parameters, by torch's version counters or the identity of JAX arrays."""

    def __init__(self) -> None:
        self._print: list[object] = []

    def same_counters(self, counters: list[object]) -> bool:
        """Return whether the leaves are certainly unchanged: all counters equal the stored counters."""
        return bool(self._print) and counters == self._print

    def note(self, counters: list[object]) -> None:
        """Store the counters of contents that were read.

        Read the counters before the contents. In the other order, a change by another thread in between would be
        missed.
        """
        self._print = counters

    @staticmethod
    def trusted(nbytes: int) -> bool:
        """Return whether equal counters prove equal contents.

        Writes through torch's `.data` do not change the counters, so the contents of small parameters are always
        compared.
        """
        return nbytes > _COMPARED_BYTES

    @staticmethod
    def counters(leaves: list[tuple[str, Any]]) -> list[object]:
        """Return the current counters of leaves."""
        prints: list[object] = []
        for _, leaf in leaves:
            if is_tensor(leaf):
                # A counter of 0 proves nothing: the tensor may be a new copy, or a `.data` alias with its own counter.
                counts = not leaf.is_inference() and leaf._version > 0
                prints.append((leaf.data_ptr(), leaf._version) if counts else object())
            elif isinstance(leaf, np.ndarray):
                prints.append(object())  # NumPy has no counters, so never report equality
            else:
                prints.append(leaf)  # JAX arrays are immutable: the same object has the same value
        return _Identity.wrap(prints)


class _Identity:
    """Compares by identity, since `==` on arrays is elementwise."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.value is other.value

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def wrap(cls, prints: list[object]) -> list[object]:
        return [entry if isinstance(entry, tuple) else cls(entry) for entry in prints]


class ParameterLoader:
    """Loads a flat buffer into a worker's agent: with `set_parameters` if the agent has it, otherwise in place."""

    def __init__(self, agent: Agent, config: WeightsConfig = ALL_WEIGHTS) -> None:
        self._agent, self._config = agent, config
        self._template = parameters_of(agent)
        leaves = travelling(leaves_of(self._template), config)
        self.schema = ParameterSchema.of(leaves, config.half)
        self._verified = False
        setter = getattr(agent, "set_parameters", None)
        self._set = setter if callable(setter) else None
        self._leaves = [leaf for _, leaf in leaves]
        pairs = [] if self._set else list(zip(self._find_own(leaves), self._leaves, strict=True))
        self._targets = [_writable(own, leaf) for own, leaf in pairs]
        is_exact = not self._set and all(_same_dtype(own, leaf) for own, leaf in pairs)
        self.own = [(name, own) for name, (own, _) in zip(self.schema.names, pairs, strict=True)] if is_exact else None
        """The agent's own tensors or arrays that new values are written to, with names; None: `set_parameters` writes
        them, or the agent converts them to another dtype."""

    def _find_own(self, leaves: list[tuple[str, Any]]) -> list[Any]:
        """Return the agent's own tensors or arrays."""
        if is_torch_module(self._agent):
            module = sys.modules["torch"].nn.Module
            # Include all names of tied tensors, like a state_dict.
            own = dict(module.named_parameters(self._agent, remove_duplicate=False))
            own.update(module.named_buffers(self._agent, remove_duplicate=False))
            if all(name in own for name, _ in leaves):
                return [own[name] for name, _ in leaves]
        again = self._current()
        for (name, leaf), (_, second) in zip(leaves, again, strict=True):
            if is_tensor(leaf):
                live = leaf.data_ptr() == second.data_ptr()
            else:
                live = isinstance(leaf, np.ndarray) and leaf.flags.writeable
                live = live and (leaf.size == 0 or np.shares_memory(leaf, second))
            if not live:
                raise AgentError(
                    f"new weights cannot reach the agent: get_parameters() returns a copy or an immutable array "
                    f"for {name!r} ({type(leaf).__module__}.{type(leaf).__name__}). Add "
                    "set_parameters(parameters), which takes what get_parameters() returns."
                )
        return [leaf for _, leaf in leaves]

    def _current(self) -> list[tuple[str, Any]]:
        """Return the agent's current leaves that are sent to workers."""
        leaves = self.schema.ordered(travelling(leaves_of(given_parameters(self._agent)), self._config))
        self.schema.check(leaves)
        return leaves

    def load(self, arrays: list[Array]) -> None:
        """Load new values into all leaves. If `set_parameters` raises, the agent may be partly updated."""
        if self._config.half:
            arrays = [widened(array, dtype) for array, dtype in zip(arrays, self.schema.sources, strict=True)]
        if self._set is not None:
            template = self._template if self._config.only is None else parameters_of(self._agent)
            self._set(self._rebuild(template, "", self._by_name(template, arrays)))
        else:
            for target, leaf, array in zip(self._targets, self._leaves, arrays, strict=True):
                if is_tensor(target):
                    target.copy_(_to_tensor(array, leaf))
                else:
                    target[...] = array
        if not self._verified:
            self._verify(arrays)
            self._verified = True

    def _verify(self, arrays: list[Array]) -> None:
        """Check that `get_parameters()` returns the loaded values. Only the first load calls this."""
        for (name, leaf), array in zip(self._current(), arrays, strict=True):
            if not np.array_equal(as_stored(name, leaf), array):
                raise AgentError(
                    f"parameter {name!r} does not have the value that was loaded into it. set_parameters() must accept "
                    "what get_parameters() returns, or get_parameters() must return the agent's own arrays."
                )

    def _by_name(self, template: Nested, arrays: list[Array]) -> Iterator[Array]:
        """Return the arrays in the order of the template; the schema may have another order."""
        leaves = travelling(leaves_of(template), self._config)
        indices = {name: i for i, name in enumerate(self.schema.names)}
        if self.schema.ordered(leaves) is leaves:
            return iter(arrays)
        return iter([arrays[indices[name]] for name, _ in leaves])

    def _rebuild(self, template: Any, name: str, arrays: Iterator[Array]) -> Any:
        """Return a value nested and typed like the template. Copy the arrays, because the buffer is reused."""
        if isinstance(template, Mapping):
            parts = {key: self._rebuild(sub, path(name, key), arrays) for key, sub in template.items()}
            return type(template)(parts)  # type: ignore[call-arg]
        if isinstance(template, (list, tuple)):
            items = [self._rebuild(sub, path(name, i), arrays) for i, sub in enumerate(template)]
            return type(template)(*items) if hasattr(template, "_fields") else type(template)(items)
        if not self._config.travels(name or "parameters"):
            return template
        array = next(arrays)
        if is_tensor(template):
            return _to_tensor(array, template)
        if isinstance(template, (bool, int, float, np.generic)):
            return type(template)(array[()])
        return array.copy().view(template.dtype)


def _writable(own: Any, leaf: Any) -> Any:
    """Return where to write new values of `leaf`: a view of the agent's memory, or a tensor that converts the dtype."""
    if not is_tensor(own):
        return own
    same = _same_dtype(own, leaf)
    numbers = all(not is_tensor(entry) or _bits(entry) is entry for entry in (own, leaf))
    return as_array(_bits(own)) if own.device.type == "cpu" and (same or numbers) else own.detach()


def _same_dtype(own: Any, leaf: Any) -> bool:
    return is_tensor(own) == is_tensor(leaf) and bool(own.dtype == leaf.dtype)


def _to_tensor(array: Array, like: Any) -> Any:
    import torch

    tensor = torch.from_numpy(array.copy())
    return tensor.view(like.dtype).to(like.device) if is_tensor(like) else tensor
