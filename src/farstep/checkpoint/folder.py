"""A folder of numbered checkpoints of a training run or a replay buffer. Damaged checkpoints are never loaded.

    path/000012/obs.npy ...      the arrays; np.load can also read them
                meta.json        plain data
                manifest.json    dtype, shape, bytes and checksum of each array; bytes and checksum of meta.json
                DONE             the checksum of manifest.json, written last
    path/.tmp-000013/            being written or removed, or left behind by a process that was killed
    path/.lock                   locked while a checkpoint is written

DONE has the checksum of the manifest, and the manifest has the checksums of all other files.
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
from collections.abc import Callable, Iterable, Iterator, Mapping
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
Warn = Callable[[str], object]
T = TypeVar("T")

_META, _MANIFEST, _DONE, _LOCK, _TEMPORARY = "meta.json", "manifest.json", "DONE", ".lock", ".tmp-"
_POLL_S = 0.02


class _Manifest(msgspec.Struct, frozen=True):
    format: Literal[1]
    arrays: dict[str, files.ArrayEntry]
    meta: files.FileEntry


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """The content of a checkpoint."""

    arrays: dict[str, Array]
    """The arrays in the order in which they were saved, each in C order."""
    meta: dict[str, object]
    """The plain data. Tuples have become lists, and NumPy numbers Python numbers."""
    folder: Path
    """The folder of the checkpoint."""
    refused: tuple[str, ...] = ()
    """One sentence with the reason for each newer checkpoint that cannot be used."""


def save(
    path: str | os.PathLike[str],
    arrays: Mapping[str, Array],
    meta: Mapping[str, object],
    *,
    keep: int = 2,
    lock_timeout_s: float = 60.0,
    warn: Warn = log.warning,
) -> Path:
    """Write the next numbered checkpoint atomically.

    Earlier checkpoints are removed only after the new one is completely on disk.

    Args:
        path: Folder of the checkpoints; created if necessary.
        arrays: Arrays by name, with dtypes that .npy files support without pickle.
        meta: Plain data that JSON can represent.
        keep: Number of newest intact checkpoints to keep, at least 1; default: 2.
        lock_timeout_s: Seconds to wait while another process saves to the same path; default: 60.
        warn: Receives a warning about an older checkpoint that cannot be removed; default: the logger.

    Returns:
        The folder of the new checkpoint.

    Raises:
        CheckpointError: The checkpoint could not be written; earlier checkpoints are intact.
        ConfigError: An argument cannot be saved.
    """
    plan = {name: np.asarray(array) for name, array in arrays.items()}
    for name, array in plan.items():
        files.check_array(name, array)
    text = _as_json(meta)
    return _save(Path(path), plan.items(), lambda: text, keep, lock_timeout_s, warn)


def save_parts(
    path: str | os.PathLike[str],
    arrays: Iterable[tuple[str, Array | files.ArrayParts]],
    meta: Callable[[], Mapping[str, object]],
    *,
    keep: int = 2,
    lock_timeout_s: float = 60.0,
    warn: Warn = log.warning,
) -> Path:
    """Like `save`, for arrays that are made while the checkpoint is written.

    Args:
        path: Folder of the checkpoints; created if necessary.
        arrays: Names and arrays; each is written before the next one is requested.
        meta: Returns the plain data; called after the last array was written.
        keep: As for `save`.
        lock_timeout_s: As for `save`.
        warn: As for `save`.

    Returns:
        The folder of the new checkpoint.

    Raises:
        CheckpointError: As for `save`.
        ConfigError: As for `save`.
    """
    return _save(Path(path), arrays, lambda: _as_json(meta()), keep, lock_timeout_s, warn)


def _as_json(meta: Mapping[str, object]) -> bytes:
    return json.dumps(_plain(meta, "meta")).encode()


def _save(
    root: Path,
    arrays: Iterable[tuple[str, Array | files.ArrayParts]],
    meta: Callable[[], bytes],
    keep: int,
    lock_timeout_s: float,
    warn: Warn,
) -> Path:
    check_count("keep", keep)
    before: list[Path] = []
    try:
        root.mkdir(parents=True, exist_ok=True)
        before = numbered(root)
        with locked(root, lock_timeout_s):
            for leftover in root.glob(f"{_TEMPORARY}*"):
                _remove(leftover)
            folder = _write(root, arrays, meta)
            _prune(root, keep, warn)
    except CheckpointError:
        raise
    except OSError as error:
        kept = "Earlier checkpoints are intact; make" if before else "Make"
        raise CheckpointError(
            f"the checkpoint could not be saved to {root}: {error}. {kept} sure that the disk has free space and that "
            "the folder is writable, then save again."
        ) from error
    return folder


def load(path: str | os.PathLike[str], *, mmap: bool = False) -> Loaded:
    """Read the newest intact checkpoint.

    Args:
        path: The folder that was saved to.
        mmap: Whether arrays are read-only views of the files instead of copies in memory. Checksums are verified in
            both cases. Default: False.

    Returns:
        The content of the checkpoint.

    Raises:
        CheckpointError: No checkpoint can be used; the message has the reason for each.
    """
    return load_with(path, lambda loaded: loaded, mmap=mmap)


def load_with(
    path: str | os.PathLike[str], use: Callable[[Loaded], T], *, mmap: bool = False, warn: Warn = log.warning
) -> T:
    """Call `use` with the newest intact checkpoint of the folder `path`, and return its result.

    Args:
        path: The folder that was saved to.
        use: Restores the content. If this is not possible, it must raise `files.Refused` before changing anything; it
            is then called with the next older checkpoint.
        mmap: As in `load`.
        warn: Receives a warning about each newer checkpoint that cannot be used; default: the logger.

    Returns:
        The result of `use`.

    Raises:
        CheckpointError: No checkpoint can be used; the message has the reason for each.
    """
    root = Path(path)
    refused: list[str] = []
    for folder in numbered(root):
        try:
            found = use(_read(folder, mmap, tuple(refused)))
        except files.Refused as reason:
            if not folder.exists():  # a concurrent save removed it, so newer checkpoints exist
                return load_with(path, use, mmap=mmap, warn=warn)
            refused.append(f"{folder} is not used: {reason}")
        else:
            for sentence in refused:
                warn(sentence)
            return found
    if refused:
        advice = (
            "If they were saved with other options or another version of farstep, use the same options and version. "
            "Otherwise the files are damaged: restore the folder from a backup, or start without a checkpoint."
        )
        reasons = [f"{sentence.removesuffix('.')}." for sentence in refused]
        raise CheckpointError("\n  ".join([f"no checkpoint in {root} can be used:", *reasons, advice]))
    if (root / _MANIFEST).exists():
        raise CheckpointError(f"{root} is a single checkpoint; load from its parent folder, {root.parent}.")
    what = "holds no checkpoint" if root.is_dir() else "is not a folder" if root.exists() else "does not exist"
    raise CheckpointError(f"{root} {what}; expected a folder of checkpoints, with e.g. {root / '000001'} in it.")


def load_number(path: str | os.PathLike[str], number: int, use: Callable[[Loaded], T]) -> T:
    """Like `load_with`, but use only the checkpoint with this number.

    Args:
        path: The folder that was saved to.
        number: Number of the checkpoint, e.g. 12 for the folder `000012`.
        use: Restores the content, or raises `files.Refused`.

    Returns:
        The result of `use`.

    Raises:
        CheckpointError: The checkpoint does not exist or cannot be used.
    """
    known = {int(folder.name): folder for folder in numbered(path)}
    if number not in known:
        there = f"it has {', '.join(map(str, sorted(known)))}" if known else "it has none"
        raise CheckpointError(f"{Path(path)} has no checkpoint {number}; {there}. Older checkpoints are removed.")
    try:
        return use(_read(known[number], mmap=False))
    except files.Refused as reason:
        raise CheckpointError(
            f"{known[number]} cannot be used: {reason}. Choose another checkpoint: "
            f"{', '.join(map(str, sorted(known)))}."
        ) from None


def numbered(path: str | os.PathLike[str]) -> list[Path]:
    """Return the folders of all checkpoints in `path`, including damaged ones, newest first; empty without `path`."""
    entries = Path(path).iterdir() if Path(path).is_dir() else ()
    folders = [entry for entry in entries if re.fullmatch(r"[0-9]{6,}", entry.name)]
    return sorted(folders, key=lambda folder: int(folder.name), reverse=True)


def _plain(value: object, where: str) -> object:
    """Convert `value` to what JSON reads back. Raise `ConfigError` if JSON cannot represent it."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain(entry, f"{where}[{key!r}]") for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry, f"{where}[{i}]") for i, entry in enumerate(value)]
    raise ConfigError(
        f"{where} is {value!r:.100}, which JSON cannot represent; expected strings, numbers, None, or lists and "
        "mappings (with strings as keys) of these. Pass arrays in `arrays`."
    )


