"""The items of a buffer: their keys, the capacity, and their memory."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farstep import Buffer, ConfigError
from farstep.buffer import FIFO, LIFO, FullBatch, Sampler, Uniform
from farstep.buffer.storage.table import Table
from tests.buffer.sampled_rows import rows


def test_bytes_limit_the_capacity() -> None:
    with Buffer(1000, Uniform(), max_bytes=4096 * 8) as buffer:
        buffer.insert({"a": np.zeros((2, 100), np.float32), "b": np.zeros(2, np.float64)})  # 408 bytes a row
        assert buffer.capacity == 4096 * 8 // 408
        buffer.insert({"a": np.zeros((500, 100), np.float32), "b": np.zeros(500)})
        assert len(buffer) == buffer.capacity
    with Buffer(1000, Uniform(), remover=LIFO(), max_bytes=80) as buffer:
        buffer.insert(rows(0, 100))
        assert len(buffer) == buffer.capacity == 9  # and a place for the row that competes
    with Buffer(1000, Uniform(), max_bytes=7) as buffer, pytest.raises(ConfigError, match="max_bytes"):
        buffer.insert(rows(0, 1))
    with pytest.raises(ConfigError, match="GiB available"):
        Buffer(10**12, Uniform(), spec={"a": ((1000,), "f4")})
    with pytest.raises(ConfigError, match="max_bytes is 0"):
        Buffer(10, Uniform(), max_bytes=0)


def test_close_frees_the_memory() -> None:
    def mapped() -> int:
        with open("/proc/self/maps") as maps:  # noqa: PTH123
            return sum("farstep-buffer" in line for line in maps)

    before = mapped()
    buffer = Buffer(1000, Uniform(), spec={"a": ((100,), "f4")})
    buffer.insert({"a": np.ones((10, 100), np.float32)})
    batch, _ = buffer.sample(4)
    assert mapped() == before + 1
    buffer.close()
    assert mapped() == before
    assert (batch["a"] == 1).all()  # copies
    assert len(buffer) == 0
    repr(buffer)


# ---- keys ----


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from("aaald"), st.integers(1, 9)), min_size=1, max_size=40))
def test_keys_are_never_reused(calls: list[tuple[str, int]]) -> None:
    """Rows may be arrays, which are written at once, or lists, which are converted."""
    named: dict[int, int] = {}  # row by key
    there: list[int] = []
    with Buffer(12, Uniform(), spec={"number": 0}, seed=21) as buffer:
        for call, n in calls:
            if call == "d":
                assert buffer.delete(cast(Any, there[:n])) == len(there[:n])
                # The cells of these are overwritten when it is their turn.
                gone, there = there[:n], there[n:]
                assert buffer.update_priorities(cast(Any, gone), np.ones(len(gone))) == 0
                continue
            number = np.arange(len(named), len(named) + n)
            keys = buffer.insert({"number": number if call == "a" else number.tolist()}).tolist()
            assert not named.keys() & set(keys)
            named.update(zip(keys, number.tolist(), strict=True))
            there = [key for key in there + keys if named[key] >= len(named) - 12]
            assert len(buffer) == len(there)
            assert buffer.update_priorities(cast(Any, list(named)), np.ones(len(named))) == len(there)
            batch, info = buffer.sample(20)
            assert [named[key] for key in info.keys.tolist()] == batch["number"].tolist()


def test_keys_of_rows_whose_insert_was_interrupted_are_not_given_again() -> None:
    """A signal's handler may raise after rows have their keys and before they count."""
    table = Table(5, 1)
    given_keys: set[int] = set()
    for start, stop in ((0, 3), (3, 5), (0, 2), (0, 2), (2, 5), (0, 1), (1, 4), (1, 5), (0, 5)):
        keys, _ = table.put_rows(slice(start, stop))
        assert (keys % 5).tolist() == list(range(start, stop))
        assert not given_keys & set(keys.tolist())
        given_keys.update(keys.tolist())
        assert table.find(keys).tolist() == list(range(start, stop))


# ---- numbers that do not fit ----


@pytest.mark.parametrize(
    ("held", "value", "shown"),
    [
        ("uint8", np.array([1, 300, 2], np.uint16), "300"),
        ("int8", np.array([1, -129, 2]), "-129"),
        ("int64", np.array([1, 2**63, 2], np.uint64), "9223372036854775808"),
        ("float32", np.array([1, 1e300, 2]), r"1e\+300"),
        ("float16", np.array([1, -70000, 2], np.float32), "-70000.0"),
        ("complex64", np.array([1, 1e300j, 2]), "1e.300j"),
    ],
)
@pytest.mark.parametrize("remover", [FIFO(), LIFO()], ids=repr)
def test_number_that_does_not_fit_is_refused(remover: Sampler, held: str, value: np.ndarray, shown: str) -> None:
    with Buffer(8, Uniform(), remover=remover, spec={"x": ((), held), "y": ((), "f4")}) as buffer:
        with pytest.raises(ConfigError, match=f"{shown} in 'x', row 1; this buffer holds {held}"):
            buffer.insert({"x": value, "y": np.zeros(3)})
        assert len(buffer) == 0


def test_numbers_that_fit_are_stored_as_they_are() -> None:
    with Buffer(8, FullBatch(), spec={"x": ((2,), "uint8"), "y": ((), "f4")}) as buffer:
        y = np.array([np.inf, np.nan, 0.1])
        buffer.insert({"x": np.array([[0, 255]] * 3, np.uint32), "y": y})
        batch, _ = buffer.sample(3)
        assert batch["x"].tolist() == [[0, 255]] * 3
        np.testing.assert_array_equal(batch["y"], y.astype(np.float32))


def test_signed_integers_that_fit_are_converted() -> None:
    """NumPy's integers are signed by default."""
    buffer = Buffer(10, FIFO(), spec={"x": ((), "uint8")})
    buffer.insert({"x": np.array([5, 255])})
    assert buffer.sample(2)[0]["x"].tolist() == [5, 255]
    for wrong in (300, -1):
        with pytest.raises(ConfigError, match=f"insert got {wrong} in 'x', row 1"):
            buffer.insert({"x": np.array([5, wrong])})
