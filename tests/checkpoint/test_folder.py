"""Checkpoints survive a round trip, and the newest are kept."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from farstep.checkpoint import files
from farstep.checkpoint.folder import load, numbered, save
from farstep.errors import ConfigError
from tests.checkpoint.checkpoint_folders import content, files_are_closed, names, two_checkpoints, value_of

two = pytest.fixture(two_checkpoints)
closed = pytest.fixture(autouse=True)(files_are_closed)

DTYPES = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(endianness="?"),
    hnp.unsigned_integer_dtypes(endianness="?"),
    hnp.floating_dtypes(endianness="?"),
    hnp.complex_number_dtypes(endianness="?"),
    hnp.datetime64_dtypes(endianness="?"),
    hnp.byte_string_dtypes(max_len=5),
    hnp.unicode_string_dtypes(max_len=5),
    st.just(np.dtype([("a", "<i4"), ("b", ">f8", (2,))])),
)


@st.composite
def views(draw: st.DrawFn) -> np.ndarray:
    """Arrays with 0 to 4 dimensions, also empty, transposed, with steps, reversed or repeated without memory."""
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
    dtype = draw(DTYPES)
    size = int(np.prod(shape)) * dtype.itemsize
    array = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), np.uint8).view()
    if dtype.kind in "bU":  # not every byte is a truth value or a character
        array = array % 2 if dtype.kind == "b" else array * 0
    array = (array.view(dtype) if size else np.empty(0, dtype)).reshape(shape)
    array = array.transpose(draw(st.permutations(range(array.ndim))))
    steps = draw(st.tuples(*[st.sampled_from([1, 2, -1]) for _ in range(array.ndim)]))
    array = array[tuple(slice(None, None, step) for step in steps)] if array.ndim else array
    if draw(st.booleans()):
        array = np.broadcast_to(array, (2, *array.shape))
    return array


NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(["obs.camera", "..", "a/b"])


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(NAMES, views(), max_size=3), st.booleans(), st.sampled_from([1, 7, 2**24]))
@pytest.mark.slow
def test_arrays_survive_a_round_trip(arrays: dict[str, np.ndarray], mmap: bool, slice_bytes: int) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "SLICE_BYTES", slice_bytes)
        written = save(folder, arrays, {})
        loaded = load(folder, mmap=mmap)
        assert loaded.folder == written and loaded.refused == () and list(loaded.arrays) == list(arrays)
        for name, array in arrays.items():
            back = loaded.arrays[name]
            assert (back.dtype, back.shape) == (array.dtype, array.shape)
            assert back.tobytes() == array.tobytes()
            assert back.flags.writeable != (mmap and array.nbytes > 0)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**200), 2**200) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text(), JSON, max_size=4))
@pytest.mark.slow
def test_meta_survives_a_round_trip(meta: dict[str, object]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        save(folder, {}, meta)
        loaded = load(folder)
        assert loaded.meta == meta and loaded.arrays == {} and list(loaded.meta) == list(meta)


def test_restored_generator_continues_its_sequence(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    rng.random(3)
    save(tmp_path, {}, {"rng": rng.bit_generator.state, "size": np.int64(3), "share": np.float32(0.1), "on": np.True_})
    meta = load(tmp_path).meta
    other = np.random.default_rng(0)
    other.bit_generator.state = meta["rng"]  # type: ignore[assignment]
    assert other.random(5).tolist() == rng.random(5).tolist()
    assert (meta["size"], meta["share"], meta["on"]) == (3, float(np.float32(0.1)), True)
    assert [type(meta[key]) for key in ("size", "share", "on")] == [int, float, bool]


def test_numpy_reads_the_files_itself(two: Path) -> None:
    np.testing.assert_array_equal(np.load(two / "000002" / "obs.npy", allow_pickle=False), content(2)[0]["obs"])


def test_a_mapped_array_outlives_its_checkpoint(two: Path) -> None:
    loaded = load(two, mmap=True)
    for value in (3, 4):
        save(two, *content(value))
    assert not loaded.folder.exists() and value_of(loaded) == 2
    assert isinstance(loaded.arrays["obs"], np.memmap)


def test_an_array_larger_than_memory_is_saved(tmp_path: Path) -> None:
    """128 MiB, repeated without memory, in an address space with room for half of them."""
    code = """
