"""A real ssh server of Debian's package, to which only the test's own key opens."""

from __future__ import annotations

import getpass
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.engines.guarded import Engine, Guarded, free_ports, require, wait_until
from tests.engines.namespaces import Network

_PRIVATE = Path("/run/sshd")
"""An empty folder that Debian's sshd insists on if root starts it; the package's service makes it too. It stays."""


class SshServer(Engine):
    """sshd under one or several host names: `ssh -F server.config HOST COMMAND`.

    All names lead to one sshd on loopback; with `network` each of its hosts has one, and clients are to run on one of
    them, too. Killing a server ends its sessions and what runs in them.
    """

    def __init__(self, hosts: Sequence[str] = ("worker",), *, network: Network | None = None) -> None:
        self.hosts = list(hosts) if network is None else network.hosts
        self._network = network
        self._running: dict[str, Guarded] = {}

    def _start(self) -> None:
        self._sshd = require("openssh-server", "sshd")[0]  # it wants to be called by its whole path
        require("openssh-client", "ssh", "ssh-keygen")
        for name in ("host_key", "key"):
            keygen: list[str | Path] = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "farstep test"]
            keygen += ["-f", self.folder / name]
            subprocess.run(keygen, check=True, stdout=subprocess.DEVNULL)
        _PRIVATE.mkdir(mode=0o755, exist_ok=True)
        self.port = free_ports(1)[0]
        self.config = self.folder / "config"
        """A file for `ssh -F`."""
        self.config.write_text("".join(self._client_lines(host) for host in self.hosts))
        self.options = ["-F", str(self.config)]
        known = (self.folder / "host_key.pub").read_text()
        (self.folder / "known_hosts").write_text("".join(f"{host} {known}" for host in self.hosts))
        for host in self.hosts[: 1 if self._network is None else None]:
            self.start(host)

    def start(self, host: str) -> None:
        """Starts a host's server, also again after `kill`."""
        address = "127.0.0.1" if self._network is None else self._network.address(host)
        settings, log = self.folder / f"{host}.sshd_config", self.folder / f"{host}.log"
        settings.write_text(
            f"ListenAddress {address}:{self.port}\n"
            f"HostKey {self.folder}/host_key\n"
            f"AuthorizedKeysFile {self.folder}/key.pub\n"
            "PidFile none\n"
            "AuthenticationMethods publickey\n"
            "StrictModes no\n"  # the key is in /tmp, which others may write to
            "UsePAM no\n"
            "PermitRootLogin yes\n"
            "MaxStartups 100\n"
            "UseDNS no\n"
        )
        with log.open("wb") as output:
            command: list[str | Path] = [self._sshd, "-D", "-e", "-f", settings]
            options: dict[str, Any] = {"stdout": output, "stderr": output}
            if self._network is None:
                server = Guarded(command, **options)
            else:
                server = self._network.popen(host, command, **options)
        self._running[host] = self._guarded(server)
        wait_until(lambda: f"listening on {address}" in log.read_text(), "sshd", logs=[log], alive=[server])

    def kill(self, host: str | None = None) -> None:
        """The server and all sessions of a host, at once; without a host: of the only server."""
        self._running.pop(host or self.hosts[0]).end()

    def _client_lines(self, host: str) -> str:
        address = "127.0.0.1" if self._network is None else self._network.address(host)
        return (
            f"Host {host}\n"
            f"  HostName {address}\n"
            f"  HostKeyAlias {host}\n"
            f"  Port {self.port}\n"
            f"  User {getpass.getuser()}\n"
            f"  IdentityFile {self.folder}/key\n"
            f"  UserKnownHostsFile {self.folder}/known_hosts\n"
            "  IdentitiesOnly yes\n  BatchMode yes\n  StrictHostKeyChecking yes\n  ConnectTimeout 10\n"
        )
