"""A worker's own columns of one lane, and the bookkeeping of episodes that all hosts share."""

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
    """Views of the arrays a chunk is written into: `row[name][t]` per step, `chunk[name]` once."""

    def __init__(self, layout: Layout, blocks: dict[str, Array], lane: int, first: int, stop: int) -> None:
        self.row = {name: blocks[name][lane, :, first:stop] for name in layout.rows}
        self.chunk = {name: blocks[name][lane, first:stop] for name in layout.chunks}
        self.num_envs = stop - first

    def at(self, names: Iterable[str], time: Array, column: Array) -> dict[str, Array]:
        """Copies of rows, of the arrays with these names; those of the whole chunk have no time."""
        return {n: self.chunk[n][column] if n in self.chunk else self.row[n][time, column] for n in names}

    def tables(self, steps: int) -> dict[str, Array]:
        """All that a chunk of `steps` steps consists of, by the names it travels under, each `[rows, envs, ...]`.

        Observations after the last step are `last_obs`; of `final_obs`, only as many rows are in use as ends fill.
        """
        after = {"last_" + name: block[steps : steps + 1] for name, block in self.row.items() if is_obs(name)}
        whole = {name: array[None] for name, array in self.chunk.items()}
        return {**{name: block[:steps] for name, block in self.row.items()}, **after, **whole}

    def clear_flags(self, steps: int) -> None:
        """Ends and starts are rare: cleared once per chunk, then only set where they happen."""
        for name in ("terminated", "truncated", "episode_start"):
            self.row[name][:steps] = False
        self.row["valid"][:steps] = True


@dataclass
class Slots:
    """State of a worker's environment slots that outlives a chunk."""

    first: int
    roots: list[int]
    episodes: list[int]
    """The episode each slot is in, or will start with."""

    def __post_init__(self) -> None:
        count = len(self.roots)
        self.started = np.zeros(count, bool)
        self.fresh = np.zeros(count, bool)
        """The next row begins an episode."""
        self.returns = np.zeros(count, np.float64)
        self.start_row = np.zeros(count, np.int64)
        self.start_time = np.zeros(count, np.float64)
        self.total_rows = 0
        """Rows of the chunks before this one."""
        self.row = 0
        """The row of this chunk that is under way."""
        self.resume = np.array(self.episodes, np.int64)
        self.any_fresh = False
        self._ends: list[tuple[int, int, int, float, float]] = []

    def seed_of(self, i: int) -> int:
        """The seed of the episode that slot `i` is in."""
        return episode_seed(self.roots[i], self.first + i, self.episodes[i])

    def choose(self, mask: Array | None, roots: list[int] | None) -> Array:
        """Move the masked slots (all without a mask) on to their next episode, or to episode 0 of new roots."""
        chosen = np.ones(len(self.roots), bool) if mask is None else mask
        for i in np.flatnonzero(chosen):
            if roots is not None:
                self.roots[i], self.episodes[i], self.resume[i] = roots[i], 0, 0
            elif self.started[i]:
                self.episodes[i] += 1
        return chosen

    def episode_step(self, i: int) -> int:
        """How many steps of its episode slot `i` had done before the row under way."""
        return int(self.total_rows + self.row - self.start_row[i])

    def begin_episode(self, i: int, next_row: int) -> None:
        """Slot `i` was reset; its first observation is row `next_row` of the current chunk."""
        self.started[i] = self.fresh[i] = self.any_fresh = True
        self.returns[i] = 0.0
        self.start_row[i] = self.total_rows + next_row
        self.start_time[i] = time.monotonic()

    def taken(self, i: int) -> int | None:
        """Between chunks: the steps that slot `i` has done of its episode; None before it has begun one."""
        return int(self.total_rows - self.start_row[i]) if self.started[i] else None

    def skip(self, i: int) -> None:
        """Give up slot `i`'s episode; its next one is begun with the next chunk."""
        self.episodes[i] += 1
        self.resume[i] = self.episodes[i]
        self.started[i] = self.fresh[i] = False

    def took(self, i: int, reward: float) -> None:
        """Slot `i` did a step of its episode again that a process before this one had handed over."""
        self.fresh[i] = False
        self.any_fresh = bool(self.fresh.any())
        self.returns[i] += reward
        self.start_row[i] -= 1
        self.resume[i] = self.episodes[i] + 1

    def end_episode(self, i: int, t: int) -> int:
        """Slot `i` ended its episode at row `t`; returns how many episodes ended in this chunk before it."""
        length = self.total_rows + t + 1 - int(self.start_row[i])
        seconds = time.monotonic() - float(self.start_time[i])
        self._ends.append((t, self.first + i, length, float(self.returns[i]), seconds))
        self.episodes[i] += 1
        return len(self._ends) - 1

    def mark_starts(self, row: Array) -> None:
        """Write the `episode_start` row for slots that were reset since the last row."""
        row[:] = self.fresh
        self.fresh[:] = False
        self.any_fresh = False

    def finish(self, steps: int) -> bytes:
        """A chunk is complete: count its rows, remember where to go on, return the ends as bytes."""
        self.total_rows += steps
        episodes = np.array(self.episodes, np.int64)
        # An episode of which no row was handed over yet can be started again without losing anything.
        self.resume = np.where(self.started & ~self.fresh, episodes + 1, episodes)
        return np.array(self._ends, ENDS).tobytes()

    def begin_chunk(self) -> None:
        self.row = 0
        self._ends.clear()

    def rewind(self, failed: Iterable[int] = ()) -> None:
        """Forget the chunk in progress; every slot goes on with its next episode, one that failed with the one after
        the failure: the same episode would only fail again."""
        for i in failed:
            self.resume[i] = self.episodes[i] + 1
        self.episodes[:] = self.resume.tolist()
        self.started[:] = self.fresh[:] = self.any_fresh = False
        self._ends.clear()


def with_nan(row: Iterable[Array]) -> list[int]:
    """Which environments of a row `[n, ...]` of observations have a NaN in theirs; looked for once something failed."""
    found = [np.isnan(array.reshape(len(array), -1)).any(axis=1) for array in row if array.dtype.kind in "fc"]
    return np.flatnonzero(np.any(found, axis=0)).tolist() if found else []
