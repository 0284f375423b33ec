"""A buffer is used while its checkpoint is written: no thread waits, and the checkpoint is a consistent snapshot."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from farstep import Batch, Buffer
from farstep.batch import FinalObs
from farstep.buffer import NStep, Prioritized, Uniform
from farstep.buffer.bound_arrays import internals_of
from farstep.buffer.saving import snapshot
from farstep.buffer.saving.saved_buffer import describe_buffer, save_buffer
from farstep.checkpoint import folder as checkpoint
from farstep.errors import CheckpointError, ClosedError
from tests.buffer.saving.test_saving import CASES, Rows, assert_equal_from_now_on, filled


class Moment:
    """The marker of a checkpoint; records its calls and whether the snapshot was taken."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer, self.has_come = buffer, False

    def __call__(self) -> dict[str, object]:
        self.has_come = True
        return {"inserts": self._buffer.limiter.inserts, "size": len(self._buffer)}


def on_write(monkeypatch: pytest.MonkeyPatch, act: Callable[[int], object]) -> None:
    """Call `act` with the number of files so far, each time a file of a checkpoint was written."""
    calls = 0

    def fsync(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        act(calls)

    monkeypatch.setattr(os, "fsync", fsync)


@pytest.mark.parametrize("case", CASES)
def test_checkpoint_has_the_contents_of_one_moment(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "BLOCK_BYTES", 256)  # 7 rows
    with filled(CASES[case]) as buffer:
        moment, rows = Moment(buffer), Rows(3)

        def use(files: int) -> None:
            if files <= 9 and not moment.has_come:
                keys = buffer.insert(rows(5))
                buffer.sample(1)
                buffer.update_priorities(keys[:2], np.ones(2))
                buffer.delete(keys[-1:])

        on_write(monkeypatch, use)
        folder = buffer.checkpoint(tmp_path, marker=moment)
        assert (folder / "cells%2F1.npy").exists(), "some rows were copied again"
        with Buffer.restore(tmp_path) as restored:
            assert restored.marker == {"inserts": buffer.limiter.inserts, "size": len(buffer)}
            assert_equal_from_now_on(buffer, restored)


class Lock:
    """A lock without effect; records the peak of the bytes allocated while it is held, and calls `act` afterwards."""

    def __init__(self, act: Callable[[], object] = lambda: None) -> None:
        self.peaks: list[int] = []
        self._act, self._before = act, 0

    def __enter__(self) -> None:
        tracemalloc.reset_peak()
        self._before = tracemalloc.get_traced_memory()[0]

    def __exit__(self, *exc: object) -> None:
        self.peaks.append(tracemalloc.get_traced_memory()[1] - self._before)
        self._act()


def taken(buffer: Buffer, lock: Lock, moment: Moment) -> snapshot.Snapshot:
    """A snapshot of the buffer with another lock."""

    def describe() -> dict[str, object]:
        return describe_buffer(buffer.options, internals_of(buffer).store, {}, buffer.removed, moment())

    return snapshot.Snapshot(lambda: internals_of(buffer).contents, lock, describe)


def test_lock_is_held_for_one_block_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, item table, priorities, links and the order of removal are each larger than a block."""
    monkeypatch.setattr(snapshot, "BLOCK_BYTES", 2**15)
    with Buffer(20_000, Prioritized(), seed=1) as buffer:
        keys = buffer.insert(Rows(0)(20_000))
        buffer.delete(keys[5:6])  # from now on, links record the order of rows
        lock = Lock(lambda: buffer.sample(16))
        tracemalloc.start()
        try:
            save_buffer(taken(buffer, lock, Moment(buffer)), tmp_path, keep=1)
        finally:
            tracemalloc.stop()
        assert max(lock.peaks) < 1.5 * 2**15
        assert len(lock.peaks) > 40
    with Buffer.restore(tmp_path) as restored:
        assert len(restored) == 19_999


@pytest.mark.parametrize("case", CASES)
def test_changes_between_two_blocks_are_in_the_checkpoint(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The buffer is used each time the lock is released, also while table and selectors are copied."""
    monkeypatch.setattr(snapshot, "BLOCK_BYTES", 256)
    with filled(CASES[case]) as buffer:
        moment, rows, releases = Moment(buffer), Rows(3), itertools.count()

        def use() -> None:
            if not moment.has_come and next(releases) % 10 == 0:
                buffer.insert(rows(1))
            elif not moment.has_come and len(buffer) > 8:  # some samplers take out what they sample
                _, info = buffer.sample(1)
                buffer.update_priorities(info.keys, np.full(len(info.keys), 1.5))

        tracemalloc.start()
        try:
            save_buffer(taken(buffer, Lock(use), moment), tmp_path, keep=1)
        finally:
            tracemalloc.stop()
        with Buffer.restore(tmp_path) as restored:
            assert restored.marker == {"inserts": buffer.limiter.inserts, "size": len(buffer)}
            assert_equal_from_now_on(buffer, restored)


def chunk(first: int, steps: int = 3) -> Batch:
    """Steps of two environments that count; the second one restarts at 1,000 more in the second step."""
    obs = first + np.arange(steps)[:, None] * np.ones(2)
    obs += [0, 500 + 1_000 * first]
    obs[2:, 1] += 1_000
    ended = np.zeros((steps, 2), bool)
    ended[1, 1] = True
    one = np.ones(1, np.int64)
    final = FinalObs(one, one, obs[1, 1:] + 1)
    episodes = {"slot": one, "return": one, "length": one}
    arrays = {"obs": obs, "reward": np.zeros((steps, 2)), "terminated": np.zeros((steps, 2), bool), "truncated": ended}
    return Batch(arrays, {"obs": "obs"}, obs[-1] + 1, final, episodes, np.arange(2), np.array([first > 0, False]))


def test_observations_after_episodes_stay_those_of_their_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "BLOCK_BYTES", 128)
    with Buffer(24, NStep(1, 0.9, by=Uniform()), seed=1) as buffer:
        moment, count = Moment(buffer), 0

        def insert(files: int = 0) -> None:
            nonlocal count
            if files <= 8 or moment.has_come:
                buffer.insert(chunk(3 * count))
                count += 1

        for _ in range(6):
            insert()
        on_write(monkeypatch, insert)
        buffer.checkpoint(tmp_path, marker=moment)
    with Buffer.restore(tmp_path) as restored:
        assert restored.marker == {"inserts": restored.limiter.inserts, "size": len(restored)}
        rows, _ = restored.sample(400)
        np.testing.assert_array_equal(rows["next_obs"], rows["obs"] + 1)
        newest = restored.limiter.inserts // 2 - 1
        first = rows["obs"][rows["obs"] % 1_000 < 500]
        assert set(first.tolist()) == set(range(newest - 11, newest + 1)), "the newest 12 rows of the first slot"


