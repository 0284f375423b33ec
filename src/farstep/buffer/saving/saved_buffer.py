"""Saves and loads checkpoints of a buffer: rows, options, limiter and counters, as arrays and plain data."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from farstep.buffer import samplers
from farstep.buffer.limiter import RateLimiter
from farstep.buffer.options import BufferOptions, make_options
from farstep.buffer.samplers import Sampler, check_sampler
from farstep.buffer.saving.snapshot import Snapshot
from farstep.buffer.storage.capacity import cells_of
from farstep.buffer.storage.frames import FrameStack
from farstep.buffer.storage.store import Store
from farstep.buffer.storage.table import Table
from farstep.checkpoint.checks import Count, check_array, check_keys, converted, require
from farstep.checkpoint.files import Refused
from farstep.checkpoint.folder import Loaded, load_with, save_parts
from farstep.core import Array
from farstep.errors import ConfigError, unknown_name
from farstep.schema import ArraySpec, Schema, Structure, leaf_names, plain_structure, structure_of

T = TypeVar("T")

_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class SavedBuffer:
    """The contents of a buffer's checkpoint."""

    options: BufferOptions
    schema: Schema
    structures: Mapping[str, Structure]
    columns: int
    """Number of environment slots."""
    removed: Mapping[str, int]
    marker: Mapping[str, object]
    arrays: Mapping[str, Array]
    """The arrays of `Snapshot`."""
    plain: Mapping[str, Any]
    """The plain data of `contents_state`."""


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
    """The schema of `meta.json`, which `save_buffer` writes."""

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
    marker: dict[str, Any] = {}
    pooled: bool = False
    frame_stack: FrameStack | None = None


def save_buffer(snapshot: Snapshot, path: str | os.PathLike[str], keep: int) -> Path:
    """Write a new checkpoint under `path` and return its folder; keep the `keep` newest checkpoints."""
    with contextlib.closing(snapshot.arrays()) as arrays:
        return save_parts(path, arrays, lambda: snapshot.description, keep=keep)


def describe_buffer(
    options: BufferOptions,
    store: Store,
    structures: Mapping[str, Structure],
    removed: Mapping[str, int],
    marker: Mapping[str, object],
) -> dict[str, Any]:
    """Return the plain data of a checkpoint, except that of `contents_state`. The buffer may change it afterwards."""
    return {
        "format": _FORMAT,
        "capacity": options.capacity,
        "max_times_sampled": options.max_times_sampled,
        "sampler": _described(options.sampler),
        "remover": _described(options.remover),
        "limiter": dataclasses.asdict(options.limiter),
        "schema": {name: [list(spec.shape), spec.dtype] for name, spec in store.schema.items()},
        "structures": {name: plain_structure(structure) for name, structure in structures.items()},
        "columns": store.num_slots,
        "removed": dict(removed),
        **({"marker": dict(marker)} if marker else {}),
        **({"pooled": True} if options.is_pooled else {}),
        **({"frame_stack": dataclasses.asdict(options.frame_stack)} if options.frame_stack is not None else {}),
    }


def load_buffer(path: str | os.PathLike[str], sampler: Sampler | None, build: Callable[[SavedBuffer], T]) -> T:
    """Build a buffer from the newest usable checkpoint under `path`.

    Args:
        path: The folder that was saved to.
        sampler: Replaces the saved sampler; None: use the saved sampler.
        build: Makes the buffer. If it raises `Refused`, it is called again with the next older checkpoint.

    Returns:
        The buffer.

    Raises:
        CheckpointError: No checkpoint can be used.
    """
    if sampler is not None:
        check_sampler("sampler", sampler)
    return load_with(path, lambda loaded: build(_saved_buffer(loaded, sampler)), mmap=True)


def _saved_buffer(loaded: Loaded, sampler: Sampler | None) -> SavedBuffer:
    if (version := loaded.meta.get("format")) != _FORMAT:
        raise Refused(f"it has format {version!r}; this farstep reads {_FORMAT}")
    meta = converted("meta.json", loaded.meta, _Meta)
    with refusing_invalid_options():
        return SavedBuffer(
            structures={name: _structure(name, plain, meta.schema) for name, plain in meta.structures.items()},
            options=make_options(
                meta.capacity,
                sampler if sampler is not None else _sampler("sampler", meta.sampler),
                remover=_sampler("remover", meta.remover),
                limiter=RateLimiter(**msgspec.structs.asdict(meta.limiter)),
                max_bytes=None,
                max_times_sampled=meta.max_times_sampled,
                pooled=meta.pooled,
                frame_stack=meta.frame_stack,
            ),
            schema=meta.schema,
            columns=meta.columns,
            removed=msgspec.structs.asdict(meta.removed),
            marker=meta.marker,
            arrays=loaded.arrays,
            plain={"rng": meta.rng, "free": meta.free},
        )


