"""Windows: rows that a trigger named, put together as the `Batch` that `collect` would have returned.

Rows are views of the buffer where they stand side by side, copies otherwise. What chunks have beyond rows (episodes
that ended, a recurrent state, whether they follow what came before) is kept here until nobody can ask for it. One
thread adds and forgets; any may ask for a batch meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass

import numpy as np

from farstep.batch import EPISODE_KEYS, Batch, FinalObs, joined
from farstep.buffer.replay import Buffer
from farstep.core import Array, Nested
from farstep.errors import FarstepError
from farstep.schema import leaf_names, leaves, map_leaves, nest


@dataclass(frozen=True)
class _Chunk:
    """What is not in the buffer of rows `[start, stop)` of an actor."""

    start: int
    stop: int
    place: int
    """Which row of the buffer's blocks it begins at: others may have written there before."""
    ended: Array
    """Row of each episode that ended."""
    episodes: dict[str, Array]
    continues: Array
    last: dict[str, Array]
    """What the next action was taken on. Where an episode ended with the last row, the buffer has its end instead."""
    state: Nested


@dataclass(frozen=True)
class _Window:
    """An actor's rows."""

    start: int
    place: int
    columns: slice
    chunks: list[_Chunk]

    def ended(self, size: int) -> tuple[Array, dict[str, Array]]:
        """Rows, from the window's first on, where episodes ended, and these."""
        rows = np.concatenate([chunk.ended for chunk in self.chunks]) - self.start
        here = (rows >= 0) & (rows < size)
        return rows[here], {k: np.concatenate([c.episodes[k] for c in self.chunks])[here] for k in EPISODE_KEYS}

    @property
    def continues(self) -> Array:
        first = self.chunks[0]
        return first.continues if first.start == self.start else np.ones(len(first.continues), bool)


