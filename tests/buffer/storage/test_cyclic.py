"""Cyclic blocks under random writers, readers, joins, leaves and crashes, in one process and in several."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from farstep import Buffer, ClosedError, ConfigError
from farstep.buffer import Uniform
from farstep.buffer.storage.cyclic import CyclicBlocks, Writer, spans
from farstep.schema import ArraySpec
from tests.buffer.storage.cyclic_writer import values

SCHEMA = {"a": ArraySpec((), "<i8"), "b": ArraySpec((3,), "<f4"), "c": ArraySpec((2, 2), "<i4")}
ROWS, COLUMNS, CONSUMERS = 5, 4, 2
TORN = -7


def number(row: int, column: int) -> int:
    return row * 1000 + column


class Blocks(RuleBasedStateMachine):
    """Row `p` of column `c` holds the same number in all arrays, for every writer; rows of a dead writer are torn."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = CyclicBlocks.create(SCHEMA, ROWS, COLUMNS, CONSUMERS)
        self.other = CyclicBlocks.attach(self.blocks.path)  # as another process would
        self.places = {name: array.ctypes.data for name, array in self.blocks.arrays.items()}
        self.committed = [0] * COLUMNS
        self.claimed = [0] * COLUMNS
        self.read_until = np.zeros((CONSUMERS, COLUMNS), int)
        self.writers: dict[tuple[int, int], Writer] = {}
        self.gone: list[Writer] = []

    def teardown(self) -> None:
        self.other.close()
        self.blocks.close()

    # ---- writers come and go ----

    @rule(first=st.integers(-1, COLUMNS), count=st.integers(0, COLUMNS + 1), mapped=st.booleans())
    def join(self, first: int, count: int, mapped: bool) -> None:
        blocks = self.other if mapped else self.blocks
        taken = any(a < first + count and first < a + n for a, n in self.writers)
        if first < 0 or count < 1 or first + count > COLUMNS or taken:
            with pytest.raises(ConfigError):
                blocks.join(first, count)
        else:
            self.writers[first, count] = blocks.join(first, count)

    def chosen(self, data: Any) -> tuple[tuple[int, int], Writer]:
        return data.draw(st.sampled_from(sorted(self.writers.items(), key=lambda item: item[0])))

    @precondition(lambda self: self.writers)
    @rule(data=st.data())
    def leave(self, data: Any) -> None:
        place, writer = self.chosen(data)
        writer.leave()
        writer.leave()
        self.gone.append(self.writers.pop(place))

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def write_after_leaving(self, data: Any) -> None:
        writer = data.draw(st.sampled_from(self.gone))
        with pytest.raises(ClosedError):
            writer.claim(1)
        with pytest.raises(ClosedError):
            writer.commit(1)
        writer.leave()

    # ---- they write ----

    def next_rows(self, first: int, count: int, rows: int) -> dict[str, np.ndarray]:
        start = np.array(self.committed[first : first + count])
        return values(self.blocks, start, np.arange(first, first + count), rows)

    def claimed_by(self, first: int, count: int, rows: int) -> None:
        for column in range(first, first + count):
            self.claimed[column] = max(self.claimed[column], self.committed[column] + rows)

    @precondition(lambda self: self.writers)
    @rule(data=st.data(), rows=st.integers(1, ROWS + 1))
    def write(self, data: Any, rows: int) -> None:
        (first, count), writer = self.chosen(data)
        if rows > ROWS:
            with pytest.raises(ConfigError, match="do not fit"):
                writer.write(self.next_rows(first, count, rows))
            return
        writer.write(self.next_rows(first, count, rows))
        self.claimed_by(first, count, rows)
        for column in range(first, first + count):
            self.committed[column] += rows

    @precondition(lambda self: self.writers)
    @rule(data=st.data(), rows=st.integers(1, ROWS), order=st.permutations(sorted(SCHEMA)))
    def write_key_by_key(self, data: Any, rows: int, order: list[str]) -> None:
        (first, count), writer = self.chosen(data)
        content = self.next_rows(first, count, rows)
        runs = writer.claim(rows)
        self.claimed_by(first, count, rows)
        for k, name in enumerate(order):
            for columns, start in runs:
                part = slice(columns.start - first, columns.stop - first)
                for here, there in spans(start % ROWS, rows, ROWS):
                    self.blocks.arrays[name][here, columns] = content[name][there, part]
            writer.commit(rows, [name])
            read = self.other.read(first, self.committed[first], rows, order[: k + 1])
            assert read is not None, "keys that are committed can be read"
            for key, value in read.items():
                np.testing.assert_array_equal(value, content[key][:, 0])
            if k + 1 < len(order):
                assert self.other.read(first, self.committed[first], rows) is None, "a row without all of its keys"
        for column in range(first, first + count):
            self.committed[column] += rows

    @precondition(lambda self: self.writers)
    @rule(data=st.data(), rows=st.integers(1, ROWS), written=st.integers(0, ROWS), keys=st.integers(0, 2))
    def crash(self, data: Any, rows: int, written: int, keys: int) -> None:
        """It claimed, wrote some rows and perhaps committed some keys, and died."""
        (first, count), writer = self.chosen(data)
        for columns, start in writer.claim(rows):
            for here, _ in spans(start % ROWS, min(rows, written), ROWS):
                for array in self.blocks.arrays.values():
                    array[here, columns] = TORN
        self.claimed_by(first, count, rows)
        if keys:
            writer.commit(rows, sorted(SCHEMA)[:keys])
        del self.writers[first, count]
        self.blocks.leave(first, count)

    @precondition(lambda self: self.writers)
    @rule(data=st.data(), rows=st.integers(1, ROWS), some=st.integers(1, COLUMNS))
    def crash_while_committing(self, data: Any, rows: int, some: int) -> None:
        """Killed between two columns of one commit: the first ones have the rows, the others do not."""
        (first, count), writer = self.chosen(data)
        content = self.next_rows(first, count, rows)
        for columns, start in writer.claim(rows):
            part = slice(columns.start - first, columns.stop - first)
            for here, there in spans(start % ROWS, rows, ROWS):
                for name, array in self.blocks.arrays.items():
                    array[here, columns] = content[name][there, part]
        self.claimed_by(first, count, rows)
        for column in range(first, min(first + some, first + count)):
            self.blocks.written[:, column] += rows
            self.committed[column] += rows
        del self.writers[first, count]
        self.blocks.leave(first, count)

    # ---- others read ----

    @rule(column=st.integers(0, COLUMNS - 1), back=st.integers(-2, 2 * ROWS), count=st.integers(0, ROWS + 1))
    def read(self, column: int, back: int, count: int) -> None:
        start = self.committed[column] - back
        there = start >= max(0, self.claimed[column] - ROWS) and start + count <= self.committed[column]
        for blocks in (self.blocks, self.other):
            read = blocks.read(column, start, count)
            assert (read is not None) == there, (start, count, self.committed[column], self.claimed[column])
            if read is not None:
                expected = values(blocks, np.array([start]), np.array([column]), count)
                for name, value in read.items():
                    np.testing.assert_array_equal(value, expected[name][:, 0])

    @rule(consumer=st.integers(0, CONSUMERS - 1), column=st.integers(0, COLUMNS - 1), rows=st.integers(0, 3))
    def consume(self, consumer: int, column: int, rows: int) -> None:
        rows = min(rows, self.committed[column] - self.read_until[consumer, column])
        self.other.cursors[consumer, column] += rows
        self.read_until[consumer, column] += rows

    @invariant()
    def cursors_agree(self) -> None:
        for blocks in (self.blocks, self.other):
            assert blocks.committed().tolist() == self.committed
            assert blocks.claimed.tolist() == self.claimed
            assert (blocks.written <= blocks.claimed).all()
            for consumer in range(CONSUMERS):
                backlog = np.array(self.committed) - self.read_until[consumer]
                assert blocks.backlog(consumer).tolist() == backlog.tolist()

    @invariant()
    def nothing_moves(self) -> None:
        assert {name: array.ctypes.data for name, array in self.blocks.arrays.items()} == self.places


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(max_examples=80, stateful_step_count=40, deadline=None, derandomize=True)


