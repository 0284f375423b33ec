"""Several hosts on one machine: each with a network, a host name and shared memory of its own.

Namespaces have no names here: open descriptors of this process keep them, so they go with it, however it ends, and
two runs of the tests never meet, though all use the same addresses.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.engines.ethernet import Bridge, Switch, TapSwitch, in_network, new_namespaces
from tests.engines.guarded import Engine, EngineError, Guarded, expect_line, require, require_root


class Network(Engine):
    """Hosts on one Ethernet, not joined to anything else; needs root.

    `delay_ms` is one way between any two hosts, `loss` is of each packet, `rate_mbit` is of each host's link in either
    direction. With a delay packets pass through a switch in user space, as no kernel module for it is needed then.
    Hosts share the file system, but for /dev/shm and /etc/hosts; with `debian_hosts` a host's own name leads to
    127.0.1.1, as Debian's installer sets it up.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        *,
        delay_ms: float = 0.0,
        loss: float = 0.0,
        rate_mbit: float | None = None,
        debian_hosts: bool = False,
    ) -> None:
        if len(set(hosts)) != len(hosts) or not 1 <= len(hosts) <= 200:
            raise ValueError(f"hosts need between 1 and 200 different names, got {list(hosts)}")
        self.hosts = list(hosts)
        self._delay_ms, self._loss, self._rate_mbit, self._debian_hosts = delay_ms, loss, rate_mbit, debian_hosts
        self._links: dict[str, list[int]] = {}
        """Descriptors of a host's network and host name, which outlive a crash."""
        self._machines: dict[str, Guarded] = {}
        """The first program of each host, with which all others end."""

    def _start(self) -> None:
        require("iproute2", "ip", "tc")
        require("nftables", "nft")
        require("util-linux", "unshare", "nsenter")
        require("mount", "mount")
        require("hostname", "hostname")
        require_root("network namespaces")
        for host in self.hosts:
            self._links[host] = new_namespaces(host)
            for descriptor in self._links[host]:
                self._stack.callback(os.close, descriptor)
        networks = [self._links[host][0] for host in self.hosts]
        self._switch: Switch = TapSwitch(networks, self._delay_ms) if self._delay_ms else Bridge(networks)
        self._stack.callback(self._switch.close)
        for host, network in zip(self.hosts, networks, strict=True):
            lines = ["link set lo up", f"address add {self.address(host)}/24 dev eth0", "link set eth0 up"]
            in_network(network, ["ip", "-batch", "-"], lines)
            if self._rate_mbit:
                self.limit(host, self._rate_mbit)
            self._boot(host)
        if self._loss:
            self._switch.lose(None, self._loss)

    def address(self, host: str) -> str:
        """The host's only address but for loopback."""
        return f"10.77.0.{self._port(host) + 1}"

    def popen(self, host: str, command: Sequence[str | Path], **options: Any) -> Guarded:
        """Starts a program on a host; killing it kills all that it started. It ends with the network."""
        self._port(host)  # or it is unknown
        machine = self._machines[host].pid
        paths = [f"/proc/{machine}/ns/{kind}" for kind in ("mnt", "pid_for_children")]
        inside = [os.open(path, os.O_RDONLY) for path in paths]
        try:
            return self._guarded(Guarded(command, [*self._links[host], *inside], **options))
        finally:
            for descriptor in inside:
                os.close(descriptor)

    def run(self, host: str, command: Sequence[str | Path], timeout_s: float = 30.0, **options: Any) -> str:
        """What a program on a host writes to stdout, when it has ended well."""
        process = self.popen(host, command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
        try:
            output, errors = process.communicate(timeout=timeout_s)
        finally:
            process.end()
        if process.returncode != 0:
            raise EngineError(f"{' '.join(map(str, command))} on {host} ended with {process.returncode}: {errors}")
        return str(output)

    def crash(self, host: str) -> None:
        """A short power failure: all processes of a host and its shared memory are gone."""
        self._machines.pop(host).end()
        self._boot(host)

    def cut(self, host: str) -> None:
        """Drop all packets to and from a host silently."""
        self._switch.cut(self._port(host), True)

    def heal(self, host: str) -> None:
        self._switch.cut(self._port(host), False)

    def cut_pair(self, a: str, b: str) -> None:
        """Drop all packets between two hosts, while both reach all others."""
        self._switch.cut_pair(self._port(a), self._port(b), True)

    def heal_pair(self, a: str, b: str) -> None:
        self._switch.cut_pair(self._port(a), self._port(b), False)

    def limit(self, host: str, mbit: float | None) -> None:
        """The rate of a host's link in either direction; None for no limit."""
        self._switch.limit(self._port(host), mbit)

    def lose(self, host: str, fraction: float) -> None:
        """The additional rate of lost packets from and to a host, besides the network's own `loss`."""
        self._switch.lose(self._port(host), fraction)

    def _port(self, host: str) -> int:
        if host not in self.hosts:
            raise EngineError(f"no host {host!r} in this network; there are {', '.join(self.hosts)}")
        return self.hosts.index(host)

    def _boot(self, host: str) -> None:
        """Starts the first program of a host."""
        names = self.folder / f"{host}.hosts"
        mine = {host: "127.0.1.1"} if self._debian_hosts else {}
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        lines += [f"{mine.get(other) or self.address(other)} {other}" for other in self.hosts]
        names.write_text("\n".join(lines) + "\n")
        setup = f"mount --bind {names} /etc/hosts; mount -t tmpfs -o mode=1777 tmpfs /dev/shm; echo up; exec sleep inf"
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self._machines[host] = self._guarded(Guarded(["sh", "-ec", setup], self._links[host], **pipes))
        expect_line(self._machines[host], "up", host)
