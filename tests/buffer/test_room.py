"""Room in a buffer: no row is evicted while there is room, and a reader and a writer do not deadlock."""

from __future__ import annotations

import math
import os
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from farstep import Buffer, ConfigError
from farstep.buffer import (
    DPER,
    FIFO,
    LIFO,
    FullBatch,
    MaxHeap,
    MinHeap,
    MinSize,
    NStep,
    Prioritized,
    Queue,
    RateLimiter,
    Sampler,
    SampleToInsertRatio,
    Sequence,
    Stack,
    Uniform,
)
from farstep.errors import BufferTimeout, CheckpointError
from tests.buffer.sampled_rows import rows

pytestmark = pytest.mark.slow  # many histories

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

SINGLE: list[Sampler] = [Uniform(), Prioritized(), FIFO(), LIFO(), FullBatch(), MinHeap(), MaxHeap()]
ORDERED: list[Sampler] = [
    *(NStep(n=n, gamma=1.0, by=by) for n in (1, 3) for by in (Uniform(), Prioritized(), FIFO(), LIFO(), MaxHeap())),
    *(Sequence(length=n, by=by) for n in (1, 3) for by in (Uniform(), Prioritized(), FIFO(), LIFO(), MinHeap())),
    Sequence(length=4, pad=True),
    Sequence(length=3, pad=True, by=LIFO()),
    DPER(),
]
LIMITERS: list[Callable[[int], RateLimiter]] = [
    lambda capacity: MinSize(1),
    lambda capacity: MinSize(3),
    lambda capacity: Queue(1),
    lambda capacity: Queue(3),
    Stack,
    lambda capacity: RateLimiter(1.0, 2, -2.0, 4.0),
    lambda capacity: RateLimiter(3.0, 1, 0.0, 5.0),
    lambda capacity: RateLimiter(0.5, 2, 0.0, 2.0),
    lambda capacity: RateLimiter(2.0, 2, -2.0, float(capacity)),
]


@dataclass
class Row:
    """A row in the model of a buffer."""

    number: int
    key: int
    follows: Row | None
    """The row before it in its episode."""
    ends: bool
    has_item: bool = True
    times: int = 0


class Model:
    """The rows that a buffer should hold, oldest first: rows with an item, and rows that an earlier item needs."""

    def __init__(self, capacity: int, span: float) -> None:
        self.capacity, self.span = capacity, span
        self.rows: list[Row] = []
        self.newest: dict[int, Row] = {}
        self.evicted = 0

    def insert(self, number: int, key: int, ends: bool, slot: int = 0) -> None:
        if len(self.rows) == self.capacity:
            self.remove([next(row for row in self.rows if row.has_item)])
            self.evicted += 1
        before = self.newest.get(slot)
        follows = before if before in self.rows and not before.ends else None
        self.newest[slot] = Row(number, key, follows, ends)
        self.rows.append(self.newest[slot])

    def remove(self, rows: list[Row]) -> None:
        for row in rows:
            row.has_item = False
        self.rows = [row for row in self.rows if self._is_needed(row)]

    def _is_needed(self, row: Row) -> bool:
        distance, at = 0, row
        while not at.has_item:
            distance, before = distance + 1, at.follows
            if before is None or before not in self.rows or distance >= self.span:
                return False
            at = before
        return True

    def episode(self, first: Row) -> list[Row]:
        found = [first]
        while not found[-1].ends and (after := [row for row in self.rows if row.follows is found[-1]]):
            found += after
        return found

    @property
    def items(self) -> list[Row]:
        return [row for row in self.rows if row.has_item]


