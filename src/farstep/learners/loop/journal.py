"""The actions of every episode in progress, so that another process can lead environments to the same place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
import numpy as np

from farstep.batch import Batch
from farstep.checkpoint.checks import converted
from farstep.checkpoint.files import Refused
from farstep.core import Array

_MOST_STEPS = 100_000
"""Of an episode; one that is longer begins anew after a resume, rather than take its time."""


class _Saved(msgspec.Struct, forbid_unknown_fields=True):
    lengths: list[Annotated[int, msgspec.Meta(ge=0, le=_MOST_STEPS)]]
    actions: dict[str, np.ndarray]


class Journal:
    """Fed with every batch of a synchronous run."""

    def __init__(self) -> None:
        self._pieces: list[list[dict[str, Array]]] = []

    def add(self, batch: Batch) -> None:
        """Take note of the actions in a batch, and forget those of episodes that ended in it."""
        names = [name for name in batch if name.split(".")[0] == "action"]
        ended = batch["terminated"] | batch["truncated"]
        rows = len(ended)
        self._pieces += [[] for _ in range(int(batch.slots.max()) + 1 - len(self._pieces))]
        for column, slot in enumerate(batch.slots.tolist()):
            ends = np.flatnonzero(ended[:, column])
            first = int(ends[-1]) + 1 if len(ends) else 0
            if first or batch["episode_start"][0, column]:
                self._pieces[slot].clear()
            if first < rows and sum(map(_length, self._pieces[slot])) <= _MOST_STEPS:
                self._pieces[slot].append({name: batch.arrays[name][first:, column].copy() for name in names})

    def actions(self) -> list[dict[str, Array]]:
        """The actions since each slot's episode began, `[steps, ...]` by name."""
        joined = []
        for pieces in self._pieces:
            names = pieces[0] if pieces and sum(map(_length, pieces)) <= _MOST_STEPS else ()
            joined.append({name: np.concatenate([piece[name] for piece in pieces]) for name in names})
        return joined

    def state(self) -> dict[str, object]:
        """For a checkpoint: the actions of all slots one after the other."""
        found = self.actions()
        names = sorted({name for actions in found for name in actions})
        joined = {name: np.concatenate([actions[name] for actions in found if actions]) for name in names}
        return {"lengths": [_length(actions) for actions in found], "actions": joined}

    @classmethod
    def of(cls, state: object) -> Journal:
        """A journal restored from what `state` returned; raises `Refused` if it is malformed."""
        saved = converted("journal", state, _Saved)
        if sum(saved.lengths) and not saved.actions:
            raise Refused(f"journal.actions is empty, {sum(saved.lengths)} rows expected")
        for name, array in saved.actions.items():
            if array.ndim == 0 or len(array) != sum(saved.lengths):
                rows = f"{array.dtype}{list(array.shape)}"
                raise Refused(f"journal.actions.{name} is {rows}, {sum(saved.lengths)} rows expected")
        journal, stops = cls(), np.cumsum(saved.lengths, dtype=np.int64)
        for stop, length in zip(stops.tolist(), saved.lengths, strict=True):
            piece = {name: array[stop - length : stop] for name, array in saved.actions.items()}
            journal._pieces.append([piece] if length else [])
        return journal


def _length(actions: Mapping[str, Array]) -> int:
    return len(next(iter(actions.values()), ()))
