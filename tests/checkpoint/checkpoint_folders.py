"""Folders of checkpoints whose content can be told apart, for the tests of checkpoints."""

from __future__ import annotations

import contextlib
import gc
import os
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from farstep.checkpoint import folder as checkpoint
from farstep.checkpoint.folder import save

FILES = ["obs.npy", "reward.npy", "meta.json", "manifest.json", "DONE"]


def content(value: int) -> tuple[dict[str, np.ndarray], dict[str, object]]:
    """Arrays and meta that all contain `value`."""
    return {"obs": np.full((3, 4), value, np.float32), "reward": np.full(5, value, np.int16)}, {"value": value}


def value_of(loaded: checkpoint.Loaded) -> int:
    """The value that all of the content has."""
    arrays, meta = content(int(loaded.meta["value"]))  # type: ignore[call-overload]
    assert meta == loaded.meta and arrays.keys() == loaded.arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(loaded.arrays[name], array)
    return int(arrays["reward"][0])


def fork(work: Callable[[], object]) -> int:
    """Run the function in a forked process."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return pid


def in_child(work: Callable[[], object]) -> int:
    """Exit status of a forked process that does the work; negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(fork(work), 0)[1])


def names(root: Path) -> list[str]:
    return sorted(entry.name for entry in root.iterdir())


def files_are_closed(tmp_path: Path) -> Iterator[None]:
    """A fixture: no file of the test's is open after it."""
    yield
    gc.collect()  # on Python 3.13, tracebacks of refused checkpoints keep their arrays, which map files, until then
    targets = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            targets.append(str(entry.readlink()))
    assert not [target for target in targets if target.startswith(str(tmp_path))]


def two_checkpoints(tmp_path: Path) -> Path:
    """A fixture: a folder with two checkpoints, of the values 1 and 2."""
    for value in (1, 2):
        save(tmp_path / "ring", *content(value))
    return tmp_path / "ring"
