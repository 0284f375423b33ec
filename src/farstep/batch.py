"""A batch: what a learner gets, `[T, N, ...]` arrays by name and what does not fit that shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from farstep.core import Array, Nested
from farstep.errors import unknown_name
from farstep.schema import Structure, leaf_names, map_leaves, nest

ENDS = np.dtype([("row", "<i4"), ("slot", "<i4"), ("length", "<i8"), ("return", "<f8"), ("time", "<f8")])
"""One record per episode that ended: where, and what it came to."""

RESERVED = {"obs", "reward", "terminated", "truncated", "valid", "version", "episode_start", "final_obs", "last_obs"}
"""What farstep records itself; an agent's outputs have other names."""


def is_final(name: str) -> bool:
    """Whether an array holds last observations of episodes, by place in the list of ends and not by row."""
    return name.split(".")[0] == "final_obs"


def is_obs(name: str) -> bool:
    """Whether an array holds observations, of which there is one more than rows."""
    return name.split(".")[0] == "obs"


EPISODE_KEYS = ("return", "length", "time", "slot")


@dataclass(frozen=True)
class FinalObs:
    """The last observations of episodes that ended in the batch: entry `k` belongs to `[row[k], slot[k]]`."""

    row: Array
    slot: Array
    obs: Nested

    def __len__(self) -> int:
        return len(self.row)


@dataclass(frozen=True, repr=False)
class Batch(Mapping[str, Nested]):
    """A mapping of arrays `[T, N, ...]`; views of the buffer until the next call, `copy()` keeps.

    `batch["obs"]` of a Dict or Tuple space is nested as the space is; `batch["obs.camera"]` is one array.
    """

    arrays: Mapping[str, Array]
    structures: Mapping[str, Structure]
    last_obs: Nested
    """The observations after the last row, `[N, ...]`: what the next action is taken on."""
    final_obs: FinalObs
    episodes: Mapping[str, Array]
    """`return`, `length`, `time` (seconds) and `slot` of each episode that ended, in order of slots."""
    slots: Array
    """The environment slot of each column."""
    continues: Array
    """Per column: its first row follows the last row of that slot which was handed out before. False at the very
    start and wherever rows between were dropped, cancelled, lost with a worker or cut off by `reset`."""
    initial_state: Nested = None
    """A recurrent agent's state at the first row, `[N, ...]`; None for others."""
    infos: Sequence[tuple[int, Any]] = ()
    """First slot and infos of each worker that sent some; `step` and `reset` merge them."""

    def __getitem__(self, key: str) -> Nested:
        if key in self.arrays:
            return self.arrays[key]
        if key not in self.structures:
            raise KeyError(unknown_name("array of the batch", str(key), {*self.arrays, *self.structures}))
        return nest(self.structures[key], self.arrays)

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)

    @property
    def shape(self) -> tuple[int, int]:
        """`(T, N)`."""
        rows, slots = self.arrays["reward" if "reward" in self.arrays else next(iter(self.arrays))].shape[:2]
        return rows, slots

    def copy(self) -> Batch:
        """The same batch in memory of its own."""
        return Batch(
            {name: array.copy() for name, array in self.arrays.items()},
            self.structures,
            _copied(self.last_obs),
            FinalObs(self.final_obs.row, self.final_obs.slot, _copied(self.final_obs.obs)),
            self.episodes,
            self.slots,
            self.continues,
            _copied(self.initial_state),
            self.infos,
        )

    def __repr__(self) -> str:
        arrays = ", ".join(f"{name}: {a.dtype}{list(a.shape)}" for name, a in self.arrays.items())
        return f"Batch({arrays}; {len(self.episodes['return'])} episodes ended)"


@dataclass(frozen=True)
class Part:
    """Some arrays of a rollout, of one worker's environments, before the rest is there (see `ClusterEnv.parts`)."""

    worker: int
    slots: Array
    """The environment slot, and in the whole batch the column, of each of its columns."""
    stage: int
    """Which stage of `EnvConfig.transfer` is complete with it. Stages that arrived together, as all do with shared
    memory, are one part with the number of the last."""
    complete: bool
    """Nothing more of this worker comes."""
    batch: Batch
    """The arrays of the stage alone. `last_obs`, `final_obs.obs` and `initial_state` are None before they are there."""
    so_far: Batch
    """With those of the stages before."""


def _copied(value: Nested) -> Nested:
    return None if value is None else map_leaves(np.ndarray.copy, value)


def side_by_side(batches: Sequence[Batch]) -> Batch:
    """One batch of the columns of several, in order of their slots, with the arrays that all of them have."""
    batches = sorted(batches, key=lambda batch: int(batch.slots[0]))
    first, firsts = batches[0], np.cumsum([0, *(len(batch.slots) for batch in batches)])
    names = [name for name in first.arrays if all(name in batch.arrays for batch in batches)]
    finals = [batch.final_obs for batch in batches]
    columns = [final.slot + column for final, column in zip(finals, firsts, strict=False)]
    return Batch(
        {name: np.concatenate([batch.arrays[name] for batch in batches], axis=1) for name in names},
        {key: each for key, each in first.structures.items() if all(name in names for name in leaf_names(each))},
        joined([batch.last_obs for batch in batches]),
        FinalObs(
            np.concatenate([final.row for final in finals]),
            np.concatenate(columns),
            joined([final.obs for final in finals]),
        ),
        {key: np.concatenate([batch.episodes[key] for batch in batches]) for key in EPISODE_KEYS},
        np.concatenate([batch.slots for batch in batches]),
        np.concatenate([batch.continues for batch in batches]),
        joined([batch.initial_state for batch in batches]),
    )


def joined(values: Sequence[Nested]) -> Nested:
    """Values of the same structure, end to end; None if one is missing."""
    first = values[0]
    if any(value is None for value in values):
        return None
    if isinstance(first, dict):
        return {key: joined([value[key] for value in values]) for key in first}
    if isinstance(first, tuple):
        return tuple(joined([value[i] for value in values]) for i in range(len(first)))
    return np.concatenate(values)
