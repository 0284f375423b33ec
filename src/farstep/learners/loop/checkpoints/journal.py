"""Records the actions of every episode in progress, so that a resumed run can replay the episodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
import numpy as np

from farstep.batch import Batch
from farstep.checkpoint.checks import converted
from farstep.checkpoint.files import Refused
from farstep.core import Array

_MAX_STEPS = 100_000
"""Maximum length of an episode that is replayed. A longer episode restarts, because replaying takes too long."""


class _Saved(msgspec.Struct, forbid_unknown_fields=True):
    lengths: list[Annotated[int, msgspec.Meta(ge=0, le=_MAX_STEPS)]]
    actions: dict[str, np.ndarray]


class Journal:
    """The actions of each slot's current episode, taken from the batches of a synchronous run.

    Args:
        num_slots: Number of slots of the run; those of parked workers may be in no batch. Default 0: as many as the
            batches have.
    """

    def __init__(self, num_slots: int = 0) -> None:
        self._segments: list[list[dict[str, Array]]] = [[] for _ in range(num_slots)]
        """For each slot, the actions of its current episode, one entry per batch."""

    def add(self, batch: Batch) -> None:
        """Add the actions of a batch, and drop the actions of episodes that ended in it."""
        names = [name for name in batch if name.split(".")[0] == "action"]
        ended = batch["terminated"] | batch["truncated"]
        rows = len(ended)
        self._segments += [[] for _ in range(int(batch.slots.max()) + 1 - len(self._segments))]
        for column, slot in enumerate(batch.slots.tolist()):
            ends = np.flatnonzero(ended[:, column])
            first = int(ends[-1]) + 1 if len(ends) else 0
            if first or batch["episode_start"][0, column]:
                self._segments[slot].clear()
            if first < rows and sum(map(_length, self._segments[slot])) <= _MAX_STEPS:
                self._segments[slot].append({name: batch.arrays[name][first:, column].copy() for name in names})

    def actions(self) -> list[dict[str, Array]]:
        """Return the actions of each slot's current episode, `[steps, ...]` by name; empty if the episode is too
        long."""
        joined = []
        for segments in self._segments:
            names = segments[0] if segments and sum(map(_length, segments)) <= _MAX_STEPS else ()
            joined.append({name: np.concatenate([segment[name] for segment in segments]) for name in names})
        return joined

    def state(self) -> dict[str, object]:
        """Return the state for a checkpoint: the concatenated actions of all slots, and their lengths."""
        by_slot = self.actions()
        names = sorted({name for actions in by_slot for name in actions})
        joined = {name: np.concatenate([actions[name] for actions in by_slot if actions]) for name in names}
        return {"lengths": [_length(actions) for actions in by_slot], "actions": joined}

    @classmethod
    def of(cls, state: object) -> Journal:
        """Restore a journal from the result of `state`. Raise `Refused` if it is malformed."""
        saved = converted("journal", state, _Saved)
        if sum(saved.lengths) and not saved.actions:
            raise Refused(f"journal.actions is empty; expected {sum(saved.lengths)} rows")
        for name, array in saved.actions.items():
            if array.ndim == 0 or len(array) != sum(saved.lengths):
                rows = f"{array.dtype}{list(array.shape)}"
                raise Refused(f"journal.actions.{name} is {rows}; expected {sum(saved.lengths)} rows")
        journal, stops = cls(), np.cumsum(saved.lengths, dtype=np.int64)
        for stop, length in zip(stops.tolist(), saved.lengths, strict=True):
            segment = {name: array[stop - length : stop] for name, array in saved.actions.items()}
            journal._segments.append([segment] if length else [])
        return journal


def _length(actions: Mapping[str, Array]) -> int:
    return len(next(iter(actions.values()), ()))
