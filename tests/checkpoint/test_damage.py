"""Damaged and forged checkpoints are refused by name, and the previous one is used."""

from __future__ import annotations

import itertools
import json
import logging
import os
import random
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from farstep.checkpoint.folder import load, numbered
from farstep.errors import CheckpointError, FarstepError
from tests.checkpoint.checkpoint_folders import FILES, files_are_closed, names, two_checkpoints, value_of

two = pytest.fixture(two_checkpoints)
closed = pytest.fixture(autouse=True)(files_are_closed)


def forge(folder: Path, change: Callable[[dict], object]) -> None:
    """Change the manifest, and DONE along with it."""
    manifest = json.loads((folder / "manifest.json").read_bytes())
    manifest = change(manifest) or manifest
    text = json.dumps(manifest).encode()
    (folder / "manifest.json").write_bytes(text)
    (folder / "DONE").write_bytes(b"%08x\n" % zlib.crc32(text))


def forge_file(folder: Path, name: str, data: bytes) -> None:
    """Replace a file, with size and checksum in the manifest along with it."""
    (folder / name).write_bytes(data)
    entry = {"size": len(data), "crc32": zlib.crc32(data)}
    where = (lambda m: m["meta"]) if name == "meta.json" else lambda m: m["arrays"][name.removesuffix(".npy")]
    forge(folder, lambda manifest: where(manifest).update(entry))


def damage(kind: str, file: Path) -> None:
    data = file.read_bytes() if file.exists() else b""
    match kind:
        case "emptied":
            file.write_bytes(b"")
        case "cut":
            file.write_bytes(data[:-1])
        case "longer":
            file.write_bytes(data + b"\n")
        case "flipped first" | "flipped middle" | "flipped last":
            at = {"first": 0, "middle": len(data) // 2, "last": -1}[kind.split()[1]]
            changed = bytearray(data)
            changed[at] ^= 1
            file.write_bytes(changed)
        case "garbage":
            file.write_bytes(random.Random(0).randbytes(len(data)))
        case "missing":
            file.unlink()
        case "folder":
            file.unlink()
            file.mkdir()
        case "pipe":
            file.unlink()
            os.mkfifo(file)
        case "link":
            shutil.copy(file, file.parent.parent / "elsewhere")
            file.unlink()
            file.symlink_to(file.parent.parent / "elsewhere")
        case "another's":
            shutil.copy(file.parent.parent / "000001" / file.name, file)
        case _:
            raise AssertionError(kind)


KINDS = ["emptied", "cut", "longer", "flipped first", "flipped middle", "flipped last", "garbage", "missing", "folder"]


@pytest.mark.parametrize("mmap", [False, True], ids=["read", "mapped"])
@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("kind", [*KINDS, "pipe", "link", "another's"])
def test_damage_is_named_and_the_previous_one_used(
    two: Path, file: str, kind: str, mmap: bool, caplog: pytest.LogCaptureFixture
) -> None:
    damage(kind, two / "000002" / file)
    loaded = load(two, mmap=mmap)
    assert value_of(loaded) == 1 and loaded.folder == two / "000001"
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("farstep", logging.WARNING)
    assert loaded.refused == (record.getMessage(),)
    assert record.getMessage().startswith(f"{two / '000002'} is not used: ")
    assert file in record.getMessage()


def test_error_has_the_actual_and_the_expected_value(two: Path) -> None:
    size = (two / "000002" / "obs.npy").stat().st_size
    os.truncate(two / "000002" / "obs.npy", 100)
    assert load(two).refused == (f"{two / '000002'} is not used: obs.npy has 100 bytes, {size} expected",)


@pytest.mark.slow
def test_change_of_any_byte_is_detected(two: Path) -> None:
    """Each byte of each file flipped, and each file cut at each length."""
    for name in FILES:
        file = two / "000002" / name
        data = file.read_bytes()
        flipped = (data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :] for at in range(len(data)))
        for changed in itertools.chain(flipped, (data[:at] for at in range(len(data)))):
            file.write_bytes(changed)
            loaded = load(two)
            assert loaded.folder.name == "000001" and name in loaded.refused[0]
        file.write_bytes(data)
        assert value_of(load(two)) == 2


def test_an_array_too_many_is_named(two: Path) -> None:
    shutil.copy(two / "000001" / "obs.npy", two / "000002" / "more.npy")
    loaded = load(two)
    assert value_of(loaded) == 1 and "more.npy is not in manifest.json" in loaded.refused[0]


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"null", b"3", b"\xff\xfe", b"[" * 100_000, b'{"format": 1, "arrays": {}}']
)
def test_a_sealed_manifest_of_garbage_is_refused(two: Path, text: bytes) -> None:
    (two / "000002" / "manifest.json").write_bytes(text)
    (two / "000002" / "DONE").write_bytes(b"%08x\n" % zlib.crc32(text))
    loaded = load(two)
    assert value_of(loaded) == 1 and "manifest.json" in loaded.refused[0]


