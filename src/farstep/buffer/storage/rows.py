"""Checks and converts the input of a buffer (rows, batches, keys, priorities), and nests its output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from farstep.batch import Batch, is_final
from farstep.core import Array, Nested
from farstep.errors import ConfigError, unknown_name
from farstep.schema import ArraySpec, Schema, Structure, first_misfit, leaf_names, leaves, nest


def as_spec(name: object, value: object) -> ArraySpec:
    """Return shape and dtype of an array's rows. `value` is `(shape, dtype)`, an `ArraySpec` or an example row."""
    if isinstance(value, ArraySpec):
        return value
    try:
        if isinstance(value, tuple) and len(value) == 2:
            shape, dtype = value
            return ArraySpec(tuple(shape) if not isinstance(shape, int) else (shape,), np.dtype(dtype).str)
        example = np.asarray(value)
        return ArraySpec(example.shape, example.dtype.str)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"spec[{name!r}] is {value!r}; expected (shape, dtype) or an example row: {error}.") from None


def as_schema(spec: object) -> Schema:
    """Return the schema that the `spec` of a buffer describes."""
    if not isinstance(spec, Mapping):
        raise ConfigError(
            f"spec is {spec!r}; expected a mapping of names to (shape, dtype) or example rows, e.g. "
            '{"obs": ((4,), "float32"), "reward": ((), "float32")}.'
        )
    return {str(name): as_spec(name, value) for name, value in spec.items()}


def as_arrays(rows: object) -> dict[str, Array]:
    """Convert rows to arrays of equal length."""
    if not isinstance(rows, Mapping) or not rows:
        raise ConfigError(f"insert got {type(rows).__name__}; expected a mapping of arrays [n, ...], or a Batch.")
    for name, value in rows.items():
        if isinstance(value, Mapping):
            named = ", ".join(f"{name}.{key}" for key in value) or "none"
            raise ConfigError(
                f"insert got {name!r} as a mapping; expected one array per entry, named by its path: {named}."
            )
    try:
        values = {str(name): np.asarray(value) for name, value in rows.items()}
    except ValueError as error:  # lists of different lengths
        raise ConfigError(f"insert got a value that cannot be converted to an array: {error}.") from None
    lengths = {name: value.shape[0] if value.ndim else None for name, value in values.items()}
    if len(set(lengths.values())) > 1 or None in lengths.values():
        raise ConfigError(f"insert got arrays of different lengths: {lengths}. Each needs one entry per row.")
    return values


def count_plain(rows: object, kinds: Sequence[tuple[str, np.dtype[Any], tuple[int, ...]]]) -> int:
    """Return the number of rows if all arrays have exactly these dtypes and shapes; -1 if conversion is needed."""
    if type(rows) is not dict or len(rows) != len(kinds):
        return -1
    count = -1
    for name, dtype, shape in kinds:
        value = rows.get(name)
        if type(value) is not np.ndarray or (value.dtype is not dtype and value.dtype != dtype):
            return -1
        got = value.shape
        if not got or got[1:] != shape or (got[0] != count and count >= 0):
            return -1
        count = got[0]
    return count


def schema_of(values: Mapping[str, Array], leading: int = 1) -> Schema:
    """Return the schema of arrays, without their leading axes."""
    schema = {}
    for name, value in values.items():
        try:
            schema[name] = ArraySpec(value.shape[leading:], value.dtype.str)
        except ValueError as error:
            raise ConfigError(f"insert got {name!r}, but {error}.") from None
    return schema


