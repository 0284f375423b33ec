"""Reading items by their keys: `Buffer.keys` and `Buffer.read`."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from farstep import Buffer, ConfigError
from farstep.buffer import (
    DPER,
    FIFO,
    LIFO,
    FullBatch,
    MaxHeap,
    MinHeap,
    NStep,
    Prioritized,
    Queue,
    Sampler,
    Sequence,
    Uniform,
)
from farstep.errors import BufferTimeout, ClosedError
from tests.buffer.sampled_rows import episodes

SAMPLERS: list[Sampler] = [
    Uniform(),
    Prioritized(),
    FIFO(),
    LIFO(),
    FullBatch(),
    MinHeap(),
    MaxHeap(),
    NStep(2),
    Sequence(2),
    Sequence(3, pad=True),
    Sequence(2, by=Prioritized()),
    DPER(),
]
LENGTHS = [3, 1, 4, 2, 5, 3]


def data() -> dict[str, np.ndarray]:
    rows = episodes(LENGTHS)
    rows["terminated"][-1] = False  # the last episode is running
    return rows | {"reward": rows["number"].astype(np.float32)}


def firsts(batch: dict[str, Any]) -> list[int]:
    """The number of the first row of each item."""
    number = batch["number"]
    return (number if number.ndim == 1 else number[:, 0]).tolist()


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_keys_are_the_items_that_samples_return(sampler: Sampler) -> None:
    """Ten rows were evicted; samples of every item return the arrays that `read` returns for its key."""
    with Buffer(15, sampler, max_times_sampled=0, seed=1) as buffer:
        buffer.insert(data())
        buffer.insert({name: value[:7] for name, value in data().items()})
        keys = buffer.keys()
        read, is_present = buffer.read(keys)
        assert is_present.all() and len(is_present) == len(keys) > 2
        seen: dict[int, dict[str, Any]] = {}
        for size in [1, len(keys)] if isinstance(sampler, (FIFO, LIFO, MinHeap, MaxHeap)) else [1] * 300:
            batch, info = buffer.sample(size)
            for i, key in enumerate(info.keys.tolist()):
                seen[key] = {name: array[i] for name, array in batch.items()}
        assert set(seen) == set(keys.tolist())
        for i, key in enumerate(keys.tolist()):
            sampled, valid = seen[key], read.get("valid")
            for name, array in read.items():
                ours = array[i] if valid is None else array[i][valid[i]]
                theirs = sampled[name] if valid is None else sampled[name][sampled["valid"]]
                np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_keys_come_oldest_first_in_a_ring_and_after_deletions(sampler: Sampler) -> None:
    with Buffer(15, sampler, max_times_sampled=0, seed=1) as buffer:
        buffer.insert(data())
        assert firsts(buffer.read(buffer.keys())[0]) == sorted(firsts(buffer.read(buffer.keys())[0]))
        buffer.delete(buffer.keys()[1:2])  # from now on, cells are reused in any order
        rows = data()
        buffer.insert({**rows, "number": rows["number"] + 100})
        numbers = firsts(buffer.read(buffer.keys())[0])
        assert numbers == sorted(numbers) and len(numbers) > 1 and numbers[-1] >= 100


def test_keys_of_dper_are_the_complete_episodes() -> None:
    with Buffer(50, DPER(), seed=1) as buffer:
        assert len(buffer.keys()) == 0
        inserted = buffer.insert(data())
        keys = buffer.keys()
        assert keys.tolist() == inserted[[0, 3, 4, 8, 10]].tolist()
        batch, _ = buffer.read(keys)
        assert batch["number"].shape == (5, 5)
        assert batch["valid"].sum(axis=1).tolist() == LENGTHS[:-1]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_unknown_keys_are_reported(sampler: Sampler) -> None:
    with Buffer(30, sampler, max_times_sampled=0, seed=1) as buffer:
        buffer.insert(data())
        keys = buffer.keys()
        buffer.delete(keys[:1])
        wanted = np.array([keys[1], keys[0], -5, keys[-1], 10**9, keys[1]])
        batch, is_present = buffer.read(wanted)
        assert is_present.tolist() == [True, False, False, True, False, True]
        numbers = firsts(batch)
        assert len(numbers) == 3 and numbers[0] == numbers[2] < numbers[1]
        batch, is_present = buffer.read(keys[:1])
        assert not is_present.any() and all(len(array) == 0 for array in batch.values())
        assert len(buffer.read([])[1]) == 0


def test_rows_at_which_no_item_starts_are_reported() -> None:
    with Buffer(30, DPER(), seed=1) as buffer:
        inserted = buffer.insert(data())
        assert buffer.read(inserted)[1].tolist() == np.isin(np.arange(18), [0, 3, 4, 8, 10]).tolist()
    with Buffer(30, Sequence(3), seed=1) as buffer:
        inserted = buffer.insert(data())
        assert buffer.read(inserted)[1].tolist() == np.isin(np.arange(18), [0, 4, 5, 10, 11, 12, 15]).tolist()


def test_reading_is_not_sampling() -> None:
    """A read neither waits for the limiter nor uses up an item."""
    with Buffer(30, FIFO(), limiter=Queue(30), seed=1) as buffer:
        keys = buffer.insert(data())
        for _ in range(3):
            assert buffer.read(keys)[1].all()
        assert (len(buffer), buffer.limiter.samples) == (18, 0)
        _, info = buffer.sample(18)
        assert (info.times_sampled == 1).all()
        assert len(buffer.keys()) == 0 and not buffer.read(keys)[1].any()
        with pytest.raises(BufferTimeout):
            buffer.sample(1, timeout_s=0)


def test_errors() -> None:
    buffer = Buffer(30, Uniform())
    with pytest.raises(ConfigError, match="no arrays yet"):
        buffer.read([1])
    buffer.insert(data())
    with pytest.raises(ConfigError, match="expected integers"):
        buffer.read([0.5])
    buffer.close()
    with pytest.raises(ClosedError):
        buffer.keys()
    with pytest.raises(ClosedError):
        buffer.read([1])


@pytest.mark.parametrize("sampler", [Uniform(), Sequence(3), DPER()], ids=repr)
def test_reads_are_consistent_while_another_thread_inserts(sampler: Sampler) -> None:
    """Every read returns whole items under their own keys, although rows are evicted all the time."""
    started, stopping = threading.Event(), threading.Event()
    with Buffer(64, sampler, max_times_sampled=0, seed=1) as buffer:

        def insert() -> None:
            first = 0
            while not stopping.is_set():
                rows = data()
                rows["terminated"][-1] = True
                buffer.insert({**rows, "number": rows["number"] + first})
                first += 18
                started.set()

        thread = threading.Thread(target=insert)
        thread.start()
        try:
            assert started.wait(30)
            for _ in range(150):
                keys = buffer.keys()
                batch, is_present = buffer.read(keys)
                number = batch["number"]
                assert len(number) == is_present.sum()
                if number.ndim == 2:
                    assert (np.diff(number, axis=1) == batch["valid"][:, 1:]).all()
                np.testing.assert_array_equal(batch["reward"], number % 18)
        finally:
            stopping.set()
            thread.join(30)
        assert len(buffer.keys()) > 0
