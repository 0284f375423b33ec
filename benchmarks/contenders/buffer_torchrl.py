"""TorchRL's replay buffers, with rows and batches as TensorDicts, as its collectors and losses have them.

``plain`` is the fastest set-up that was found: ``ReplayBuffer`` rather than ``TensorDictReplayBuffer``, which also
writes an index into every row, and is the other mode; ``add`` for a single row, ``extend`` for more;
``LazyTensorStorage`` rather than ``LazyMemmapStorage``; without ``prefetch``, whose thread costs more than it saves.
"""

from typing import Any

import _setup  # noqa: F401

# isort: split
import torch
from replay import ALPHA, BETA, KEYS, Array, Rows, Store, Task, parse_arguments, run
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, PrioritizedSampler, RandomSampler, ReplayBuffer, TensorDictReplayBuffer

torch.set_num_threads(1)


class TorchrlBuffer(Store):
    def __init__(self, task: Task, rows_per_insert: int) -> None:
        kind = TensorDictReplayBuffer if task.mode == "tensordict" else ReplayBuffer
        self.buffer = kind(
            storage=LazyTensorStorage(task.capacity),
            sampler=PrioritizedSampler(task.capacity, ALPHA, BETA) if task.prioritised else RandomSampler(),
        )

    def native(self, rows: Rows) -> TensorDict:
        tensors = {key: torch.from_numpy(values) for key, values in rows.items()}
        count = len(rows["reward"])
        found = TensorDict(tensors, batch_size=[count])
        return found[0] if count == 1 else found

    def insert(self, rows: TensorDict) -> None:
        if rows.batch_dims:
            self.buffer.extend(rows)
        else:
            self.buffer.add(rows)

    def sample(self, batch_size: int) -> tuple[TensorDict, dict[str, Any]]:
        return self.buffer.sample(batch_size, return_info=True)

    def update(self, batch: tuple[TensorDict, dict[str, Any]], priorities: Array) -> None:
        self.buffer.update_priority(batch[1]["index"], torch.from_numpy(priorities))

    def arrays(self, batch: Any) -> Rows:
        return {key: batch[0][key].numpy() for key in KEYS}


if __name__ == "__main__":
    task = parse_arguments(modes=("plain", "tensordict"))
    name = "torchrl" if task.mode == "plain" else "torchrl-tensordict"
    run(name, task, TorchrlBuffer, packages=("torch", "torchrl", "tensordict"))
