"""Room in a buffer whose rows leave in any order: what was freed is used again, and no limiter that fits deadlocks."""

from __future__ import annotations

import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sampled_rows import rows

from farstep import Buffer, ConfigError
from farstep.buffer import (
    FIFO,
    LIFO,
    FullBatch,
    MaxHeap,
    MinSize,
    Prioritized,
    Queue,
    RateLimiter,
    Sampler,
    SampleToInsertRatio,
    Stack,
    Uniform,
)
from farstep.errors import BufferTimeout, CheckpointError

KINDS: list[tuple[Sampler, int | None]] = [
    (LIFO(), None),
    (LIFO(), 3),
    (FIFO(), None),
    (Uniform(), 1),
    (Uniform(), 2),
    (Prioritized(), 1),
    (MaxHeap(), 2),
]
"""Samplers whose rows are removed once they were sampled, with `max_times_sampled`."""


class RoomMachine(RuleBasedStateMachine):
    """A buffer beside a list of the rows it should hold, oldest first."""

    is_limited = True
    buffer: Buffer | None = None

    @initialize(kind=st.sampled_from(KINDS), capacity=st.integers(2, 12), size=st.integers(0, 12))
    def make(self, kind: tuple[Sampler, int | None], capacity: int, size: int) -> None:
        sampler, most = kind
        limiter = Stack(min(size, capacity)) if size else MinSize(1)
        self.buffer = Buffer(capacity, sampler, limiter=limiter, max_times_sampled=most, seed=0)
        self.is_limited, self.capacity = bool(size), capacity
        self.held: list[int] = []
        self.key_of: dict[int, int] = {}
        self.times: Counter[int] = Counter()
        self.inserted = self.evicted = 0

    def put(self, count: int) -> None:
        if not (count := self.buffer.limiter.room(count)):
            return
        keys = self.buffer.insert(rows(self.inserted, count), timeout_s=0)
        for key in keys.tolist():
            assert key not in self.key_of.values()
            self.key_of[self.inserted] = key
            self.held.append(self.inserted)
            self.inserted += 1
            if len(self.held) > self.capacity:
                self.held.pop(0)
                self.evicted += 1

    def take(self, count: int) -> None:
        try:
            batch, info = self.buffer.sample(count, timeout_s=0)
        except (BufferTimeout, ConfigError):  # fewer rows than asked for, now or for ever
            return
        got = batch["number"].tolist()
        assert info.keys.tolist() == [self.key_of[number] for number in got]
        assert set(got) <= set(self.held)
        if isinstance(self.buffer.sampler, LIFO | FIFO):
            newest = isinstance(self.buffer.sampler, LIFO)
            assert got == (self.held[::-1] if newest else self.held)[:count]
        self.times.update(got)
        most = self.buffer.max_times_sampled
        assert max(self.times.values()) <= most
        self.held = [number for number in self.held if self.times[number] < most]

    @rule(count=st.integers(1, 20))
    def insert(self, count: int) -> None:
        self.put(count)

    @rule(count=st.integers(1, 6))
    def sample(self, count: int) -> None:
        self.take(count)

    @precondition(lambda self: not self.is_limited)  # a limiter waits for the samples of deleted rows, as Reverb's does
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        # A ring, which FIFO has, uses the place of a row that is deleted when it comes around.
        if self.held and not self.buffer.is_cyclic:
            chosen = data.draw(st.lists(st.sampled_from(self.held), unique=True))
            assert self.buffer.delete([self.key_of[number] for number in chosen]) == len(chosen)
            self.held = [number for number in self.held if number not in chosen]

    @invariant()
    def nothing_is_evicted_while_there_is_room(self) -> None:
        if self.buffer is not None:
            assert (len(self.buffer), self.buffer.removed["evicted"]) == (len(self.held), self.evicted)
            if self.is_limited and self.buffer.max_times_sampled == 1:
                assert not self.evicted, "the limiter was to keep every row until it is sampled"

    def teardown(self) -> None:
        """Writer and reader never wait for each other: one of them can always go on."""
        if self.buffer is None:
            return
        for turn in range(4 * self.capacity):
            before = self.inserted + self.times.total()
            for call in (self.put, self.take)[:: 1 if turn % 3 else -1]:
                call(1)
            assert self.inserted + self.times.total() > before, f"both wait: {self.buffer}, {self.buffer.limiter}"
        self.buffer.close()


TestRoom = RoomMachine.TestCase
TestRoom.settings = settings(max_examples=40, stateful_step_count=20, deadline=None, derandomize=True)


def test_stack_keeps_all_rows_that_wait() -> None:
    with Buffer(64, LIFO(), limiter=Stack(50)) as buffer:
        buffer.insert(rows(0, 40))
        for i in range(20):
            buffer.insert(rows(40 + 10 * i, 10), timeout_s=0)
            buffer.sample(10, timeout_s=0)
        assert len(buffer) == 40 and buffer.removed["evicted"] == 0
        assert buffer.sample(40, timeout_s=0)[0]["number"].tolist() == list(range(39, -1, -1))


@pytest.mark.parametrize(("sampler", "most"), KINDS, ids=repr)
def test_every_row_comes_out_while_a_writer_and_a_reader_run(sampler: Sampler, most: int | None) -> None:
    uses = most or 1
    with Buffer(16, sampler, limiter=RateLimiter(uses, 1, 0, 12), max_times_sampled=most, seed=0) as buffer:
        with ThreadPoolExecutor() as pool:
            writing = pool.submit(buffer.insert, rows(0, 100), timeout_s=60)
            taken: Counter[int] = Counter()
            for _ in range(100 * uses):
                taken.update(buffer.sample(1, timeout_s=60)[0]["number"].tolist())
            assert len(writing.result(60)) == 100
        assert taken == dict.fromkeys(range(100), uses)
        assert buffer.removed == {"evicted": 0, "sampled": 100, "deleted": 0}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sampler": FIFO(), "limiter": Queue(20)}, r"max_diff=20 .* the 10 rows .* capacity to at least 20"),
        ({"sampler": LIFO(), "limiter": Stack(11)}, r"max_diff=11 .* capacity to at least 11"),
        ({"sampler": FullBatch(), "limiter": Queue(11)}, "max_diff=11"),
        ({"sampler": Uniform(), "max_times_sampled": 2, "limiter": Queue(21)}, r"2 each.* capacity to at least 11"),
        ({"sampler": FIFO(), "limiter": SampleToInsertRatio(2.0, 1, (0, 8))}, r"samples_per_insert=2 .* 1 times"),
        ({"sampler": FIFO(), "limiter": Queue(5), "max_bytes": 32, "spec": {"number": 0}}, "the 4 rows"),
    ],
    ids=lambda value: value if isinstance(value, str) else repr(value["sampler"]),
)
def test_limiter_that_the_rows_can_never_satisfy_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Buffer(10, **options)


def test_limiter_that_the_rows_can_satisfy_is_accepted() -> None:
    Buffer(10, FIFO(), limiter=Queue(10)).close()
    Buffer(10, FIFO(), limiter=MinSize(10)).close()
    Buffer(10, Uniform(), limiter=Queue(20)).close()  # a row can be sampled any number of times
    with Buffer(10, FIFO(), limiter=Queue(10)) as buffer:
        buffer.limit(max_diff=math.inf)
        with pytest.raises(ConfigError, match="max_diff=11"):
            buffer.limit(max_diff=11)


def test_checkpoint_of_a_ring_with_holes_is_refused_by_name(tmp_path: Path) -> None:
    """As versions of farstep before wrote it, for LIFO: as many cells as rows."""
    with Buffer(8, LIFO(), max_times_sampled=0) as buffer:
        buffer.insert(rows(0, 5))
        buffer.max_times_sampled = 1
        buffer.checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"LIFO\(\) .* fill a new\s+buffer"):
        Buffer.restore(tmp_path)


def test_free_cells_are_known_after_a_restart(tmp_path: Path) -> None:
    with Buffer(8, LIFO(), limiter=Stack(8)) as buffer:
        buffer.insert(rows(0, 8))
        buffer.sample(3)
        buffer.checkpoint(tmp_path)
    with Buffer.restore(tmp_path) as again:
        again.insert(rows(8, 3), timeout_s=0)
        assert again.sample(8, timeout_s=0)[0]["number"].tolist() == [10, 9, 8, 4, 3, 2, 1, 0]
        assert again.removed["evicted"] == 0
