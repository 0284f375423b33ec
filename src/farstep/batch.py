"""Batches: what a learner gets, as named arrays `[T, N, ...]` (T steps of N environments)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from farstep.core import Array, Nested
from farstep.errors import unknown_name
from farstep.schema import Structure, leaf_names, map_leaves, nest

ENDS = np.dtype([("row", "<i4"), ("slot", "<i4"), ("length", "<i8"), ("return", "<f8"), ("time", "<f8")])
"""Record of an episode that ended: position in the chunk, length, return, and duration in seconds."""

RESERVED = {"obs", "reward", "terminated", "truncated", "valid", "version", "episode_start", "final_obs", "last_obs"}
RESERVED |= {"info"}
"""Names that farstep uses for its own arrays; `act` must not return them."""

PRIORITY = "priority"
"""Name of the array of initial priorities: what the agent's `priorities(rows)` returned, or an output of `act`."""


def info_array(key: str) -> str:
    """Return the name of the array with an entry of the environments' infos (`EnvConfig.info_keys`)."""
    return f"info.{key}"


def is_final(name: str) -> bool:
    """Return whether an array holds final observations: one per ended episode, not one per row."""
    return name.split(".")[0] == "final_obs"


def is_obs(name: str) -> bool:
    """Return whether an array holds observations. A chunk has one more observation than rows."""
    return name.split(".")[0] == "obs"


EPISODE_KEYS = ("return", "length", "time", "slot")


@dataclass(frozen=True)
class FinalObs:
    """The final observations of the episodes that ended in a batch. Entry `k` belongs to `[row[k], slot[k]]`.

    Attributes:
        row: Row of the batch in which each episode ended.
        slot: Column of the batch in which each episode ended.
        obs: The observations, nested like the observation space.
    """

    row: Array
    slot: Array
    obs: Nested

    def __len__(self) -> int:
        return len(self.row)


@dataclass(frozen=True, repr=False)
class Batch(Mapping[str, Array]):
    """T steps of N environments, as a mapping of arrays `[T, N, ...]`.

    `batch["reward"]`, `batch["obs"]`, `batch["action"]` and so on are views. They are valid until the next call that
    collects; use `copy()` to keep them. With a Dict or Tuple space, `batch["obs"]` is nested like the space:
    `batch["obs"]["camera"]` and `batch["obs.camera"]` are the same array.

    Attributes:
        arrays: All arrays by name; nested ones by path, e.g. `obs.camera`.
        structures: How arrays are nested, for each key that the agent or the environment returns.
        last_obs: The observations after the last row, `[N, ...]`, from which the next actions are chosen.
        final_obs: The final observations of the episodes that ended.
        episodes: `return`, `length` (steps), `time` (duration in seconds) and `slot` of each episode that ended, in the
            order of chunks.
        slots: The environment slot of each column, `[N]`.
        continues: For each column, whether its first row directly follows the last row that was yielded for this slot.
            False at the start, and after rows were dropped, cancelled, lost with a worker or cut off by `reset`.
        initial_state: The state of a recurrent agent before the first row, `[N, ...]`; None for other agents.
        infos: Pairs `(first slot, infos)`, one per worker that sent infos; `step` and `reset` merge them.
    """

    arrays: Mapping[str, Array]
    structures: Mapping[str, Structure]
    last_obs: Nested
    final_obs: FinalObs
    episodes: Mapping[str, Array]
    slots: Array
    continues: Array
    initial_state: Nested = None
    infos: Sequence[tuple[int, Any]] = ()

    def __getitem__(self, key: str) -> Array:
        """Return an array by name, or nested arrays (annotated as one array) if `key` names a Dict or Tuple space."""
        if key in self.arrays:
            return self.arrays[key]
        if key not in self.structures:
            raise KeyError(unknown_name("array of the batch", str(key), {*self.arrays, *self.structures}))
        nested: Array = nest(self.structures[key], self.arrays)
        return nested

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)

    @property
    def shape(self) -> tuple[int, int]:
        """`(T, N)`: steps and columns."""
        rows, slots = self.arrays["reward" if "reward" in self.arrays else next(iter(self.arrays))].shape[:2]
        return rows, slots

    def copy(self) -> Batch:
        """Copy the batch, to keep it after the next call that collects.

        Returns:
            A batch whose arrays stay valid.
        """
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
    """Some arrays of one worker's chunk, yielded before the rest has arrived (see `ClusterEnv.parts`).

    Attributes:
        worker: Index of the worker.
        slots: The environment slot of each column; also the index of that column in the whole batch.
        stage: Index of the stage of `EnvConfig.transfer` that this part completes. Stages that arrive together form one
            part with the index of the last stage; with shared memory, all stages arrive together.
        complete: Whether this is the last part of the worker's chunk.
        batch: Only the arrays of this part. `last_obs`, `final_obs.obs` and `initial_state` are None until they have
            arrived.
        so_far: All arrays of the chunk that have arrived.
    """

    worker: int
    slots: Array
    stage: int
    complete: bool
    batch: Batch
    so_far: Batch


def _copied(value: Nested) -> Nested:
    return None if value is None else map_leaves(np.ndarray.copy, value)


def side_by_side(batches: Sequence[Batch]) -> Batch:
    """Concatenate the columns of several batches, ordered by slot; keep the arrays that all of them have."""
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
    """Concatenate values of the same structure; None if one of them is None."""
    first = values[0]
    if any(value is None for value in values):
        return None
    if isinstance(first, dict):
        return {key: joined([value[key] for value in values]) for key in first}
    if isinstance(first, tuple):
        return tuple(joined([value[i] for value in values]) for i in range(len(first)))
    return np.concatenate(values)
