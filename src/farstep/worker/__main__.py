"""`python -m farstep.worker`: the worker process, started by every launcher.

It reads its bootstrap (address of the head, keys, ...) from a descriptor or a file of mode 0600, never from arguments
or environment variables. It limits the number of threads before it imports any library that starts threads.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

from farstep.rollout.nested_launch import mark_worker_process
from farstep.worker.connection.bootstrap import read_bootstrap
from farstep.worker.connection.death_pipe import die_with_starter


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m farstep.worker", description=__doc__)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--bootstrap-fd", type=int, help="descriptor to read the bootstrap from")
    where.add_argument("--bootstrap", type=Path, help="file of mode 0600 to read the bootstrap from")
    arguments = parser.parse_args()
    bootstrap = read_bootstrap(arguments.bootstrap_fd, arguments.bootstrap)
    while "requests_fd" in bootstrap:
        bootstrap = _fork_workers(bootstrap)  # returns in each worker, or in a further zygote
    _start(bootstrap)
    _run(bootstrap)


def _fork_workers(bootstrap: dict[str, Any]) -> dict[str, Any]:
    """Become a zygote. Return only in the processes that it forks, with their bootstraps."""
    import socket

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _start(bootstrap)
    from farstep.worker.zygote import Zygote

    zygote = Zygote(socket.socket(fileno=bootstrap["requests_fd"]))
    zygote.import_modules(bootstrap["modules"], bootstrap["import_s"])
    return zygote.serve()


def _start(bootstrap: dict[str, Any]) -> None:
    """Prepare this process before it imports any library."""
    mark_worker_process()
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)  # a process group of its own: the whole group is killed at the end
    if "death_fd" in bootstrap:
        die_with_starter(bootstrap["death_fd"])
    _limit_threads(int(bootstrap["threads"]))
    if "cores" in bootstrap:
        os.sched_setaffinity(0, bootstrap["cores"])  # threads that libraries start later inherit it
    sys.path[:] = list(dict.fromkeys(bootstrap.get("path", []) + sys.path))


def _limit_threads(threads: int) -> None:
    for name in ("OMP", "MKL", "OPENBLAS", "NUMEXPR", "VECLIB_MAXIMUM"):
        os.environ[f"{name}_NUM_THREADS"] = str(threads)


def _run(bootstrap: dict[str, Any]) -> None:
    import faulthandler
    import logging

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the head handles Ctrl-C
    if bootstrap.get("has_daemon"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # engines may signal all processes; the node daemon handles it
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True, chain=False)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")

    from farstep.worker.connection.connect import connect

    try:
        connect(bootstrap).serve()
    except EOFError:
        sys.exit("the head closed the connection")
    finally:
        _end_children()


def _end_children() -> None:
    """Kill processes that environments left behind; after this worker exits, only the head could do so."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                group = (entry / "stat").read_text().rpartition(")")[2].split()[2]
                if int(group) == os.getpgrp():
                    os.kill(int(entry.name), signal.SIGKILL)


if __name__ == "__main__":
    main()
