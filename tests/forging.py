"""Checkpoints that differ from a real one in one value, with matching checksums."""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from farstep.checkpoint import folder as checkpoint
from farstep.checkpoint.files import file_name, write_array, write_file

REMOVED = object()
Way = tuple[Any, ...]


def fields(value: Any, way: Way = ()) -> Iterator[tuple[Way, Any]]:
    """Every value inside nested mappings and lists, and these themselves, with the keys that lead there."""
    if way:
        yield way, value
    if isinstance(value, dict):
        for key, sub in value.items():
            yield from fields(sub, (*way, key))
    elif isinstance(value, list):  # its entries are alike, but for a few short ones
        for i in range(len(value)) if len({type(entry) for entry in value}) > 1 else {len(value) - 1} - {-1}:
            yield from fields(value[i], (*way, i))


def changed(value: Any, way: Way, new: Any) -> Any:
    """A copy with another value at a path; all other parts are shared."""
    if not way:
        return new
    value, key = copy.copy(value), way[0]
    if len(way) == 1 and new is REMOVED:
        del value[key]
    else:
        value[key] = changed(value[key], way[1:], new)
    return value


def forgeries(value: Any) -> dict[str, Any]:
    """Wrong values in place of a value."""
    found: dict[str, Any] = {"removed": REMOVED, "text": "x"} | ({} if value is None else {"none": None})
    if isinstance(value, np.ndarray):
        return found | forged_arrays(value)
    found |= {"list": [[]], "mapping": {"x": 1}}
    if isinstance(value, int):
        return found | {"fraction": value + 0.5, "bool": True, "negative": -1, "huge": 2**70, "nan": math.nan}
    if isinstance(value, float):
        return found | {"bool": True, "negative": -1.0, "huge": 1e300, "infinite": math.inf, "nan": math.nan}
    return found | {"number": 3}


def forged_arrays(array: np.ndarray) -> dict[str, np.ndarray]:
    def with_first(value: Any) -> np.ndarray:
        other = array.copy()
        other.reshape(-1)[:1] = value
        return other

    found = {"shape": array[None], "dtype": array.astype(np.int16), "wider": array.astype(np.float64)}
    if array.ndim:
        found["longer"] = np.concatenate([array, array[-1:] if len(array) else np.ones(1, array.dtype)])
    if array.dtype.kind == "f":
        return found | {"negative": with_first(-1), "infinite": with_first(math.inf), "nan": with_first(math.nan)}
    if array.dtype == bool:
        return found | {"flipped": with_first(~array.reshape(-1)[:1]), "byte": with_byte(array, 2)}
    return found | {"huge": with_first(np.iinfo(array.dtype).max)}


def with_byte(array: np.ndarray, byte: int) -> np.ndarray:
    """A copy whose first byte is this one."""
    other = array.copy()
    other.reshape(-1).view(np.uint8)[:1] = byte
    return other


class Folder:
    """A folder whose newest checkpoint, 000002, is written again and again; files that stay the same are links."""

    def __init__(self, folder: Path, arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any]) -> None:
        self._arrays = arrays
        self.real = checkpoint.save(folder / "real", arrays, meta)
        self.folder = folder / "forged"
        self._manifest = json.loads((self.real / "manifest.json").read_bytes())

    def write(self, arrays: Mapping[str, np.ndarray], meta: Any) -> None:
        """The newest checkpoint is this one."""
        newest = self.folder / "000002"
        shutil.rmtree(newest, ignore_errors=True)
        newest.mkdir(parents=True)
        entries = {}
        for name, array in arrays.items():
            if array is self._arrays.get(name):
                os.link(self.real / file_name(name), newest / file_name(name))
                entries[name] = self._manifest["arrays"][name]
            else:
                entries[name] = msgspec.to_builtins(write_array(newest, name, array))
        text = msgspec.to_builtins(write_file(newest / "meta.json", [json.dumps(meta).encode()]))
        manifest = json.dumps({"format": 1, "arrays": entries, "meta": text}).encode()
        (newest / "manifest.json").write_bytes(manifest)
        (newest / "DONE").write_bytes(b"%08x\n" % zlib.crc32(manifest))
