"""farstep's buffer, in its defaults; ``next-row``: without next_obs, which NStep(1) reads from the row that follows;
``remover-...``: another remover than the default one, which removes the oldest rows."""

from typing import Any

import _setup  # noqa: F401

# isort: split
from replay import ALPHA, BETA, KEYS, Array, Rows, Store, Task, parse_arguments, run

import farstep
from farstep.buffer import LIFO, MinHeap, NStep, Prioritized, Uniform

REMOVERS = {
    "remover-lifo": LIFO(),
    "remover-uniform": Uniform(),
    "remover-prioritized": Prioritized(),
    "remover-heap": MinHeap(),
}


class FarstepBuffer(Store):
    takes_any_rows = True

    def __init__(self, task: Task, rows_per_insert: int) -> None:
        sampler = Prioritized(alpha=ALPHA, beta=BETA) if task.prioritized else Uniform()
        chosen = NStep(1, by=sampler) if task.mode == "next-row" else sampler
        self.buffer = farstep.Buffer(task.capacity, chosen, remover=REMOVERS.get(task.mode or ""))

    def insert(self, rows: Rows) -> None:
        self.buffer.insert(rows)

    def sample(self, batch_size: int) -> Any:
        return self.buffer.sample(batch_size)

    def update(self, batch: Any, priorities: Array) -> None:
        self.buffer.update_priorities(batch[1].keys, priorities)

    def arrays(self, batch: Any) -> Rows:
        return {key: batch[0][key] for key in KEYS if key in batch[0]}


class NextRowBuffer(FarstepBuffer):
    next_obs = "read from the next row"
    takes_any_rows = False  # it needs rewards

    def native(self, rows: Rows) -> Rows:
        return {key: values for key, values in rows.items() if key != "next_obs"}


if __name__ == "__main__":
    task = parse_arguments(modes=("plain", "next-row", *REMOVERS))
    if task.mode == "next-row":
        run("farstep-next-row", task, NextRowBuffer, packages=("farstep",))
    else:
        name = "farstep" if task.mode == "plain" else f"farstep-{task.mode}"
        run(name, task, FarstepBuffer, packages=("farstep",))
