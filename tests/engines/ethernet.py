"""Switches between the hosts of a `namespaces.Network`: the kernel's bridge, or a delaying switch in user space."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from tests.engines.guarded import EngineError, Guarded, expect_line, system_path

_ROOT = Path(__file__).parents[2]


class Switch(Protocol):
    """Joins hosts, which it knows by the numbers of their ports."""

    def cut(self, port: int, is_cut: bool) -> None:
        """Whether nothing passes to and from a port."""

    def cut_pair(self, a: int, b: int, is_cut: bool) -> None:
        """Whether nothing passes between two ports."""

    def limit(self, port: int, mbit: float | None) -> None:
        """The rate of a port in each direction."""

    def lose(self, port: int | None, fraction: float) -> None:
        """The share of lost packets to and from a port; None: of all ports, in addition."""

    def close(self) -> None: ...


class Bridge:
    """The kernel's bridge, in a namespace of its own; drops by nftables, rates by tc's token bucket."""

    def __init__(self, networks: Sequence[int]) -> None:
        self._networks = networks
        self._cut: set[int] = set()
        self._pairs: set[tuple[int, int]] = set()
        self._losses: dict[int | None, float] = {}
        self._here, uts = new_namespaces()
        os.close(uts)
        mine = f"/proc/{os.getpid()}/fd"
        lines = ["link add bridge0 type bridge forward_delay 0 mcast_snooping 0", "link set bridge0 up"]
        for port, network in enumerate(networks):
            lines += [
                f"link add port{port} type veth peer name eth0 netns {mine}/{network}",
                f"link set port{port} master bridge0 up",
            ]
        in_network(self._here, ["ip", "-batch", "-"], lines)

    def cut(self, port: int, is_cut: bool) -> None:
        (self._cut.add if is_cut else self._cut.discard)(port)
        self._rule()

    def cut_pair(self, a: int, b: int, is_cut: bool) -> None:
        (self._pairs.add if is_cut else self._pairs.discard)((min(a, b), max(a, b)))
        self._rule()

    def limit(self, port: int, mbit: float | None) -> None:
        for network, device in ((self._here, f"port{port}"), (self._networks[port], "eth0")):
            bucket = f"tbf rate {mbit}mbit burst 128kb latency 100ms" if mbit else "noqueue"
            in_network(network, ["tc", "-batch", "-"], [f"qdisc replace dev {device} root {bucket}"])

    def lose(self, port: int | None, fraction: float) -> None:
        self._losses[port] = fraction
        self._rule()

    def close(self) -> None:
        os.close(self._here)

    def _rule(self) -> None:
        """Replaces all rules by those of now, at once."""
        rules = [f"{way} port{port} drop" for port in self._cut for way in ("iifname", "oifname")]
        for a, b in self._pairs:
            rules += [f"iifname port{a} oifname port{b} drop", f"iifname port{b} oifname port{a} drop"]
        for port, fraction in self._losses.items():
            for way in [""] if port is None else [f"iifname port{port}", f"oifname port{port}"]:
                rules += [f"{way} numgen random mod 1000000 < {round(fraction * 1e6)} drop"] if fraction else []
        chain = ["chain pass {", "type filter hook forward priority 0;", *rules, "}"]
        table = "table bridge farstep"
        in_network(self._here, ["nft", "-f", "-"], [table, f"delete {table}", table + " {", *chain, "}"])


class TapSwitch:
    """`tap_switch.py`, a process of its own."""

    def __init__(self, networks: Sequence[int], delay_ms: float) -> None:
        # Not isolated (-I): it imports its neighbor.
        command = [sys.executable, "-S", "-m", "tests.engines.tap_switch", str(delay_ms), *map(str, networks)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self._process = Guarded(command, pass_fds=networks, text=True, bufsize=1, cwd=_ROOT, **pipes)
        try:
            expect_line(self._process, "up", "the switch")
        except BaseException:
            self.close()
            raise

    def cut(self, port: int, is_cut: bool) -> None:
        self._tell("cut", port, int(is_cut))

    def cut_pair(self, a: int, b: int, is_cut: bool) -> None:
        self._tell("cut_pair", a, b, int(is_cut))

    def limit(self, port: int, mbit: float | None) -> None:
        self._tell("limit", port, mbit or 0)

    def lose(self, port: int | None, fraction: float) -> None:
        self._tell("lose", -1 if port is None else port, fraction)

    def close(self) -> None:
        self._process.end()

    def _tell(self, *words: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        expect_line(self._process, "ok", "the switch")


def new_namespaces(host: str = "switch") -> list[int]:
    """Descriptors of a new network and a new host name; closing them ends the namespaces."""
    command = ["unshare", "--net", "--uts", "sh", "-ec", f"hostname {host}; echo made; read end"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env=system_path(), **pipes) as maker:
        expect_line(maker, "made", "unshare")
        found = [os.open(f"/proc/{maker.pid}/ns/{kind}", os.O_RDONLY) for kind in ("net", "uts")]
        assert maker.stdin is not None
        maker.stdin.write("\n")
    return found


def in_network(network: int, command: Sequence[str], lines: Sequence[str]) -> None:
    """Runs a program of the system in a network, with lines for its stdin."""
    result = subprocess.run(
        ["nsenter", f"--net=/proc/self/fd/{network}", *command],
        input="\n".join(lines) + "\n",
        pass_fds=[network],
        env=system_path(),
        capture_output=True,
        text=True,
    )
    if result.returncode != 0:
        raise EngineError(f"{' '.join(command)}: {result.stderr}{result.stdout} (it was told: {'; '.join(lines)})")