@contextlib.contextmanager
def locked(root: Path, timeout_s: float) -> Iterator[None]:
    """Context manager: hold an exclusive lock on the folder. The kernel releases it when the process ends."""
    deadline = time.monotonic() + timeout_s
    with open(root / _LOCK, "ab", opener=files.no_follow) as stream:
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise CheckpointError(
                        f"{root} is still locked by another save after {timeout_s} s, so nothing was saved; use a "
                        f"separate folder for each run, or raise lock_timeout_s. `fuser {root / _LOCK}` shows the "
                        "process that holds the lock."
                    ) from None
            time.sleep(_POLL_S)
        try:
            yield
        finally:
            fcntl.flock(stream, fcntl.LOCK_UN)  # closing does not suffice if a fork inherited the descriptor


def _write(root: Path, arrays: Iterable[tuple[str, Array | files.ArrayParts]], meta: Callable[[], bytes]) -> Path:
    number = f"{max((int(folder.name) for folder in numbered(root)), default=0) + 1:06d}"
    temporary = root / f"{_TEMPORARY}{number}"
    temporary.mkdir()
    try:
        entries = {name: files.write_array(temporary, name, array) for name, array in arrays}
        manifest = _Manifest(1, entries, files.write_file(temporary / _META, [meta()]))
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


def _prune(root: Path, keep: int, warn: Warn) -> None:
    """Remove all checkpoints that are older than the `keep` newest complete checkpoints."""
    complete = 0
    for folder in numbered(root):
        try:
            if complete >= keep:  # rename first, so that a concurrent load never sees a part of it
                _remove(folder.rename(root / f"{_TEMPORARY}{folder.name}"))
            else:
                _inspect(folder)
                complete += 1
        except files.Refused:
            pass
        except OSError as error:
            warn(f"{folder} is no longer needed but could not be removed: {error}")


def _remove(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    else:
        entry.unlink()


def _inspect(folder: Path) -> _Manifest:
    """Return the manifest of a checkpoint. Raise `Refused` if a file is missing or has the wrong size."""
    with files.opened(folder / _DONE, len(_seal(b""))) as stream:
        seal = stream.read()
    with files.opened(folder / _MANIFEST) as stream:
        content = stream.read()
        if _seal(content) != seal:
            raise files.Refused(f"{_MANIFEST} does not match its checksum in {_DONE}: one of them was changed")
        manifest = msgspec.json.decode(content, type=_Manifest)
        sizes = {_META: manifest.meta.size} | {files.file_name(n): e.size for n, e in manifest.arrays.items()}
        extra = sorted({file.name for file in folder.glob("*.npy")} - sizes.keys())
    for name, size in sizes.items():
        with files.opened(folder / name, size):
            pass
    if extra:
        raise files.Refused(f"{extra[0]} is not in {_MANIFEST}")
    return manifest


def _read(folder: Path, mmap: bool, refused: tuple[str, ...] = ()) -> Loaded:
    """Read a checkpoint. Raise `Refused` if it is damaged."""
    manifest = _inspect(folder)
    arrays = {name: files.read_array(folder, name, entry, mmap) for name, entry in manifest.arrays.items()}
    return Loaded(arrays=arrays, meta=_read_meta(folder, manifest.meta), folder=folder, refused=refused)


def _read_meta(folder: Path, entry: files.FileEntry) -> dict[str, object]:
    with files.opened(folder / _META, entry.size) as stream:
        content = stream.read()
        files.check(folder / _META, zlib.crc32(content), entry)
        meta = json.loads(content)
        if not isinstance(meta, dict):
            raise files.Refused(f"{_META} is not a mapping")
    return meta
