"""Starts worker processes on this machine, and ends them with all processes that they started."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

from farstep.core import Ended

_TAIL_BYTES = 16 * 1024


class ProcessStarter:
    """Starts worker processes, each in a new session. A pipe ends the workers when this process ends."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        # The kernel closes this pipe when this process ends, for any reason, and then kills every worker
        # (worker/__main__.py).
        self._death_read, self._death_write = os.pipe()
        _starters.add(self)

    def start(self, bootstrap: Mapping[str, object], fds: Sequence[int] = ()) -> WorkerProcess:
        contents = {"threads": self._threads, **bootstrap, "path": import_path()}
        with contextlib.ExitStack() as opened, contextlib.ExitStack() as kept:
            # One open file per worker, because the kernel signals only one process group per open file.
            death = os.open(f"/proc/self/fd/{self._death_read}", os.O_RDONLY | os.O_NONBLOCK)
            opened.callback(os.close, death)
            bootstrap_fd = os.memfd_create("farstep-bootstrap", os.MFD_CLOEXEC)
            opened.callback(os.close, bootstrap_fd)
            output_read, output_write = os.pipe()
            opened.callback(os.close, output_write)
            kept.callback(os.close, output_read)
            os.write(bootstrap_fd, json.dumps({**contents, "death_fd": death}).encode())
            os.lseek(bootstrap_fd, 0, os.SEEK_SET)
            process = subprocess.Popen(
                # -P: do not import from the current folder unless `path` contains it.
                [sys.executable, "-P", "-m", "farstep.worker", "--bootstrap-fd", str(bootstrap_fd)],
                pass_fds=[bootstrap_fd, death, *fds],
                stdin=subprocess.DEVNULL,
                stdout=output_write,
                stderr=output_write,
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **_with_gpu(bootstrap.get("gpu"))},
            )
            kept.callback(process.wait)
            kept.callback(process.kill)
            started = WorkerProcess(process, output_read)
            kept.pop_all()  # the handle owns them now
        return started

    def close_in_fork(self) -> None:
        """Close the write end in a fork of this process; otherwise the fork would keep the workers alive."""
        _starters.discard(self)
        os.close(self._death_write)

    def close(self) -> None:
        _starters.discard(self)
        os.close(self._death_read)
        os.close(self._death_write)


_starters: weakref.WeakSet[ProcessStarter] = weakref.WeakSet()


def _close_all() -> None:
    for starter in list(_starters):
        starter.close_in_fork()


os.register_at_fork(after_in_child=_close_all)


class WorkerProcess:
    """One worker process, and the tail of its output (see `core.WorkerHandle`)."""

    leaving = False

    def __init__(self, process: subprocess.Popen[bytes], output_fd: int) -> None:
        self._process = process
        self._tail = b""
        self._oom_kills = _oom_kills()
        os.set_blocking(output_fd, False)
        self.output_fd = output_fd
        self.exit_fd = os.pidfd_open(process.pid)
        self._ended: Ended | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> Ended | None:
        if self._ended is not None:
            return self._ended  # its process id may have been reused
        status = self._process.poll()
        if status is None:
            return None
        self._kill_group()  # includes processes that its environments started
        note = ""
        if status == -signal.SIGKILL and _oom_kills() > self._oom_kills:
            note = "the machine ran out of memory and the kernel killed this process; use fewer environments per node"
        self._ended = Ended(status, note)
        return self._ended

    def kill(self) -> None:
        if self._ended is None:
            self._kill_group()

    def suspend(self) -> None:
        if self._ended is None:
            self._signal_group(signal.SIGSTOP)

    def resume(self) -> None:
        if self._ended is None:
            self._signal_group(signal.SIGCONT)

    def _kill_group(self) -> None:
        self._signal_group(signal.SIGKILL)

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def dump_stacks(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR2)

    def read_output(self) -> bytes | None:
        new = b""
        for _ in range(16):  # limited, because the worker may print faster than this loop reads
            try:
                part = os.read(self.output_fd, 65536)
            except BlockingIOError:
                break
            if not part and not new:
                return None
            new += part
        self._tail = (self._tail + new)[-_TAIL_BYTES:]
        return new

    def output(self) -> str:
        self.read_output()
        return self._tail.decode(errors="replace")

    def close(self) -> None:
        """Free the descriptors of the ended process."""
        os.close(self.output_fd)
        os.close(self.exit_fd)


def _with_gpu(rank: object) -> dict[str, str]:
    """The environment variable that makes one GPU visible to a worker. CUDA reads it at initialization."""
    if not isinstance(rank, int):
        return {}
    names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return {"CUDA_VISIBLE_DEVICES": names[rank % len(names)] if names else str(rank)}


def import_path() -> list[str]:
    """The module search path of this process, with absolute entries, for its workers."""
    return [path or str(Path.cwd()) for path in sys.path]


def _oom_kills() -> int:
    """Number of processes that the kernel has killed for lack of memory since boot."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
