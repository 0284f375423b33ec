"""Prefetched batches: each is received before the learner uses it, whichever thread sampled it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from farstep.buffer import Buffer, NStep
from farstep.buffer.bound_arrays import internals_of
from farstep.buffer.limiter import RateLimiter
from farstep.errors import ClosedError
from farstep.learners.replay.batches import Copies, CudaCopies, DeviceBatches, ReplayBatch

NAMES = ("obs", "reward")
ROWS, BATCH = 64, 4
if torch.cuda.is_available():
    torch.zeros(1, device="cuda")  # CUDA keeps descriptors open, which no test has to close
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class SlowDevice:
    """A device on the CPU whose copies end only when they are received. It refuses what a GPU would compute wrongly."""

    def __init__(self) -> None:
        self.sent: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        """Sources and copies by event, in the order of `send`, until they are received."""
        self.threads: list[str] = []
        self.events = 0
        self._lock = threading.Lock()

    def send(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], int]:
        assert all(tensor.device.type == "cpu" for tensor in tensors)
        copies = [torch.zeros_like(tensor) for tensor in tensors]
        with self._lock:
            self.events += 1
            self.sent[self.events] = (list(tensors), copies)
            self.threads.append(threading.current_thread().name)
            return copies, self.events

    def receive(self, tensors: Sequence[Tensor], event: int) -> None:
        with self._lock:
            sources, copies = self.sent.pop(event)  # KeyError: received twice, or never sent
        assert len(tensors) == len(copies) and all(a is b for a, b in zip(tensors, copies, strict=True))
        for source, copied in zip(sources, copies, strict=True):
            copied.copy_(source)


@pytest.fixture
def buffer() -> Iterator[Buffer]:
    """Rows whose observation and reward are their number from 1, and room for `ROWS` samples."""
    limiter = RateLimiter(1.0, 1, 0.0, float("inf"))
    with Buffer(ROWS, NStep(1, 0.9), limiter=limiter, seed=1) as made:
        numbers = np.arange(1, ROWS + 1)
        made.insert(
            {
                "obs": np.repeat(numbers[:, None], 3, 1).astype(np.float32),
                "reward": numbers.astype(np.float32),
                "terminated": np.ones(ROWS, bool),
                "truncated": np.zeros(ROWS, bool),
                "next": np.zeros(ROWS, np.float32),
            }
        )
        yield made


def batches_of(buffer: Buffer, copies: Copies | None, device: str = "cpu") -> DeviceBatches:
    return DeviceBatches(buffer, BATCH, NAMES, torch.device(device), copies=copies)


def assert_complete(batch: ReplayBatch, count: int = BATCH) -> None:
    """All tensors have their contents, and belong to the same rows."""
    rows: Any = batch.rows
    assert rows["obs"].shape == (count, 3) and len(batch.keys) == count
    numbers = rows["reward"].numpy(force=True)
    assert (numbers > 0).all() and (batch.weights.numpy(force=True) == 1).all()
    np.testing.assert_array_equal(rows["obs"].numpy(force=True), np.repeat(numbers[:, None], 3, 1))


def test_each_batch_is_received_once_and_only_one_is_prefetched(buffer: Buffer) -> None:
    device = SlowDevice()
    batches = batches_of(buffer, device)
    for taken in range(1, ROWS // BATCH + 1):
        assert batches.is_ready
        assert_complete(batches.take())
        assert buffer.limiter.samples <= (taken + 1) * BATCH
    assert not batches.is_ready and buffer.limiter.samples == ROWS  # the limiter allows one sample per row
    batches.close()
    assert not device.sent and device.events == ROWS // BATCH
    assert device.threads[0] == threading.current_thread().name and set(device.threads[1:]) == {"farstep-prefetch_0"}


def test_rows_are_read_while_a_prefetched_batch_is_pending(buffer: Buffer) -> None:
    """A refresh of priorities reads all rows while the next batch is on its way."""
    device = SlowDevice()
    batches = batches_of(buffer, device)
    assert_complete(batches.take())
    keys = buffer.keys()
    assert_complete(batches.read(keys), len(keys))
    assert_complete(batches.take())
    batches.close()
    assert len(device.sent) <= 1  # a batch that was dropped


def test_an_error_of_the_prefetching_thread_reaches_the_learner(buffer: Buffer) -> None:
    class Failing(SlowDevice):
        def send(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], int]:
            if self.events == 1:
                self.events += 1
                raise RuntimeError("out of memory")
            return super().send(tensors)

    batches = batches_of(buffer, Failing())
    assert_complete(batches.take())
    with pytest.raises(RuntimeError, match="out of memory"):
        batches.take()
    assert_complete(batches.take())  # the error is raised once
    batches.close()


def test_closing_ends_a_thread_that_waits_for_rows() -> None:
    """A batch may be requested although its rows are removed after the limiter allowed it."""
    calls = threading.Semaphore(0)
    raised: list[Exception] = []

    class Watched(Buffer):
        def sample(self, batch_size: int, timeout_s: float | None = None) -> Any:
            calls.release()
            try:
                return super().sample(batch_size, timeout_s)
            except Exception as error:
                raised.append(error)
                raise

    limiter = RateLimiter(1.0, 1, 0.0, float("inf"))
    with Watched(8, NStep(1, 0.9), limiter=limiter, seed=1) as buffer:
        buffer.insert({"reward": np.ones(8, np.float32), "terminated": np.ones(8, bool)})
        batches = DeviceBatches(buffer, BATCH, ("reward",), torch.device("cpu"), copies=SlowDevice())
        with internals_of(buffer).gate.lock:  # the prefetching thread samples only after the rows are gone
            batches.take()
            buffer.delete(buffer.keys())
        assert calls.acquire(timeout=30) and calls.acquire(timeout=30)
        batches.close()
    assert [type(error) for error in raised] == [ClosedError]  # a timeout would come only after 60 s


def test_without_a_gpu_batches_are_sampled_when_they_are_taken(buffer: Buffer) -> None:
    batches = batches_of(buffer, None)
    assert_complete(batches.take())
    assert buffer.limiter.samples == BATCH
    batches.close()


@needs_cuda
def test_batches_on_a_gpu_are_complete_while_it_is_busy() -> None:
    """Large rows, so that copies take a while, and memory that is freed at once, so that it would be reused."""
    width, count = 1 << 16, 64
    limiter = RateLimiter(1e6, 1, 0.0, float("inf"))
    with Buffer(count, NStep(1, 0.9), limiter=limiter, seed=1) as buffer:
        numbers = np.arange(1, count + 1, dtype=np.float32)
        buffer.insert({"obs": np.repeat(numbers[:, None], width, 1), "reward": numbers, "terminated": numbers > 0})
        device = torch.device("cuda")
        batches = DeviceBatches(buffer, 32, NAMES, device)
        wrong = torch.zeros((), dtype=torch.int64, device=device)
        work = torch.ones(2048, 2048, device=device)
        for step in range(100):
            rows: Any = (batches.read(buffer.keys()) if step % 5 == 4 else batches.take()).rows
            for _ in range(4):  # the learner's stream is behind the copies
                work = (work @ work).clamp(max=1.0)
            wrong += (rows["obs"] != rows["reward"][:, None]).sum() + (rows["reward"] <= 0).sum()
            del rows
        batches.close()
        assert wrong.item() == 0


@needs_cuda
def test_copies_to_a_gpu_are_ordered_by_their_event() -> None:
    device = torch.device("cuda")
    copies = CudaCopies(device)
    source = torch.arange(1 << 22, dtype=torch.float32)
    moved, event = copies.send([source])
    copies.receive(moved, event)
    assert torch.equal(moved[0].cpu(), source) and event.query()
