"""A buffer as arrays and plain data, and back: its contents, its options, its limiter and what it counts."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from farstep.buffer import samplers
from farstep.buffer.checkpoint import Loaded, load, save
from farstep.buffer.limiter import RateLimiter
from farstep.buffer.samplers import Sampler
from farstep.errors import CheckpointError, unknown_name
from farstep.spec import ArraySpec, plain_structure, structure_of

if TYPE_CHECKING:
    from farstep.buffer.replay import Buffer

_FORMAT = 1


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
    from farstep.buffer.replay import Buffer

    loaded = load(path)
    meta = cast(dict[str, Any], loaded.meta)
    if meta.get("format") != _FORMAT:
        raise CheckpointError(f"{loaded.folder} has format {meta.get('format')!r}; this farstep reads {_FORMAT}.")
    buffer = Buffer(
        meta["capacity"],
        sampler if sampler is not None else _sampler(meta["sampler"], loaded),
        remover=_sampler(meta["remover"], loaded),
        limiter=RateLimiter(**meta["limiter"]),
        max_times_sampled=meta["max_times_sampled"],
    )
    schema = {name: ArraySpec(tuple(shape), dtype) for name, (shape, dtype) in meta["schema"].items()}
    buffer.bind(schema, meta["columns"], {name: structure_of(value) for name, value in meta["structures"].items()})
    if len(loaded.arrays["table/keys"]) != (cells := buffer.store.table.cells):
        buffer.close()
        raise CheckpointError(
            f"{loaded.folder} is of an earlier farstep, which kept rows of {buffer.sampler!r} with max_times_sampled="
            f"{buffer.max_times_sampled} in a ring ({len(loaded.arrays['table/keys'])} cells, now {cells}); fill a new "
            "buffer."
        )
    buffer.contents.restore(loaded.arrays, meta)
    buffer.removed.update(meta["removed"])
    return buffer


def _described(sampler: Sampler) -> dict[str, Any]:
    if not dataclasses.is_dataclass(sampler):
        return {"kind": type(sampler).__name__}
    fields = {field.name: getattr(sampler, field.name) for field in dataclasses.fields(sampler)}
    plain = {name: _described(value) if isinstance(value, Sampler) else value for name, value in fields.items()}
    return {"kind": type(sampler).__name__, **plain}


def _sampler(said: Mapping[str, Any], loaded: Loaded) -> Sampler:
    known: dict[str, type[Sampler]] = {
        name: kind
        for name, kind in vars(samplers).items()
        if isinstance(kind, type) and issubclass(kind, Sampler) and dataclasses.is_dataclass(kind) and name[0] != "_"
    }
    options = {name: _sampler(value, loaded) if isinstance(value, dict) else value for name, value in said.items()}
    kind = known.get(str(options.pop("kind")))
    if kind is None:
        raise CheckpointError(
            f"{loaded.folder}: {unknown_name('sampler', str(said['kind']), known)} For one of your own: "
            "Buffer.restore(path, sampler=...)."
        )
    return kind(**options)
