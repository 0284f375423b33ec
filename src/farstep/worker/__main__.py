"""`python -m farstep.worker`: what every launcher starts.

Where to connect and with which keys comes through a descriptor or a file of mode 0600, never through arguments or
the environment. Threads are set before anything that starts some is imported.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import select
import signal
import sys
from pathlib import Path
from typing import Any

from farstep.rollout.nested_launch import mark_worker_process
from farstep.worker.bootstrap import read_bootstrap

_F_SETSIG = 10


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m farstep.worker", description=__doc__)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--bootstrap-fd", type=int, help="descriptor to read the bootstrap from")
    where.add_argument("--bootstrap", type=Path, help="file of mode 0600 to read the bootstrap from")
    arguments = parser.parse_args()
    mark_worker_process()
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)  # our group is what we kill at the end: nobody else may be in it
    bootstrap = read_bootstrap(arguments.bootstrap_fd, arguments.bootstrap)
    if "death_fd" in bootstrap:
        _die_with_the_head(bootstrap["death_fd"])
    _limit_threads(int(bootstrap["threads"]))
    sys.path[:] = list(dict.fromkeys(bootstrap.get("path", []) + sys.path))
    _run(bootstrap)


def _die_with_the_head(fd: int) -> None:
    """Have the kernel kill this process group when the head's end of the pipe closes.

    A thread that waits for it could be held up by an environment that keeps the interpreter; a signal cannot.
    """
    fcntl.fcntl(fd, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(fd, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    gone = select.poll()
    gone.register(fd, 0)
    if gone.poll(0):  # it died before we asked
        os._exit(1)


def _limit_threads(threads: int) -> None:
    for name in ("OMP", "MKL", "OPENBLAS", "NUMEXPR", "VECLIB_MAXIMUM"):
        os.environ[f"{name}_NUM_THREADS"] = str(threads)


def _run(bootstrap: dict[str, Any]) -> None:
    import faulthandler
    import logging

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the head's to handle
    if bootstrap.get("has_daemon"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # an engine may tell all of a node's processes; its agent acts
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True, chain=False)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")

    from farstep.worker.connect import connect

    try:
        connect(bootstrap).serve()
    except EOFError:
        sys.exit("the head is gone")
    finally:
        _end_children()


def _end_children() -> None:
    """End what environments started and left: once we are gone, a head that dies too could not do it any more."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                group = (entry / "stat").read_text().rpartition(")")[2].split()[2]
                if int(group) == os.getpgrp():
                    os.kill(int(entry.name), signal.SIGKILL)


if __name__ == "__main__":
    main()
