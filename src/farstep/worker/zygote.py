"""The zygote: a process that has imported what workers need, and forks a worker on request.

The launcher's side is `launch/daemon/zygote.py`. It sends one request per worker, which consists of descriptors: the
job (a file in memory with bootstrap, environment variables and folder), the worker's output, a socket for reports, and
what the worker inherits. The zygote reports the process id and later the exit status of the worker.

A job may name further modules, such as that of an agent that the run has adopted since. The zygote imports them before
it forks.

A fork of a process that has threads can deadlock. If an import starts a thread, the zygote therefore refuses to fork,
and the launcher starts workers without it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

READY, FORKED, ENDED, NOT_FORKED, REFUSED = b"R", b"F", b"E", b"N", b"X"
"""First byte of a report: imports are complete; process id of a worker; its exit status; a worker could not be forked;
why no worker can be forked."""
FAILED = "an import failed"
"""Why a zygote does not fork if the worker itself will report the cause."""
MAX_FDS = 16
_OUTPUT_BYTES = 16384
"""Last bytes of the imports' output that are kept; a new pipe has room for them."""
_BASE = ("farstep.worker.loop", "farstep.worker.connection.connect", "farstep.wire.channels.dealer")
_BLAS = ("openblas_set_num_threads", "openblas_set_num_threads64_", "scipy_openblas_set_num_threads64_")


@dataclass(frozen=True)
class _Request:
    """Descriptors of a worker that the launcher asks for."""

    job: int
    output: int
    reports: socket.socket
    inherited: Sequence[int]

    @classmethod
    def receive(cls, requests: socket.socket) -> _Request | None:
        """Receive a request; None if the launcher has closed the socket."""
        data, fds, flags, _ = socket.recv_fds(requests, 1, MAX_FDS)
        if not data:
            return None
        if flags & socket.MSG_CTRUNC:  # this process cannot open more files
            for fd in fds:
                os.close(fd)
            raise OSError(errno.EMFILE, "not all descriptors of a request were received")
        job, output, reports, *inherited = fds
        return cls(job, output, socket.socket(fileno=reports), inherited)

    def close(self) -> None:
        self.reports.close()
        for fd in (self.job, self.output, *self.inherited):
            os.close(fd)


@dataclass(frozen=True)
class _Forked:
    """A worker that has not ended yet."""

    pid: int
    pidfd: int
    reports: socket.socket

    def close(self) -> None:
        os.close(self.pidfd)
        self.reports.close()