def test_rows_overwritten_by_a_dead_writer_are_not_read() -> None:
    """The next writer claims less than the dead one had: rows beyond are still torn."""
    blocks = CyclicBlocks.create(SCHEMA, ROWS, 1)
    writer = blocks.join(0, 1)
    writer.write(values(blocks, np.zeros(1, int), np.zeros(1, int), 5))
    for columns, start in writer.claim(4):
        for here, _ in spans(start % ROWS, 4, ROWS):
            for array in blocks.arrays.values():
                array[here, columns] = TORN
    blocks.leave(0, 1)
    after = blocks.join(0, 1)
    after.write(values(blocks, np.full(1, 5), np.zeros(1, int), 1))
    assert [blocks.read(0, row, 1) is not None for row in range(7)] == [False, False, False, False, True, True, False]
    blocks.close()


def test_a_reader_that_a_new_writer_overtook_gets_nothing() -> None:
    """Keys of unfinished rows are reclaimed and rewritten while a reader copies them."""
    blocks = CyclicBlocks.create({"a": ArraySpec((2,), "<i8"), "b": ArraySpec((), "<i8")}, ROWS, 1)
    writer = blocks.join(0, 1)
    writer.claim(1)
    blocks.arrays["a"][0] = 1
    writer.commit(1, ["a"])

    class Meanwhile:
        """The array as a slow reader sees it: between its two halves a writer dies and another one joins."""

        def __getitem__(self, place: Any) -> np.ndarray:
            blocks.leave(0, 1)
            again = blocks.join(0, 1)
            again.claim(1)
            array["a"][0] = 2
            again.commit(1, ["a"])
            return np.array([[1, 2]])

    array = dict(blocks.arrays)
    assert blocks.read(0, 0, 1, ["a"]) is not None
    blocks.arrays["a"] = Meanwhile()  # type: ignore[assignment]
    assert blocks.read(0, 0, 1, ["a"]) is None
    blocks.arrays = array
    found = blocks.read(0, 0, 1, ["a"])
    assert found is not None
    np.testing.assert_array_equal(found["a"], [[2, 2]])
    blocks.close()


