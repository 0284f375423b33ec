"""Nodes that ssh reaches: an agent on each, told where to connect through its standard input."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from farstep.errors import LaunchError
from farstep.launch.addresses import own_addresses
from farstep.launch.engine import Standing
from farstep.launch_config import SSHConfig

_TAIL_BYTES = 4096


class SSHEngine:
    """A session per host; a host whose session ended is used again when a node is asked for."""

    grace_s = 20.0

    def __init__(self, config: SSHConfig) -> None:
        self._config = config
        self._sessions: dict[str, Session] = {}

    def listen_on(self) -> Sequence[str]:
        return self._config.head_address or own_addresses()

    def ask(self, nodes: int, bootstrap: bytes) -> Sessions:
        program = self._config.ssh[0]
        if shutil.which(program) is None:
            raise LaunchError(f"{program!r} is not on this machine; install an ssh client (Debian: openssh-client).")
        free = [host for host in self._config.hosts if host not in self._sessions or self._sessions[host].ended]
        started = []
        for host in free[:nodes]:
            if host in self._sessions:
                self._sessions[host].end()
            self._sessions[host] = Session([*self._config.ssh, host, self._command()], host, bootstrap)
            started.append(self._sessions[host])
        return Sessions(started)

    def _command(self) -> str:
        """For the shell of the host."""
        agent = f"exec {shlex.quote(self._config.python or sys.executable)} -m farstep.launch.node_agent"
        return "\n".join([*self._config.setup, agent])

    def close(self) -> None:
        for session in self._sessions.values():
            session.end()


class Session:
    """One ssh client."""

    def __init__(self, command: Sequence[str], host: str, bootstrap: bytes) -> None:
        self.host = host
        self._log = tempfile.TemporaryFile(prefix="farstep-ssh-")  # noqa: SIM115 - closed by `end`
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
        if self._log.closed:
            return self._last_words
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES)).decode(errors="replace").rstrip()

    def end(self) -> None:
        """The agent was told to leave; whoever is still there is beyond hearing."""
        if self._log.closed:
            return
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGTERM)
            self._process.wait()
        self._last_words = self.tail()
        self._log.close()


class Sessions:
    """Sessions that were begun together (see `engine.Group`)."""

    def __init__(self, sessions: Sequence[Session]) -> None:
        self._sessions = sessions

    def standing(self) -> Standing:
        here = [session.host for session in self._sessions if not session.ended]
        gone = [session.host for session in self._sessions if session.ended]
        parts = [f"ssh {what} {', '.join(hosts)}" for what, hosts in (("runs on", here), ("ended on", gone)) if hosts]
        return Standing("; ".join(parts) or "no host of SSHConfig.hosts is free", len(here))

    def logs(self) -> str:
        return "\n".join(f"{session.host}:\n{session.tail()}" for session in self._sessions if session.tail())

    def cancel(self) -> None:
        for session in self._sessions:
            session.end()
