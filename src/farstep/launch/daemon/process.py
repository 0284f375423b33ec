"""Starts worker processes on this machine, and ends them with all processes that they started."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from farstep.config.launch import StartMethod
from farstep.core import Ended
from farstep.launch.daemon.affinity import CoreAssignment
from farstep.launch.daemon.child import Child, spawn
from farstep.launch.daemon.zygote import ForkedProcess, ZygoteBusy, ZygoteEnded, ZygoteProcess
from farstep.resources import usable_cpus
from farstep.worker.zygote import FAILED

log = logging.getLogger("farstep")
_TAIL_BYTES = 16 * 1024


class ProcessStarter:
    """Starts worker processes, each in a new session. A pipe ends the workers when this process ends.

    Args:
        threads: Threads that torch and BLAS may use in one worker.
        method: How to start: fork a zygote that has imported `modules`, or `cold`, a new interpreter for each worker.
        modules: Modules that workers need.
        connect_s: How long a worker may take to connect. The zygote may use most of it for its imports.
        warn: Called with a text if workers start cold instead.
        assignment: Cores of each worker; None: workers are not pinned.
    """

    shared: ClassVar[ZygoteProcess | None] = None
    """If set, zygotes are forks of this one (see `farstep.testing.shared_zygote`)."""

    def __init__(
        self,
        threads: int,
        method: StartMethod = "zygote",
        modules: Sequence[str] = (),
        connect_s: float = 60.0,
        warn: Callable[[str], object] = log.warning,
        assignment: CoreAssignment | None = None,
    ) -> None:
        self._threads, self._method, self._modules, self._warn = threads, method, modules, warn
        self._assignment = assignment
        self._import_s = 0.75 * connect_s
        self._zygote: ZygoteProcess | None = None
        self._further: list[str] = []
        """Modules that the zygote imports before it forks the next worker."""
        self._path: Sequence[str] = ()
        """Where the zygote searches them first."""
        self._unusable: set[str] = set()
        """Those that the zygote could not import, or that started a thread."""
        self._refusals: list[tuple[ZygoteProcess | None, str]] = []
        """Zygotes that have not forked a worker, and why; each entry lets one worker start cold."""
        # The kernel closes this pipe when this process ends, for any reason, and then kills every worker
        # (worker/__main__.py).
        self._death_read, self._death_write = os.pipe()
        # If Ctrl-C interrupts a launch before the launcher owns this object, `close` is never called.
        self._close_pipe = weakref.finalize(self, _close_fds, self._death_read, self._death_write)
        self._close_pipe.atexit = False
        _starters.add(self)

    def preload(self, modules: Sequence[str], path: Sequence[str]) -> None:
        """Let the zygote import these modules, too, before it forks the next worker.

        If an import fails or starts a thread, a new zygote forks workers without these modules.

        Args:
            modules: Names of modules.
            path: The head's module search path.
        """
        self._path = path
        self._further = [name for name in modules if name not in {*self._modules, *self._unusable}]

    def start(self, bootstrap: Mapping[str, object], fds: Sequence[int] = (), rank: int = 0) -> WorkerProcess:
        """Start a worker.

        Args:
            bootstrap: What the worker reads first (see `worker/connection/bootstrap.py`).
            fds: Descriptors that it inherits.
            rank: Its number on this machine, which decides on its cores.

        Returns:
            The process.
        """
        environ = {**_environ(), **_with_gpu(bootstrap.get("gpu"))}
        contents = {"threads": self._threads, **bootstrap, "path": import_path()}
        if bootstrap.get("role") == "acting":  # acting servers share the cores of a machine, and are not pinned
            contents["threads"] = max(1, usable_cpus() // int(str(bootstrap["cores_divisor"])))
        elif self._assignment is not None:
            contents["cores"] = self._assignment.cores_of(rank)
        with contextlib.ExitStack() as opened, contextlib.ExitStack() as kept:
            death = opened.enter_context(self.death_fd())
            output_read, output_write = os.pipe()
            opened.callback(os.close, output_write)
            kept.callback(os.close, output_read)
            contents["death_fd"] = death
            arguments = (contents, environ, output_write, [death, *fds])
            child: Child = self._fork(*arguments) or spawn(*arguments)
            kept.callback(child.close)
            kept.callback(child.kill)
            started = WorkerProcess(child, output_read)
            kept.pop_all()  # the handle owns them now
        return started

    def _fork(
        self, bootstrap: Mapping[str, Any], environ: Mapping[str, str], output_fd: int, fds: Sequence[int]
    ) -> ForkedProcess | None:
        """Request a worker from the zygote. Return None if the worker must start cold."""
        if self._method == "cold" or self._has_refused():
            return None
        for _ in range(2):
            self._zygote = self._zygote or self.start_zygote()
            try:
                refused = partial(self._note_refusal, self._zygote)
                job = _job(bootstrap, environ, fds) | {"modules": self._further, "path": list(self._path)}
                return self._zygote.fork(job, output_fd, refused)
            except ZygoteBusy:
                break
            except ZygoteEnded:
                if not self._zygote.is_ready:
                    break  # the refusals of earlier requests say why
                self._drop_zygote()
        return None

    def _drop_zygote(self) -> None:
        if self._zygote is not None:
            self._zygote.close()
            self._zygote = None

    def _note_refusal(self, zygote: ZygoteProcess | None, reason: str) -> None:
        self._refusals.append((zygote, reason))

    def _has_refused(self) -> bool:
        """Whether the zygote has refused a request for which no worker has started cold yet."""
        if not self._refusals:
            return False
        zygote, reason = self._refusals.pop(0)
        if not reason or zygote not in (None, self._zygote):
            return True
        if self._further:
            self._unusable.update(self._further)
            self._further = []
            self._drop_zygote()
        else:
            self._method = "cold"
            if reason != FAILED:
                self._warn(f"workers start in new interpreters, because the zygote cannot fork them: {reason}.")
        return True

    def start_zygote(self) -> ZygoteProcess:
        """Start the zygote: a fork of the shared one, or a new interpreter."""

        def start(bootstrap: Mapping[str, Any], fds: Sequence[int]) -> Child:
            null = os.open(os.devnull, os.O_WRONLY)
            try:
                if self.shared is not None:
                    with contextlib.suppress(ZygoteEnded, ZygoteBusy):
                        return self.shared.fork(
                            _job(bootstrap, _environ(), fds), null, partial(self._note_refusal, None)
                        )
                return spawn(bootstrap, _environ(), null, fds)
            finally:
                os.close(null)

        with self.death_fd() as death:
            bootstrap = {"threads": 1, "path": import_path(), "modules": list(self._modules)}
            return ZygoteProcess(start, {**bootstrap, "import_s": self._import_s, "death_fd": death})

    @contextlib.contextmanager
    def death_fd(self) -> Iterator[int]:
        """Open the pipe once more, because the kernel signals only one process group per open file."""
        fd = os.open(f"/proc/self/fd/{self._death_read}", os.O_RDONLY | os.O_NONBLOCK)
        try:
            yield fd
        finally:
            os.close(fd)

    def close_in_fork(self) -> None:
        """Close the write end in a fork of this process; otherwise the fork would keep the workers alive."""
        _starters.discard(self)
        self._close_pipe.detach()
        os.close(self._death_write)
        if self._zygote is not None:
            self._zygote.close_in_fork()

    def close(self) -> None:
        _starters.discard(self)
        self._drop_zygote()
        self._close_pipe()


def _close_fds(*fds: int) -> None:
    for fd in fds:
        os.close(fd)


_starters: weakref.WeakSet[ProcessStarter] = weakref.WeakSet()


def _close_all() -> None:
    for starter in list(_starters):
        starter.close_in_fork()


os.register_at_fork(after_in_child=_close_all)


class WorkerProcess:
    """One worker process, and the tail of its output (see `core.WorkerHandle`)."""

    leaving = False

    def __init__(self, child: Child, output_fd: int) -> None:
        self._child = child
        self._tail = b""
        self._oom_kills = _oom_kills()
        os.set_blocking(output_fd, False)
        self.output_fd, self.exit_fd = output_fd, child.exit_fd
        self._ended: Ended | None = None

    @property
    def pid(self) -> int:
        return self._child.pid

    def poll(self) -> Ended | None:
        if self._ended is not None:
            return self._ended  # its process id may have been reused
        status = self._child.poll()
        if status is None:
            return None
        note = self._child.note
        if status == -signal.SIGKILL and _oom_kills() > self._oom_kills:
            note = "the machine ran out of memory and the kernel killed this process; use fewer environments per node"
        self._ended = Ended(status, note, self._child.was_refused)
        return self._ended

    def kill(self) -> None:
        if self._ended is None:
            self._child.kill()

    def replace_child(self, child: Child) -> None:
        """Continue with the process that was restored in place of one that has ended."""
        self._child.close()
        self._child, self.exit_fd, self._ended = child, child.exit_fd, None

    def suspend(self, parked: bool = False) -> None:
        if self._ended is None:
            self._child.signal_group(signal.SIGSTOP)

    def resume(self) -> None:
        if self._ended is None:
            self._child.signal_group(signal.SIGCONT)

    def dump_stacks(self) -> None:
        self._child.send_signal(signal.SIGUSR2)

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
        self._child.close()


def _job(bootstrap: Mapping[str, Any], environ: Mapping[str, str], fds: Sequence[int]) -> dict[str, Any]:
    """What a zygote needs to fork a process that looks like one that this process has started."""
    of_process = {"environ": dict(environ), "folder": str(Path.cwd()), "inherited": list(fds)}
    return {"bootstrap": bootstrap, "modules": [], **of_process}


def _environ() -> dict[str, str]:
    return {**os.environ, "PYTHONUNBUFFERED": "1"}


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
