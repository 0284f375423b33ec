"""Processes that a benchmark starts end with it, also when it is terminated.

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
"""Seconds that a terminated benchmark has to close what it opened before its processes are killed."""
RESOURCE_TRACKER = b"multiprocessing.resource_tracker"


def run_script(main: Callable[[], int | None]) -> NoReturn:
    """Run `main` and exit with what it returns; no descendant of this process outlives it.

    SIGTERM and SIGINT terminate the children and unwind `main` (SystemExit, KeyboardInterrupt), so that its `with` and
    `finally` blocks run. What is still alive afterwards is killed, as it is after CLEAN_UP_S or a second signal.
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
    """Make this process the parent of what its children leave behind, to count and to end it."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_children() -> None:
    """Kill and reap until there are none; the children of those that die become children of this process."""
    while pids := child_pids():
        _send(pids, signal.SIGKILL)
        for pid in pids:
            try:
                os.waitpid(pid, 0)
            except ChildProcessError:  # another thread was faster
                pass


def child_pids() -> list[int]:
    """The children of this process, adopted ones and zombies included.

    Not the resource tracker of `multiprocessing`, which ends by itself after this process, when it has removed what
    killed processes left in shared memory.
    """
    found = []
    for children in Path("/proc/self/task").glob("*/children"):
        try:
            found += [int(pid) for pid in children.read_text().split()]
        except OSError:  # the thread ended meanwhile, and another one has its children now
            continue
    return [pid for pid in found if not _is_resource_tracker(pid)]


def _is_resource_tracker(pid: int) -> bool:
    try:
        return RESOURCE_TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # reaped meanwhile
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
    """Without reaping them: what waits for a child in this process is woken by its end."""
    signal.alarm(1)  # again, for those that they started
    _send(child_pids(), signal.SIGKILL)


def _send(pids: list[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass
