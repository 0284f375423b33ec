"""Checkpoints of a training run or a replay buffer: a folder of numbered ones, each of them intact or not used.

    path/000012/obs.npy ...      the arrays, for np.load, too
                meta.json        plain data
                manifest.json    dtype, shape, bytes and checksum of each array; bytes and checksum of meta.json
                DONE             the checksum of manifest.json, written last
    path/.tmp-000013/            one that is being written or removed, or left behind by a process that was killed
    path/.lock                   locked while one is written

DONE vouches for the manifest and the manifest for every other file.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
import numpy as np

from farstep.checkpoint import files
from farstep.config.env import check_count
from farstep.core import Array
from farstep.errors import CheckpointError, ConfigError

log = logging.getLogger("farstep")
T = TypeVar("T")

_META, _MANIFEST, _DONE, _LOCK, _TEMPORARY = "meta.json", "manifest.json", "DONE", ".lock", ".tmp-"
_POLL_S = 0.02


class _Manifest(msgspec.Struct, frozen=True):
    format: Literal[1]
    arrays: dict[str, files.ArrayEntry]
    meta: files.FileEntry


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What a checkpoint held."""

    arrays: dict[str, Array]
    """In the order in which they were given, each in C order."""
    meta: dict[str, object]
    """As given, but with lists for tuples and Python's numbers for NumPy's."""
    folder: Path
    """The checkpoint."""
    refused: tuple[str, ...] = ()
    """A sentence for each newer checkpoint that is damaged."""


def save(
    path: str | os.PathLike[str],
    arrays: Mapping[str, Array],
    meta: Mapping[str, object],
    *,
    keep: int = 2,
    lock_timeout_s: float = 60.0,
) -> Path:
    """Write the next checkpoint of the folder `path`, and return its own folder.

    Until all of it is on the disk, the ones before it stay as they are; then all but the `keep` newest are removed.
    While another process saves to the same path, this one waits for up to `lock_timeout_s`.
    """
    check_count("keep", keep)
    plan = {name: np.asarray(array) for name, array in arrays.items()}
    for name, array in plan.items():
        files.check_array(name, array)
    text = json.dumps(_plain(meta, "meta")).encode()
    root = Path(path)
    before: list[Path] = []
    try:
        root.mkdir(parents=True, exist_ok=True)
        before = numbered(root)
        with _locked(root, lock_timeout_s):
            for leftover in root.glob(f"{_TEMPORARY}*"):
                _remove(leftover)
            folder = _write(root, plan, text)
            _prune(root, keep)
    except CheckpointError:
        raise
    except OSError as error:
        kept = "The ones before it are still there; make" if before else "Make"
        raise CheckpointError(
            f"the checkpoint could not be saved to {root}: {error}. {kept} sure that there is space and that the "
            "folder is writable, then save again."
        ) from error
    return folder


def load(path: str | os.PathLike[str], *, mmap: bool = False) -> Loaded:
    """Read the newest checkpoint of the folder `path` that is complete and whose content is what was saved.

    With `mmap`, arrays are read-only views of the files instead of copies in memory; they are checked all the same.
    """
    return load_with(path, lambda loaded: loaded, mmap=mmap)


def load_with(path: str | os.PathLike[str], use: Callable[[Loaded], T], *, mmap: bool = False) -> T:
    """Call `use` with the newest intact checkpoint of the folder `path`, and return its result.

    Args:
        path: The folder that was saved to.
        use: Raises `files.Refused`, with the reason and before it changes anything, if the content does not fit what is
            to be restored; it is then called with the checkpoint before.
        mmap: As in `load`.

    Raises:
        CheckpointError: If there is no checkpoint that can be used; the message says why each was refused.
    """
    root = Path(path)
    refused: list[str] = []
    for folder in numbered(root):
        try:
            manifest = _inspect(folder)
            arrays = {name: files.read_array(folder, name, entry, mmap) for name, entry in manifest.arrays.items()}
            meta = _read_meta(folder, manifest.meta)
            found = use(Loaded(arrays=arrays, meta=meta, folder=folder, refused=tuple(refused)))
        except files.Refused as reason:
            if not folder.exists():  # removed by a save meanwhile, so there are newer ones
                return load_with(path, use, mmap=mmap)
            refused.append(f"{folder} is not used: {reason}")
        else:
            for sentence in refused:
                log.warning("%s", sentence)
            return found
    if refused:
        advice = (
            "If they were saved with other options or another version of farstep, use those; otherwise the files are "
            "damaged: restore the folder from a backup, or start without a checkpoint."
        )
        raise CheckpointError("\n  ".join([f"no checkpoint in {root} can be used:", *refused, advice]))
    if (root / _MANIFEST).exists():
        raise CheckpointError(f"{root} is a single checkpoint; load from the folder it is in, {root.parent}.")
    what = "holds no checkpoint" if root.is_dir() else "is not a folder" if root.exists() else "does not exist"
    raise CheckpointError(f"{root} {what}; expected a folder that was saved to, with e.g. {root / '000001'} in it.")


def numbered(path: str | os.PathLike[str]) -> list[Path]:
    """The checkpoints in the folder `path`, newest first, intact or not; none if there is no such folder."""
    entries = Path(path).iterdir() if Path(path).is_dir() else ()
    folders = [entry for entry in entries if re.fullmatch(r"[0-9]{6,}", entry.name)]
    return sorted(folders, key=lambda folder: int(folder.name), reverse=True)


def _plain(value: object, where: str) -> object:
    """`value` as JSON gives it back."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain(entry, f"{where}[{key!r}]") for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry, f"{where}[{i}]") for i, entry in enumerate(value)]
    raise ConfigError(
        f"{where} is {value!r:.100}, which JSON would not give back; expected text, numbers, None, or lists and "
        "mappings (with keys of text) of these. Arrays go into `arrays`."
    )


@contextlib.contextmanager
def _locked(root: Path, timeout_s: float) -> Iterator[None]:
    """The folder for this process alone; the kernel gives it back when the process ends."""
    deadline = time.monotonic() + timeout_s
    with open(root / _LOCK, "ab", opener=files.no_follow) as stream:
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise CheckpointError(
                        f"{root} is still locked by another save after {timeout_s} s, so nothing was saved; give each "
                        f"run a folder of its own, or a longer lock_timeout_s. `fuser {root / _LOCK}` shows who it is."
                    ) from None
            time.sleep(_POLL_S)
        try:
            yield
        finally:
            fcntl.flock(stream, fcntl.LOCK_UN)  # a process forked meanwhile has the descriptor, too


def _write(root: Path, arrays: Mapping[str, Array], meta: bytes) -> Path:
    number = f"{max((int(folder.name) for folder in numbered(root)), default=0) + 1:06d}"
    temporary = root / f"{_TEMPORARY}{number}"
    temporary.mkdir()
    try:
        entries = {name: files.write_array(temporary, name, array) for name, array in arrays.items()}
        manifest = _Manifest(1, entries, files.write_file(temporary / _META, [meta]))
        content = msgspec.json.encode(manifest)
        files.write_file(temporary / _MANIFEST, [content])
        files.write_file(temporary / _DONE, [_seal(content)])
        files.sync_folder(temporary)
        folder = temporary.rename(root / number)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    files.sync_folder(root)
    return folder


def _seal(manifest: bytes) -> bytes:
    return b"%08x\n" % zlib.crc32(manifest)


def _prune(root: Path, keep: int) -> None:
    """Remove what is older than the `keep` newest; one that lacks something takes nobody's place."""
    whole = 0
    for folder in numbered(root):
        try:
            if whole >= keep:  # renamed first: a load never sees half of it
                _remove(folder.rename(root / f"{_TEMPORARY}{folder.name}"))
            else:
                _inspect(folder)
                whole += 1
        except files.Refused:
            pass
        except OSError as error:
            log.warning("%s is no longer needed but could not be removed: %s", folder, error)


def _remove(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    else:
        entry.unlink()


def _inspect(folder: Path) -> _Manifest:
    """The manifest of a checkpoint that has all of its files, in full length."""
    with files.opened(folder / _DONE, len(_seal(b""))) as stream:
        seal = stream.read()
    with files.opened(folder / _MANIFEST) as stream:
        content = stream.read()
        if _seal(content) != seal:
            raise files.Refused(f"{_MANIFEST} is not the one that {_DONE} was written for: one of them was changed")
        manifest = msgspec.json.decode(content, type=_Manifest)
        sizes = {_META: manifest.meta.size} | {files.file_name(n): e.size for n, e in manifest.arrays.items()}
        extra = sorted({file.name for file in folder.glob("*.npy")} - sizes.keys())
    for name, size in sizes.items():
        with files.opened(folder / name, size):
            pass
    if extra:
        raise files.Refused(f"{extra[0]} is not in {_MANIFEST}")
    return manifest


def _read_meta(folder: Path, entry: files.FileEntry) -> dict[str, object]:
    with files.opened(folder / _META, entry.size) as stream:
        content = stream.read()
        files.check(folder / _META, zlib.crc32(content), entry)
        meta = json.loads(content)
        if not isinstance(meta, dict):
            raise files.Refused(f"{_META} is not a mapping")
    return meta