@contextlib.contextmanager
def refusing_invalid_options() -> Iterator[None]:
    """Context manager: convert a `ConfigError` about the saved options to `Refused`."""
    try:
        yield
    except ConfigError as error:
        raise Refused(str(error)) from error
    except RecursionError as error:
        raise Refused("meta.json is nested too deeply") from error


def check_sizes(saved: SavedBuffer) -> None:
    """Refuse sizes that would allocate more memory than the arrays of the checkpoint need."""
    columns, options, arrays = saved.columns, saved.options, saved.arrays
    capacity = options.capacity
    if options.pooled:
        slots = arrays.get("slots")
        require(slots is not None and slots.shape == (columns,), f"slots does not have {columns} entries")
        columns = 1
    require(columns and capacity % columns == 0, f"capacity is {capacity}, a multiple of columns={columns} expected")
    cells = cells_of(capacity, columns, options.is_cyclic)
    keys = arrays.get("table/keys")
    require(keys is not None and keys.ndim == 1, "table/keys is missing, or does not have one entry per cell")
    assert keys is not None
    if len(keys) != cells:
        raise Refused(
            f"table/keys has {len(keys)} cells, {cells} expected. Earlier versions of farstep kept the rows of "
            f"{options.sampler!r} with max_times_sampled={options.max_times_sampled} in a ring; if one of them saved "
            "this checkpoint, fill a new buffer instead"
        )
    stored = saved.schema if options.frame_stack is None else options.frame_stack.stored(saved.schema)
    for name, spec in stored.items():
        rows = arrays.get(f"rows/{name}")
        require(rows is not None, f"the checkpoint lacks rows/{name}")
        assert rows is not None
        check_array(f"rows/{name}", rows, (*rows.shape[:1], columns, *spec.shape), spec.dtype)


def check_counts(saved: SavedBuffer, table: Table) -> None:
    """Refuse counters that disagree with the restored items."""
    limiter, most = saved.options.limiter, saved.options.max_times_sampled
    require(limiter.size == table.size, f"the limiter counts {limiter.size} items, {table.size} expected")
    removed = sum(saved.removed.values())
    require(removed == limiter.deletes, f"the limiter counts {limiter.deletes} deletes, {removed} expected")
    is_used_up = most and (table.times[table.keys >= 0] >= most).any()
    require(not is_used_up, f"table/times has an item that was sampled max_times_sampled={most} times, but not removed")


def _structure(name: str, plain: object, schema: Schema) -> Structure:
    """Restore a structure from plain data. Refuse it unless it names exactly the arrays of `name`."""
    structure = structure_of(plain)
    is_leaf = isinstance(structure, str)
    expected = [name] if is_leaf else sorted(array for array in schema if array.startswith(f"{name}."))
    found = sorted(leaf_names(structure))
    require(found == expected, f"structures: {name} has the arrays {found}, {expected} expected")
    return structure


def _described(sampler: Sampler) -> dict[str, Any]:
    """Return the sampler as plain data: its class name and its options."""
    if not dataclasses.is_dataclass(sampler):
        return {"kind": type(sampler).__name__}
    fields = {field.name: getattr(sampler, field.name) for field in dataclasses.fields(sampler)}
    plain = {name: _described(value) if isinstance(value, Sampler) else value for name, value in fields.items()}
    return {"kind": type(sampler).__name__, **plain}


def _sampler(where: str, plain: object) -> Sampler:
    """Return the sampler that `_described` encoded; `where` names it in an error message."""
    known: dict[str, type[Sampler]] = {
        name: kind
        for name, kind in vars(samplers).items()
        if isinstance(kind, type) and issubclass(kind, Sampler) and dataclasses.is_dataclass(kind) and name[0] != "_"
    }
    options = converted(where, plain, dict[str, object])
    name = converted(f"{where}.kind", options.pop("kind", None), str)
    if (kind := known.get(name)) is None:
        raise Refused(f"{unknown_name('sampler', name, known)} For your own class: Buffer.restore(path, sampler=...)")
    fields = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]  # known are dataclasses
    check_keys(where, options, fields)
    return converted(where, options, kind, lambda _, value: _sampler(f"{where}.by", value))
