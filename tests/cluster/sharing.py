"""A coordinator and runs that share its slots."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import farstep
from farstep.elastic.coordinator.server import CoordinatorServer, WorkloadStatus, read_status
from farstep.testing import CountingEnv

PATIENCE_S = 60.0
LEASE_S = 2.0
SOURCE = {"type": "factory", "env_name": CountingEnv, "envs_per_node": 4, "seed": 1}


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextlib.contextmanager
def serving(
    folder: Path, slots: int, devices: int = 0, turn_s: float = 30.0, lease_s: float = LEASE_S
) -> Iterator[str]:
    """A coordinator in a thread of this process."""
    server = CoordinatorServer(folder, slots, devices, lease_s, turn_s)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield str(folder)
    finally:
        server.stop()
        thread.join()


@contextlib.contextmanager
def started(*command: object) -> Iterator[subprocess.Popen[str]]:
    """A process of Python that is killed at the end."""
    arguments = [sys.executable, "-m", *map(str, command)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def started_coordinator(folder: Path, *options: object) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    return started("farstep", "coordinator", "start", "--name", folder, "--lease-s", LEASE_S, *options)


def shared(name: str, workers: int = 2, **options: object) -> farstep.ClusterEnv:
    return farstep.ClusterEnv(
        SOURCE,
        farstep.LocalConfig(workers_per_node=workers, coordinator=name, **options),  # type: ignore[arg-type]
    )


def runs(name: str) -> list[WorkloadStatus]:
    return read_status(name)[1]


def held(name: str) -> list[int]:
    return [len(run.workload.held) for run in runs(name)]


def times(file: Path) -> list[float]:
    """The ends of a run's rollouts."""
    text = file.read_text() if file.exists() else ""
    return [float(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def turns_of(outs: list[Path]) -> str:
    """Return the runs in the order in which their rollouts ended, such as 0101."""
    return "".join(str(index) for _, index in sorted((end, i) for i, out in enumerate(outs) for end in times(out)))