class Windows:
    """The chunks of all actors of a workflow; an actor's rows are counted since the beginning."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self._columns: dict[int, slice] = {}
        self._chunks: dict[int, deque[_Chunk]] = {}
        self._offsets: dict[int, int] = {}
        """Per actor, from its rows to those of the blocks, where others may have written before."""

    def add(self, actor: int, start: int, batch: Batch) -> None:
        """An actor's next chunk was inserted, its first row at `start`."""
        steps, width = batch.shape
        first = int(batch.slots[0])
        state = None if batch.initial_state is None else map_leaves(np.ndarray.copy, batch.initial_state)
        ended, episodes = start + batch.final_obs.row, dict(batch.episodes)
        last = {name: value.copy() for name, value in leaves(batch.structures["obs"], batch.last_obs)}
        with self._buffer.locked():
            place = int(self._buffer.store.blocks.committed(slice(first, first + 1))[0]) - steps
            chunk = _Chunk(start, start + steps, place, ended, episodes, batch.continues, last, state)
            self._columns[actor], self._offsets[actor] = slice(first, first + width), place - start
            self._chunks.setdefault(actor, deque()).append(chunk)

    def forget(self, actor: int, upto: int) -> int:
        """Nobody asks for an actor's rows before `upto` any more; how many chunks that frees."""
        with self._buffer.locked():
            chunks, before = self._chunks.get(actor, ()), len(self._chunks.get(actor, ()))
            while chunks and chunks[0].stop <= upto:
                chunks.popleft()
            return before - len(chunks)

    def read(self, consumer: int, upto: dict[int, int]) -> None:
        """A consumer is done with the rows of these actors before those; who maps the blocks can see it."""
        if not self._chunks:
            return
        with self._buffer.locked():
            cursors = self._buffer.store.blocks.cursors
            for actor in upto.keys() & self._offsets.keys() if consumer < len(cursors) else ():
                cursors[consumer, self._columns[actor]] = upto[actor] + self._offsets[actor]

    def where(self, actor: int, start: int, size: int) -> tuple[tuple[int, int], int]:
        """The environment slots of an actor, first and last + 1, and the row of the blocks that a window begins at."""
        with self._buffer.locked():
            window = self._window(actor, start, size)
            return (window.columns.start, window.columns.stop), window.place

    def batch(self, actors: Sequence[int], starts: Sequence[int], size: int, gaps: Container[int] = ()) -> Batch:
        """Rows `[start, start + size)` of each actor, in order of their environment slots. Before those of `gaps`, rows
        are missing that were there."""
        with self._buffer.locked():  # what follows a row may be written at this moment
            return self._batch(actors, starts, size, gaps)

    def _batch(self, actors: Sequence[int], starts: Sequence[int], size: int, gaps: Container[int]) -> Batch:
        store, structures = self._buffer.store, self._buffer.structures
        found = [(self._window(actor, start, size), actor) for actor, start in zip(actors, starts, strict=True)]
        found.sort(key=lambda each: each[0].columns.start)
        windows = [window for window, _ in found]
        slots = np.concatenate([np.arange(w.columns.start, w.columns.stop) for w in windows])
        per_slot = np.concatenate([np.full(w.columns.stop - w.columns.start, w.place) for w in windows])

        ended = [window.ended(size) for window in windows]
        rows = np.concatenate([rows for rows, _ in ended])
        episodes = {key: np.concatenate([found[key] for _, found in ended]) for key in EPISODE_KEYS}
        column = np.searchsorted(slots, episodes["slot"])
        names, ends = leaf_names(structures["obs"]), (per_slot[column] + rows) % store.rows * store.columns
        final = nest(structures["obs"], {n: store.observed_after(n, ends + episodes["slot"]) for n in names})
        last = {n: np.concatenate([_last(store.blocks.arrays[n], n, w, size) for w in windows]) for n in names}
        return Batch(
            {name: _rows(block, windows, size) for name, block in store.blocks.arrays.items()},
            structures,
            nest(structures["obs"], last),
            FinalObs(rows, column, final),
            episodes,
            slots,
            np.concatenate([window.continues & (actor not in gaps) for window, actor in found]),
            _states(windows),
        )

    def _window(self, actor: int, start: int, size: int) -> _Window:
        chunks = [c for c in self._chunks.get(actor, ()) if c.start < start + size and c.stop > start]
        rows = f"rows {start} to {start + size} of worker {actor}"
        if not chunks or chunks[0].start > start or chunks[-1].stop < start + size:
            raise FarstepError(f"{rows} are not held any more: batch() is for the consumer of their message.")
        columns, place = self._columns[actor], chunks[0].place + start - chunks[0].start
        if any(chunk.place - chunk.start != place - start for chunk in chunks):
            raise FarstepError(f"{rows} are not together: somebody else inserted into the buffer between them.")
        if place < self._buffer.store.blocks.oldest(columns.start):
            raise FarstepError(f"{rows} are gone: somebody else inserted into the buffer and overwrote them.")
        return _Window(start, place, columns, chunks)


def _rows(block: Array, windows: Sequence[_Window], size: int) -> Array:
    first, last = windows[0], windows[-1]
    width = sum(w.columns.stop - w.columns.start for w in windows)
    place = first.place % len(block)
    aligned = all((window.place - first.place) % len(block) == 0 for window in windows)
    if aligned and width == last.columns.stop - first.columns.start and place + size <= len(block):
        return block[place : place + size, first.columns.start : last.columns.stop]
    parts = [block[np.arange(w.place, w.place + size) % len(block), w.columns] for w in windows]
    return np.concatenate(parts, axis=1)


def _last(block: Array, name: str, window: _Window, size: int) -> Array:
    """What was observed after the window's last row, or after the reset that followed it."""
    newest = window.chunks[-1]
    if newest.stop == window.start + size:
        return newest.last[name]
    after: Array = block[(window.place + size) % len(block), window.columns]
    return after


def _states(windows: Sequence[_Window]) -> Nested:
    """A recurrent agent's state at the first row, where a chunk begins there."""
    found = [w.chunks[0].state for w in windows]
    if any(state is None or w.chunks[0].start != w.start for state, w in zip(found, windows, strict=True)):
        return None
    return joined(found)
