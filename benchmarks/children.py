"""Ends the processes that a benchmark starts with the benchmark, also when it is terminated.

Every script that starts processes ends with

    if __name__ == "__main__":
        run_script(main)
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

PR_SET_CHILD_SUBREAPER = 36
CLEAN_UP_S = 20
"""Seconds that a terminated benchmark has for its own clean-up before its processes are killed."""
RESOURCE_TRACKER = b"multiprocessing.resource_tracker"


def run_script(main: Callable[[], int | None]) -> NoReturn:
    """Run `main` and exit with its result; no descendant outlives this process.

    SIGTERM and SIGINT terminate the children and unwind `main` (SystemExit, KeyboardInterrupt), so that its `with` and
    `finally` blocks run. Processes that are alive afterwards, after CLEAN_UP_S or on a second signal are killed.
    """
    adopt_orphans()
    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:  # a shell's `&` ignores SIGINT
            signal.signal(number, _terminate)
    try:
        sys.exit(main())
    finally:
        kill_children()


def adopt_orphans() -> None:
    """Adopt orphaned descendants, so that they can be counted and killed."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_children() -> None:
    """Kill and reap children until none are left; orphaned grandchildren become children of this process."""
    while pids := child_pids():
        _send(pids, signal.SIGKILL)
        for pid in pids:
            try:
                os.waitpid(pid, 0)
            except ChildProcessError:  # another thread reaped it first
                pass


def child_pids() -> list[int]:
    """The children of this process, adopted ones and zombies included.

    Excluded is the resource tracker of `multiprocessing`, which ends after this process, when it has removed what
    killed processes left in shared memory.
    """
    found = []
    for children in Path("/proc/self/task").glob("*/children"):
        try:
            found += [int(pid) for pid in children.read_text().split()]
        except OSError:  # the thread has ended, and another one has its children now
            continue
    return [pid for pid in found if not _is_resource_tracker(pid)]


def _is_resource_tracker(pid: int) -> bool:
    try:
        return RESOURCE_TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # already reaped
        return False


def _terminate(number: int, _: object) -> None:
    signal.signal(signal.SIGTERM, _kill)
    signal.signal(signal.SIGINT, _kill)
    signal.signal(signal.SIGALRM, _kill)
    signal.alarm(CLEAN_UP_S)
    _send(child_pids(), signal.SIGTERM)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


def _kill(*_: object) -> None:
    """Terminate the children without reaping them, so that threads that wait for a child are woken."""
    signal.alarm(1)  # again, for processes that they started
    _send(child_pids(), signal.SIGKILL)


def _send(pids: list[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass
