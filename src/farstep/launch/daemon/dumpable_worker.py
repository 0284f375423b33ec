"""A worker that is written to disk while it is parked (`EngineConfig.park_method`)."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

from farstep.core import BytesLike, Ended
from farstep.launch.daemon.child import RestoredProcess
from farstep.launch.daemon.criu import Criu, CriuRun, affinities, end_restored, size_of
from farstep.launch.daemon.node_worker import NodeWorker
from farstep.wire.channels.local import LocalLink

_ATTACH_S = 30.0
"""Seconds for a worker to detach, or to attach again."""
_REAP_S = 10.0
"""Seconds for the processes that were dumped with a worker to end."""


class Stage(Enum):
    """Where a worker is on its way to the disk and back."""

    ATTACHED = "attached"
    """It has a link. Its process runs, or is suspended between two rollouts."""
    DETACHING = "detaching"
    """It was requested to close its link."""
    DETACHED = "detached"
    """It has no link. Its process is suspended if it waits for criu, or if criu has failed."""
    DUMPING = "dumping"
    ON_DISK = "on disk"
    """It has no process."""
    RESTORING = "restoring"
    ATTACHING = "attaching"
    """It was requested to open a link."""


_BEFORE_DUMP = (Stage.ATTACHED, Stage.DETACHING, Stage.DETACHED)


@dataclass
class DumpableWorker(NodeWorker):
    """A worker on this node that criu writes to disk while it is parked.

    Before that, the worker detaches: it reads all messages and closes its link, so that pipes are all that its process
    shares with others. After criu has restored the process as a child of this one, the worker attaches over a new link.
    Messages of the head wait meanwhile. If the process cannot be dumped, it is suspended instead; if it cannot be
    restored, the worker has ended.
    """

    criu: Criu = field(kw_only=True)
    open_death_pipe: Callable[[], AbstractContextManager[int]] = field(kw_only=True)
    """Opens the pipe that ends workers with this process."""
    dumped_pid: int = 0
    """The process id with which it was last dumped, and with which criu restores it."""
    _stage: Stage = Stage.ATTACHED
    _is_parked: bool = False
    _failed: bool = False
    """Whether the worker could not be dumped since it was parked."""
    _affinities: Mapping[int, set[int]] = field(default_factory=dict)
    """The cores of each thread of the processes that were dumped. Criu does not restore them."""
    _run: CriuRun | None = None
    _waiting: list[Sequence[BytesLike]] = field(default_factory=list)
    """Messages of the head that arrived while the worker had no link."""
    _listener: socket.socket | None = None
    _deadline: float = math.inf
    _lost: Ended | None = None
    _note: str = ""

    # ---- the daemon's requests ----

    def set_suspended(self, suspended: bool, parked: bool = False) -> None:
        self.suspended, self._is_parked = suspended, suspended and parked
        self._failed = self._failed and self._is_parked
        if self._stage is Stage.ATTACHED and not self._is_parked:
            super().set_suspended(suspended)
        elif self._stage is Stage.DETACHING and not self._is_parked:
            self.process.resume()

    @property
    def is_returning(self) -> bool:
        return self._stage is not Stage.ATTACHED and not self._is_parked

    def pass_on(self, frames: Sequence[BytesLike] | None = None) -> None:
        if frames is None or self._stage is Stage.ATTACHED:
            super().pass_on(frames)
        else:
            self._waiting.append([bytes(frame) for frame in frames])

    def link_ended(self) -> None:
        super().link_ended()
        if self._stage is Stage.DETACHING:
            self._enter(Stage.DETACHED)

    def poll(self) -> Ended | None:
        if self._stage in (Stage.DUMPING, Stage.ON_DISK, Stage.RESTORING):
            return self._lost
        ended = self._lost or super().poll()
        return replace(ended, note=self._note) if ended is not None and self._note else ended

    def kill(self) -> None:
        if self._stage in (Stage.DUMPING, Stage.RESTORING) and self._run is not None:
            self._run.kill()
        if self._stage is Stage.DUMPING:
            self._failed = True
            self._enter(Stage.DETACHED)
        if self._stage is Stage.RESTORING:
            end_restored(self.dumped_pid)
        if self._stage in (Stage.ON_DISK, Stage.RESTORING):
            self._lost = Ended(-signal.SIGKILL)
        else:
            super().kill()

    def fds(self) -> list[int]:
        if self._stage is Stage.ON_DISK or self._lost is not None:
            return []
        if self._stage in (Stage.DUMPING, Stage.RESTORING) and self._run is not None and self._run.poll() is None:
            return [self._run.exit_fd]
        return [*super().fds(), *([] if self._listener is None else [self._listener.fileno()])]

    def close(self) -> None:
        self._stop_listening()
        self._remove_images()
        super().close()

    # ---- stages ----

    def advance(self) -> bool:
        steps = {
            Stage.ATTACHED: self._park,
            Stage.DETACHING: self._check_detaching,
            Stage.DETACHED: self._dump_or_attach,
            Stage.DUMPING: self._check_dump,
            Stage.ON_DISK: self._restore,
            Stage.RESTORING: self._check_restore,
            Stage.ATTACHING: self._attach,
        }
        before = None
        while before is not self._stage and self._lost is None and self.ended is None:
            before = self._stage
            try:
                steps[before]()
            except OSError as error:  # of this worker only, such as a full disk
                self._on_error(error)
        return self._lost is not None

    def _on_error(self, error: OSError) -> None:
        """Keep a worker in memory that cannot be dumped; end one that cannot be restored."""
        if self._stage is Stage.DUMPING or (self._is_parked and self._stage in _BEFORE_DUMP):
            if self._stage is Stage.DUMPING and self._run is not None:
                self._run.kill()
                self._enter(Stage.DETACHED)
            self._remove_images()
            self._fail(str(error))
        elif self._stage in (Stage.ON_DISK, Stage.RESTORING):
            self._lose(str(error))
        else:
            self.blameless = self.process.poll() is None
            self._note = f"it could not be connected again after it was parked: {error}"
            self.process.kill()
            self._stop_listening()
            self._enter(Stage.ATTACHING)

    def _lose(self, reason: str) -> None:
        """End a worker that cannot be restored."""
        if self._stage is Stage.RESTORING and self._run is not None:
            self._run.kill()
            end_restored(self.dumped_pid)
        self._remove_images()
        self.blameless = True
        self._lost = Ended(1, f"it could not be restored from disk: {reason}")

    def _enter(self, stage: Stage, limit_s: float = math.inf) -> None:
        self._stage, self._deadline = stage, time.monotonic() + limit_s

    @property
    def _is_late(self) -> bool:
        return time.monotonic() > self._deadline

    def _park(self) -> None:
        if self._is_parked and not self._failed and self.link is not None:
            self.link.send_detach(str(self._path("link")))
            self._enter(Stage.DETACHING, _ATTACH_S)

    def _check_detaching(self) -> None:
        if self._is_late and self._is_parked:
            self._fail(f"it did not close its connection within {_ATTACH_S:g} s")
            self._deadline = math.inf

    def _dump_or_attach(self) -> None:
        if not self._is_parked:
            self._listen()
            self.process.resume()
        elif self._failed or self.criu.is_busy:
            self.process.suspend()
        else:
            self.process.resume()  # otherwise criu would restore it suspended: it could not notice the daemon's end
            self.dumped_pid, self._affinities = self.process.pid, affinities(self.process.pid)
            self._run = self.criu.dump(self.dumped_pid, self._path("images"))
            self._enter(Stage.DUMPING)

    def _check_dump(self) -> None:
        if self._run is None or (outcome := self._run.poll()) is None:
            return
        if not outcome.reason:
            if self.process.poll() is not None:  # it was reaped, so that its process id is free
                self.disk_bytes = size_of(self._path("images"))
                self._enter(Stage.ON_DISK, _REAP_S)
            return
        self._failed = True
        self._enter(Stage.DETACHED)
        self._remove_images()
        if outcome.was_killed:
            self._note = f"{outcome.reason} while it wrote the worker to disk"
            self.process.kill()  # criu runs code of its own in the process, and may not have removed it
        else:
            self._fail(outcome.reason)

    def _fail(self, reason: str) -> None:
        """Suspend a worker in memory that could not be dumped."""
        self._failed, self.problem = True, reason
        self.process.suspend()

    def _restore(self) -> None:
        is_free = self.criu.reap(self.dumped_pid)
        if self._is_parked or self.criu.is_busy or not (is_free or self._is_late):
            return
        if Path(f"/proc/{self.dumped_pid}").exists():
            self._lose(f"another process has its process id {self.dumped_pid}")
            return
        output = os.open(f"/proc/self/fd/{self.process.output_fd}", os.O_WRONLY)
        try:
            with self.open_death_pipe() as death:
                pipes = {str(Path(f"/proc/self/fd/{fd}").readlink()): fd for fd in (output, death)}
                self._run = self.criu.restore(self.dumped_pid, self._path("images"), pipes)
        finally:
            os.close(output)
        self._enter(Stage.RESTORING)

    def _check_restore(self) -> None:
        if self._run is None or (outcome := self._run.poll()) is None:
            return
        if outcome.reason:
            self._lose(outcome.reason)
            return
        self._remove_images()
        self.process.replace_child(RestoredProcess(self.dumped_pid))
        self._enter(Stage.ATTACHING)
        for thread, cores in self._affinities.items():
            with contextlib.suppress(OSError):  # it has ended, or the cores were taken from this node
                os.sched_setaffinity(thread, cores)
        self._listen()

    def _listen(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        folder = os.open(self.criu.folder, os.O_PATH)
        try:
            new = self._path("new")
            self._listener.bind(f"/proc/self/fd/{folder}/{new.name}")  # the path itself may be too long
            self._listener.listen(1)
            new.rename(self._path("link"))
        finally:
            os.close(folder)
        self._enter(Stage.ATTACHING, _ATTACH_S)

    def _attach(self) -> None:
        if self._listener is None:
            return
        try:
            accepted, _ = self._listener.accept()
        except BlockingIOError:
            if self._is_late:
                self._note = f"it did not connect within {_ATTACH_S:g} s after it was parked"
                self.process.kill()
                self._deadline = math.inf
            return
        if _pid_of_peer(accepted) != self.process.pid:
            accepted.close()
            return
        self._stop_listening()
        try:
            socket.send_fds(accepted, [b"A"], [self.board.memory.fd])
        except OSError:
            accepted.close()
            raise
        accepted.setblocking(False)
        self.link = LocalLink(accepted)
        self._enter(Stage.ATTACHED)
        waiting, self._waiting = self._waiting, []
        for frames in waiting:
            self.pass_on(frames)
        if self.suspended and not self._is_parked:
            self.process.suspend()

    # ---- files ----

    def _path(self, name: str) -> Path:
        return self.criu.folder / f"{name}-{self.number}"

    def _stop_listening(self) -> None:
        if self._listener is not None:
            for name in ("link", "new"):
                with contextlib.suppress(OSError):
                    self._path(name).unlink()
            self._listener.close()
            self._listener = None

    def _remove_images(self) -> None:
        self.criu.remove(self.dumped_pid, self._path("images"))
        self.disk_bytes = 0


def _pid_of_peer(sock: socket.socket) -> int:
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[0])
