"""A worker's columns of one lane (`Rows`), and the episode counters of its slots (`Slots`); used by all hosts."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from farstep.batch import ENDS, is_obs
from farstep.core import Array
from farstep.rollout.blocks import Layout
from farstep.rollout.seeds import episode_seed


class Rows:
    """Views of the arrays of one chunk: `row[name]` has one entry per step, `chunk[name]` one entry per chunk."""

    def __init__(self, layout: Layout, blocks: dict[str, Array], lane: int, first: int, stop: int) -> None:
        self.row = {name: blocks[name][lane, :, first:stop] for name in layout.rows}
        self.chunk = {name: blocks[name][lane, first:stop] for name in layout.chunks}
        self.num_envs = stop - first

    def at(self, names: Iterable[str], time: Array, column: Array) -> dict[str, Array]:
        """Copies of single rows of the named arrays; arrays with one entry per chunk ignore `time`."""
        return {n: self.chunk[n][column] if n in self.chunk else self.row[n][time, column] for n in names}

    def tables(self, steps: int) -> dict[str, Array]:
        """All arrays of a chunk of `steps` rows, `[rows, envs, ...]`, by their names in messages.

        `last_obs` is the observation after the last step. `final_obs` has one entry per ended episode, stored in its
        first rows; its other rows are unused.
        """
        after = {"last_" + name: block[steps : steps + 1] for name, block in self.row.items() if is_obs(name)}
        whole = {name: array[None] for name, array in self.chunk.items()}
        return {**{name: block[:steps] for name, block in self.row.items()}, **after, **whole}

    def clear_flags(self, steps: int) -> None:
        """Set the flags of all rows to their default values, so that hosts write only exceptions."""
        for name in ("terminated", "truncated", "episode_start"):
            self.row[name][:steps] = False
        self.row["valid"][:steps] = True


@dataclass
class Slots:
    """The episodes of a worker's environment slots; kept from chunk to chunk."""

    first: int
    roots: list[int]
    episodes: list[int]
    """Index of each slot's episode in progress, or of its next episode if none is in progress."""

    def __post_init__(self) -> None:
        count = len(self.roots)
        self.started = np.zeros(count, bool)
        self.fresh = np.zeros(count, bool)
        """Whether the next row is the first of an episode."""
        self.returns = np.zeros(count, np.float64)
        self.start_row = np.zeros(count, np.int64)
        self.start_time = np.zeros(count, np.float64)
        self.total_rows = 0
        """Total number of rows of all previous chunks."""
        self.row = 0
        """The row of the current chunk that is being stepped."""
        self.resume = np.array(self.episodes, np.int64)
        """The episode with which each slot continues if the current chunk is lost."""
        self.any_fresh = False
        self._ends: list[tuple[int, int, int, float, float]] = []

    def seed_of(self, i: int) -> int:
        """The seed of slot `i`'s episode."""
        return episode_seed(self.roots[i], self.first + i, self.episodes[i])

    def choose(self, mask: Array | None, roots: list[int] | None) -> Array:
        """Advance the masked slots to their next episode, or to episode 0 of new roots. No mask: all slots.

        Returns:
            The mask of the advanced slots.
        """
        chosen = np.ones(len(self.roots), bool) if mask is None else mask
        for i in np.flatnonzero(chosen):
            if roots is not None:
                self.roots[i], self.episodes[i], self.resume[i] = roots[i], 0, 0
            elif self.started[i]:
                self.episodes[i] += 1
        return chosen

    def episode_step(self, i: int) -> int:
        """Steps of slot `i`'s episode before the row that is being stepped."""
        return int(self.total_rows + self.row - self.start_row[i])

    def begin_episode(self, i: int, next_row: int) -> None:
        """Record that slot `i` was reset; its first observation is in row `next_row` of the current chunk."""
        self.started[i] = self.fresh[i] = self.any_fresh = True
        self.returns[i] = 0.0
        self.start_row[i] = self.total_rows + next_row
        self.start_time[i] = time.monotonic()

    def steps_done(self, i: int) -> int | None:
        """Steps of slot `i`'s episode so far, between chunks; None if no episode is in progress."""
        return int(self.total_rows - self.start_row[i]) if self.started[i] else None

    def skip(self, i: int) -> None:
        """Abandon slot `i`'s episode; the next chunk starts with the next episode of this slot."""
        self.episodes[i] += 1
        self.resume[i] = self.episodes[i]
        self.started[i] = self.fresh[i] = False

    def replayed(self, i: int, reward: float) -> None:
        """Record that slot `i` replayed a step of its episode. The head already has the row of this step."""
        self.fresh[i] = False
        self.any_fresh = bool(self.fresh.any())
        self.returns[i] += reward
        self.start_row[i] -= 1
        self.resume[i] = self.episodes[i] + 1

    def end_episode(self, i: int, t: int) -> int:
        """Record that slot `i`'s episode ended in row `t`; return how many episodes ended earlier in this chunk."""
        length = self.total_rows + t + 1 - int(self.start_row[i])
        seconds = time.monotonic() - float(self.start_time[i])
        self._ends.append((t, self.first + i, length, float(self.returns[i]), seconds))
        self.episodes[i] += 1
        return len(self._ends) - 1

    def mark_starts(self, row: Array) -> None:
        """Write one row of `episode_start`: True for slots that were reset since the last row."""
        row[:] = self.fresh
        self.fresh[:] = False
        self.any_fresh = False

    def mark_starts_in(self, part: slice, row: Array) -> None:
        """As `mark_starts`, for some of the slots; `row` has the entries of these slots."""
        row[:] = self.fresh[part]
        self.fresh[part] = False
        self.any_fresh = bool(self.fresh.any())

    def unmark_starts(self, row: Array) -> None:
        """Undo `mark_starts` for a row that is not recorded after all."""
        self.fresh |= row
        self.any_fresh = bool(self.fresh.any())

    def finish(self, steps: int) -> bytes:
        """End a chunk: count its rows and update `resume`; returns records of `batch.ENDS` as bytes."""
        self.total_rows += steps
        episodes = np.array(self.episodes, np.int64)
        # An episode without a row can restart without loss.
        self.resume = np.where(self.started & ~self.fresh, episodes + 1, episodes)
        return np.array(self._ends, ENDS).tobytes()

    def begin_chunk(self) -> None:
        self.row = 0
        self._ends.clear()

    def rewind(self, failed: Iterable[int] = ()) -> None:
        """Discard the current chunk; every slot continues with the episode in `resume`.

        A `failed` slot continues after its current episode, which would fail again.
        """
        for i in failed:
            self.resume[i] = self.episodes[i] + 1
        self.episodes[:] = self.resume.tolist()
        self.started[:] = self.fresh[:] = self.any_fresh = False
        self._ends.clear()


def with_nan(row: Iterable[Array]) -> list[int]:
    """The environments with NaN in the arrays `[n, ...]` of one row of observations; used to explain errors."""
    found = [np.isnan(array.reshape(len(array), -1)).any(axis=1) for array in row if array.dtype.kind in "fc"]
    return np.flatnonzero(np.any(found, axis=0)).tolist() if found else []
