"""Windows: returns the rows that a trigger names as a `Batch`, like `collect`.

Adjacent rows are views of the buffer; other rows are copies. This module also keeps the data of chunks that rows do not
have: ended episodes, recurrent states, and whether a chunk continues the previous chunk. One thread adds and forgets
chunks; any thread may request a batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass

import numpy as np

from farstep.batch import EPISODE_KEYS, Batch, FinalObs, joined
from farstep.buffer.bound_arrays import internals_of
from farstep.buffer.replay import Buffer
from farstep.buffer.storage.store import Store
from farstep.core import Array, Nested
from farstep.errors import FarstepError
from farstep.schema import leaf_names, leaves, map_leaves, nest


@dataclass(frozen=True)
class _Chunk:
    """The data of an actor's chunk with the rows `[start, stop)`, apart from these rows."""

    start: int
    stop: int
    place: int
    """Index of its first row in the blocks of the buffer; differs from `start` if other rows were inserted before."""
    ended: Array
    """The last row of each episode that ended."""
    episodes: dict[str, Array]
    continues: Array
    last: dict[str, Array]
    """The observations after the last row, from which the next actions are chosen. The buffer does not have them if an
    episode ended with the last row; it then stores the final observation."""
    state: Nested


@dataclass(frozen=True)
class _Window:
    """An actor's rows."""

    start: int
    place: int
    columns: slice
    chunks: list[_Chunk]

    def ended(self, size: int) -> tuple[Array, dict[str, Array]]:
        """Return the rows at which episodes ended, relative to the window's first row, and the records of these
        episodes."""
        rows = np.concatenate([chunk.ended for chunk in self.chunks]) - self.start
        here = (rows >= 0) & (rows < size)
        return rows[here], {k: np.concatenate([c.episodes[k] for c in self.chunks])[here] for k in EPISODE_KEYS}

    @property
    def continues(self) -> Array:
        first = self.chunks[0]
        return first.continues if first.start == self.start else np.ones(len(first.continues), bool)


class Windows:
    """The chunks of all actors of a workflow. An actor's rows are counted from 0 over all runs."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = internals_of(buffer)
        self._columns: dict[int, slice] = {}
        self._chunks: dict[int, deque[_Chunk]] = {}
        self._offsets: dict[int, int] = {}
        """For each actor, the offset from its row numbers to the rows of the blocks."""

    def add(self, actor: int, start: int, batch: Batch) -> None:
        """Add an actor's chunk that was just inserted into the buffer; `start` is its first row."""
        steps, width = batch.shape
        first = int(batch.slots[0])
        state = None if batch.initial_state is None else map_leaves(np.ndarray.copy, batch.initial_state)
        ended, episodes = start + batch.final_obs.row, dict(batch.episodes)
        last = {name: value.copy() for name, value in leaves(batch.structures["obs"], batch.last_obs)}
        with self._buffer.gate.lock:
            place = int(self._buffer.store.blocks.committed(slice(first, first + 1))[0]) - steps
            chunk = _Chunk(start, start + steps, place, ended, episodes, batch.continues, last, state)
            self._columns[actor], self._offsets[actor] = slice(first, first + width), place - start
            self._chunks.setdefault(actor, deque()).append(chunk)

    def forget(self, actor: int, upto: int) -> int:
        """Forget an actor's chunks before row `upto`. Return the number of forgotten chunks."""
        with self._buffer.gate.lock:
            chunks, before = self._chunks.get(actor, ()), len(self._chunks.get(actor, ()))
            while chunks and chunks[0].stop <= upto:
                chunks.popleft()
            return before - len(chunks)

    def read(self, consumer: int, upto: dict[int, int]) -> None:
        """Set the read cursors of a consumer (the first unread row of each actor), which other processes can see."""
        if not self._chunks:
            return
        with self._buffer.gate.lock:
            cursors = self._buffer.store.blocks.cursors
            for actor in upto.keys() & self._offsets.keys() if consumer < len(cursors) else ():
                cursors[consumer, self._columns[actor]] = upto[actor] + self._offsets[actor]

    def where(self, actor: int, start: int, size: int) -> tuple[tuple[int, int], int]:
        """Return an actor's environment slots as (first, end), and the first row of a window in the blocks."""
        with self._buffer.gate.lock:
            window = self._window(actor, start, size)
            return (window.columns.start, window.columns.stop), window.place

    def batch(
        self, actors: Sequence[int], starts: Sequence[int], size: int, gaps: Container[tuple[int, int]] = ()
    ) -> Batch:
        """Make a batch of windows, in the order of environment slots. Windows of one actor are in order of their rows.

        Args:
            actors: The actor of each window.
            starts: The first row of each window.
            size: Rows per window.
            gaps: (actor, first row) of each window whose preceding rows were dropped.

        Returns:
            The batch.

        Raises:
            FarstepError: Rows are no longer retained, or other rows were inserted into the buffer.
        """
        with self._buffer.gate.lock:  # prevents concurrent writes to the row after the window
            return self._batch(actors, starts, size, gaps)

    def _batch(
        self, actors: Sequence[int], starts: Sequence[int], size: int, gaps: Container[tuple[int, int]]
    ) -> Batch:
        store, structures = self._buffer.store, self._buffer.structures
        found = [(self._window(actor, start, size), actor) for actor, start in zip(actors, starts, strict=True)]
        found.sort(key=lambda each: (each[0].columns.start, each[0].start))
        windows = [window for window, _ in found]
        widths = [w.columns.stop - w.columns.start for w in windows]
        slots = np.concatenate([np.arange(w.columns.start, w.columns.stop) for w in windows])
        per_slot = np.repeat([w.place for w in windows], widths)

        ended = [window.ended(size) for window in windows]
        rows = np.concatenate([rows for rows, _ in ended])
        episodes = {key: np.concatenate([found[key] for _, found in ended]) for key in EPISODE_KEYS}
        firsts = np.cumsum([0, *widths[:-1]]) - [w.columns.start for w in windows]
        column = episodes["slot"] + np.repeat(firsts, [len(rows) for rows, _ in ended])
        names, ends = leaf_names(structures["obs"]), (per_slot[column] + rows) % store.rows * store.columns
        final = nest(structures["obs"], {n: store.observed_after(n, ends + episodes["slot"]) for n in names})
        last = {n: np.concatenate([_last(store, n, w, size) for w in windows]) for n in names}
        return Batch(
            {name: _rows(store, name, windows, size) for name in store.schema},
            structures,
            nest(structures["obs"], last),
            FinalObs(rows, column, final),
            episodes,
            slots,
            np.concatenate([window.continues & ((actor, window.start) not in gaps) for window, actor in found]),
            _states(windows),
        )

    def _window(self, actor: int, start: int, size: int) -> _Window:
        chunks = [c for c in self._chunks.get(actor, ()) if c.start < start + size and c.stop > start]
        rows = f"rows {start} to {start + size} of worker {actor}"
        if not chunks or chunks[0].start > start or chunks[-1].stop < start + size:
            raise FarstepError(
                f"{rows} are no longer retained: call batch() in the consumer of their message, before it returns."
            )
        columns, place = self._columns[actor], chunks[0].place + start - chunks[0].start
        if any(chunk.place - chunk.start != place - start for chunk in chunks):
            raise FarstepError(
                f"{rows} are not contiguous: other rows were inserted between them. Insert into the buffer of a "
                "workflow only through the workflow."
            )
        if place < self._buffer.store.blocks.oldest(columns.start):
            raise FarstepError(
                f"{rows} were overwritten by other rows. Insert into the buffer of a workflow only through the "
                "workflow."
            )
        return _Window(start, place, columns, chunks)


