"""Stores stacked observations once per frame.

A row keeps only the newest frame of its stack; the rows before it have the others. The *older* frames of a row, all but
the newest, are stored separately if the row before it does not have them: at the start of an episode, after lost rows,
and wherever a stack is not the stack before it, shifted by one frame. A row whose previous row is about to be
overwritten or removed gets its older frames first. So every stack is restored exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from farstep.buffer.storage.sparse_rows import SparseRows
from farstep.config.env import check_count
from farstep.core import Array
from farstep.errors import ConfigError, unknown_name, warn_caller
from farstep.schema import ArraySpec, Schema

_WARN_ROWS = 4096  # rows after which a warning says that most stacks are not shifted by one frame

Older = dict[str, tuple[Array, Array, Array]]
"""For each stacked array: step and column of the rows whose older frames are stored separately, and these frames."""


@dataclass(frozen=True)
class FrameStack:
    """Store each frame of stacked observations once, so that a row takes the memory of one frame.

    Samples are equal to those of a buffer without this option, also if the stacks do not overlap: if the stack
    of a row is not the stack of the row before, shifted by one frame, all its frames are stored.

    Args:
        num_frames: Frames per stack, at least 2.
        axis: Axis of the stack, oldest frame first: 0 (the first axis of an observation) or -1 (the last). A frame may
            have several channels on this axis. Default: 0, as in Gymnasium's `FrameStackObservation`.
        arrays: Names of the stacked arrays. Default: `("obs",)`; an entry of a Dict observation is `"obs.<key>"`.

    Raises:
        ConfigError: An argument is invalid.

    Example:
        Buffer(1_000_000, NStep(), frame_stack=FrameStack(4))  # observations [4, 84, 84]
    """

    num_frames: int
    axis: int = 0
    arrays: tuple[str, ...] = ("obs",)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_frames", check_count("num_frames", self.num_frames, minimum=2))
        if self.axis not in (0, -1) or isinstance(self.axis, bool):
            raise ConfigError(f"axis is {self.axis!r}; expected 0 (the first axis) or -1 (the last axis).")
        if isinstance(self.arrays, str) or not self.arrays or not all(isinstance(name, str) for name in self.arrays):
            raise ConfigError(f'arrays is {self.arrays!r}; expected names of stacked arrays, e.g. ("obs",).')
        object.__setattr__(self, "arrays", tuple(self.arrays))

    def stored(self, schema: Schema) -> Schema:
        """Return the schema with one frame in place of each stack.

        Args:
            schema: The arrays of a row.

        Returns:
            The arrays that are stored for each row.

        Raises:
            ConfigError: A stacked array does not exist, or cannot be divided into `num_frames` frames.
        """
        return schema | {name: self._frame(name, schema) for name in self.arrays}

    def _frame(self, name: str, schema: Schema) -> ArraySpec:
        if name not in schema:
            raise ConfigError(unknown_name("array of frame_stack", name, schema))
        shape = list(schema[name].shape)
        if not shape or not shape[self.axis] or shape[self.axis] % self.num_frames:
            which = "first" if self.axis == 0 else "last"
            raise ConfigError(
                f"frame_stack expects {self.num_frames} frames on the {which} axis of {name!r}, which is "
                f"{schema[name]}. Give FrameStack the right num_frames and axis, or omit frame_stack."
            )
        shape[self.axis] //= self.num_frames
        return ArraySpec(tuple(shape), schema[name].dtype)


class Frames:
    """The frames of the stacked arrays of one store.

    Args:
        stack: Which arrays are stacked, and how.
        schema: The arrays of a row, with whole stacks.
        flat: The newest frame of each row, by array and cell.
        preceding: Returns the cells of the rows before the given ones; any cell for a row without a previous row.
    """

    def __init__(
        self, stack: FrameStack, schema: Schema, flat: Mapping[str, Array], preceding: Callable[[Array], Array]
    ) -> None:
        self._stack, self._schema, self._preceding = stack, schema, preceding
        self._flat = {name: flat[name] for name in stack.arrays}
        self.older = {name: self._sparse_rows(frames) for name, frames in self._flat.items()}
        """For each stacked array, the older frames of some rows."""
        self._inserted = self._whole = 0
        self._has_warned = False

    def _sparse_rows(self, frames: Array) -> SparseRows:
        shape = (self._stack.num_frames - 1, *frames.shape[1:])
        return SparseRows({"frames": ArraySpec(shape, frames.dtype.str)}, len(frames))

    def __contains__(self, name: str) -> bool:
        return name in self._flat

    # ---- inserting ----

    def split(self, values: Mapping[str, Array], follows: Array, newest: Array) -> tuple[dict[str, Array], Older]:
        """Divide the stacks of new rows into newest and older frames.

        Args:
            values: The arrays `[T, n, ...]` of the rows.
            follows: For each row `[T, n]`, whether it follows the row before it.
            newest: For each of the `n` columns, the cell of the row before the first new row.

        Returns:
            The arrays with the newest frame of each stack, and the older frames that `put` must store.
        """
        single, older = dict(values), Older()
        for name in self._flat:
            stacks = values[name].astype(self._flat[name].dtype, copy=False)
            frames = self._frames(name, stacks, leading=2)
            is_shifted = follows.copy()
            is_shifted[1:] &= self._are_shifted(name, stacks[1:], stacks[:-1], leading=2)
            if len(columns := np.flatnonzero(follows[0])):
                before = self.take(name, newest[columns])
                is_shifted[0, columns] = self._are_shifted(name, stacks[0, columns], before, leading=1)
            step, column = np.nonzero(~is_shifted)
            single[name], older[name] = frames[:, :, -1], (step, column, frames[step, column, :-1])
        self._count(follows, older)
        return single, older

    def put(self, older: Older, cells: Array) -> None:
        """Store the older frames that `split` returned; `cells` `[T, n]` are the cells of its rows."""
        for name, (step, column, frames) in older.items():
            self.older[name].put(cells[step, column], {"frames": frames})

    def detach(self, cells: Array) -> None:
        """Store the older frames of these rows, because the rows before them will be overwritten or removed."""
        for name, older in self.older.items():
            if len(alone := cells[older.places(cells) < 0]):
                frames = self._frames(name, self.take(name, alone), leading=1)
                older.put(alone, {"frames": frames[:, :-1]})

    def drop(self, cells: Array) -> None:
        """Remove the older frames of these rows."""
        for older in self.older.values():
            older.drop(cells)

    def _count(self, follows: Array, older: Older) -> None:
        """Warn once if most rows that follow another row need all frames of their stacks."""
        self._inserted += int(np.count_nonzero(follows))
        starts = follows.size - int(np.count_nonzero(follows))
        self._whole += max(len(step) for step, _, _ in older.values()) - starts
        if not self._has_warned and self._inserted >= _WARN_ROWS:
            self._has_warned = True
            if self._whole > self._inserted // 2:
                warn_caller(
                    f"{self._whole} of {self._inserted} stacks of {self._stack.num_frames} frames are not the previous "
                    "stack shifted by one frame, so these whole stacks are stored, taking more memory than a buffer "
                    f"without frame_stack. Check {self._stack!r}, or omit it (--frame-stack 0)."
                )

    # ---- reading ----

    def take(self, name: str, cells: Array) -> Array:
        """Copy the stacks `[n, ...]` of rows."""
        count, older = self._stack.num_frames, self.older[name]
        chain = np.empty((len(cells), count), np.int64)
        place, rows_back = np.full(len(cells), -1), np.full(len(cells), -1)
        chain[:, -1] = at = cells
        for back in range(count - 1):
            found = older.places(at)
            is_here = (found >= 0) & (place < 0)
            place[is_here], rows_back[is_here] = found[is_here], back
            at = np.where(place < 0, self._preceding(at), at)
            chain[:, count - 2 - back] = at
        flat = self._flat[name]
        frames = flat.take(chain.reshape(-1), axis=0).reshape(*chain.shape, *flat.shape[1:])
        for back in range(count - 1):
            if len(rows := np.flatnonzero(rows_back == back)):
                frames[rows, : count - 1 - back] = older.take("frames", place[rows])[:, back:]
        if self._stack.axis == 0:
            return frames.reshape(len(cells), *self._schema[name].shape)
        stacks = np.empty((len(cells), *self._schema[name].shape), flat.dtype)
        target = self._frames(name, stacks, leading=1)
        for k in range(count):
            target[:, k] = frames[:, k]
        return stacks

    def _frames(self, name: str, stacks: Array, leading: int) -> Array:
        """Return stacks as a view `[..., num_frames, *frame]`, after `leading` axes."""
        lead, count = stacks.shape[:leading], self._stack.num_frames
        shape = self._flat[name].shape[1:]
        if self._stack.axis == 0:
            return stacks.reshape(*lead, count, *shape)
        return np.moveaxis(stacks.reshape(*lead, *shape[:-1], count, shape[-1]), -2, leading)

    def _are_shifted(self, name: str, stacks: Array, before: Array, leading: int) -> Array:
        """Return for each stack whether its older frames have the bytes of the newer frames of the stack before."""
        frame = self._flat[name].shape[1:]
        width = frame[-1] if self._stack.axis else math.prod(frame)  # neighboring elements of one frame
        lead, size = stacks.shape[:leading], math.prod(self._schema[name].shape)
        now, then = stacks.reshape(*lead, size), before.reshape(*lead, size)
        if now.dtype.kind not in "biu":  # -0.0 equals 0.0, and NaN differs from NaN, but bytes are exact
            now, then = (np.ascontiguousarray(each).view(np.uint8) for each in (now, then))
            width *= stacks.itemsize
        is_equal = np.ones(now.shape, bool)
        np.equal(now[..., :-width], then[..., width:], out=is_equal[..., :-width])
        if self._stack.axis:
            is_equal.reshape(-1, self._stack.num_frames * width)[:, -width:] = True  # the newest frame
        return np.asarray(is_equal.all(axis=-1))
