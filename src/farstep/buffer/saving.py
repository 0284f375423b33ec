"""A buffer as arrays and plain data, and back: its contents, its options, its limiter and what it counts."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from farstep.buffer import samplers
from farstep.buffer.limiter import RateLimiter
from farstep.buffer.samplers import Sampler, check_sampler
from farstep.buffer.storage.contents import cells_of
from farstep.checkpoint.checks import Count, check_array, check_keys, converted, require
from farstep.checkpoint.files import Refused
from farstep.checkpoint.folder import Loaded, load_with, save
from farstep.core import Array
from farstep.errors import ConfigError, unknown_name
from farstep.schema import ArraySpec, Schema, Structure, leaf_names, plain_structure, structure_of

if TYPE_CHECKING:
    from farstep.buffer.replay import Buffer

_FORMAT = 1


class _Limiter(msgspec.Struct, forbid_unknown_fields=True):
    samples_per_insert: float
    min_size: Count
    min_diff: float
    max_diff: float
    inserts: Count
    samples: Count
    deletes: Count


class _Removed(msgspec.Struct, forbid_unknown_fields=True):
    evicted: Count
    sampled: Count
    deleted: Count


class _Meta(msgspec.Struct, forbid_unknown_fields=True):
    """The plain data of a checkpoint, as `save_buffer` writes it."""

    format: int
    capacity: Count
    max_times_sampled: Count
    sampler: dict[str, Any]
    remover: dict[str, Any]
    limiter: _Limiter
    schema: dict[str, ArraySpec]
    structures: dict[str, Any]
    columns: Count
    removed: _Removed
    rng: dict[str, Any]
    free: list[int]


def save_buffer(buffer: Buffer, path: str | os.PathLike[str]) -> Path:
    """Everything there is of a buffer that nobody changes meanwhile."""
    store = buffer.store
    arrays, plain = buffer.contents.state()
    meta = {
        "format": _FORMAT,
        "capacity": buffer.capacity,
        "max_times_sampled": buffer.max_times_sampled,
        "sampler": _described(buffer.sampler),
        "remover": _described(buffer.remover),
        "limiter": dataclasses.asdict(buffer.limiter),
        "schema": {name: [list(spec.shape), spec.dtype] for name, spec in store.schema.items()},
        "structures": {name: plain_structure(structure) for name, structure in buffer.structures.items()},
        "columns": store.columns,
        "removed": buffer.removed,
        **plain,
    }
    return save(path, arrays, meta)


def load_buffer(path: str | os.PathLike[str], sampler: Sampler | None) -> Buffer:
    """A new buffer, as the newest checkpoint under `path` that can be used describes it."""
    if sampler is not None:
        check_sampler("sampler", sampler)
    return load_with(path, lambda loaded: _restored(loaded, sampler))


def _restored(loaded: Loaded, sampler: Sampler | None) -> Buffer:
    """The buffer of one checkpoint; if anything in it is wrong, `Refused` and no buffer."""
    from farstep.buffer.replay import Buffer

    if (version := loaded.meta.get("format")) != _FORMAT:
        raise Refused(f"it has format {version!r}; this farstep reads {_FORMAT}")
    meta = converted("meta.json", loaded.meta, _Meta)
    try:
        structures = {name: _structure(name, plain, meta.schema) for name, plain in meta.structures.items()}
        buffer = Buffer(
            meta.capacity,
            sampler if sampler is not None else _sampler("sampler", meta.sampler),
            remover=_sampler("remover", meta.remover),
            limiter=RateLimiter(**msgspec.structs.asdict(meta.limiter)),
            max_times_sampled=meta.max_times_sampled,
        )
        _check_sizes(buffer, meta, loaded.arrays)
        buffer.bind(meta.schema, meta.columns, structures)
    except ConfigError as error:
        raise Refused(str(error)) from error
    except RecursionError as error:
        raise Refused("meta.json is nested too deeply") from error
    try:
        buffer.contents.restore(loaded.arrays, {"rng": meta.rng, "free": meta.free})
        buffer.removed.update(msgspec.structs.asdict(meta.removed))
        _check_counts(buffer)
    except BaseException:
        buffer.close()
        raise
    return buffer


def _check_sizes(buffer: Buffer, meta: _Meta, arrays: Mapping[str, Array]) -> None:
    """Refuse metadata that would have more memory allocated than the arrays of the checkpoint say."""
    columns, capacity = meta.columns, meta.capacity
    require(columns and capacity % columns == 0, f"capacity is {capacity}, a multiple of columns={columns} expected")
    cells = cells_of(capacity, columns, buffer.is_cyclic)
    keys = arrays.get("table/keys")
    require(keys is not None and keys.ndim == 1, "table/keys is missing, or not one per cell")
    assert keys is not None
    if len(keys) != cells:
        raise Refused(
            f"table/keys has {len(keys)} cells, {cells} expected. An earlier farstep kept rows of {buffer.sampler!r} "
            f"with max_times_sampled={buffer.max_times_sampled} in a ring; if that saved it, fill a new buffer"
        )
    for name, spec in meta.schema.items():
        rows = arrays.get(f"rows/{name}")
        require(rows is not None, f"the checkpoint lacks rows/{name}")
        assert rows is not None
        check_array(f"rows/{name}", rows, (*rows.shape[:1], columns, *spec.shape), spec.dtype)


def _check_counts(buffer: Buffer) -> None:
    """Refuse counters that do not belong to these items."""
    limiter, table, most = buffer.limiter, buffer.store.table, buffer.max_times_sampled
    require(limiter.size == len(buffer), f"the limiter counts {limiter.size} items, {len(buffer)} expected")
    removed = sum(buffer.removed.values())
    require(removed == limiter.deletes, f"the limiter counts {limiter.deletes} deletes, {removed} expected")
    worn = most and (table.times[table.keys >= 0] >= most).any()
    require(not worn, f"table/times has an item that was sampled max_times_sampled={most} times, but not removed")


def _structure(name: str, plain: object, schema: Schema) -> Structure:
    """A structure from plain data, if it is that of the arrays of this name."""
    structure = structure_of(plain)
    is_leaf = isinstance(structure, str)
    expected = [name] if is_leaf else sorted(array for array in schema if array.startswith(f"{name}."))
    found = sorted(leaf_names(structure))
    require(found == expected, f"structures: {name} has the arrays {found}, {expected} expected")
    return structure


def _described(sampler: Sampler) -> dict[str, Any]:
    if not dataclasses.is_dataclass(sampler):
        return {"kind": type(sampler).__name__}
    fields = {field.name: getattr(sampler, field.name) for field in dataclasses.fields(sampler)}
    plain = {name: _described(value) if isinstance(value, Sampler) else value for name, value in fields.items()}
    return {"kind": type(sampler).__name__, **plain}


def _sampler(where: str, said: object) -> Sampler:
    known: dict[str, type[Sampler]] = {
        name: kind
        for name, kind in vars(samplers).items()
        if isinstance(kind, type) and issubclass(kind, Sampler) and dataclasses.is_dataclass(kind) and name[0] != "_"
    }
    options = converted(where, said, dict[str, object])
    name = converted(f"{where}.kind", options.pop("kind", None), str)
    if (kind := known.get(name)) is None:
        raise Refused(f"{unknown_name('sampler', name, known)} For one of your own: Buffer.restore(path, sampler=...)")
    fields = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]  # known are dataclasses
    check_keys(where, options, fields)
    return converted(where, options, kind, lambda _, value: _sampler(f"{where}.by", value))