def test_columns_join_later_without_copying() -> None:
    blocks = CyclicBlocks.create(SCHEMA, 8, columns=6)
    places = {name: array.ctypes.data for name, array in blocks.arrays.items()}
    first = blocks.join(0, 2)
    first.write(values(blocks, np.zeros(2, int), np.arange(2), 8))
    second = blocks.join(2, 3)
    second.write(values(blocks, np.zeros(3, int), np.arange(2, 5), 3))
    first.write(values(blocks, np.full(2, 8), np.arange(2), 4))
    with pytest.raises(ConfigError, match="not within the 6 reserved"):
        blocks.join(5, 2)
    with pytest.raises(ConfigError, match="have a writer"):
        blocks.join(4, 2)
    assert {name: array.ctypes.data for name, array in blocks.arrays.items()} == places
    assert blocks.committed().tolist() == [12, 12, 3, 3, 3, 0]
    early, late = blocks.read(0, 4, 8), blocks.read(3, 0, 3)
    assert early is not None and early["a"].tolist() == [number(row, 0) for row in range(4, 12)]
    assert late is not None and late["a"].tolist() == [number(row, 3) for row in range(3)]
    assert blocks.read(5, 0, 1) is None
    blocks.close()


def test_a_row_has_all_of_its_arrays() -> None:
    blocks = CyclicBlocks.create(SCHEMA, 8)
    writer = blocks.join(0, 1)
    content = values(blocks, np.zeros(1, int), np.zeros(1, int), 2)
    for wrong in ({"a": content["a"]}, {**content, "d": content["a"]}):
        with pytest.raises(ConfigError, match="expected the arrays a, b, c"):
            writer.write(wrong)
    assert blocks.committed().tolist() == blocks.claimed.tolist() == [0]
    blocks.close()


# ---- several processes ----

BIG = {
    "a": ArraySpec((), "<i8"),
    "b": ArraySpec((1500,), "<f8"),
    "c": ArraySpec((40, 40), "<i4"),
    "d": ArraySpec((), "<f8"),
}
DEADLINE_S = 60.0


