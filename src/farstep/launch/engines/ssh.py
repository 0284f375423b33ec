"""Starts node daemons through ssh. Each daemon reads the head's address and its keys from its standard input."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence

from farstep.config.launch import SSHConfig
from farstep.errors import LaunchError
from farstep.launch.addresses import own_addresses
from farstep.launch.engines.engine_processes import EngineProcess, EngineProcesses, after_setup, end_processes


class SSHEngine:
    """Starts one ssh session per host. When a session has ended, later requests can use its host.

    Args:
        config: How to log in, and how to start node daemons.
        hosts: The hosts. None: those of `config`.
    """

    grace_s = 20.0

    def __init__(self, config: SSHConfig, hosts: Sequence[str] | None = None) -> None:
        self._config = config
        self._hosts = config.hosts if hosts is None else hosts
        self._sessions: dict[str, EngineProcess] = {}

    def listen_on(self) -> Sequence[str]:
        return self._config.head_address or own_addresses()

    def request(self, nodes: int, bootstrap: bytes) -> EngineProcesses:
        program = self._config.ssh[0]
        if shutil.which(program) is None:
            raise LaunchError(f"{program!r} is not on this machine; install an ssh client (Debian: openssh-client).")
        free = [host for host in self._hosts if host not in self._sessions or self._sessions[host].ended]
        started = []
        for host in free[:nodes]:
            if host in self._sessions:
                self._sessions[host].close()
            self._sessions[host] = EngineProcess([*self._config.ssh, host, self._command(host)], host, bootstrap)
            started.append(self._sessions[host])
        return EngineProcesses("ssh", started)

    def _command(self, host: str) -> str:
        """The command for the shell of the host."""
        python, place = shlex.quote(self._config.python or sys.executable), shlex.quote(f"ssh {host}")
        return after_setup(self._config.setup, f"{python} -m farstep.launch.daemon.node_daemon --place {place}")

    def close(self) -> None:
        end_processes(list(self._sessions.values()))
