"""A child process as its starter sees it, and children in an interpreter of their own."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

_COMMAND = (sys.executable, "-P", "-m", "farstep.worker")
"""Runs a worker. -P: do not import from the current folder unless the import path contains it."""


class Child(Protocol):
    """A process that this process has started, or that its zygote has forked."""

    exit_fd: int
    """Readable when `poll` has something to read."""
    note: str
    """An explanation of the status; empty if there is none."""
    was_refused: bool
    """Whether the process was never started, through no fault of its own."""

    @property
    def pid(self) -> int:
        """The process id; 0 before the process has started."""

    def poll(self) -> int | None:
        """Return the exit status, or None while the process may still run. Its group has ended with it."""

    def kill(self) -> None:
        """Kill the process group."""

    def signal_group(self, number: int) -> None:
        """Send a signal to the process group, if the process has started."""

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, if it still runs."""

    def close(self) -> None:
        """Free the descriptors."""


class SpawnedProcess:
    """A process in an interpreter of its own (see `Child`)."""

    note = ""
    was_refused = False

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.exit_fd = os.pidfd_open(process.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        status = self._process.poll()
        if status is not None:
            self.kill()  # includes processes that its environments started
        return status

    def kill(self) -> None:
        self.signal_group(signal.SIGKILL)

    def signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def close(self) -> None:
        os.close(self.exit_fd)


class RestoredProcess:
    """A process that criu has restored as a child of this process (see `Child`)."""

    note = ""
    was_refused = False

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.exit_fd = os.pidfd_open(pid)
        self._status: int | None = None

    def poll(self) -> int | None:
        if self._status is None and is_readable(self.exit_fd):
            self.kill()  # includes processes that its environments started; before the process id can be reused
            try:
                _, status = os.waitpid(self.pid, 0)
                self._status = os.waitstatus_to_exitcode(status)
            except ChildProcessError:  # it was reaped elsewhere
                self._status = -signal.SIGKILL
        return self._status

    def kill(self) -> None:
        self.signal_group(signal.SIGKILL)

    def signal_group(self, number: int) -> None:
        if self._status is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.exit_fd, number)

    def close(self) -> None:
        os.close(self.exit_fd)


def spawn(
    bootstrap: Mapping[str, Any], environ: Mapping[str, str], output_fd: int, fds: Sequence[int]
) -> SpawnedProcess:
    """Start the program of workers in a new session.

    Args:
        bootstrap: What the process reads first (see `worker/__main__.py`).
        environ: Environment variables.
        output_fd: Descriptor for what the process prints.
        fds: Further descriptors that the process inherits.

    Returns:
        The process.
    """
    with memory_file("farstep-bootstrap", bootstrap) as bootstrap_fd:
        process = subprocess.Popen(
            [*_COMMAND, "--bootstrap-fd", str(bootstrap_fd)],
            pass_fds=[bootstrap_fd, *fds],
            stdin=subprocess.DEVNULL,
            stdout=output_fd,
            stderr=output_fd,
            start_new_session=True,
            env=dict(environ),
        )
    try:
        return SpawnedProcess(process)
    except BaseException:
        process.kill()
        process.wait()
        raise


@contextlib.contextmanager
def memory_file(name: str, contents: Mapping[str, Any]) -> Iterator[int]:
    """Context manager: the descriptor of a file in memory with `contents` as JSON."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.write(fd, json.dumps(contents).encode())
        os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)


def is_readable(fd: int, timeout_s: float = 0.0) -> bool:
    """Wait until a descriptor is readable; return whether it is."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))
