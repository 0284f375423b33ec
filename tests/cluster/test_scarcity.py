"""Runs without free descriptors, processes, memory or disk space retry where that helps, or raise a typed error."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import farstep
from farstep.errors import ResourceError, RunError
from farstep.observe.curves import Run
from farstep.observe.loggers import JsonlLogger, TensorBoardLogger
from farstep.observe.run_folder import RunFolder
from farstep.testing import CountingEnv, TableAgent
from farstep.wire.channels.memory import SharedMemory
from tests.cluster import scarce
from tests.cluster.checks import cluster, within

ADVICE = "raise the limit (ulimit -n) or use fewer workers."


def outcomes(*arguments: str) -> dict[int, str]:
    """Of `scarce.py`, by how many descriptors were left."""
    done = subprocess.run(
        [sys.executable, "-m", scarce.__name__, *arguments],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr[-3000:]  # ZeroMQ would have aborted it
    return {int(count): said for count, said in json.loads(done.stdout).items()}


@pytest.mark.timeout(160)
@pytest.mark.parametrize(
    ("config", "counts"), [("in_process", range(8)), ("local", range(15)), ("tcp", range(4, 20))], ids=str
)
def test_a_launch_without_descriptors_works_or_says_what_to_do(config: str, counts: range) -> None:
    """Every descriptor that the head opens for a launch and a rollout is refused once."""
    found = outcomes("launch", config, *map(str, counts), "60")
    assert found.pop(60) == "ok"
    for count, said in found.items():
        assert said.startswith(("ResourceError: ", "WorkerError: ")), (count, said)
        assert ADVICE in said, (count, said)
        assert "LEFT" not in said, (count, said)


@pytest.mark.timeout(160)
@pytest.mark.parametrize(("config", "left"), [("local", 0), ("tcp", 1)])
def test_a_worker_is_replaced_once_there_are_descriptors_again(config: str, left: int) -> None:
    """The restart budget is 1: attempts for which descriptors were missing take nothing of it."""
    assert outcomes("replace", config, str(left)) == {left: "ok, retried=True, restarts=1"}


def test_a_launch_without_processes_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(ResourceError, match=r"worker 0 could not be started(.|\n)*ulimit -u"):
        cluster(start_method="cold").launch()


def test_a_launch_without_threads_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr("threading.Thread.start", refuse)
        env = cluster()
        with pytest.raises(ResourceError, match=r"the head's thread could not be started(.|\n)*ulimit -u"):
            env.launch()


@contextmanager
def file_limit(nbytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_shared_memory_beyond_a_limit_is_a_typed_error() -> None:
    with file_limit(1 << 16):
        SharedMemory.create(1 << 16).close()
        with pytest.raises(ResourceError, match=r"131072 bytes of shared memory(.|\n)*65536 bytes(.|\n)*ulimit -f"):
            SharedMemory.create(1 << 17)


def test_rollouts_beyond_a_limit_are_a_typed_error_and_the_cluster_stays_usable() -> None:
    with cluster(CountingEnv, config=farstep.InProcessConfig()) as env:
        agent = TableAgent()
        env.collect(agent, steps=4)
        with file_limit(1 << 16), pytest.raises(ResourceError, match="farstep-rollouts"):
            env.collect(agent, steps=5000)
        assert env.collect(agent, steps=5000).shape == (5000, 2)


# ---- run folders ----


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.getuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "farstep-test", disk]).returncode:
        pytest.skip("only root can mount a file system")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_full_disk_is_a_typed_error_and_the_run_can_be_read_and_resumed(small_disk: Path, caplog: Any) -> None:
    run = RunFolder.create(small_disk, "first", {"seed": 1})
    filler = small_disk / "filler"
    board = TensorBoardLogger(run.tensorboard)
    metrics = JsonlLogger(run.metrics_file)
    metrics.log(1, {"a": 1.0})
    with filler.open("wb", buffering=0) as stream, pytest.raises(OSError, match="No space left"):
        while True:
            stream.write(bytes(4096))
    for step in range(2, 1000):
        metrics.log(step, {"name" * 20: 1.0})
    with pytest.raises(RunError, match="free disk space"):
        metrics.close()
    with pytest.raises(RunError, match=r"events.out.tfevents.* cannot be written: .*Free disk space"):
        for step in range(1000):
            board.log(step, {"name" * 20: 1.0})
    with pytest.raises(RunError, match=r"config.json cannot be written: .*Free disk space"):
        run.write_config({"seed": 2, "text": "x" * 8192})
    with pytest.raises(RunError, match=r"no run can be written under .*Free disk space"):
        RunFolder.create(small_disk, "second", {"text": "x" * 8192})
    assert not (small_disk / "second").exists()
    with pytest.raises(RunError, match=r"\.lock cannot be written: .*Free disk space"), run.lock():
        pass
    assert run.read_config() == {"seed": 1}
    filler.unlink()
    board.close()
    assert Run.read(run.path).rows[0] == {"step": 1, "a": 1.0}
    JsonlLogger(run.metrics_file, resume_step=1).close()
    assert Run.read(run.path).rows == [{"step": 1, "a": 1.0}]


def test_a_read_only_run_folder_is_a_typed_error(small_disk: Path) -> None:
    run = RunFolder.create(small_disk, "first", {"seed": 1})
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    calls = {
        "lock": lambda: run.lock().__enter__(),
        "write_config": lambda: run.write_config({"seed": 2}),
        "metrics": lambda: JsonlLogger(run.metrics_file),
        "tensorboard": lambda: TensorBoardLogger(run.tensorboard),
        "another": lambda: RunFolder.create(small_disk, "second", {}),
    }
    for name, call in calls.items():
        with pytest.raises(RunError, match="Read-only file system"):
            within(call)
            raise AssertionError(name)


DAMAGED = b"\n".join(
    [
        b'{"step": 1, "a": 1.0}',
        b"\x00\xff\xfe binary \x80",
        b"[" * 100_000,
        b'{"step": 2, "a": "text"}',
        b'{"step": 3, "a": [1, 2]}',
        b'{"step": 1' + b"0" * 4000 + b"}",
        b'{"step": 4, "a": 4.0}',
        b'{"step": 5, "a',
    ]
)


def test_damaged_metrics_are_left_out_by_number(tmp_path: Path, caplog: Any) -> None:
    run = RunFolder.create(tmp_path, "first", {"seed": 1})
    run.metrics_file.write_bytes(DAMAGED)
    good = [{"step": 1, "a": 1.0}, {"step": 4, "a": 4.0}]
    assert Run.read(run.path).rows == good
    assert Run.read(run.path).curve("a")[1].tolist() == [1.0, 4.0]
    said = f"{run.metrics_file}: skipped line 2, 3, 4, 5, 6 and 1 more: truncated, or not written by farstep"
    assert said in [record.getMessage() for record in caplog.records]
    caplog.clear()
    logger = JsonlLogger(run.metrics_file, resume_step=4)
    assert said in [record.getMessage() for record in caplog.records]
    logger.log(6, {"a": 6.0})
    logger.close()
    caplog.clear()
    assert Run.read(run.path).rows == [*good, {"step": 6, "a": 6.0}]
    assert not caplog.records