class RoomMachine(RuleBasedStateMachine):
    """A buffer beside a model of the rows it should hold."""

    buffer: Any = None  # a Buffer once `make` has run

    @initialize(
        sampler=st.sampled_from(SINGLE + ORDERED),
        most=st.sampled_from([None, 0, 1, 2, 3]),
        remover=st.sampled_from([FIFO(), FIFO(), LIFO(), MinHeap(), Uniform()]),
        limiter=st.sampled_from(LIMITERS),
        capacity=st.integers(8, 14),
        has_next=st.booleans(),
    )
    def make(
        self,
        sampler: Sampler,
        most: int | None,
        remover: Sampler,
        limiter: Callable[[int], RateLimiter],
        capacity: int,
        has_next: bool,
    ) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                self.buffer = Buffer(
                    capacity, sampler, remover=remover, limiter=limiter(capacity), max_times_sampled=most, seed=0
                )
            except ConfigError:  # a refused combination is not tested
                assume(False)
        is_ordered = sampler in ORDERED
        span = {NStep: getattr(sampler, "n", 0) + (not has_next), DPER: math.inf}.get(type(sampler), sampler.reach)
        self.model = Model(capacity, span if is_ordered else 1)
        self.is_exact = remover == FIFO()
        """Whether the model knows which rows are evicted, not only how many."""
        self.counts = (0, 0)
        """Number of rows and of evicted rows, for when the model is not exact."""
        self.has_next, self.inserted, self.taken = has_next, 0, 0
        self.by_key: dict[int, Row] = {}

    def put(self, ends: list[bool]) -> bool:
        """Insert as many rows as the limiter allows now; returns whether there were any."""
        count = self.buffer.limiter.room(len(ends))
        if not count:
            with pytest.raises(BufferTimeout):
                self.buffer.insert(self.values(ends[:1]), timeout_s=0)
            return False
        keys = self.buffer.insert(self.values(ends[:count]), timeout_s=0).tolist()
        for key, end in zip(keys, ends[:count], strict=True):
            assert key not in self.by_key
            self.model.insert(self.inserted, key, end)
            self.by_key[key] = self.model.rows[-1]
            self.inserted += 1
        size = min(self.counts[0] + count, self.model.capacity)
        self.counts = size, self.counts[1] + self.counts[0] + count - size
        return True

    def values(self, ends: list[bool]) -> dict[str, np.ndarray]:
        number = np.arange(self.inserted, self.inserted + len(ends))
        values = {"obs": number, "reward": 2.0**-number, "terminated": np.array(ends)}
        return values | ({"next_obs": number + 1} if self.has_next else {})

    def take(self, count: int) -> bool:
        """Sample items without waiting; returns whether that was possible."""
        try:
            batch, info = self.buffer.sample(count, timeout_s=0)
        except BufferTimeout:
            return False
        except ConfigError:
            assert count > 1, "one item can be sampled in every buffer that was accepted"
            return self.take(1)
        rows = [self.by_key[key] for key in info.keys.tolist()]
        assert not self.is_exact or all(row.has_item for row in rows)
        first = batch["obs"] if batch["obs"].ndim == 1 else batch["obs"][:, 0]
        assert first.tolist() == [row.number for row in rows]
        self.check_content(batch, rows)
        most = self.buffer.max_times_sampled
        for row in rows:
            row.times += 1
            assert not most or row.times <= most
        self.taken += count
        used_up = list({row.key: row for row in rows if row.times == most}.values()) if most else []
        self.counts = self.counts[0] - len(used_up), self.counts[1]
        self.remove(used_up)
        return True

    def check_content(self, batch: dict[str, Any], rows: list[Row]) -> None:
        """Check that sequences and n-step transitions consist of consecutive rows of one episode."""
        sampler = self.buffer.sampler
        for i, row in enumerate(rows):
            if isinstance(sampler, NStep):
                steps = int(batch["steps"][i])
                assert steps == sampler.n or self.has_next or batch["terminated"][i]
                assert batch["reward"][i] == sum(2.0 ** -(row.number + k) for k in range(steps))
                if not batch["terminated"][i]:
                    assert batch["next_obs"][i] == row.number + steps
            elif batch["obs"].ndim == 2:
                valid = int(batch["valid"][i].sum())
                assert batch["obs"][i, :valid].tolist() == list(range(row.number, row.number + valid))
                assert not batch["terminated"][i, : valid - 1].any()

    def remove(self, rows: list[Row]) -> None:
        if isinstance(self.buffer.sampler, DPER):
            rows = [each for row in rows for each in self.whole(row)]
        self.model.remove(rows)

    def whole(self, row: Row) -> list[Row]:
        """All rows of the episode if it is complete and `row` is its first one; otherwise only `row`."""
        episode = self.model.episode(row)
        begins = row.number == 0 or self.by_number(row.number - 1).ends
        return episode if begins and episode[-1].ends else [row]

    def by_number(self, number: int) -> Row:
        return next(row for row in self.by_key.values() if row.number == number)

    @rule(ends=st.lists(st.integers(0, 4).map(lambda k: k == 0), min_size=1, max_size=20))
    def insert(self, ends: list[bool]) -> None:
        self.put(ends)

    @rule(count=st.integers(1, 6))
    def sample(self, count: int) -> None:
        self.take(count)

    @precondition(lambda self: self.buffer is not None and self.is_exact)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        if items := self.model.items:
            chosen = data.draw(st.lists(st.sampled_from(items), unique_by=lambda row: row.key, max_size=6))
            assert self.buffer.delete([row.key for row in chosen]) == len(chosen)
            self.remove(chosen)

    @rule()
    def save_and_restore(self) -> None:
        if self.buffer.is_bound:
            no_sync = mock.patch.object(os, "fsync")  # faster: this checkpoint need not survive a power failure
            with tempfile.TemporaryDirectory() as folder, no_sync, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.buffer.checkpoint(folder)
                self.buffer.close()
                self.buffer = Buffer.restore(folder)

    @invariant()
    def nothing_is_evicted_while_there_is_room(self) -> None:
        if self.buffer is not None:
            found = (len(self.buffer), self.buffer.removed["evicted"])
            assert found == ((len(self.model.items), self.model.evicted) if self.is_exact else self.counts)

    def teardown(self) -> None:
        """Check that a reader and a writer do not deadlock from here on, and that the reader gets rows."""
        if self.buffer is None:
            return
        before, failed = self.taken, 0
        for _ in range(6 * self.model.capacity):
            went_on = [self.take(2), self.put([self.inserted % 4 == 3])]
            failed = 0 if any(went_on) else failed + 1
            assert not failed, f"both wait: {self.buffer}, {self.buffer.limiter}"
        assert self.taken > before, f"nothing is sampled: {self.buffer}, {self.buffer.limiter}"
        self.buffer.close()


TestRoom = RoomMachine.TestCase
TestRoom.settings = settings(
    max_examples=100, stateful_step_count=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


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
        ({"sampler": Uniform(), "max_times_sampled": 2, "limiter": Queue(11)}, r"1 each.* capacity to at least 11"),
        ({"sampler": Uniform(), "max_times_sampled": 4, "limiter": RateLimiter(4, 1, 0, 11)}, "to at least 11"),
        ({"sampler": NStep(n=2), "max_times_sampled": 2, "limiter": Queue(11)}, r"max_diff=11 .* at least 11"),
        (
            {"sampler": Sequence(length=2), "max_times_sampled": 2, "limiter": Queue(21)},
            r"2 each.* capacity to at least 11",
        ),
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
        buffer.options = replace(buffer.options, max_times_sampled=1)
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