def test_other_threads_insert_and_sample_while_files_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with filled({"sampler": Prioritized()}) as buffer:
        waited: list[bool] = []

        def use(files: int) -> None:
            thread = threading.Thread(target=lambda: (buffer.insert(Rows(1)(2)), buffer.sample(2)))
            thread.start()
            thread.join(60)
            waited.append(thread.is_alive())

        on_write(monkeypatch, use)
        buffer.checkpoint(tmp_path)
        assert waited and not any(waited)


def test_rows_that_are_replaced_faster_than_written_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "BLOCK_BYTES", 128)
    with filled({"sampler": Uniform()}) as buffer:
        buffer.checkpoint(tmp_path)
        size = buffer.limiter.inserts
        on_write(monkeypatch, lambda files: [buffer.insert(Rows(files)(60))])
        with pytest.raises(CheckpointError, match="replaced faster than they are written"):
            buffer.checkpoint(tmp_path)
    with Buffer.restore(tmp_path) as restored:
        assert restored.limiter.inserts == size


def test_checkpoint_of_a_buffer_that_is_closed_meanwhile_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = filled({"sampler": Uniform()})
    on_write(monkeypatch, lambda files: buffer.close())
    with pytest.raises(ClosedError):
        buffer.checkpoint(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == [".lock"]


def test_full_disk_leaves_the_earlier_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with filled({"sampler": Uniform()}) as buffer:
        buffer.checkpoint(tmp_path, keep=1)
        inserts = buffer.limiter.inserts
        buffer.insert(Rows(1)(5))

        def fill(files: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        on_write(monkeypatch, fill)
        with pytest.raises(CheckpointError, match="No space left"):
            buffer.checkpoint(tmp_path, keep=1)
        with Buffer.restore(tmp_path) as restored:
            assert restored.limiter.inserts == inserts


FORGERIES: dict[str, tuple[Callable[[dict[str, np.ndarray]], object], str]] = {
    "no such cell": (lambda arrays: arrays["cells/1"].put(-1, 64), "names a cell that does not exist"),
    "a cell twice": (lambda arrays: arrays["cells/1"].put(0, arrays["cells/1"][1]), "a cell twice"),
    "another dtype": (lambda arrays: arrays.update({"cells/1": arrays["cells/1"] / 2}), "cells/1 is float64"),
    "fewer rows": (lambda arrays: arrays.update({"rows1/obs": arrays["rows1/obs"][1:]}), "rows1: obs is float64"),
    "no rows": (lambda arrays: arrays.pop("rows1/obs"), "rows1: the checkpoint lacks obs"),
    "another number": (lambda arrays: arrays.update({"cells/2": arrays.pop("cells/1")}), "lacks 1"),
    "missing": (lambda arrays: [arrays.pop(name) for name in list(arrays) if "1/" in name or "/1" in name], "missing"),
}


@pytest.mark.parametrize("which", FORGERIES)
def test_forged_rows_that_were_copied_again_are_refused(
    which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Buffer(64, Uniform(), seed=1) as buffer:
        buffer.insert(Rows(0)(10))
        on_write(monkeypatch, lambda files: buffer.insert(Rows(1)(5)) if files == 1 else None)
        folder = buffer.checkpoint(tmp_path)
    loaded = checkpoint.load(tmp_path)
    with Buffer.restore(tmp_path) as restored:
        assert len(restored) == 15
    forge, reason = FORGERIES[which]
    forge(loaded.arrays)
    shutil.rmtree(folder)
    checkpoint.save(tmp_path, loaded.arrays, loaded.meta)
    with pytest.raises(CheckpointError, match=reason):
        Buffer.restore(tmp_path)
