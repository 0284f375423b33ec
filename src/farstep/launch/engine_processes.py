"""Agents that run as long as a process of this machine does: an ssh client, an `srun`."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Sequence
from typing import IO

from farstep.launch.engine import Group, RequestStatus, setup_lines

_TAIL_BYTES = 4096
_LEAVE_S = 2.0
ENDED = "ended on"


class EngineProcess:
    """A process that runs agents on nodes, and to whose standard input they are told where to connect."""

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
        return self._last_words if self._log.closed else file_tail(self._log)

    def wait(self, deadline: float) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, deadline - time.monotonic()))
        return self.ended

    def kill(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def close(self) -> None:
        """Once it has ended."""
        if not self._log.closed:
            self._process.wait()
            self._last_words = self.tail()
            self._log.close()


def file_tail(file: IO[bytes]) -> str:
    """The end of what was written to it."""
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES)).decode(errors="replace").strip()


def after_setup(setup: Sequence[str], agent: str) -> str:
    """Lines for a shell; its standard input, where the keys are, is for the agent only."""
    if not setup:
        return f"exec {agent}"
    return "\n".join(["exec 3<&0 </dev/null", *setup_lines(setup), f"exec {agent} <&3 3<&-"])


def end_processes(sessions: Iterable[EngineProcess], patience_s: float = _LEAVE_S) -> None:
    """Agents were told to leave; whoever is still there after a while is beyond hearing."""
    left = [session for session in sessions if not session.ended]
    for wait_s, number in ((patience_s, signal.SIGTERM), (_LEAVE_S, signal.SIGKILL)):
        deadline = time.monotonic() + wait_s
        left = [session for session in left if not session.wait(deadline)]
        for session in left:
            session.kill(number)
    for session in sessions:
        session.close()


class EngineProcesses(Group):
    """Sessions that were begun together."""

    def __init__(self, program: str, sessions: Sequence[EngineProcess]) -> None:
        self._program, self._sessions = program, sessions

    def standing(self) -> RequestStatus:
        ended = [session for session in self._sessions if session.ended]
        here = [session for session in self._sessions if not session.ended]
        parts = [
            f"{self._program} {what} {', '.join(session.where for session in some)}"
            for what, some in (("runs on", here), (ENDED, ended))
            if some
        ]
        text = "; ".join(parts) or f"no node is free for {self._program}"
        over = [f"{self._program} {session.where}" for session in ended]
        return RequestStatus(text, sum(session.nodes for session in here), over=over)

    def logs(self) -> str:
        return "\n".join(f"{session.where}:\n{session.tail()}" for session in self._sessions if session.tail())

    def cancel(self) -> None:
        end_processes(self._sessions)
