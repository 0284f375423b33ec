"""A pytest plugin that fails tests that leak resources: `pytest -p farstep.testing.leaks`.

It compares processes, threads, file descriptors, shared memory and temporary files before and after each test, and
waits up to 10 seconds for resources that are being released.
"""

from __future__ import annotations

import gc
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

_PATIENCE_S = 10.0
_OURS = ("/memfd:farstep", "socket:", "pipe:", "anon_inode:[eventpoll]", "anon_inode:[pidfd]", "anon_inode:[eventfd]")


_strangers: set[int] = set()
"""Processes of the last scan that are no descendants: they cannot become descendants, so they are not read again."""


def _processes() -> set[str]:
    """Return the descendants of this process, except zombies."""
    parents: dict[int, int] = {}
    names: dict[int, str] = {}
    pids = {int(name) for name in os.listdir("/proc") if name.isdigit()}  # noqa: PTH208 (pathlib takes three times)
    for pid in pids - _strangers:
        try:
            head, _, tail = _start_of_file(f"/proc/{pid}/stat").rpartition(")")
        except OSError:
            continue
        state, parent = tail.split(maxsplit=2)[:2]
        if state != "Z":
            parents[pid] = int(parent)
            names[pid] = head.partition("(")[2]
    found: set[int] = set()
    mine = {os.getpid()}
    while mine:
        mine = {pid for pid, parent in parents.items() if parent in mine} - found
        found |= mine
    _strangers.intersection_update(pids)
    _strangers.update(parents.keys() - found - {os.getpid()})
    return {f"process {pid} ({names[pid]})" for pid in found}


def _start_of_file(path: str) -> str:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, 512).decode(errors="replace")
    finally:
        os.close(descriptor)


def _descriptors() -> set[str]:
    found = set()
    for name in _names_in("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115 (pathlib takes four times the CPU time)
        except OSError:
            continue
        if target.startswith(_OURS):
            found.add(f"descriptor {name} -> {target}")
    return found


def _of_others(thing: str) -> bool:
    """Return whether `thing` is shared memory of another process that is not a descendant of this process."""
    if not thing.startswith("shared memory "):
        return False
    try:
        inode = (Path("/dev/shm") / thing.removeprefix("shared memory ")).stat().st_ino
    except OSError:
        return True  # already removed
    ours = {os.getpid(), *(int(name.split()[1]) for name in _processes())}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) not in ours:
            try:
                mapped = (entry / "maps").read_text()
            except OSError:
                continue
            # Compare inodes, because a semaphore is created under a temporary name.
            if any("/dev/shm/" in line and line.split()[4] == str(inode) for line in mapped.splitlines()):
                return True
    return False


def _names_in(folder: str) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208
    except FileNotFoundError:
        return []


def snapshot() -> set[str]:
    """Return what exists now of all that a test may leave behind, as text."""
    threads = {f"thread {thread.name} ({thread.ident})" for thread in threading.enumerate()}
    shared = {f"shared memory {name}" for name in _names_in("/dev/shm")}
    folder = tempfile.gettempdir()
    temporary = {f"file {folder}/{name}" for name in _names_in(folder) if name.startswith("farstep")}
    return threads | _processes() | _descriptors() | shared | temporary


@pytest.fixture(autouse=True)
def leak_check(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test if it leaks resources."""
    gc.freeze()  # exclude existing objects from collections: with torch loaded, a collection takes most of a second
    before = snapshot()
    yield
    gc.collect()
    if not snapshot() - before:
        return
    gc.unfreeze()
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        gc.collect()
        left = {thing for thing in snapshot() - before if not _of_others(thing)}
        if not left:
            return
        if time.monotonic() > deadline:
            pytest.fail(f"left behind: {', '.join(sorted(left))}")
        time.sleep(0.05)
