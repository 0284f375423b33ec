"""The memory layout of rollouts: one block per key, with a column per environment slot.

A lane has room for one batch: `[steps + 1, slots, ...]` per key. The extra row holds the observation after the last
step. Every worker writes only its own range of columns. A batch is a view of a lane. Head and workers compute the same
offsets from the same `Layout`, so no addresses are exchanged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from farstep.batch import is_obs
from farstep.core import Array, BytesLike
from farstep.schema import ArraySpec, Schema
from farstep.wire.messages import SetLayout

_ALIGN = 4096  # every block starts on a page, so that untouched keys cost no memory


@dataclass(frozen=True)
class Layout:
    """The shapes and offsets of all blocks."""

    lanes: int
    steps: int
    slots: int
    rows: Schema
    """Keys with one row per step."""
    chunks: Schema = field(default_factory=dict)
    """Keys with one entry per chunk, e.g. a recurrent state at its start."""

    def names(self) -> list[str]:
        """Names of a chunk's arrays in messages (see `rows.Rows.tables`)."""
        return [*self.rows, *("last_" + name for name in self.rows if is_obs(name)), *self.chunks]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a key's block, lanes first."""
        if name in self.rows:
            return (self.lanes, self.steps + 1, self.slots, *self.rows[name].shape)
        return (self.lanes, self.slots, *self.chunks[name].shape)

    def _specs(self) -> dict[str, ArraySpec]:
        return {**self.rows, **self.chunks}

    def offsets(self) -> dict[str, int]:
        """The byte offset of each key's block; the key "" has the total size."""
        offsets, end = {}, 0
        for name, spec in self._specs().items():
            offsets[name] = end
            size = math.prod(self.shape(name)) * np.dtype(spec.dtype).itemsize
            end += -(-size // _ALIGN) * _ALIGN
        offsets[""] = end
        return offsets

    @property
    def nbytes(self) -> int:
        return self.offsets()[""]

    def views(self, memory: BytesLike) -> dict[str, Array]:
        """Each key's block over `memory`."""
        offsets = self.offsets()
        return {
            name: np.ndarray(self.shape(name), np.dtype(spec.dtype), memory, offsets[name])
            for name, spec in self._specs().items()
        }

    def covers(self, other: Layout) -> bool:
        """Whether rollouts of `other` can use the memory of this layout as it is."""
        return (
            self.lanes >= other.lanes
            and self.steps >= other.steps
            and self.slots == other.slots
            and self.rows == other.rows
            and self.chunks == other.chunks
        )

    def message(self) -> SetLayout:
        return SetLayout(self.lanes, self.steps, self.slots, self.rows, self.chunks)

    @classmethod
    def of(cls, message: SetLayout) -> Layout:
        return cls(message.lanes, message.steps, message.slots, message.rows, message.chunks)
