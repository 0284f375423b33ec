"""Environments with known numbers, batches of them as `collect` returns these, and a slow model of a buffer."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from farstep import Batch
from farstep.batch import FinalObs


@dataclass
class Row:
    """One step of one slot, and what came after it."""

    obs: int
    reward: float
    terminated: bool
    truncated: bool
    after: int
    start: bool
    valid: bool = True
    follows: bool = False
    """The row before it in its column is the step before."""

    @property
    def ended(self) -> bool:
        return self.terminated or self.truncated


class Slot:
    """An environment whose every observation has a number of its own. With `filler` it resets in the next step."""

    def __init__(self, slot: int, seed: int, filler: bool) -> None:
        self._rng = np.random.default_rng([seed, slot])
        self._filler, self._pending = filler, False
        self._next = slot * 1_000_000
        self._reset()

    def _new(self) -> int:
        self._next += 1
        return self._next

    def _reset(self) -> None:
        self.obs, self._fresh = self._new(), True
        self._left = int(self._rng.integers(1, 7))

    def step(self) -> Row:
        if self._pending:  # this step only resets; it sees the last observation once more
            seen, self._pending = self.obs, False
            self._reset()
            return Row(seen, 0.0, False, False, self.obs, False, valid=False)
        self._left -= 1
        over, truncates = self._left == 0, bool(self._rng.random() < 0.4)
        row = Row(
            self.obs,
            float(self._rng.integers(-4, 5)),
            over and not truncates,
            over and truncates,
            self._new(),
            self._fresh,
        )
        self.obs, self._fresh = row.after, False
        if over and self._filler:
            self._pending = True
        elif over:
            self._reset()
        return row


class World:
    """Workers with some slots each."""

    def __init__(self, slots_of: list[int], seed: int, filler: bool = False, nested: bool = False) -> None:
        edges = np.cumsum([0, *slots_of])
        self.workers = [range(a, b) for a, b in pairwise(edges.tolist())]
        self.slots = [Slot(i, seed, filler) for i in range(edges[-1])]
        self._handed_out = np.zeros(edges[-1], bool)
        self._rng = np.random.default_rng(seed)
        self._nested = nested

    def lose(self, worker: int, steps: int) -> None:
        """Step the environments without a chunk for the learner."""
        for slot in self.workers[worker]:
            for _ in range(steps):
                self.slots[slot].step()
            self._handed_out[slot] = False

    def batch(self, workers: list[int], steps: int) -> tuple[Batch, list[list[Row]], list[int]]:
        """Chunks of these workers side by side; its rows by column, and their slots."""
        slots = [slot for worker in workers for slot in self.workers[worker]]
        continues = self._handed_out[slots].copy()
        rows = [[self.slots[slot].step() for _ in range(steps)] for slot in slots]
        self._handed_out[slots] = True
        last = np.array([self.slots[slot].obs for slot in slots])

        def grid(name: str, dtype: Any) -> np.ndarray:
            return np.array([[getattr(column[t], name) for column in rows] for t in range(steps)], dtype)

        obs = grid("obs", np.int64)
        ends = [(t, k) for k, column in enumerate(rows) for t in range(steps) if column[t].ended]
        ends = [ends[i] for i in self._rng.permutation(len(ends))]
        final = np.array([rows[k][t].after for t, k in ends], np.int64)
        arrays = {
            **({"obs.id": obs, "obs.pair": self.pair(obs)} if self._nested else {"obs": obs}),
            "reward": grid("reward", np.float32),
            "terminated": grid("terminated", bool),
            "truncated": grid("truncated", bool),
            "valid": grid("valid", bool),
            "episode_start": grid("start", bool),
            "version": np.full((steps, len(slots)), 3),
            "action": -obs,
        }
        structure = {"id": "obs.id", "pair": "obs.pair"} if self._nested else "obs"
        batch = Batch(
            arrays,
            {"obs": structure, "action": "action"},
            self.observed(last),
            FinalObs(np.array([t for t, _ in ends], int), np.array([k for _, k in ends], int), self.observed(final)),
            {"return": np.zeros(len(ends))},
            np.array(slots),
            continues,
        )
        for column, follows in zip(rows, continues.tolist(), strict=True):
            for t, row in enumerate(column):
                row.follows = bool(t) or follows
        return batch, rows, slots

    def pair(self, obs: np.ndarray) -> np.ndarray:
        return np.stack([obs % 1000, -obs], axis=-1).astype(np.float64)

    def observed(self, obs: np.ndarray) -> Any:
        return {"id": obs, "pair": self.pair(obs)} if self._nested else obs

    def check(self, value: Any, numbers: Any) -> None:
        """An observation of the buffer's is that of these numbers."""
        numbers = np.array(numbers)
        if self._nested:
            np.testing.assert_array_equal(value["id"], numbers)
            np.testing.assert_array_equal(value["pair"], self.pair(numbers))
        else:
            np.testing.assert_array_equal(value, numbers)


@dataclass
class Held:
    """The rows in a buffer, by column."""

    rows: int
    columns: list[list[Row]]
    slots: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, capacity: int, columns: int) -> Held:
        return cls(capacity // columns, [[] for _ in range(columns)], [-1] * columns)

    def add(self, batch_rows: list[list[Row]], slots: list[int]) -> None:
        for rows, slot in zip(batch_rows, slots, strict=True):
            column = slot % len(self.columns)
            if self.slots[column] != slot:
                rows[0].follows = False
            self.slots[column] = slot
            self.columns[column] = (self.columns[column] + rows)[-self.rows :]

    def items(self) -> dict[int, tuple[int, int]]:
        """Where each row that can be sampled is, by its observation."""
        return {row.obs: (c, i) for c, column in enumerate(self.columns) for i, row in enumerate(column) if row.valid}

    def path(self, column: int, i: int, most: int) -> list[Row]:
        """At most `most` consecutive rows of one episode."""
        rows = self.columns[column]
        found = [rows[i]]
        while len(found) < most and not found[-1].ended and i + 1 < len(rows):
            i += 1
            if not rows[i].follows or rows[i].start:
                break
            found.append(rows[i])
        return found

    def episodes(self) -> dict[int, list[Row]]:
        """Complete episodes, by their first observation."""
        paths = [self.path(*place, 10**6) for place in self.items().values()]
        return {path[0].obs: path for path in paths if path[0].start and path[-1].ended}
