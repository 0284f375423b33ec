"""Reverb's tables, over its in-process client: written through a TrajectoryWriter, read through a TrajectoryDataset.

The following observation of an item is a reference to the next step's, so it is written once. Reverb's server and the
dataset's prefetching keep their own threads, which no other contender has.
"""

from collections.abc import Iterator
from typing import Any

import _setup  # noqa: F401

# isort: split
import numpy as np
import reverb
import tensorflow as tf
from replay import ALPHA, KEYS, Array, Rows, Store, Task, parse_arguments, run

TABLE = "rows"


class ReverbTable(Store):
    next_obs = "read from the next row"

    def __init__(self, task: Task, rows_per_insert: int) -> None:
        prioritized = reverb.selectors.Prioritized(ALPHA)
        scalar = {"action": tf.int64, "reward": tf.float32, "terminated": tf.bool}
        obs = tf.TensorSpec(task.shape, task.dtype)
        table = reverb.Table(
            TABLE,
            sampler=prioritized if task.prioritized else reverb.selectors.Uniform(),
            remover=reverb.selectors.Fifo(),
            max_size=task.capacity,
            rate_limiter=reverb.rate_limiters.MinSize(1),
            signature={"obs": obs, "next_obs": obs} | {key: tf.TensorSpec((), dtype) for key, dtype in scalar.items()},
        )
        self.server = reverb.Server([table])
        self.address = f"localhost:{self.server.port}"
        self.tf_client = reverb.TFClient(self.address)
        self.writer = reverb.Client(self.address).trajectory_writer(num_keep_alive_refs=2)
        self.batches: dict[int, Iterator[Any]] = {}

    def native(self, rows: Rows) -> list[dict[str, Any]]:
        kept = [key for key in KEYS if key != "next_obs"]
        return [{key: rows[key][index] for key in kept} for index in range(len(rows["reward"]))]

    def insert(self, rows: list[dict[str, Any]]) -> None:
        writer = self.writer
        for row in rows:
            writer.append(row)
            if writer.episode_steps < 2:
                continue
            history = writer.history
            trajectory = {key: history[key][-2] for key in row}
            trajectory["next_obs"] = history["obs"][-1]
            writer.create_item(TABLE, priority=1.0, trajectory=trajectory)
        writer.flush()

    def sample(self, batch_size: int) -> Any:
        if batch_size not in self.batches:
            rows = reverb.TrajectoryDataset.from_table_signature(
                self.address, TABLE, max_in_flight_samples_per_worker=2 * batch_size
            )
            self.batches[batch_size] = iter(rows.batch(batch_size).prefetch(1))
        return next(self.batches[batch_size])

    def update(self, batch: Any, priorities: Array) -> None:
        self.tf_client.update_priorities(TABLE, batch.info.key, priorities.astype(np.float64))

    def arrays(self, batch: Any) -> Rows:
        return {key: batch.data[key].numpy() for key in KEYS}

    def close(self) -> None:
        self.batches.clear()
        self.writer.close()
        self.server.stop()


if __name__ == "__main__":
    run("reverb", parse_arguments(), ReverbTable, packages=("dm-reverb", "tensorflow"))