class Killable:
    """`cyclic_writer.py` for some columns."""

    def __init__(self, blocks: CyclicBlocks, first: int, count: int) -> None:
        script = Path(__file__).with_name("cyclic_writer.py")
        self.place = first, count
        self._process = subprocess.Popen(
            [sys.executable, str(script), blocks.path, str(first), str(count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.pid = 0

    def start(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        self.pid = int(self._process.stdout.readline())

    def kill(self) -> None:
        assert self._process.stdout is not None
        os.kill(self.pid, signal.SIGKILL)
        assert self._process.stdout.readline() == "killed\n"
        self.pid = 0

    def __enter__(self) -> Killable:
        return self

    def __exit__(self, *error: object) -> None:
        if self.pid:
            self.kill()
        self._process.communicate(timeout=DEADLINE_S)  # the end of its input is its end


def read_some(blocks: CyclicBlocks, rng: np.random.Generator) -> int:
    """Read a few rows at a random position, check that they are complete, and return their number."""
    column, count = int(rng.integers(blocks.columns)), int(rng.integers(1, 9))
    newest = int(blocks.committed()[column])
    start = max(0, int(rng.choice([blocks.oldest(column), newest - count, newest - blocks.rows])))
    read = blocks.read(column, start, count)
    if read is None:
        return 0
    expected = [number(row, column) for row in range(start, start + count)]
    for name, value in read.items():
        wrong = value.reshape(count, -1) != np.array(expected)[:, None]
        assert not wrong.any(), f"a torn row: {name} of column {column} from {start} on is {value}"
    return count


@pytest.mark.slow
def test_writers_that_are_killed_leave_whole_rows() -> None:
    rng = np.random.default_rng(1)
    blocks = CyclicBlocks.create(BIG, rows=32, columns=5)
    with Killable(blocks, 0, 2) as one, Killable(blocks, 2, 3) as two:
        read, deadline = 0, time.monotonic() + DEADLINE_S
        for life in range(30):
            for writer in (one, two):
                if not writer.pid:
                    writer.start()
            before = blocks.committed()
            target = int(rng.integers(3, 60))  # past the wrap, now and then
            while (blocks.committed() - before < target).any():
                assert time.monotonic() < deadline, f"life {life}: {blocks.committed()}"
                read += read_some(blocks, rng)
            victim = one if life % 2 else two
            victim.kill()
            blocks.leave(*victim.place)
            for _ in range(10):
                read += read_some(blocks, rng)
        assert (blocks.committed() > 2 * blocks.rows).all()
        assert read > 1000
    assert (blocks.written <= blocks.claimed).all()
    blocks.close()


def test_another_process_reads_a_buffer() -> None:
    code = (
        "import sys; from farstep.buffer.storage.cyclic import CyclicBlocks\n"
        "blocks = CyclicBlocks.attach(sys.argv[1])\n"
        "print(blocks.rows, blocks.columns, *blocks.schema, *blocks.read(0, 2, 4)['x'].tolist())"
    )
    with Buffer(5, Uniform()) as buffer:
        buffer.insert({"x": np.arange(7), "y": np.zeros((7, 2), np.float32)})
        done = subprocess.run(
            [sys.executable, "-c", code, buffer.path], capture_output=True, text=True, timeout=60, check=True
        )
        assert done.stdout.split() == ["5", "1", "x", "y", "2", "3", "4", "5"]


# ---- what is no block ----


def described(**changes: Any) -> bytes:
    schema = {name: [list(spec.shape), spec.dtype] for name, spec in SCHEMA.items()}
    return msgspec.msgpack.encode({"rows": 5, "columns": 2, "consumers": 0, "schema": schema, **changes})


def file_of(said: bytes, length: int | None = None, total: int = 1 << 16) -> bytes:
    head = np.array([0x6661727374657031, len(said) if length is None else length, 0, 0, 0, 0, 0, 0]).tobytes()
    return (head + said).ljust(total, b"\0")


GARBAGE = {
    "nothing": b"",
    "a little": b"farstep",
    "noise": np.random.default_rng(1).bytes(10_000),
    "zeros": bytes(10_000),
    "no description": file_of(b""),
    "a broken description": file_of(b"\xff" * 100),
    "a description cut off": file_of(described(), length=len(described()) - 9),
    "a length beyond the page": file_of(described(), length=10**12),
    "a negative length": file_of(described(), length=-5),
    "no rows": file_of(described(rows=0)),
    "negative columns": file_of(described(columns=-3)),
    "negative consumers": file_of(described(consumers=-1)),
    "more than the file has": file_of(described(rows=10**9)),
    "more than a number has": file_of(described(rows=2**62, columns=2**62)),
    "objects": file_of(described(schema={"a": [[2], "|O"]})),
    "a negative shape": file_of(described(schema={"a": [[-2], "<f4"]})),
    "no dtype": file_of(described(schema={"a": [[2], "no such"]})),
    "a file cut off": file_of(described(), total=4096),
}


@pytest.mark.parametrize("content", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "blocks"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="blocks"):
        CyclicBlocks.attach(path)


def test_a_described_file_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "blocks"
    path.write_bytes(file_of(described()))
    blocks = CyclicBlocks.attach(path)
    assert (blocks.rows, blocks.columns, blocks.schema) == (5, 2, SCHEMA)
    blocks.close()
    with pytest.raises(ClosedError):
        _ = blocks.path


def test_too_many_arrays_to_describe() -> None:
    schema = {f"a rather long name of an array {i}": ArraySpec((), "<f4") for i in range(200)}
    with pytest.raises(ConfigError, match="200 arrays does not fit"):
        CyclicBlocks.create(schema, 4)
