"""What a replay buffer saves, and what it costs, if it stores each frame of stacked images once.

    python benchmarks/frames.py                    # half a minute
    python benchmarks/frames.py --rounds 1 --rows 2048 --out frames.json

Rows are those of Gymnasium's `FrameStackObservation`: four frames of 84x84 random pixels, stacked along the first or
the last axis. A buffer with `FrameStack` and one without get the same chunks, and sample the same transitions, which
have to be equal.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Any

import gymnasium
import numpy as np
from children import run_script
from document import header, machines, write_document
from gymnasium.wrappers import FrameStackObservation, TransformObservation
from policy_models import RandomPolicy
from roster import BENCHMARKS
from tables import table

import farstep
from farstep.buffer import FrameStack, NStep

NUM_FRAMES, NUM_ENVS, BATCH_SIZE = 4, 16, 32
AXES = {"first": 0, "last": -1}
STORAGES = ("whole stacks", "each frame once")


class Pixels(gymnasium.Env[Any, Any]):
    """Images of random pixels."""

    observation_space = gymnasium.spaces.Box(0, 255, (84, 84), np.uint8)
    action_space = gymnasium.spaces.Discrete(4)

    def _image(self) -> Any:
        return self.np_random.integers(0, 256, (84, 84), np.uint8)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self._image(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self._image(), 1.0, bool(self.np_random.random() < 0.005), False, {}


def make_stacked(axis: str) -> gymnasium.Env[Any, Any]:
    env = FrameStackObservation(Pixels(), NUM_FRAMES)
    if axis == "first":
        return env
    space = gymnasium.spaces.Box(0, 255, (84, 84, NUM_FRAMES), np.uint8)
    return TransformObservation(env, lambda stack: np.moveaxis(stack, 0, -1), space)


def measured(axis: str, capacity: int, steps: int) -> dict[str, Any]:
    """Fill both buffers twice and time the second pass; then sample from them alternately."""
    source = {"type": "factory", "env_name": make_stacked, "env_kwargs": {"axis": axis}, "envs_per_node": NUM_ENVS}
    stacks = (None, FrameStack(NUM_FRAMES, AXES[axis]))
    buffers = {
        name: farstep.Buffer(capacity, NStep(), seed=1, frame_stack=stack)
        for name, stack in zip(STORAGES, stacks, strict=True)
    }
    seconds: dict[str, dict[str, list[float]]] = {name: {"insert": [], "sample": []} for name in buffers}
    with farstep.ClusterEnv({**source, "seed": 1}, farstep.InProcessConfig()) as env:
        agent = RandomPolicy(4)
        for chunk in range(2 * (filled := capacity // (NUM_ENVS * steps))):
            batch = env.collect(agent, steps=steps)
            for name, buffer in list(buffers.items())[:: 1 if chunk % 2 else -1]:  # the second one finds a warm cache
                began = time.perf_counter()
                buffer.insert(batch)
                if chunk >= filled:  # until then, the memory is new
                    seconds[name]["insert"].append(time.perf_counter() - began)
    for _ in range(500):
        samples = []
        for name, buffer in buffers.items():
            began = time.perf_counter()
            samples.append(buffer.sample(BATCH_SIZE)[0])
            seconds[name]["sample"].append(time.perf_counter() - began)
        assert all(np.array_equal(samples[0][key], samples[1][key]) for key in ("obs", "next_obs"))
    found: dict[str, Any] = {"axis": axis}
    for name, buffer in buffers.items():
        found[name] = {
            "bytes_per_row": round(buffer.nbytes / capacity),
            "insert_us": round(1e6 * median(seconds[name]["insert"]) / (NUM_ENVS * steps), 3),
            "sample_us": round(1e6 * median(seconds[name]["sample"]), 1),
        }
        buffer.close()
    return found


def summary(document: dict[str, Any]) -> str:
    """The section of docs/replay.md."""
    rows = []
    for axis in AXES:
        runs = [run for run in document["runs"] if run["axis"] == axis]
        for name in STORAGES:
            cells = [f"{axis}, {name}", f"{runs[0][name]['bytes_per_row']:,}"]
            for key in ("insert_us", "sample_us"):
                ratios = [run[name][key] / run[STORAGES[0]][key] for run in runs]
                cells.append(f"{median(run[name][key] for run in runs):.1f} ({median(ratios):.1f})")
            rows.append(cells)
    title = (
        f"On {machines(document)}: stacks of {NUM_FRAMES} frames of 84x84 bytes, {NUM_ENVS} environments, chunks of "
        f"{document['steps']} steps, {document['rows']:,} rows, medians of {len(document['runs']) // 2} rounds "
        "(`results/frames.json`). In brackets: divided by the time for whole stacks."
    )
    header = ["axis of the frames, what is stored", "bytes per row", "insert, µs per row"]
    return f"{title}\n\n{table([*header, f'sample {BATCH_SIZE} transitions, µs'], rows)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="rounds; each measures both axes")
    parser.add_argument("--rows", type=int, default=16_384, help="rows that a buffer holds")
    parser.add_argument("--steps", type=int, default=8, help="steps of a chunk")
    parser.add_argument("--out", type=Path, default=BENCHMARKS / "results" / "frames.json", help="results file")
    options = parser.parse_args()
    document: dict[str, Any] = {**header("frames.py"), "rows": options.rows, "steps": options.steps, "runs": []}
    for number in range(options.rounds):
        for axis in AXES:
            document["runs"].append(measured(axis, options.rows, options.steps))
            print(f"round {number + 1} of {options.rounds}: {document['runs'][-1]}", flush=True)
    write_document(options.out, document)
    print(summary(document))


if __name__ == "__main__":
    run_script(main)
