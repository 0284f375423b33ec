"""Parameters as one flat buffer: named leaves in a fixed order, each aligned, and the way back into an agent.

`get_parameters()` may return torch tensors (CPU or GPU), NumPy or JAX arrays, nested in mappings, lists or tuples,
or an iterator over them. The core imports neither torch nor jax: a leaf is recognised by what it can do.
"""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from farstep.config.env import ALL_WEIGHTS, WeightsConfig
from farstep.core import Agent, Array, Nested
from farstep.errors import AgentError, described

_ALIGN = 64
_COMPARED_BYTES = 2**20  # below this, contents are compared even when version counters say "unchanged"


def parameters_of(agent: Agent) -> Nested:
    """What `get_parameters()` returns, as something that can be looked at twice; a baseline may have none."""
    parameters = given_parameters(agent)
    if is_torch_module(agent) and not leaves_of(parameters) and _has_tensors(agent):
        raise AgentError(
            f"get_parameters() returned nothing, but {type(agent).__name__} has parameters of torch: workers could "
            "never learn of new weights. Return those that act uses, e.g. state_dict()."
        )
    return parameters


def given_parameters(agent: Agent) -> Nested:
    """What `get_parameters()` returns now, an iterator as a list, since one look uses it up."""
    try:
        parameters = agent.get_parameters()
        return list(parameters) if hasattr(parameters, "__next__") else parameters
    except Exception as error:
        raise AgentError(
            f"get_parameters() of {type(agent).__name__} raised {described(error)}. Without it no weights "
            "reach workers: let it return the policy's arrays or tensors whenever it is called."
        ) from error


def _has_tensors(agent: Any) -> bool:
    own = sys.modules["torch"].nn.Module.parameters(agent)  # an agent may have a parameters() of its own
    return any(True for _ in own)


def leaves_of(parameters: Nested, name: str = "") -> list[tuple[str, Any]]:
    """The named leaves of nested parameters, in order."""
    return list(_walk(parameters, name))


def travelling(leaves: list[tuple[str, Any]], config: WeightsConfig) -> list[tuple[str, Any]]:
    """The leaves that are sent to workers."""
    found = [(name, leaf) for name, leaf in leaves if config.travels(name)]
    names = [name for name, _ in leaves]
    if names and (idle := config.idle_patterns(names)):
        raise AgentError(
            f"weights.only has the pattern {idle[0]!r}, which chooses none of the agent's parameters, so what it is "
            f"meant for would never travel. {_nearest(idle[0], names)} Correct the pattern, or leave it out."
        )
    if names and not found:
        raise AgentError(
            f"none of the agent's parameters is chosen by weights.only={config.only!r}, so nothing would travel. "
            f"{_some(names)} Let it return True for some of them."
        )
    return found


def _nearest(pattern: str, names: list[str]) -> str:
    near = difflib.get_close_matches(pattern.strip("*"), names, n=3, cutoff=0.4)
    return f"The nearest are {', '.join(near)}." if near else _some(names)


def _some(names: list[str]) -> str:
    return f"It has {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}."


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
            f"get_parameters() returned a {type(value).__name__} at {name or 'its top'!r}; expected arrays or "
            "tensors in nested mappings, lists or tuples. Return only what the policy needs, e.g. state_dict()."
        )


def path(name: str, key: object) -> str:
    """The name of a part."""
    return f"{name}.{key}" if name else str(key)


def as_array(leaf: Any, name: str = "a value of the agent") -> Array:
    """A leaf as a NumPy array on the host, over the same memory where it is there already."""
    try:
        return leaf.numpy(force=True) if is_tensor(leaf) else np.asarray(leaf)
    except Exception as error:  # sparse, on no device, not initialised yet, of a dtype that NumPy lacks
        raise AgentError(
            f"{name} is a {type(leaf).__module__}.{type(leaf).__name__} that NumPy cannot hold ({error}); expected "
            "dense numbers. Convert it, e.g. with .float() or .to_dense(), or leave it out."
        ) from error