def _rows(store: Store, name: str, windows: Sequence[_Window], size: int) -> Array:
    """Return the rows of all windows, as a view of the block if possible."""
    if store.frames is not None and name in store.frames:
        return np.concatenate([_taken(store, name, window, window.place, size) for window in windows], axis=1)
    block, first, last = store.blocks.arrays[name], windows[0], windows[-1]
    width = sum(w.columns.stop - w.columns.start for w in windows)
    place = first.place % len(block)
    aligned = all((window.place - first.place) % len(block) == 0 for window in windows)
    if aligned and width == last.columns.stop - first.columns.start and place + size <= len(block):
        return block[place : place + size, first.columns.start : last.columns.stop]
    return np.concatenate([_rows_of(block, window, size) for window in windows], axis=1)


def _rows_of(block: Array, window: _Window, size: int) -> Array:
    """Return the rows of one window, as a view unless they continue at the start of the block."""
    place = window.place % len(block)
    if place + size <= len(block):
        return block[place : place + size, window.columns]
    return block[np.arange(place, place + size) % len(block), window.columns]


def _taken(store: Store, name: str, window: _Window, place: int, size: int) -> Array:
    """Copy the rows `[size, columns]` of a window's columns from `place` on."""
    rows, columns = np.arange(place, place + size) % store.rows, window.columns
    cells = rows[:, None] * store.columns + np.arange(columns.start, columns.stop)
    taken: Array = store.take(name, cells.reshape(-1)).reshape(*cells.shape, *store.schema[name].shape)
    return taken


def _last(store: Store, name: str, window: _Window, size: int) -> Array:
    """Return the observation after the window's last row; if a reset followed, the first observation of the new
    episode."""
    newest = window.chunks[-1]
    if newest.stop == window.start + size:
        return newest.last[name]
    after: Array = _taken(store, name, window, window.place + size, 1)[0]
    return after


def _states(windows: Sequence[_Window]) -> Nested:
    """Return the recurrent state at the first row, or None if a window does not start at a chunk's first row."""
    found = [w.chunks[0].state for w in windows]
    if any(state is None or w.chunks[0].start != w.start for state, w in zip(found, windows, strict=True)):
        return None
    return joined(found)
