"""Stacked observations that are stored once per frame."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farstep import Buffer
from farstep.buffer import DPER, FIFO, LIFO, FrameStack, MinHeap, NStep, Prioritized, Sequence, Uniform
from farstep.buffer.saving import snapshot
from farstep.checkpoint.folder import load_with, save_parts
from farstep.errors import CheckpointError, ConfigError
from tests.buffer.saving.test_saving_meanwhile import Moment, on_write
from tests.buffer.storage.stacked_envs import StackedEnvs, assert_equal_contents, assert_equal_samples

pytestmark = pytest.mark.slow  # real processes, or learning

SAMPLERS = (
    Uniform(),
    Prioritized(),
    NStep(1, 0.9),
    NStep(3, 0.9, by=Prioritized()),
    Sequence(4, pad=True),
    DPER(),
    FIFO(),
)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), sampler=st.sampled_from(SAMPLERS), pooled=st.booleans())
def test_samples_are_equal_to_those_of_whole_stacks(seed: int, sampler: Any, pooled: bool) -> None:
    """Random episodes, paddings, lost chunks, jumps, evictions, deletions and restarts."""
    rng = np.random.default_rng(seed)
    num_frames, axis, num_slots = int(rng.integers(2, 6)), int(rng.choice([0, -1])), int(rng.integers(1, 4))
    envs = StackedEnvs(
        rng,
        num_frames,
        axis,
        padding=str(rng.choice(["reset", "zero", "random"])),
        channels=int(rng.integers(1, 3)),
        dtype=str(rng.choice(["uint8", "float32"])),
        nested=bool(rng.integers(2)),
        jumps=float(rng.choice([0.0, 0.2])),
        has_filler=bool(rng.integers(2)),
    )
    capacity = num_slots * int(rng.integers(9, 25))
    stack = FrameStack(num_frames, axis, (envs.array,))
    whole = Buffer(capacity, sampler, pooled=pooled, seed=seed)
    buffer = Buffer(capacity, sampler, pooled=pooled, seed=seed, frame_stack=stack)
    with tempfile.TemporaryDirectory() as folder:
        try:
            for _ in range(25):
                slots = sorted(rng.choice(num_slots, int(rng.integers(1, num_slots + 1)), replace=False).tolist())
                if rng.random() < 0.1:
                    envs.chunk(slots, 2)  # a chunk that was lost with its worker
                steps = int(rng.integers(1, 9))
                batch = envs.chunk(slots if whole.is_bound else list(range(num_slots)), steps)
                np.testing.assert_array_equal(buffer.insert(batch), whole.insert(batch))
                match int(rng.integers(25)):
                    case 0 | 1 | 2 if len(whole.keys()) > 3:
                        gone = rng.choice(whole.keys(), 2)
                        assert buffer.delete(gone) == whole.delete(gone)
                    case 3:
                        for each, name in ((whole, "whole"), (buffer, "frames")):
                            each.checkpoint(Path(folder) / name)
                            each.close()
                        whole = Buffer.restore(Path(folder) / "whole")
                        buffer = Buffer.restore(Path(folder) / "frames")
                    case 4 | 5 | 6 | 7 if len(whole.keys()) > 3:
                        (found, info), (expected, expected_info) = buffer.sample(3), whole.sample(3)
                        np.testing.assert_array_equal(info.keys, expected_info.keys)
                        assert_equal_samples(found, expected)
                assert_equal_contents(buffer, whole)
        finally:
            whole.close()
            buffer.close()


def test_rows_inserted_as_arrays_are_equal_too() -> None:
    rng = np.random.default_rng(5)
    stack = FrameStack(3, -1, ("obs", "next_obs"))
    with Buffer(20, NStep(2, 0.9), seed=1) as whole, Buffer(20, NStep(2, 0.9), seed=1, frame_stack=stack) as buffer:
        envs = StackedEnvs(rng, 3, -1, padding="zero")
        for _ in range(15):
            batch = envs.chunk([0], int(rng.integers(1, 7)))
            after = np.concatenate([batch["obs"][1:], np.asarray(batch.last_obs)[None]])
            after[batch.final_obs.row, batch.final_obs.slot] = batch.final_obs.obs
            rows = {name: array[:, 0] for name, array in {**batch.arrays, "next_obs": after}.items()}
            buffer.insert(rows), whole.insert(rows)
            assert_equal_contents(buffer, whole)


def test_stacks_take_the_memory_of_single_frames() -> None:
    """Atari: rows [4, 84, 84] take about a quarter of their bytes, in memory and on disk."""
    shape, sizes = (84, 84), {}
    envs = StackedEnvs(np.random.default_rng(0), size=shape, end=1 / 200)
    chunks = [envs.chunk([0, 1], 50) for _ in range(20)]
    for name, stack in (("whole", None), ("frames", FrameStack(4))):
        with Buffer(1_600, NStep(), frame_stack=stack) as buffer, tempfile.TemporaryDirectory() as folder:
            for chunk in chunks:
                buffer.insert(chunk)
            assert len(buffer) == 1_600
            saved = sum(file.stat().st_size for file in buffer.checkpoint(folder).rglob("*"))
            sizes[name] = buffer.nbytes / len(buffer), saved / len(buffer)
    for whole, frames in zip(sizes["whole"], sizes["frames"], strict=True):
        assert whole > 4 * 84 * 84 and frames < 0.3 * whole


def test_capacity_of_max_bytes_counts_single_frames() -> None:
    row = 84 * 84
    with Buffer(
        10**6, Uniform(), max_bytes=100 * row, spec={"obs": ((4, 84, 84), "uint8")}, frame_stack=FrameStack(4)
    ) as buffer:
        assert buffer.capacity == 100


def test_newest_chunk_may_replace_all_rows_of_a_ring() -> None:
    with Buffer(8, Uniform(), frame_stack=FrameStack(4)) as buffer, Buffer(8, Uniform()) as whole:
        envs = StackedEnvs(np.random.default_rng(0), end=0.0)
        for steps in (3, 8, 7, 8, 1):
            batch = envs.chunk([0], steps)
            buffer.insert(batch), whole.insert(batch)
            assert_equal_contents(buffer, whole)


@pytest.mark.parametrize("pooled", [False, True])
def test_checkpoint_has_the_frames_of_one_moment(pooled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are inserted and evicted while the files are written, before and after the moment of the checkpoint."""
    monkeypatch.setattr(snapshot, "BLOCK_BYTES", 64)
    envs, options = StackedEnvs(np.random.default_rng(1)), {"pooled": pooled, "seed": 1}
    with (
        Buffer(40, NStep(2), frame_stack=FrameStack(4), **options) as buffer,  # type: ignore[arg-type]
        Buffer(40, NStep(2), **options) as whole,  # type: ignore[arg-type]
    ):
        for each in [envs.chunk([0, 1], 5) for _ in range(8)]:
            buffer.insert(each), whole.insert(each)
        moment = Moment(buffer)

        def use(files: int) -> None:
            batch = envs.chunk([0, 1], 3)
            buffer.insert(batch)
            if not moment.has_come:
                whole.insert(batch)

        on_write(monkeypatch, lambda files: use(files) if files <= 4 or moment.has_come else None)
        buffer.checkpoint(tmp_path, marker=moment)
        assert len(list(tmp_path.glob("*/rows1*"))) > 3, "some rows were copied again"
        with Buffer.restore(tmp_path) as restored:
            assert_equal_contents(restored, whole)