LIES = {
    "a path upwards": lambda m: m["arrays"].update({"../000001/obs": m["arrays"].pop("obs")}),
    "an absolute path": lambda m: m["arrays"].update({"/etc/passwd": m["arrays"].pop("obs")}),
    "two dots": lambda m: m["arrays"].update({"..": m["arrays"].pop("obs")}),
    "a zero in the name": lambda m: m["arrays"].update({"obs\0": m["arrays"].pop("obs")}),
    "a long name": lambda m: m["arrays"].update({"x" * 5000: m["arrays"].pop("obs")}),
    "an array less": lambda m: m["arrays"].pop("obs") and m,
    "huge shape": lambda m: m["arrays"]["obs"].update(shape=[2**40, 2**40]),
    "too huge shape": lambda m: m["arrays"]["obs"].update(shape=[2**90]),
    "huge size": lambda m: m["arrays"]["obs"].update(size=2**60),
    "another shape": lambda m: m["arrays"]["obs"].update(shape=[4, 3]),
    "negative shape": lambda m: m["arrays"]["obs"].update(shape=[-3, -4]),
    "shape of text": lambda m: m["arrays"]["obs"].update(shape="3"),
    "shape of floats": lambda m: m["arrays"]["obs"].update(shape=[3.5, 4]),
    "no shape": lambda m: m["arrays"]["obs"].pop("shape") and m,
    "objects": lambda m: m["arrays"]["obs"].update(dtype="|O"),
    "another dtype": lambda m: m["arrays"]["obs"].update(dtype="<i4"),
    "dtype of numbers": lambda m: m["arrays"]["obs"].update(dtype=4),
    "checksum of text": lambda m: m["arrays"]["obs"].update(crc32="0"),
    "arrays in a list": lambda m: m.update(arrays=[]),
    "another format": lambda m: m.update(format=2),
    "no meta": lambda m: m.pop("meta") and m,
}


@pytest.mark.parametrize("lie", LIES)
def test_inconsistent_manifest_is_refused(two: Path, lie: str) -> None:
    forge(two / "000002", LIES[lie])
    loaded = load(two)
    assert value_of(loaded) == 1 and loaded.refused[0].startswith(f"{two / '000002'} is not used: ")
    assert value_of(load(two, mmap=True)) == 1


def npy_file(header: str, data: bytes = b"") -> bytes:
    text = header.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data


HEADERS = {
    "huge": ("{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776, 1099511627776)}", "<f4", [2**40] * 2),
    "negative": ("{'descr': '<f4', 'fortran_order': False, 'shape': (-1, -1)}", "<f4", [-1, -1]),
    "objects": ("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}", "|O", [1]),
    "Fortran": ("{'descr': '<f4', 'fortran_order': True, 'shape': (1,)}", "<f4", [1]),
    "code": ("__import__('os').abort()", "<f4", [1]),
    "unfinished": ("{'descr': ('''", "<f4", [1]),
    "deep": ("(" * 5000, "<f4", [1]),
    "many dimensions": (f"{{'descr': '<f4', 'fortran_order': False, 'shape': {(1,) * 100}}}", "<f4", [1] * 100),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mmap", [False, True], ids=["read", "mapped"])
@pytest.mark.parametrize("header", HEADERS)
def test_inconsistent_header_is_refused(two: Path, header: str, mmap: bool) -> None:
    """Also if manifest, checksums and DONE match it."""
    text, dtype, shape = HEADERS[header]
    forge_file(two / "000002", "obs.npy", npy_file(text, b"1234"))
    forge(two / "000002", lambda manifest: manifest["arrays"]["obs"].update(dtype=dtype, shape=shape))
    loaded = load(two, mmap=mmap)
    assert value_of(loaded) == 1 and "obs.npy" in loaded.refused[0]


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"[" * 100_000, b"9" * 5000, b"\xff"])
def test_a_sealed_meta_of_garbage_is_refused(two: Path, text: bytes) -> None:
    forge_file(two / "000002", "meta.json", text)
    loaded = load(two)
    assert value_of(loaded) == 1 and "meta.json" in loaded.refused[0]


def test_error_names_all_damaged_checkpoints(two: Path) -> None:
    (two / "000001" / "DONE").unlink()
    damage("flipped last", two / "000002" / "reward.npy")
    with pytest.raises(CheckpointError) as caught:
        load(two)
    assert isinstance(caught.value, FarstepError) and isinstance(caught.value, OSError)
    for part in ("000001 is not used: DONE is missing", "000002 is not used: reward.npy differs from what was saved"):
        assert part in str(caught.value)
    assert names(two) == [".lock", "000001", "000002"]  # damaged checkpoints are kept for inspection


def test_error_says_why_a_folder_has_no_checkpoint(tmp_path: Path, two: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    assert numbered(tmp_path / "empty") == numbered(tmp_path / "nowhere") == []
    for path, words in {
        "nowhere": "nowhere does not exist",
        "empty": "empty holds no checkpoint",
        "file": "file is not a folder",
        "ring/000002": "000002 is a single checkpoint; load from its parent folder, .*ring",
    }.items():
        with pytest.raises(CheckpointError, match=words):
            load(tmp_path / path)
