"""Starts a zygote (`worker/zygote.py`), and requests workers from it."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from farstep.core import UNKNOWN_STATUS
from farstep.launch.daemon.child import Child, is_readable, memory_file
from farstep.worker.zygote import ENDED, FORKED, NOT_FORKED, READY, REFUSED

_REPORT_S = 0.5
"""How long to wait for a report that the zygote makes at once."""
_END_S = 5.0
_BUSY = (errno.EAGAIN, errno.ETOOMANYREFS)
"""Errors of a request if too many requests, or too many of their descriptors, wait."""
Refused = Callable[[str], None]
"""Called with the reason if a zygote cannot fork workers; with an empty text if only one request failed."""


class ZygoteEnded(Exception):
    """The zygote has ended."""


class ZygoteBusy(Exception):
    """Too many requests wait for the zygote."""


class ZygoteProcess:
    """A zygote process. It imports in the background; requests wait until it is ready.

    Args:
        start: Starts the process with a bootstrap and descriptors to inherit.
        bootstrap: Import path, threads, modules to import, and the descriptor that ends the zygote with this process.
    """

    def __init__(
        self, start: Callable[[Mapping[str, Any], Sequence[int]], Child], bootstrap: Mapping[str, Any]
    ) -> None:
        self._is_ready = False
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._requests.setblocking(False)
        with contextlib.ExitStack() as failed, theirs:
            failed.callback(self._requests.close)
            fds = [theirs.fileno(), bootstrap["death_fd"]]
            self._process = start({**bootstrap, "requests_fd": theirs.fileno()}, fds)
            failed.pop_all()

    @property
    def is_ready(self) -> bool:
        """Whether its imports are complete."""
        if not self._is_ready:
            with contextlib.suppress(OSError):
                self._is_ready = self._requests.recv(1) == READY
        return self._is_ready

    def fork(self, job: Mapping[str, Any], output_fd: int, refused: Refused) -> ForkedProcess:
        """Request a worker.

        Args:
            job: Bootstrap, environment variables, folder, the descriptors that the worker inherits, modules that the
                zygote imports before it forks, and the path on which it finds them.
            output_fd: Descriptor for what the worker prints.
            refused: Called if the zygote does not fork the worker.

        Returns:
            The worker; it may not have started yet.

        Raises:
            ZygoteEnded: The zygote has ended.
            ZygoteBusy: Too many requests wait.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.ExitStack() as failed, theirs, memory_file("farstep-job", job) as fd:
            failed.callback(ours.close)
            try:
                socket.send_fds(self._requests, [b"F"], [fd, output_fd, theirs.fileno(), *job["inherited"]])
            except ConnectionError as error:
                raise ZygoteEnded from error
            except OSError as error:
                if error.errno in _BUSY:
                    raise ZygoteBusy from error
                raise
            process = ForkedProcess(self, ours, refused)
            failed.pop_all()
        return process

    def kill(self) -> None:
        """End the zygote at once. Workers that it has forked continue."""
        self._process.kill()

    def close_in_fork(self) -> None:
        self._requests.close()

    def close(self) -> None:
        self._requests.close()
        self._process.kill()
        deadline = time.monotonic() + _END_S
        while self._process.poll() is None and time.monotonic() < deadline:
            is_readable(self._process.exit_fd, _REPORT_S)
        self._process.close()


class ForkedProcess:
    """A process that a zygote forks (see `Child`).

    Args:
        zygote: The zygote.
        reports: Socket on which the zygote reports the worker's process id and exit status.
        refused: Called if the zygote does not fork the worker.
    """

    def __init__(self, zygote: ZygoteProcess, reports: socket.socket, refused: Refused) -> None:
        self._zygote, self._reports, self._refused = zygote, reports, refused
        self._reports.setblocking(False)
        self._ready = select.epoll()
        self._ready.register(reports, select.EPOLLIN)
        self.exit_fd = self._ready.fileno()
        self.pid = 0
        self.note = ""
        self.was_refused = False
        self._pidfd = -1
        self._status: int | None = None
        self._is_killed = self._zygote_ended = False

    def poll(self) -> int | None:
        self._read_reports()
        if self._status is None and self._has_ended():
            is_readable(self._reports.fileno(), _REPORT_S)
            self._read_reports()
            if self._status is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, signal.SIGKILL)  # processes that its environments started
                self._status = UNKNOWN_STATUS
                self.note = "its exit status is unknown, because the process that forked it has ended"
        return self._status

    def _has_ended(self) -> bool:
        return self._pidfd >= 0 and is_readable(self._pidfd)

    def _read_reports(self) -> None:
        while self._status is None and not self._zygote_ended:
            try:
                report, fds, _, _ = socket.recv_fds(self._reports, 1024, 1)
            except BlockingIOError:
                return
            except ConnectionError:
                report, fds = b"", []
            kind, rest = report[:1], report[1:].decode(errors="replace")
            if kind == FORKED:
                self.pid, self._pidfd = int(rest), fds[0]
                self._ready.register(self._pidfd, select.EPOLLIN)
                if self._is_killed:
                    self.kill()
            elif kind == ENDED:
                self._status = int(rest)
            elif kind == REFUSED:
                self._refuse(rest)
            elif kind == NOT_FORKED:
                self._refuse("")
            else:
                self._end_of_reports()

    def _end_of_reports(self) -> None:
        """Continue without the zygote, which has ended."""
        self._zygote_ended = True
        self._ready.unregister(self._reports)
        if not self.pid:
            if self._is_killed:
                self._status = -signal.SIGKILL
            else:
                self._refuse("" if self._zygote.is_ready else "it ended during its imports")

    def _refuse(self, reason: str) -> None:
        self._status, self.was_refused = 1, True
        self.note = "the process that forks workers could not start it"
        self._refused(reason)

    def kill(self) -> None:
        """Kill the process group. If the worker has not been forked yet, it will not be."""
        self._is_killed = True
        if self.pid:
            self.signal_group(signal.SIGKILL)
            return
        with contextlib.suppress(OSError):
            self._reports.shutdown(socket.SHUT_WR)
        if not self._zygote.is_ready or not is_readable(self._reports.fileno(), _REPORT_S):
            self._zygote.kill()  # it still imports, or is stuck

    def signal_group(self, number: int) -> None:
        if self.pid and not self._has_ended():  # otherwise the zygote may have reaped it, and its id may be reused
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def send_signal(self, number: int) -> None:
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def close(self) -> None:
        self._ready.close()
        self._reports.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