def as_stored(name: str, leaf: Any) -> Array:
    """A parameter as it travels: dtypes NumPy lacks (bfloat16) come as their bits."""
    if is_tensor(leaf):
        return as_array(_bits(leaf), f"parameter {name!r}")
    array = as_array(leaf, f"parameter {name!r}")
    if array.dtype.hasobject or array.dtype.names:
        raise AgentError(
            f"parameter {name!r} is an array of {array.dtype}; expected plain numbers. Leave it out, or make "
            "get_parameters() return the numbers in it."
        )
    return array.view(f"u{array.dtype.itemsize}") if array.dtype.kind == "V" else array


def is_tensor(leaf: Any) -> bool:
    """Whether `leaf` is a torch tensor, without importing torch."""
    return hasattr(leaf, "data_ptr") and hasattr(leaf, "detach")


def is_torch_module(agent: Any) -> bool:
    """Whether the agent is a torch module; torch is imported by the agent itself or not at all."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(agent, torch.nn.Module)


def _bits(tensor: Any) -> Any:
    """The tensor itself or, of a type that NumPy lacks, its bits as integers over the same memory."""
    import torch

    has_type = tensor.dtype in (torch.float16, torch.float32, torch.float64) or not tensor.dtype.is_floating_point
    if has_type or tensor.layout != torch.strided:
        return tensor
    return tensor.detach().view({1: torch.uint8, 2: torch.int16}[tensor.dtype.itemsize])


def has_nan(leaf: Any, stored: Array) -> bool:
    """Whether a parameter, given also as it is stored, holds a NaN."""
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
    """Their dtypes in the agent."""
    dtypes: tuple[str, ...]
    """Their dtypes in the buffer."""

    @classmethod
    def of(cls, leaves: list[tuple[str, Any]], half: bool = False) -> ParameterSchema:
        arrays = [as_stored(name, leaf) for name, leaf in leaves]
        sources = tuple(a.dtype.str for a in arrays)
        stored = tuple("<f2" if half and source in ("<f4", "<f8") else source for source in sources)
        return cls(tuple(name for name, _ in leaves), tuple(a.shape for a in arrays), sources, stored)

    @cached_property
    def _sizes(self) -> list[int]:
        return [
            math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        ]

    @cached_property
    def nbytes(self) -> int:
        return sum(-(-size // _ALIGN) * _ALIGN for size in self._sizes)

    def views(self, buffer: Any, offset: int = 0) -> list[Array]:
        """The leaves as arrays over `buffer`."""
        arrays = []
        for shape, dtype, size in zip(self.shapes, self.dtypes, self._sizes, strict=True):
            arrays.append(np.ndarray(shape, np.dtype(dtype), buffer, offset))
            offset += -(-size // _ALIGN) * _ALIGN
        return arrays

    def ordered(self, leaves: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
        """The leaves in this order, if they are the same ones: a mapping may have been built anew in another."""
        got = tuple(name for name, _ in leaves)
        if got == self.names or sorted(got) != sorted(self.names) or len(set(got)) < len(got):
            return leaves
        by_name = dict(leaves)
        return [(name, by_name[name]) for name in self.names]

    def check(self, leaves: list[tuple[str, Any]]) -> None:
        """Refuse, by name, parameters that are missing, new or of another shape."""
        got = [name for name, _ in leaves]
        if tuple(got) != self.names:
            missing, extra = sorted(set(self.names) - set(got)), sorted(set(got) - set(self.names))
            raise AgentError(
                f"get_parameters() changed: missing {missing or 'none'}, new {extra or 'none'}"
                f"{'' if missing or extra else ' (the order differs)'}. The old version stays in force; "
                "return the same parameters every time."
            )
        for (name, leaf), shape in zip(leaves, self.shapes, strict=True):
            if tuple(leaf.shape) != shape:
                raise AgentError(
                    f"parameter {name!r} changed its shape from {list(shape)} to {list(leaf.shape)}; the old "
                    "version stays in force. An agent of other shapes must be another object."
                )


class ChangeDetector:
    """Tells whether an agent's parameters changed since they were last noted, as cheaply as the framework allows."""

    def __init__(self) -> None:
        self._print: list[object] = []

    def same_counters(self, counters: list[object]) -> bool:
        """True when every leaf has a counter or is immutable, and none moved since those that were noted."""
        return bool(self._print) and counters == self._print

    def note(self, counters: list[object]) -> None:
        """Remember the counters of leaves whose contents are known. They must have been read before the contents: else
        a change in between, by another thread, would never be noticed."""
        self._print = counters

    @staticmethod
    def trusted(nbytes: int) -> bool:
        """Whether equal counters alone are believed: writing through torch's `.data` bypasses them, so what is
        cheap to compare is compared."""
        return nbytes > _COMPARED_BYTES

    @staticmethod
    def counters(leaves: list[tuple[str, Any]]) -> list[object]:
        """The counters of leaves now."""
        prints: list[object] = []
        for _, leaf in leaves:
            if is_tensor(leaf):
                # Counter 0: a copy made just now, or a `.data` alias whose counter is its own. It says nothing.
                counts = not leaf.is_inference() and leaf._version > 0
                prints.append((leaf.data_ptr(), leaf._version) if counts else object())
            elif isinstance(leaf, np.ndarray):
                prints.append(object())  # NumPy has no counter: never equal
            else:
                prints.append(leaf)  # JAX arrays never change in place: the same object is the same value
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
    """Puts a flat buffer into a worker's copy of the agent, by the first way that works."""

    def __init__(self, agent: Agent, config: WeightsConfig = ALL_WEIGHTS) -> None:
        self._agent, self._config = agent, config
        self._template = parameters_of(agent)
        leaves = travelling(leaves_of(self._template), config)
        self.schema = ParameterSchema.of(leaves, config.half)
        self._verified = False
        setter = getattr(agent, "set_parameters", None)
        self._set = setter if callable(setter) else None
        self._leaves = [leaf for _, leaf in leaves]
        self._targets = [] if self._set else self._find_targets(leaves)

    def _find_targets(self, leaves: list[tuple[str, Any]]) -> list[Any]:
        """The agent's own tensors or arrays that can be written in place."""
        if is_torch_module(self._agent):
            module = sys.modules["torch"].nn.Module
            # With all names of tied tensors, as a state_dict has them.
            own = dict(module.named_parameters(self._agent, remove_duplicate=False))
            own.update(module.named_buffers(self._agent, remove_duplicate=False))
            if all(name in own for name, _ in leaves):
                return [_writable(own[name], leaf) for name, leaf in leaves]
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
        return [_writable(leaf, leaf) for _, leaf in leaves]

    def _current(self) -> list[tuple[str, Any]]:
        """What the agent has now, of what travels."""
        leaves = self.schema.ordered(travelling(leaves_of(given_parameters(self._agent)), self._config))
        self.schema.check(leaves)
        return leaves

    def load(self, arrays: list[Array]) -> None:
        """Load the leaves; either all of them or, on an error, as the agent's own setter left it."""
        if self._config.half:
            arrays = [array.astype(dtype) for array, dtype in zip(arrays, self.schema.sources, strict=True)]
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
        """Make sure, once, that what was loaded is what the agent has now."""
        for (name, leaf), array in zip(self._current(), arrays, strict=True):
            if not np.array_equal(as_stored(name, leaf), array):
                raise AgentError(
                    f"parameter {name!r} does not have the value that was loaded into it. Let set_parameters() take "
                    "what get_parameters() returns, or let get_parameters() return the agent's own arrays."
                )

    def _by_name(self, template: Nested, arrays: list[Array]) -> Iterator[Array]:
        """The arrays in the template's order, which is the agent's own: its setter may have kept them in another."""
        leaves = travelling(leaves_of(template), self._config)
        indices = {name: i for i, name in enumerate(self.schema.names)}
        if self.schema.ordered(leaves) is leaves:
            return iter(arrays)
        return iter([arrays[indices[name]] for name, _ in leaves])

    def _rebuild(self, template: Any, name: str, arrays: Iterator[Array]) -> Any:
        """What get_parameters() returned, types included, with new contents (copies, for the buffer is reused)."""
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
    """What to write new values of `leaf` into: the agent's own memory as an array, or the tensor if it must convert."""
    if not is_tensor(own):
        return own
    same = is_tensor(leaf) and own.dtype == leaf.dtype
    numbers = all(not is_tensor(entry) or _bits(entry) is entry for entry in (own, leaf))
    return as_array(_bits(own)) if own.device.type == "cpu" and (same or numbers) else own.detach()


def _to_tensor(array: Array, like: Any) -> Any:
    import torch

    tensor = torch.from_numpy(array.copy())
    return tensor.view(like.dtype).to(like.device) if is_tensor(like) else tensor
