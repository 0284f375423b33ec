"""Restores a store from a checkpoint, and refuses a state that no sequence of insertions can produce."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from farstep.buffer.storage.store import Store
from farstep.checkpoint.checks import check_like, require
from farstep.core import Array

_MEANING = {"tails": "a tail", "older": "older frames"}


def restore_store(store: Store, state: Mapping[str, Array]) -> None:
    """Apply a state to a store whose rows are already restored."""
    _check(store, state)
    if store.links is not None:
        store.flat_cut[:] = state["cut"].reshape(-1)
        store.links.restore(state["after"])
    store.cut[:], store.is_open[:], store.newest[:] = state["cut"], state["open"], state["newest"]
    store.blocks.written[:] = state["written"]
    store.blocks.claimed[:] = store.blocks.committed()
    for name, sparse in store.sparse.items():
        sparse.restore(name, state)
    if store.links is None:
        _check_frames(store, store.table.is_used)


def _check(store: Store, state: Mapping[str, Array]) -> None:
    """Refuse a state that does not fit these rows, or that no sequence of insertions can produce."""
    expected = store.state()
    for name, sparse in store.sparse.items():
        expected |= sparse.empty_state(name)
    check_like(state, expected)
    cut, written = state["cut"], state["written"][0]
    require((state["written"] == written).all(), "written differs between arrays of the same rows")
    require(((written >= 0) & (written <= 2**62)).all(), "written is not a number of rows")
    for name, sparse in store.sparse.items():
        cells = state[name]
        is_cell = ((cells >= 0) & (cells < store.table.cells)).all() and (np.diff(cells) > 0).all()
        may_have = is_cell and (name != "tails" or cut.reshape(-1)[cells].all())
        require(may_have, f"{name} names a row that cannot have {_MEANING[name.split('.')[0]]}")
        is_complete = all(len(state[f"{name}.{array}"]) == len(cells) for array in sparse.schema)
        require(is_complete, f"{name} differ in length")
    if store.links is None:
        _check_ring(store, state, written)
    else:
        require(not written.any(), "written counts rows, but the rows are linked")


def _check_ring(store: Store, state: Mapping[str, Array], written: Array) -> None:
    columns = np.flatnonzero(written)
    newest = np.full(store.columns, -1)
    newest[columns] = (written[columns] - 1) % store.rows * store.columns + columns
    require((state["newest"] == newest).all(), "newest is not the last written row")
    cut, is_used = state["cut"], np.arange(store.rows)[:, None] < written
    ended, starts = _ends_and_starts(store)
    must = ~is_used | (ended & is_used) | np.roll(starts & is_used, -1, axis=0)
    must.reshape(-1)[newest[columns]] = True
    require((cut | ~must).all(), "cut lets a row follow the last one of its episode or column")
    _check_open(store, state, ended)
    if store.tails is not None:
        require(is_used.reshape(-1)[state["tails"]].all(), "tails names a row that cannot have a tail")


def _check_frames(store: Store, is_row: Array) -> None:
    """Refuse older frames of a cell without a row, and a row that has neither older frames nor a previous row."""
    if store.frames is None:
        return
    before = store.preceding(cells := np.arange(store.table.cells))
    has_previous = ~store.flat_cut[before] if store.links is None else before != cells
    for name, older in store.frames.older.items():
        require(is_row[older.cells].all(), f"older.{name} names a row that cannot have older frames")
        is_whole = has_previous | (older.places(cells) >= 0)
        require(is_whole[is_row].all(), f"older.{name} lacks the older frames of a row without a previous row")


def _ends_and_starts(store: Store) -> tuple[Array, Array]:
    """Return for each cell whether its row is the last row, and whether it is the first row, of an episode."""
    ended, starts = np.zeros_like(store.cut), np.zeros_like(store.cut)
    ended[...] = store.ended_in(slice(None), slice(None))
    if "episode_start" in store.schema:
        starts[...] = store.blocks.arrays["episode_start"].astype(bool)
    return ended, starts


def _check_open(store: Store, state: Mapping[str, Array], ended: Array) -> None:
    newest = state["newest"]
    is_open = (newest >= 0) & ~ended.reshape(-1)[newest]
    require((state["open"] == is_open).all(), "open does not match the episodes that are still running")


def check_free(store: Store, is_free: Array) -> None:
    """Raise `Refused` if a restored linked store does not agree with the free cells."""
    assert store.links is not None
    state, (ended, starts) = store.state(), _ends_and_starts(store)
    newest = state["newest"]
    is_cell = ((newest >= -1) & (newest < store.table.cells)).all()
    held = newest[newest >= 0]
    is_last = is_cell and (store.flat_cut & ~is_free)[held].all() and len(np.unique(held)) == len(held)
    require(is_last, "newest is not the last row of an environment")
    _check_open(store, state, ended)
    linked = np.flatnonzero(~store.flat_cut)
    after = store.links.after[linked]
    require(not (is_free[linked] | is_free[after]).any(), "after names a cell that is free")
    is_end = ended.reshape(-1)[linked] | starts.reshape(-1)[after]
    require(not is_end.any(), "after lets a row follow the last one of its episode")
    if store.tails is not None:
        require(not is_free[store.tails.cells].any(), "tails names a row that cannot have a tail")
    _check_frames(store, ~is_free)
