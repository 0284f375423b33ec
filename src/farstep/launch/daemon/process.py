"""Worker processes of this machine: started, watched, ended with all they started."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from farstep.core import Ended

_TAIL_BYTES = 16 * 1024


class ProcessStarter:
    """Starts `python -m farstep.worker`, each in a session of its own, tied to this process's life by a pipe."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        # Held open as long as the head lives; its end makes the kernel end every worker (worker/__main__.py).
        self._death_read, self._death_write = os.pipe()
        _starters.add(self)

    def start(self, bootstrap: Mapping[str, object], fds: Sequence[int] = ()) -> WorkerProcess:
        contents = {"threads": self._threads, **bootstrap, "path": import_path()}
        with contextlib.ExitStack() as opened, contextlib.ExitStack() as kept:
            # A death pipe per worker: the kernel's signal goes to one process group only.
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
                # -P: Python adds the current folder to the worker's path only if it is on the head's.
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
            kept.pop_all()  # from here on, all this is the handle's
        return started

    def forget(self) -> None:
        """In a fork of the head: workers must not outlive the head because its child still holds the pipe."""
        _starters.discard(self)
        os.close(self._death_write)

    def close(self) -> None:
        _starters.discard(self)
        os.close(self._death_read)
        os.close(self._death_write)


_starters: weakref.WeakSet[ProcessStarter] = weakref.WeakSet()


def _forget_all() -> None:
    for starter in list(_starters):
        starter.forget()


os.register_at_fork(after_in_child=_forget_all)


class WorkerProcess:
    """One worker process, with the tail of its output."""

    leaving = False

    def __init__(self, process: subprocess.Popen[bytes], output_fd: int) -> None:
        self._process = process
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0
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
            return self._ended  # its process id may be somebody else's by now
        status = self._process.poll()
        if status is None:
            return None
        self._kill_group()  # whatever its environments had started goes with it
        note = ""
        if status == -signal.SIGKILL and _oom_kills() > self._oom_kills:
            note = "the machine ran out of memory and the kernel chose this process; use fewer environments per node"
        self._ended = Ended(status, note)
        return self._ended

    def kill(self) -> None:
        if self._ended is None:
            self._kill_group()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def dump_stacks(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR2)

    def read_output(self) -> bytes | None:
        new = b""
        for _ in range(16):  # not until nothing is left: it may print faster than we read
            try:
                part = os.read(self.output_fd, 65536)
            except BlockingIOError:
                break
            if not part and not new:
                return None
            new += part
        self._tail.append(new)
        self._tail_bytes += len(new)
        while self._tail_bytes - len(self._tail[0]) > _TAIL_BYTES:
            self._tail_bytes -= len(self._tail.popleft())
        return new

    def output(self) -> str:
        self.read_output()
        return b"".join(self._tail)[-_TAIL_BYTES:].decode(errors="replace")

    def close(self) -> None:
        """Forget the process; it has ended."""
        os.close(self.output_fd)
        os.close(self.exit_fd)


def _with_gpu(rank: object) -> dict[str, str]:
    """The one GPU that a worker is to see, by the name that it has here; said before anything of CUDA starts."""
    if not isinstance(rank, int):
        return {}
    names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return {"CUDA_VISIBLE_DEVICES": names[rank % len(names)] if names else str(rank)}


def import_path() -> list[str]:
    """Where this process finds modules, for workers to look there too."""
    return [path or str(Path.cwd()) for path in sys.path]


def _oom_kills() -> int:
    """How often the kernel has killed for memory since boot."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
