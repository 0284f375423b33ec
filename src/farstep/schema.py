"""Array schemas: which arrays store a space or an agent's output, and how these arrays are nested.

A nested space is stored as named arrays: the entry `camera` of a Dict observation as `obs.camera`, the second entry of
a Tuple action as `action.1`. A `Structure` describes the nesting; `leaves` flattens a value, `nest` rebuilds it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
from gymnasium import spaces

from farstep.core import Array, Nested
from farstep.errors import AgentError, SpaceError

Structure = str | dict[str, Any] | tuple[Any, ...]
"""The name of an array, or a mapping or tuple of structures."""


class ArraySpec(msgspec.Struct, frozen=True, array_like=True):
    """Shape and dtype of an array for one step of one environment."""

    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        # Specs also come from workers, so check them: an object array in shared memory would consist of raw pointers.
        try:
            plain = not np.dtype(self.dtype).hasobject and all(size >= 0 for size in self.shape)
        except (TypeError, ValueError, SyntaxError):  # NumPy parses a dtype with a comma as Python code
            plain = False
        if not plain:
            raise ValueError(f"{self.dtype!r} with shape {self.shape} is not an array of plain numbers")

    @property
    def nbytes(self) -> int:
        return int(np.dtype(self.dtype).itemsize * math.prod(self.shape))

    @classmethod
    def of(cls, array: Array) -> ArraySpec:
        """Return the spec of a batch `array` of shape [n, ...]."""
        return cls(tuple(array.shape[1:]), array.dtype.str)

    def __str__(self) -> str:
        return f"{np.dtype(self.dtype).name}{list(self.shape)}"


Schema = dict[str, ArraySpec]

_UNSUPPORTED = {
    "Text": "strings have no fixed number of bytes",
    "Graph": "the number of nodes and edges varies",
    "Sequence": "the length varies from step to step",
    "OneOf": "the shape depends on the choice",
}


def space_schema(space: spaces.Space[Any], name: str) -> tuple[Structure, Schema]:
    """Return how `space` is stored under `name`: its structure, and one spec per array.

    Raises:
        SpaceError: The space has no fixed array layout.
    """
    schema: Schema = {}
    return _visit(space, name, schema), schema


def _visit(space: spaces.Space[Any], name: str, schema: Schema) -> Structure:
    if isinstance(space, spaces.Dict):
        for key in space.spaces:
            if not isinstance(key, str) or not key or "." in key:
                raise SpaceError(
                    f"{name}: the Dict space has the key {key!r}; keys become array names, so they must be "
                    "non-empty strings without a dot. Rename it in a wrapper."
                )
        return {key: _visit(sub, f"{name}.{key}", schema) for key, sub in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_visit(sub, f"{name}.{i}", schema) for i, sub in enumerate(space.spaces))
    if isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        assert space.shape is not None and space.dtype is not None
        dtype = np.dtype(space.dtype)
        if dtype.hasobject:
            raise SpaceError(
                f"{name}: {space} holds Python objects; only plain numbers can be shared. Give it a dtype of numbers."
            )
        schema[name] = ArraySpec(tuple(space.shape), dtype.str)
        return name
    kind = type(space).__name__
    reason = _UNSUPPORTED.get(kind, "farstep has no array layout for them")
    raise SpaceError(
        f"{name}: {kind} spaces are not supported, since {reason} and farstep stores steps in fixed arrays. "
        "Turn it into Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of these, with a wrapper."
    )


def leaf_spaces(space: spaces.Space[Any], name: str) -> dict[str, spaces.Space[Any]]:
    """Return the spaces of the arrays that store `space`, by name of the array."""
    if isinstance(space, spaces.Dict):
        return {n: s for key, sub in space.spaces.items() for n, s in leaf_spaces(sub, f"{name}.{key}").items()}
    if isinstance(space, spaces.Tuple):
        return {n: s for i, sub in enumerate(space.spaces) for n, s in leaf_spaces(sub, f"{name}.{i}").items()}
    return {name: space}


def value_structure(value: Nested, name: str, arrays: dict[str, Array]) -> Structure:
    """Return the structure of an agent's output, and add its arrays to `arrays` by name.

    Raises:
        AgentError: A key is not a string without a dot, or a value is not an array of numbers.
    """
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str) or not key or "." in key:
                raise AgentError(
                    f"{name}: the agent's output has the key {key!r}; keys become array names, so they must be "
                    "non-empty strings without a dot. Rename it."
                )
        return {key: value_structure(sub, f"{name}.{key}", arrays) for key, sub in value.items()}
    if isinstance(value, (tuple, list)):
        return tuple(value_structure(sub, f"{name}.{i}", arrays) for i, sub in enumerate(value))
    array = np.asarray(value)
    if array.dtype.kind not in "biufc":
        got = type(array.flat[0]).__name__ if array.dtype.hasobject and array.size else array.dtype
        raise AgentError(f"{name}: the agent returned {got}; arrays of numbers are expected, e.g. of float32 or int64.")
    arrays[name] = array
    return name


def first_misfit(array: Array, dtype: np.dtype[Any]) -> tuple[int, ...] | None:
    """Return the index of the first number that `dtype` cannot represent, or None.

    Integers must keep their value and finite numbers must stay finite; floats may be rounded.
    """
    with np.errstate(all="ignore"):
        source = array if dtype.kind == "c" else array.real
        cast = source.astype(dtype)
        if dtype.kind in "biu":
            wrong = (cast.astype(source.dtype) != source) | ((cast < 0) != (source < 0))
        else:
            wrong = np.isinf(cast) & ~np.isinf(source)
    if source is not array:
        wrong |= array.imag != 0
    return tuple(map(int, np.argwhere(wrong)[0])) if wrong.any() else None


def map_leaves(function: Callable[[Any], Any], value: Nested) -> Nested:
    """Return the same nesting with `function(leaf)` for each leaf; mappings become dicts."""
    if isinstance(value, (list, tuple)):
        items = [map_leaves(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Mapping):
        return {key: map_leaves(function, item) for key, item in value.items()}
    return function(value)


def flat(value: Nested) -> Iterator[Any]:
    """Yield the leaves of nested lists, tuples and mappings, in order."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from flat(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from flat(item)
    else:
        yield value


