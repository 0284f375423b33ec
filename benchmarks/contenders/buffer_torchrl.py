"""TorchRL's replay buffers, with rows and batches as TensorDicts, as its collectors and losses have them.

``plain`` is the fastest set-up that was found: ``ReplayBuffer`` rather than ``TensorDictReplayBuffer``, which also
writes an index into every row, and is the other mode; ``extend``, or ``add`` of each row where that is faster;
``LazyTensorStorage`` rather than ``LazyMemmapStorage``; without ``prefetch``, whose thread costs more than it saves.
"""

from typing import Any

import _setup  # noqa: F401

# isort: split
import torch
from replay import ALPHA, BETA, KEYS, Array, Rows, Store, Task, Way, parse_arguments, run
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, PrioritizedSampler, RandomSampler, ReplayBuffer, TensorDictReplayBuffer

torch.set_num_threads(1)


class TorchrlBuffer(Store):
    takes_any_rows = True

    def __init__(self, task: Task, rows_per_insert: int) -> None:
        kind = TensorDictReplayBuffer if task.mode == "tensordict" else ReplayBuffer
        self.buffer = kind(
            storage=LazyTensorStorage(task.capacity),
            sampler=PrioritizedSampler(task.capacity, ALPHA, BETA) if task.prioritized else RandomSampler(),
        )

    def native(self, rows: Rows) -> TensorDict:
        tensors = {key: torch.from_numpy(values) for key, values in rows.items()}
        return TensorDict(tensors, batch_size=[len(rows["obs"])])

    def insert(self, rows: TensorDict) -> None:
        self.buffer.extend(rows)

    def singly(self, rows: Rows) -> tuple[TensorDict, ...]:
        return self.native(rows).unbind(0)

    def add(self, rows: tuple[TensorDict, ...]) -> None:
        for row in rows:
            self.buffer.add(row)

    def ways(self) -> list[Way]:
        return [(self.native, self.insert), (self.singly, self.add)]

    def sample(self, batch_size: int) -> tuple[TensorDict, dict[str, Any]]:
        return self.buffer.sample(batch_size, return_info=True)

    def update(self, batch: tuple[TensorDict, dict[str, Any]], priorities: Array) -> None:
        self.buffer.update_priority(batch[1]["index"], torch.from_numpy(priorities))

    def arrays(self, batch: Any) -> Rows:
        return {key: values.numpy() for key, values in batch[0].items() if key in KEYS}


if __name__ == "__main__":
    task = parse_arguments(modes=("plain", "tensordict"))
    name = "torchrl" if task.mode == "plain" else "torchrl-tensordict"
    run(name, task, TorchrlBuffer, packages=("torch", "torchrl", "tensordict"))
