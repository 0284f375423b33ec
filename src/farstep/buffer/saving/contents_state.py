"""Describes the contents of a buffer for a checkpoint, and restores them; `snapshot.py` copies rows and tails."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from farstep.buffer.saving.store_state import check_free, restore_store
from farstep.buffer.storage.contents import Contents
from farstep.buffer.storage.free_cells import FreeCells
from farstep.checkpoint.checks import check_array, check_keys, check_like, check_numpy_generator, prefixed, require
from farstep.checkpoint.files import Refused
from farstep.core import Array


def contents_state(contents: Contents) -> tuple[dict[str, Array], dict[str, Any]]:
    """Return the contents for a checkpoint, without rows and tails, as arrays and plain data."""
    parts: dict[str, Mapping[str, Array]] = {
        "table": contents.store.table.state(),
        "store": contents.store.state(),
        **{f"selector{place}": selector.state() for place, selector in enumerate(contents.selectors())},
    }
    arrays = {f"{part}/{name}": array for part, held in parts.items() for name, array in held.items()}
    arrays["begun"], arrays["slots"] = contents.episodes.begun, contents.slots
    return arrays, {"rng": contents.rng.bit_generator.state, "free": contents.free.cells.tolist()}


def restore_contents(contents: Contents, arrays: Mapping[str, Array], plain: Mapping[str, Any]) -> None:
    """Restore a state from a `Snapshot` into empty contents.

    Raises:
        Refused: The state is inconsistent. The caller must discard these contents.
    """
    store, table = contents.store, contents.store.table
    if contents.is_cyclic and "store/after" in arrays and not contents.is_linked:
        contents.link()
    selectors = contents.selectors()
    parts: dict[str, dict[str, Array]] = {"rows": {}, "cells": {}, "table": {}, "store": {}, "": {}}
    parts |= {f"selector{place}": {} for place in range(len(selectors))}
    copies = sum(name.startswith("cells/") for name in arrays)
    parts |= {f"rows{number}": {} for number in range(1, copies + 1)}
    for name, array in arrays.items():
        part, rest = name.split("/", 1) if "/" in name else ("", name)
        require(part in parts, f"the checkpoint has an unknown array {name!r}")
        parts[part][rest] = array

    with prefixed("table"):
        table.restore(parts["table"])
    _restore_rows(contents, parts, copies)
    with prefixed("store"):
        restore_store(store, parts["store"])
        filled = np.minimum(store.blocks.written[0], store.rows)
        is_ring = contents.is_cyclic and not contents.is_linked
        require((filled == (table.used if is_ring else 0)).all(), "written and table/used do not agree")
    for place, selector in enumerate(selectors):
        with prefixed(f"selector{place}"):
            try:
                selector.restore(parts[f"selector{place}"])
            except Refused:
                raise
            except Exception as error:  # a user's own selector may raise anything
                raise Refused(f"{type(selector).__name__} raised {type(error).__name__}: {error}") from error
    _restore_columns(contents, parts[""])
    _restore_free(contents, plain["free"])
    require(table.size <= contents.capacity, f"there are {table.size} items, at most {contents.capacity} expected")
    check_numpy_generator("rng", plain["rng"])
    contents.rng.bit_generator.state = plain["rng"]


def _restore_free(contents: Contents, free: list[int]) -> None:
    store, expected = contents.store, np.zeros(0, np.int64)
    if store.links is not None:
        expected = store.links.unneeded(contents.span)
    elif not contents.is_cyclic:
        expected = np.flatnonzero(store.table.keys < 0)
    require(sorted(free) == expected.tolist(), "free does not name every free cell exactly once")
    contents.free = FreeCells(store.table.cells)
    contents.free.push(np.array(free[::-1], np.int64))
    if store.links is not None:
        with prefixed("store"):
            check_free(store, contents.free.is_free)


def _restore_rows(contents: Contents, parts: Mapping[str, Mapping[str, Array]], copies: int) -> None:
    """Restore the rows as they were first copied, then those that changed meanwhile (see `snapshot.py`)."""
    store, table = contents.store, contents.store.table
    with prefixed("rows"):
        check_keys("the checkpoint", parts["rows"], store.blocks.schema)
        count = len(parts["rows"][next(iter(store.blocks.schema))])
        require(count <= table.used.max(), f"there are {count} rows, at most {table.used.max()} expected")
        for name, spec in store.blocks.schema.items():
            check_array(name, parts["rows"][name], (count, store.columns, *spec.shape), spec.dtype)
            store.blocks.arrays[name][:count] = parts["rows"][name]
    is_restored = np.arange(table.cells) < count * store.columns
    check_keys("cells", parts["cells"], [str(number) for number in range(1, copies + 1)])
    for number in range(1, copies + 1):
        cells, rows = parts["cells"][str(number)], parts[f"rows{number}"]
        check_array(f"cells/{number}", cells, cells.shape[:1], np.int64)
        is_cell = ((cells >= 0) & (cells < table.cells)).all() and (np.diff(cells) > 0).all()
        require(is_cell, f"cells/{number} names a cell that does not exist, or a cell twice")
        with prefixed(f"rows{number}"):
            check_keys("the checkpoint", rows, store.blocks.schema)
            for name, spec in store.blocks.schema.items():
                check_array(name, rows[name], (len(cells), *spec.shape), spec.dtype)
                store.flat[name][cells] = rows[name]
        is_restored[cells] = True
    require(is_restored[table.is_used].all(), "rows are missing")


def _restore_columns(contents: Contents, state: Mapping[str, Array]) -> None:
    check_like(state, {"begun": contents.episodes.begun, "slots": contents.slots})
    begun, slots, columns = state["begun"], state["slots"], np.arange(contents.store.num_slots)
    is_key = contents.store.table.was_issued(begun) & (contents.is_linked | (begun % contents.store.columns == columns))
    require((is_key | (begun == -1)).all(), "begun has a key that no row of its column ever had")
    is_slot = (slots >= 0) & (slots <= 2**62) & (slots % contents.store.num_slots == columns)
    require((is_slot | (slots == -1)).all(), "slots has an environment slot of another column")
    contents.episodes.begun[:], contents.slots[:] = begun, slots