import resource, sys, numpy as np
from farstep.checkpoint.folder import save
limit = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + 2**26
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
save(sys.argv[1], {"obs": np.broadcast_to(np.arange(2**10, dtype=np.float32), (2**15, 2**10))[:, ::-1]}, {})
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=120)
    obs = load(tmp_path, mmap=True).arrays["obs"]
    assert obs.nbytes == 2**27 and obs[-1].tolist() == list(range(2**10 - 1, -1, -1))


@pytest.mark.parametrize(
    "array",
    [
        np.array([None, {}], object),
        np.empty(2, [("a", "<i4"), ("b", "O")]),
        np.array([1, 2], ml_dtypes.bfloat16),
        np.empty(1, [(f"field{i}" * 10, "<i4") for i in range(500)]),
    ],
    ids=["objects", "objects in a field", "bfloat16", "header too long"],
)
def test_arrays_that_need_pickle_are_refused(tmp_path: Path, array: np.ndarray) -> None:
    with pytest.raises(ConfigError, match=r"the array 'x' of dtype .* without pickle"):
        save(tmp_path / "new", {"x": array}, {})
    assert not (tmp_path / "new").exists()


@pytest.mark.skipif(not hasattr(np.dtypes, "StringDType"), reason="NumPy 2")
def test_strings_of_any_length_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="fixed number of bytes"):
        save(tmp_path, {"x": np.array(["a", "bc"], np.dtypes.StringDType())}, {})


@pytest.mark.parametrize("name", [3, "\ud800"], ids=["number", "surrogate"])
def test_names_that_are_not_strings_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="a string as name"):
        save(tmp_path, {name: np.zeros(1)}, {})


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"a": [0, np.zeros(2)]}, r"meta\['a'\]\[1\]"),
        ({"a": {1: 2}}, r"meta\['a'\]"),
        ({"a": b"x"}, r"meta\['a'\]"),
        ({"a": {1, 2}}, r"meta\['a'\]"),
        ({"a": 1j}, r"meta\['a'\]"),
        ({"a": np.datetime64("2020-01-01")}, r"meta\['a'\]"),
        ({"a": np.longdouble(1)}, r"meta\['a'\]"),
        ({2: "a"}, "meta"),
    ],
)
def test_meta_that_is_not_plain_is_refused(tmp_path: Path, value: dict[str, object], where: str) -> None:
    with pytest.raises(ConfigError, match=f"^{where} is .* JSON"):
        save(tmp_path / "new", {}, value)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("keep", [0, -1, 1.5, True, "2"])
def test_keep_is_a_number_of_checkpoints(tmp_path: Path, keep: int) -> None:
    with pytest.raises(ConfigError, match="keep is"):
        save(tmp_path / "new", {}, {}, keep=keep)


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_are_kept(tmp_path: Path, keep: int) -> None:
    for value in range(1, 6):
        assert save(tmp_path, *content(value), keep=keep).name == f"{value:06d}"
        assert value_of(load(tmp_path)) == value
    assert names(tmp_path) == [".lock", *(f"{value:06d}" for value in range(6 - keep, 6))]


def test_numbers_grow_past_six_digits(two: Path) -> None:
    (two / "000002").rename(two / "999999")
    assert save(two, *content(3)).name == "1000000"
    assert value_of(load(two)) == 3
    assert [folder.name for folder in numbered(two)] == ["1000000", "999999"]


def test_a_damaged_checkpoint_replaces_no_other(two: Path) -> None:
    os.truncate(two / "000002" / "obs.npy", 100)
    save(two, *content(3))
    assert names(two) == [".lock", "000001", "000002", "000003"]
    save(two, *content(4))
    assert names(two) == [".lock", "000003", "000004"]


def test_foreign_files_are_kept(two: Path) -> None:
    (two / "notes.txt").write_text("mine")
    (two / "12").mkdir()
    save(two, *content(3))
    assert names(two) == [".lock", "000002", "000003", "12", "notes.txt"]
    assert value_of(load(two)) == 3


def test_file_with_a_numeric_name_is_not_a_checkpoint(two: Path) -> None:
    (two / "000007").write_text("")
    assert value_of(load(two)) == 2
    assert save(two, *content(3)).name == "000008"
    save(two, *content(4))
    save(two, *content(5))
    assert names(two) == [".lock", "000009", "000010"]


def test_old_checkpoint_that_cannot_be_removed_is_reported(
    two: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rmtree(folder: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(folder))

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    save(two, *content(3))
    assert "000001 is no longer needed but could not be removed" in caplog.text
    monkeypatch.undo()
    save(two, *content(4))
    assert names(two) == [".lock", "000003", "000004"]
