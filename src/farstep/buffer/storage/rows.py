"""What comes into a buffer, checked before anything changes: rows by name, a batch of rollouts, keys, priorities; and
rows as they go out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from farstep.batch import Batch, is_final
from farstep.core import Array, Nested
from farstep.errors import ConfigError, unknown_name
from farstep.schema import ArraySpec, Schema, Structure, first_misfit, leaf_names, leaves, nest


def as_spec(name: object, value: object) -> ArraySpec:
    """What an array's rows are like: said by `(shape, dtype)`, an ArraySpec, or an example of one row."""
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
    """What arrays a `spec` names."""
    if not isinstance(spec, Mapping):
        raise ConfigError(
            f"spec is {spec!r}; expected a mapping of names to (shape, dtype) or example rows, e.g. "
            '{"obs": ((4,), "float32"), "reward": ((), "float32")}.'
        )
    return {str(name): as_spec(name, value) for name, value in spec.items()}


def as_arrays(rows: object) -> dict[str, Array]:
    """Rows as arrays of one length."""
    if not isinstance(rows, Mapping) or not rows:
        raise ConfigError(f"insert got {type(rows).__name__}; expected a mapping of arrays [n, ...], or a Batch.")
    for name, value in rows.items():
        if isinstance(value, Mapping):
            named = ", ".join(f"{name}.{key}" for key in value) or "none"
            raise ConfigError(
                f"insert got {name!r} as a mapping; expected an array for each of its parts, named by path: {named}."
            )
    try:
        values = {str(name): np.asarray(value) for name, value in rows.items()}
    except ValueError as error:  # lists of different lengths
        raise ConfigError(f"insert got something that is no array: {error}.") from None
    lengths = {name: value.shape[0] if value.ndim else None for name, value in values.items()}
    if len(set(lengths.values())) > 1 or None in lengths.values():
        raise ConfigError(f"insert got arrays of different lengths: {lengths}. Each needs one entry per row.")
    return values


def count_plain(rows: object, kinds: Sequence[tuple[str, np.dtype[Any], tuple[int, ...]]]) -> int:
    """How many rows, if they are arrays of exactly these dtypes and shapes; else -1, and somebody looks closer."""
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
    """Which arrays these are, without their leading axes."""
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
        schema: What the buffer holds.
        leading: Axes before those of a row.
        slots: With `leading=2`, the environment slots, for the error.
    """
    for name, spec in schema.items():
        if name not in values:
            raise ConfigError(f"insert got no {name!r}; every row has {', '.join(schema)}.")
        got = values[name]
        if got.shape[leading:] != spec.shape or not _converts(got.dtype, np.dtype(spec.dtype)):
            what = f"{got.dtype}{list(got.shape[leading:])}"
            raise ConfigError(
                f"insert got {name!r} as {what}; this buffer holds {spec}. Convert it with .astype() or .reshape()."
            )
        if got.dtype != spec.dtype and (place := first_misfit(got, np.dtype(spec.dtype))) is not None:
            where = f"row {place[0]}" if leading == 1 else f"row {place[0]} of slot {slots[place[1]]}"
            raise ConfigError(
                f"insert got {got[place]} in {name!r}, {where}; this buffer holds {spec}, which cannot hold this "
                "number. Give the buffer a wider dtype (spec), or clip the values."
            )


def _converts(given: np.dtype[Any], held: np.dtype[Any]) -> bool:
    """Whether numbers of one kind may stand for the other if they fit: signed and unsigned integers do."""
    return np.can_cast(given, held, "same_kind") or (given.kind in "iu" and held.kind in "iu")


def check_names(values: Mapping[str, Array], schema: Schema) -> None:
    for name in values:
        if name not in schema:
            raise ConfigError(unknown_name("array", name, schema))


def arrays_of(batch: Batch, with_next: bool) -> dict[str, Array]:
    """A batch's rows `[T, N, ...]`, if so said each with what it led to."""
    values = {name: array for name, array in batch.arrays.items() if not is_final(name)}
    return values | _observed_after(batch) if with_next else values


def _observed_after(batch: Batch) -> dict[str, Array]:
    """What every row of a batch led to, as `next_obs` arrays `[T, N, ...]`."""
    structure, final = batch.structures["obs"], batch.final_obs
    last, ends = dict(leaves(structure, batch.last_obs)), dict(leaves(structure, final.obs))
    after = {}
    for name, observed in last.items():
        after["next_" + name] = following = np.concatenate([batch.arrays[name][1:], observed[None]])
        following[final.row, final.slot] = ends[name]
    return after


def as_keys(keys: object) -> Array:
    """Names of items."""
    array = np.atleast_1d(np.asarray(keys))
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ConfigError(f"keys are {array.dtype}{list(array.shape)}; expected integers, as `insert` returned them.")
    return array.astype(np.int64)


def as_priorities(priorities: object, keys: Array) -> Array:
    """A priority for each of these keys."""
    try:
        values = np.atleast_1d(np.asarray(priorities, np.float64))
    except (TypeError, ValueError):
        raise ConfigError(f"priorities are {priorities!r}; expected numbers.") from None
    if keys.shape != values.shape:
        raise ConfigError(f"{keys.shape} keys and {values.shape} priorities; one priority per key is expected.")
    if values.size and not (values.min() >= 0 and values.max() < np.inf):  # nor is NaN
        bad = int(np.flatnonzero(~np.isfinite(values) | (values < 0))[0])
        raise ConfigError(f"priority {values[bad]} of key {keys[bad]}; priorities are finite and at least 0.")
    return values


def nested(batch: dict[str, Array], structures: Mapping[str, Structure]) -> dict[str, Nested]:
    """Sampled rows, with arrays that belong together also as an environment nests them."""
    found: dict[str, Nested] = dict(batch)
    for name, structure in structures.items():
        if not isinstance(structure, str):
            found[name] = nest(structure, batch)
            after = {n: batch["next_" + n] for n in leaf_names(structure) if "next_" + n in batch}
            if after:
                found["next_" + name] = nest(structure, after)
    return found
