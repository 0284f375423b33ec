"""Node daemons that end with a local process: an ssh client or an `srun`."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Sequence
from typing import IO

from farstep.launch.engines.engine import Group, RequestStatus, setup_lines

_TAIL_BYTES = 4096
_LEAVE_S = 2.0
ENDED = "ended on"


class EngineProcess:
    """A local process that runs node daemons on nodes and passes the bootstrap to their standard input."""

    def __init__(self, command: Sequence[str], where: str, bootstrap: bytes, nodes: int = 1) -> None:
        self.where, self.nodes = where, nodes
        self._log = tempfile.TemporaryFile(prefix="farstep-session-")  # noqa: SIM115 - closed by `end`
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=self._log, stderr=self._log, start_new_session=True
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(bootstrap)

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def tail(self) -> str:
        return self._final_tail if self._log.closed else file_tail(self._log)

    def wait(self, deadline: float) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, deadline - time.monotonic()))
        return self.ended

    def kill(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def close(self) -> None:
        """Free the log of a process that has ended; `tail` still works."""
        if not self._log.closed:
            self._process.wait()
            self._final_tail = self.tail()
            self._log.close()


def file_tail(file: IO[bytes]) -> str:
    """The last `_TAIL_BYTES` bytes of a file, as text."""
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES)).decode(errors="replace").strip()


def after_setup(setup: Sequence[str], daemon: str) -> str:
    """Shell lines that run the setup, then the daemon. Only the daemon can read the keys from standard input."""
    if not setup:
        return f"exec {daemon}"
    return "\n".join(["exec 3<&0 </dev/null", *setup_lines(setup), f"exec {daemon} <&3 3<&-"])


def end_processes(sessions: Iterable[EngineProcess], patience_s: float = _LEAVE_S) -> None:
    """Wait `patience_s` seconds for processes whose daemons got `Leave`. Then terminate, and finally kill, the rest."""
    left = [session for session in sessions if not session.ended]
    for wait_s, number in ((patience_s, signal.SIGTERM), (_LEAVE_S, signal.SIGKILL)):
        deadline = time.monotonic() + wait_s
        left = [session for session in left if not session.wait(deadline)]
        for session in left:
            session.kill(number)
    for session in sessions:
        session.close()


class EngineProcesses(Group):
    """Processes that were started together."""

    def __init__(self, program: str, sessions: Sequence[EngineProcess]) -> None:
        self._program, self._sessions = program, sessions

    def status(self) -> RequestStatus:
        ended = [session for session in self._sessions if session.ended]
        running = [session for session in self._sessions if not session.ended]
        parts = [
            f"{self._program} {state} {', '.join(session.where for session in sessions)}"
            for state, sessions in (("runs on", running), (ENDED, ended))
            if sessions
        ]
        text = "; ".join(parts) or f"no node is free for {self._program}"
        ended_places = {f"{self._program} {each.where}": f"{self._program} {ENDED} {each.where}" for each in ended}
        return RequestStatus(text, sum(session.nodes for session in running), ended=ended_places)

    def logs(self) -> str:
        return "\n".join(f"{session.where}:\n{session.tail()}" for session in self._sessions if session.tail())

    def cancel(self) -> None:
        end_processes(self._sessions)
