"""Plain arrays: what cannot be beaten. Rows are drawn uniformly, and priorities are written and never read."""

from typing import Any

import _setup  # noqa: F401

# isort: split
import numpy as np
from replay import Array, Rows, Store, Task, parse_arguments, run


class PlainArrays(Store):
    """One array per key, written in a circle."""

    def __init__(self, task: Task, rows_per_insert: int) -> None:
        self.mode = task.mode
        self.capacity = task.capacity
        self.position = 0
        self.rng = np.random.default_rng(3)
        self.priorities = np.ones(task.capacity, np.float32)
        self.columns = {
            "obs": np.zeros((task.capacity, *task.shape), task.dtype),
            "action": np.zeros(task.capacity, np.int64),
            "reward": np.zeros(task.capacity, np.float32),
            "next_obs": np.zeros((task.capacity, *task.shape), task.dtype),
            "terminated": np.zeros(task.capacity, np.bool_),
        }
        self.out: dict[int, Rows] = {}

    def insert(self, rows: Rows) -> None:
        count = len(rows["reward"])
        first = min(count, self.capacity - self.position)
        for key, column in self.columns.items():
            values = rows[key]
            column[self.position : self.position + first] = values[:first]
            if first < count:
                column[: count - first] = values[first:]
        self.position = (self.position + count) % self.capacity

    def sample(self, batch_size: int) -> tuple[Rows, Array]:
        rows = self.rng.integers(0, self.capacity, batch_size)
        if self.mode == "fancy":
            return {key: column[rows] for key, column in self.columns.items()}, rows
        if self.mode == "take":
            return {key: column.take(rows, axis=0) for key, column in self.columns.items()}, rows
        if batch_size not in self.out:
            shapes = {key: (batch_size, *column.shape[1:]) for key, column in self.columns.items()}
            self.out[batch_size] = {key: np.zeros(shapes[key], self.columns[key].dtype) for key in shapes}
        out = self.out[batch_size]
        for key, column in self.columns.items():
            # Only with a mode other than "raise" does NumPy write to `out` without a copy in between.
            column.take(rows, axis=0, out=out[key], mode="clip")
        return out, rows

    def update(self, batch: tuple[Rows, Array], priorities: Array) -> None:
        self.priorities[batch[1]] = priorities

    def arrays(self, batch: Any) -> Rows:
        return dict(batch[0])


if __name__ == "__main__":
    task = parse_arguments(modes=("fancy", "take", "out"))
    notes = {
        "fancy": "array[rows]",
        "take": "array.take(rows)",
        "out": "array.take(rows, out=...): every batch in the same memory",
    }
    run(f"numpy-{task.mode}", task, PlainArrays, notes=notes[str(task.mode)])