def nest(structure: Structure, arrays: Mapping[str, Any]) -> Nested:
    """Build nested arrays from named ones. Runs in every step, so it does not use the slower `map_leaves`."""
    if isinstance(structure, str):
        return arrays[structure]
    if isinstance(structure, dict):
        return {key: nest(sub, arrays) for key, sub in structure.items()}
    return tuple(nest(sub, arrays) for sub in structure)


def leaves(structure: Structure, value: Nested) -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of each array of a nested value."""
    if isinstance(structure, str):
        yield structure, value
    elif isinstance(structure, dict):
        for key, sub in structure.items():
            yield from leaves(sub, value[key])
    else:
        for sub, entry in zip(structure, value, strict=True):
            yield from leaves(sub, entry)


def leaf_names(structure: Structure) -> list[str]:
    """Return the names of a structure's arrays, in order."""
    return list(flat(structure))


def plain_structure(structure: Structure) -> Any:
    """Return a structure as plain data for JSON and msgpack: tuples become lists."""
    if isinstance(structure, dict):
        return {key: plain_structure(sub) for key, sub in structure.items()}
    return [plain_structure(sub) for sub in structure] if isinstance(structure, tuple) else structure


def structure_of(plain: Any) -> Structure:
    """Return the structure that `plain_structure` encoded."""
    if isinstance(plain, dict):
        return {str(key): structure_of(sub) for key, sub in plain.items()}
    return tuple(structure_of(sub) for sub in plain) if isinstance(plain, (list, tuple)) else str(plain)


def differences(mine: Mapping[str, ArraySpec], theirs: Mapping[str, ArraySpec]) -> list[str]:
    """Return one clause per array in which two schemas differ; empty if they are equal."""
    found = []
    for name in sorted(mine.keys() | theirs.keys()):
        a, b = mine.get(name), theirs.get(name)
        if a != b:
            found.append(f"{name} is {a or 'absent'} here and {b or 'absent'} there")
    return found
