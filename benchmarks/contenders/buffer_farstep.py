"""farstep's buffer, in its defaults."""

from typing import Any

import _setup  # noqa: F401

# isort: split
from replay import ALPHA, BETA, KEYS, Array, Rows, Store, Task, parse_arguments, run

import farstep
import farstep.buffer


class FarstepBuffer(Store):
    def __init__(self, task: Task, rows_per_insert: int) -> None:
        prioritised = farstep.buffer.Prioritized(alpha=ALPHA, beta=BETA)
        self.buffer = farstep.Buffer(task.capacity, prioritised if task.prioritised else farstep.buffer.Uniform())

    def insert(self, rows: Rows) -> None:
        self.buffer.insert(rows)

    def sample(self, batch_size: int) -> Any:
        return self.buffer.sample(batch_size)

    def update(self, batch: Any, priorities: Array) -> None:
        self.buffer.update_priorities(batch[1].keys, priorities)

    def arrays(self, batch: Any) -> Rows:
        return {key: batch[0][key] for key in KEYS}


if __name__ == "__main__":
    run("farstep", parse_arguments(), FarstepBuffer, packages=("farstep",))