def check_rows(values: Mapping[str, Array], schema: Schema, leading: int = 1, slots: Sequence[int] = ()) -> None:
    """Raise `ConfigError` if a buffer with this schema cannot hold these rows.

    Args:
        values: Arrays `[rows, ...]`, or `[rows, slots, ...]` with `leading=2`.
        schema: The arrays of the buffer.
        leading: Number of leading axes that do not belong to a row.
        slots: With `leading=2`, the environment slots, for error messages.
    """
    for name, spec in schema.items():
        if name not in values:
            raise ConfigError(f"insert got no {name!r}; expected {', '.join(schema)} in every row.")
        got = values[name]
        if got.shape[leading:] != spec.shape or not _converts(got.dtype, np.dtype(spec.dtype)):
            what = f"{got.dtype}{list(got.shape[leading:])}"
            raise ConfigError(
                f"insert got {name!r} as {what}; this buffer holds {spec}. Convert it with .astype() or .reshape()."
            )
        if got.dtype != spec.dtype and (place := first_misfit(got, np.dtype(spec.dtype))) is not None:
            where = f"row {place[0]}" if leading == 1 else f"row {place[0]} of slot {slots[place[1]]}"
            raise ConfigError(
                f"insert got {got[place]} in {name!r}, {where}; this buffer holds {spec}, which cannot represent this "
                "number. Give the buffer a wider dtype (spec), or clip the values."
            )


def _converts(given: np.dtype[Any], held: np.dtype[Any]) -> bool:
    """Return whether values may be converted: within the same kind, or between signed and unsigned integers."""
    return np.can_cast(given, held, "same_kind") or (given.kind in "iu" and held.kind in "iu")


def check_names(values: Mapping[str, Array], schema: Schema) -> None:
    for name in values:
        if name not in schema:
            raise ConfigError(unknown_name("array", name, schema))


def arrays_of(batch: Batch, with_next: bool) -> dict[str, Array]:
    """Return the arrays `[T, N, ...]` of a batch, optionally with the next observation of every row."""
    values = {name: array for name, array in batch.arrays.items() if not is_final(name)}
    return values | _observed_after(batch) if with_next else values


def _observed_after(batch: Batch) -> dict[str, Array]:
    """Return the next observation of every row of a batch, as arrays `next_obs` `[T, N, ...]`."""
    structure, final = batch.structures["obs"], batch.final_obs
    last, ends = dict(leaves(structure, batch.last_obs)), dict(leaves(structure, final.obs))
    after = {}
    for name, observed in last.items():
        after["next_" + name] = following = np.concatenate([batch.arrays[name][1:], observed[None]])
        following[final.row, final.slot] = ends[name]
    return after


def as_keys(keys: object) -> Array:
    """Convert keys of items to an array."""
    array = np.atleast_1d(np.asarray(keys))
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ConfigError(f"keys are {array.dtype}{list(array.shape)}; expected integers, as `insert` returned them.")
    return array.astype(np.int64)


def as_priorities(priorities: object, keys: Array) -> Array:
    """Convert priorities to an array with one finite value of at least 0 per key."""
    try:
        values = np.atleast_1d(np.asarray(priorities, np.float64))
    except (TypeError, ValueError):
        raise ConfigError(f"priorities are {priorities!r}; expected numbers.") from None
    if keys.shape != values.shape:
        raise ConfigError(f"{keys.shape} keys and {values.shape} priorities; one priority per key is expected.")
    if values.size and not (values.min() >= 0 and values.max() < np.inf):  # also true for NaN
        bad = int(np.flatnonzero(~np.isfinite(values) | (values < 0))[0])
        raise ConfigError(f"priority of key {keys[bad]} is {values[bad]}; expected a finite number of at least 0.")
    return values


def nested(batch: dict[str, Array], structures: Mapping[str, Structure]) -> dict[str, Nested]:
    """Add observations and actions, nested as in the environment, to the flat arrays of a batch."""
    found: dict[str, Nested] = dict(batch)
    for name, structure in structures.items():
        if not isinstance(structure, str):
            found[name] = nest(structure, batch)
            after = {n: batch["next_" + n] for n in leaf_names(structure) if "next_" + n in batch}
            if after:
                found["next_" + name] = nest(structure, after)
    return found