class Zygote:
    """Forks workers on request.

    Args:
        requests: Socket to the launcher.
    """

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._poll = select.poll()
        self._poll.register(requests, select.POLLIN)
        self._workers: dict[int, _Forked] = {}
        """Workers by their pidfd, and by the descriptor of their reports."""
        self._refusal = ""
        self._limit_s = 0.0
        self._import_output = b""
        """What imports printed, for the output of the first worker."""

    def import_modules(self, names: Sequence[str], limit_s: float) -> None:
        """Import what workers need, within `limit_s` seconds.

        If an import fails or takes too long, modules may be half imported, so that a fork could not repeat the import.
        The zygote then refuses to fork, and a worker that starts cold reports the error.
        """
        self._limit_s = limit_s
        self._import([*_BASE, *names])
        _report(self._requests, READY)

    def _import(self, names: Sequence[str]) -> None:
        with os.fdopen(os.memfd_create("farstep-imports"), "w+b") as printed:
            with _output_to(printed.fileno()):
                self._import_all(names)
            printed.seek(0)
            self._import_output = (self._import_output + printed.read())[-_OUTPUT_BYTES:]
        gc.collect()
        gc.freeze()  # a collection in a worker does not touch these objects, so their pages stay shared

    def _import_all(self, names: Sequence[str]) -> None:
        deadline = time.monotonic() + self._limit_s
        for name in names:
            try:
                with _time_limit(deadline - time.monotonic()):
                    importlib.import_module(name)
            except _TooSlow:
                self._refusal = f"its imports take longer than {self._limit_s:g} s (the last one: {name})"
            except (Exception, SystemExit):
                self._refusal = FAILED
            if len(list(Path("/proc/self/task").iterdir())) > 1:
                self._refusal = f"importing {name} starts threads"
            if self._refusal:
                break

    def serve(self) -> dict[str, Any]:
        """Fork workers until the launcher closes the socket, then exit.

        Returns:
            The job, in a forked worker only.
        """
        while True:
            for fd, _ in self._poll.poll():
                if fd == self._requests.fileno():
                    if (job := self._handle_request()) is not None:
                        return job
                elif (worker := self._workers.get(fd)) is not None:
                    if fd == worker.pidfd:
                        self._reap(worker)
                    else:  # the launcher has dropped this worker
                        _kill_group(worker)
                        self._poll.unregister(fd)
                        del self._workers[fd]

    def _handle_request(self) -> dict[str, Any] | None:
        try:
            request = _Request.receive(self._requests)
        except OSError:
            return None  # closing the descriptors has told the launcher
        if request is None:
            sys.exit()
        try:
            job = _read_job(request.job)
            if not self._refusal:
                self._import_further(job)
            if self._refusal:
                _report(request.reports, REFUSED + self._refusal.encode())
            elif not (pid := os.fork()):
                return self._become_worker(request, job)
            else:
                self._import_output = b""
                self._watch(pid, request.reports)
        except OSError:
            _report(request.reports, NOT_FORKED)
        request.close()
        return None

    def _import_further(self, job: Mapping[str, Any]) -> None:
        """Import the modules of a job that this process has not imported yet."""
        if names := [name for name in job["modules"] if name not in sys.modules]:
            sys.path[:] = list(dict.fromkeys(job["path"] + sys.path))
            self._import(names)

    def _watch(self, pid: int, reports: socket.socket) -> None:
        try:
            worker = _Forked(pid, os.pidfd_open(pid), reports.dup())
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        _report(worker.reports, FORKED + str(pid).encode(), [worker.pidfd])
        for fd in (worker.pidfd, worker.reports.fileno()):
            self._workers[fd] = worker
            self._poll.register(fd, select.POLLIN)

    def _reap(self, worker: _Forked) -> None:
        _kill_group(worker)  # processes that its environments started; before the process id can be reused
        _, status = os.waitpid(worker.pid, 0)
        _report(worker.reports, ENDED + str(os.waitstatus_to_exitcode(status)).encode())
        for fd in (worker.pidfd, worker.reports.fileno()):
            if self._workers.pop(fd, None) is not None:
                self._poll.unregister(fd)
        worker.close()

    def _become_worker(self, request: _Request, job: Mapping[str, Any]) -> dict[str, Any]:
        """Make this fork look like a process that the launcher has started. Return the bootstrap."""
        os.setsid()
        self._requests.close()
        request.reports.close()
        for worker in {id(worker): worker for worker in self._workers.values()}.values():
            worker.close()
        os.close(request.job)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (request.output, 1), (request.output, 2)):
            os.dup2(source, target)
        os.close(null)
        os.close(request.output)
        os.write(1, self._import_output)
        os.chdir(job["folder"])
        os.environ.clear()
        os.environ.update(job["environ"])
        bootstrap: dict[str, Any] = job["bootstrap"]
        received = dict(zip(job["inherited"], request.inherited, strict=True))
        for name, value in bootstrap.items():
            if name.endswith("_fd"):
                bootstrap[name] = received[value]
        _use_threads(int(bootstrap["threads"]))
        return bootstrap


def _read_job(fd: int) -> dict[str, Any]:
    job: dict[str, Any] = json.loads(os.pread(fd, os.fstat(fd).st_size, 0))
    return job


@contextlib.contextmanager
def _output_to(fd: int) -> Iterator[None]:
    """Context manager: what this process prints goes to `fd`."""
    before = [(number, os.dup(number)) for number in (1, 2)]
    try:
        for number, _ in before:
            os.dup2(fd, number)
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # an import may have closed it
                stream.flush()
        for number, copy in before:
            os.dup2(copy, number)
            os.close(copy)


class _TooSlow(BaseException):
    """An import exceeded the time limit. Not an `Exception`, because modules catch these."""


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise _TooSlow

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _report(reports: socket.socket, message: bytes, fds: Sequence[int] = ()) -> None:
    with contextlib.suppress(OSError):  # the launcher has ended or has dropped this worker
        socket.send_fds(reports, [message], fds)


def _kill_group(worker: _Forked) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(worker.pid, signal.SIGKILL)


def _use_threads(threads: int) -> None:
    """Set the number of threads of libraries that were imported with one thread."""
    if threads == 1:
        return
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(threads)
    lines = Path("/proc/self/maps").read_text().splitlines()
    for path in {line.split()[-1] for line in lines if "openblas" in line}:
        library = ctypes.CDLL(path)
        for name in _BLAS:
            if hasattr(library, name):
                getattr(library, name)(threads)
