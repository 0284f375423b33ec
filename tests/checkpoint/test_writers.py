"""Writers that are killed, run out of space or meet each other leave the old or the new checkpoint."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from farstep.checkpoint import files
from farstep.checkpoint import folder as checkpoint
from farstep.checkpoint.folder import load, save
from farstep.errors import CheckpointError
from tests.checkpoint.checkpoint_folders import (
    FILES,
    content,
    files_are_closed,
    fork,
    in_child,
    names,
    two_checkpoints,
    value_of,
)

two = pytest.fixture(two_checkpoints)
closed = pytest.fixture(autouse=True)(files_are_closed)


@pytest.mark.slow
def test_a_writer_killed_at_any_line_leaves_the_old_or_the_new_one(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer counts the lines it runs, of farstep and of removing folders, and kills itself at one of them."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # what is killed is a process, not the machine
    traced = {checkpoint.__file__, files.__file__, shutil.__file__}
    root, seen, chosen = two.parent / "copy", set(), random.Random(0)

    def save_until(last: int) -> None:
        lines = itertools.count(1)

        def trace(frame: FrameType, event: str, argument: object) -> Any:
            if event == "line" and next(lines) == last:
                os.kill(os.getpid(), signal.SIGKILL)
            return trace if frame.f_code.co_filename in traced else None

        sys.settrace(trace)
        save(root, *content(3))
        sys.settrace(None)

    last, status = 1, -signal.SIGKILL
    while status == -signal.SIGKILL:
        shutil.copytree(two, root)
        status = in_child(partial(save_until, last))
        loaded = load(root)
        seen.add((value_of(loaded), any(name.startswith(".tmp-") for name in names(root))))
        assert loaded.refused == () and value_of(loaded) in (2, 3)
        save(root, *content(4))
        assert value_of(load(root)) == 4
        assert [name[0] for name in names(root)] == [".", "0", "0"]
        shutil.rmtree(root)
        last += chosen.randint(1, 9)
    assert status == 0
    assert seen == {(2, False), (2, True), (3, False), (3, True)}


WRITER = """
import sys, numpy as np
from farstep.checkpoint.folder import save
value = int(sys.argv[2])
while True:
    value += 1
    save(sys.argv[1], {"obs": np.full((1000, 1000), value, np.int32)}, {"value": value})
    print(value, flush=True)
"""


@pytest.mark.parametrize("seed", range(6))
def test_a_writer_killed_at_a_random_moment_leaves_the_old_or_the_new_one(tmp_path: Path, seed: int) -> None:
    chosen = random.Random(seed)
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), "0"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        saved = [int(process.stdout.readline()) for _ in range(chosen.randint(1, 3))][-1]
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(chosen.uniform(0.0, 0.03))
        process.kill()
        saved = max([saved, *map(int, process.stdout)])
    loaded = load(tmp_path)
    assert loaded.meta["value"] in (saved, saved + 1) and loaded.refused == ()
    assert np.unique(loaded.arrays["obs"]).tolist() == [loaded.meta["value"]]
    save(tmp_path, *content(1))
    assert len(names(tmp_path)) == 3 and value_of(load(tmp_path)) == 1


@pytest.mark.parametrize("file", FILES)
def test_a_full_disk_leaves_the_old_ones(two: Path, file: str) -> None:
    """With space for all but the last byte of a file."""
    limit = (two / "000002" / file).stat().st_size - 1

    def save_without_space() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        with pytest.raises(
            CheckpointError, match=r"could not be saved to .*File too large.*Earlier checkpoints are intact"
        ) as caught:
            save(two, *content(3))
        assert isinstance(caught.value.__cause__, OSError)

    assert in_child(save_without_space) == 0
    assert names(two) == [".lock", "000001", "000002"]
    assert value_of(load(two)) == 2


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO], ids=["full", "broken"])
def test_a_disk_that_fails_at_any_sync_leaves_the_old_ones(
    two: Path, error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for failing in itertools.count(1):
        calls = itertools.count(1)

        def fsync(descriptor: int) -> None:
            if next(calls) == failing:
                raise OSError(error, os.strerror(error))

        monkeypatch.setattr(os, "fsync", fsync)
        try:
            save(two, *content(3))
            break
        except CheckpointError as caught:
            assert os.strerror(error) in str(caught)
        assert not [name for name in names(two) if name.startswith(".tmp-")]
        assert {"000001", "000002"} <= set(names(two)) and value_of(load(two)) in (2, 3)
    assert failing == len(FILES) + 3  # each file, the folder, the folder it is in; then none fails


def test_error_of_the_first_save_mentions_no_earlier_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(CheckpointError, match=r"No space left on device\. Make sure that the disk has free space"):
        save(tmp_path, *content(1))


def test_ctrl_c_leaves_the_old_checkpoints(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(folder: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(files, "sync_folder", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(two, *content(3))
    assert names(two) == [".lock", "000001", "000002"]


def test_a_path_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"could not be saved to .*file"):
        save(tmp_path / "file", {}, {})


def test_a_locked_folder_is_waited_for_and_then_named(two: Path) -> None:
    with (two / ".lock").open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match=r"ring is still locked by another save after 0\.05 s.*fuser"):
            save(two, *content(3), lock_timeout_s=0.05)
        assert value_of(load(two)) == 2  # reading needs no lock
    assert value_of(load(save(two, *content(3), lock_timeout_s=0).parent)) == 3


def test_the_lock_of_a_killed_process_is_free(two: Path) -> None:
    code = """
import sys, signal
from pathlib import Path
from farstep.checkpoint import folder as checkpoint
with checkpoint.locked(Path(sys.argv[1]), 0):
    print("locked", flush=True)
    signal.pause()
"""
    with subprocess.Popen([sys.executable, "-c", code, str(two)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"locked\n"
        with pytest.raises(CheckpointError, match="locked"):
            save(two, *content(3), lock_timeout_s=0)
        process.kill()
        process.wait()
    assert save(two, *content(3), lock_timeout_s=0).name == "000003"


@pytest.mark.parametrize("keep", [1, 2])
def test_many_can_save_and_load_at_once(tmp_path: Path, keep: int, caplog: pytest.LogCaptureFixture) -> None:
    def save_many(writer: int) -> None:
        for i in range(10):
            save(tmp_path, *content(100 * writer + i), keep=keep)

    save(tmp_path, *content(0))
    pids = [fork(partial(save_many, writer)) for writer in range(1, 5)]
    while pids:
        value_of(load(tmp_path))
        done, status = os.waitpid(pids[0], os.WNOHANG)
        if done:
            pids.pop(0)
            assert status == 0
    loaded = load(tmp_path)
    assert loaded.folder.name == "000041" and value_of(loaded) % 100 == 9
    assert not caplog.records and len(names(tmp_path)) == keep + 1