@pytest.mark.parametrize("axis", [0, -1])
def test_bytes_of_equal_numbers_are_kept(axis: int) -> None:
    """-0.0 == 0.0, and NaN != NaN: neither may change a stack or be taken for another frame."""
    numbers = [[1.0, 0.0], [-0.0, 2.0], [2.0, np.nan], [np.nan, -0.0], [0.0, -np.nan]]
    stacks = np.array([np.ones((2, 3, 2)) for _ in numbers], np.float32)
    for stack, (older, newer) in zip(stacks, numbers, strict=True):
        first, last = (stack[0], stack[1]) if axis == 0 else (stack[..., 0], stack[..., 1])
        first[...], last[...] = older, newer
    with Buffer(8, FIFO(), frame_stack=FrameStack(2, axis)) as buffer:
        buffer.insert({"obs": stacks})
        assert np.asarray(buffer.sample(5)[0]["obs"]).tobytes() == stacks.tobytes()


def test_forged_checkpoint_without_older_frames_is_refused(tmp_path: Path) -> None:
    with Buffer(8, Uniform(), frame_stack=FrameStack(4)) as buffer:
        envs = StackedEnvs(np.random.default_rng(0), end=0.0)
        for _ in range(3):
            buffer.insert(envs.chunk([0], 4))
        buffer.checkpoint(tmp_path / "good")
    arrays, meta = load_with(tmp_path / "good", lambda loaded: (dict(loaded.arrays), dict(loaded.meta)), mmap=False)
    arrays |= {"store/older.obs": np.zeros(0, np.int64), "store/older.obs.frames": np.zeros((0, 3, 1, 3, 2), np.uint8)}
    save_parts(tmp_path / "forged", iter(arrays.items()), lambda: meta, keep=1)
    with pytest.raises(CheckpointError, match=r"older.obs lacks the\s+older\s+frames"):
        Buffer.restore(tmp_path / "forged")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_frames": 1}, "num_frames is 1"),
        ({"num_frames": 4, "axis": 1}, "axis is 1"),
        ({"num_frames": 4, "arrays": "obs"}, "arrays is 'obs'"),
    ],
)
def test_invalid_frame_stack_is_refused(options: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        FrameStack(**options)


def test_arrays_that_are_not_stacks_are_refused() -> None:
    spec = {"obs": ((4, 8, 8), "uint8")}
    stacks: list[tuple[Any, str]] = [
        (FrameStack(3), "3 frames on the first axis of 'obs'"),
        (FrameStack(4, arrays=("image",)), "image"),
        (4, "frame_stack is 4"),
    ]
    for stack, reason in stacks:
        with pytest.raises(ConfigError, match=reason):
            Buffer(8, Uniform(), spec=spec, frame_stack=stack)


def test_frame_stack_needs_rows_in_order() -> None:
    for options in ({"sampler": LIFO()}, {"sampler": Uniform(), "remover": MinHeap()}):
        with pytest.raises(ConfigError, match="rows before"):
            Buffer(8, frame_stack=FrameStack(4), **options)


def test_buffer_warns_if_stacks_are_not_shifted() -> None:
    envs = StackedEnvs(np.random.default_rng(0), jumps=1.0, end=0.0)
    with Buffer(128, Uniform(), frame_stack=FrameStack(4)) as buffer, warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for _ in range(70):
            buffer.insert(envs.chunk([0], 64))
    assert len(heard) == 1 and "whole stacks are stored" in str(heard[0].message)
    assert heard[0].filename == __file__
