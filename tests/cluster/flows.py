"""Buffers, consumers and helpers for tests of workflows; workers and other processes import this module by its name."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import farstep
from farstep.testing import CountingEnv
from tests.cluster.faulty import once


class GatedEnv(CountingEnv):
    """Never ends; the first one of the machine waits in its third step for the file `gate`."""

    def __init__(self, folder: str) -> None:
        super().__init__(length=None)
        self._gate = Path(folder) / "gate"
        self._is_slow = once(f"{folder}/slow")

    def step(self, action: Any) -> Any:
        while self._is_slow and self.count == 2 and not self._gate.exists():
            time.sleep(0.005)
        return super().step(action)


def full(rows: int, **options: Any) -> farstep.Buffer:
    """A buffer for on-policy learners with the given capacity in transitions."""
    return farstep.Buffer(capacity=rows, sampler=farstep.FullBatch(), **options)


def everything(batch: farstep.Batch) -> dict[str, np.ndarray]:
    """All reproducible contents of a batch, as copies by name."""
    found: dict[str, np.ndarray] = {f"array {name}": array for name, array in batch.arrays.items()}
    found |= _flat("last", batch.last_obs) | _flat("final", batch.final_obs.obs) | _flat("state", batch.initial_state)
    found |= {"final row": batch.final_obs.row, "final slot": batch.final_obs.slot}
    found |= {f"episode {key}": batch.episodes[key] for key in ("return", "length", "slot")}
    found |= {"slots": batch.slots, "continues": batch.continues}
    return {name: np.array(value) for name, value in found.items()}


def _flat(name: str, value: Any) -> dict[str, np.ndarray]:
    if value is None:
        return {}
    if isinstance(value, dict):
        return {k: v for key, sub in value.items() for k, v in _flat(f"{name} {key}", sub).items()}
    if isinstance(value, tuple):
        return {k: v for i, sub in enumerate(value) for k, v in _flat(f"{name} {i}", sub).items()}
    return {name: value}


def receive() -> None:
    """Another process: takes messages and prints, for each, the rewards that it reads in the buffer's own memory."""
    from farstep.buffer.storage.cyclic import CyclicBlocks
    from farstep.workflow.delivery import ZmqReceiver

    receiver = ZmqReceiver(json.loads(sys.stdin.readline()))
    try:
        while (message := receiver.take(60.0)) is not None:
            blocks = CyclicBlocks.attach(message["path"])
            columns = [
                blocks.read(column, row, message["size"], ["reward"])["reward"].tolist()  # type: ignore[index]
                for (first, stop), row in zip(message["slots"], message["rows"], strict=True)
                for column in range(first, stop)
            ]
            blocks.close()
            print(json.dumps([list(message["actor_ids"]), list(message["start"]), columns]), flush=True)
            receiver.done(message)
    except farstep.ClosedError:
        pass
    finally:
        receiver.close()


if __name__ == "__main__":
    receive()
