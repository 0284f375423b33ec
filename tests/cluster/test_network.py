"""Head and workers on separate hosts: broken and slow links, partitions, and address translation."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.checks import assert_balanced, eventually
from tests.engines.namespaces import Network
from tests.engines.ssh_hosts import SshServer

pytestmark = pytest.mark.timeout(300)
HERE = Path(__file__).parent


class FarHead:
    """A head on host h1 that collects from node daemons on the others."""

    def __init__(
        self,
        network: Network,
        server: SshServer,
        folder: Path,
        steps: int,
        size: int,
        hosts: Sequence[str] = (),
        ssh: Sequence[str] = (),
        inference: Any = "local",
        **options: Any,
    ) -> None:
        asked = {
            "hosts": [*hosts] or network.hosts[1:],
            "ssh": ["ssh", "-T", *server.options, *ssh],
            "options": {"workers_per_node": 1, "head_address": network.address("h1"), **options},
            "steps": steps,
            "size": size,
            "inference": inference,
        }
        self._log = folder / "head.log"
        with self._log.open("wb") as log:
            self.process = network.popen(
                "h1",
                [sys.executable, str(HERE / "far_head.py"), json.dumps(asked)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.batches: list[dict[str, Any]] = []
        self.stats: dict[str, Any] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            found = json.loads(line)
            self.stats = found.get("stats", {})
            if not self.stats:
                self.batches.append(found)

    def kill_alone(self) -> None:
        """The head, with nothing that it started: its ssh sessions stay."""
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                words = path.read_bytes().split(b"\0")
                if words[1:2] == [str(HERE / "far_head.py").encode()]:
                    os.kill(int(path.parent.name), signal.SIGKILL)
        self.process.wait(30)

    def wait_for(self, batches: int, columns: int, seconds: float = 90.0) -> None:
        """Wait for `batches` more batches of that width, and check that all rows are consecutive."""
        first = len(self.batches)
        try:
            eventually(lambda: sum(b["columns"] == columns for b in self.batches[first:]) >= batches, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.batches[-5:]}\n{self._log.read_text()[-3000:]}") from None
        assert all(batch["follows"] for batch in self.batches), self.batches

    def finish(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self._reader.join(60)
        assert self.stats, self._log.read_text()[-3000:]
        assert all(batch["follows"] for batch in self.batches)
        assert_balanced(self.stats)
        return self.stats


@contextmanager
def far_head(
    folder: Path, hosts: int = 3, steps: int = 16, size: int = 0, network: Any = None, **options: Any
) -> Iterator[Any]:
    with Network([f"h{i + 1}" for i in range(hosts)], **(network or {})) as net, SshServer(network=net) as server:
        head = FarHead(net, server, folder, steps, size, **options)
        try:
            yield net, head
        finally:
            head.process.end()


@pytest.mark.parametrize(
    "options", [{}, {"relay": True}, {"inference": {"where": "head"}}], ids=["direct", "relay", "served"]
)
def test_a_broken_link_that_comes_back_within_the_lease_loses_nothing(tmp_path: Path, options: dict[str, Any]) -> None:
    """Nor does a link on which a chunk takes more than a second."""
    with far_head(tmp_path, size=100_000, lease_s=30, **options) as (net, head):
        head.wait_for(5, columns=4)
        for _ in range(3):
            net.cut("h2")
            time.sleep(2.0)
            net.heal("h2")
            head.wait_for(3, columns=4)
        net.limit("h2", 20)
        head.wait_for(3, columns=4)
        stats = head.finish()
        assert stats["workers"]["restarts"] == 0
        assert not stats["dropped"]


@pytest.mark.parametrize("relay", [False, True], ids=["direct", "relay"])
def test_a_host_that_is_cut_off_for_longer_is_lost_and_joins_again(tmp_path: Path, relay: bool) -> None:
    """Then it crashes, and training continues without it."""
    with far_head(tmp_path, min_nodes=1, lease_s=4, relay=relay) as (net, head):
        head.wait_for(5, columns=4)
        net.cut("h3")
        head.wait_for(3, columns=2)  # the others continue
        net.heal("h3")
        head.wait_for(3, columns=4)
        net.crash("h3")
        head.wait_for(10, columns=2)
        head.finish()


def test_a_node_behind_a_router_that_translates_addresses(tmp_path: Path) -> None:
    """h3 is a router between h1 and h2; only the ssh that starts the node daemon can connect to h2 from outside."""
    with Network(["h1", "h2", "h3"]) as net, SshServer(network=net) as server:
        for key, value in (("ip_forward", 1), ("conf/all/send_redirects", 0), ("conf/eth0/send_redirects", 0)):
            net.run("h3", ["sh", "-c", f"echo {value} > /proc/sys/net/ipv4/{key}"])
        chain = "add table ip nat; add chain ip nat out { type nat hook postrouting priority 100; }"
        net.run("h3", ["nft", f"{chain}; add rule ip nat out ip saddr {net.address('h2')} masquerade"])
        net.run("h2", ["ip", "route", "add", net.address("h1"), "via", net.address("h3")])
        net.cut_pair("h1", "h2")
        jump = ["-o", f"ProxyCommand=ssh {' '.join(server.options)} h3 -W %h:%p"]
        head = FarHead(net, server, tmp_path, 16, 100_000, hosts=["h2"], ssh=jump)
        try:
            head.wait_for(5, columns=2)
            peers = {line.split()[-1].rpartition(":")[0] for line in net.run("h1", ["ss", "-Htn"]).splitlines()}
            assert peers == {net.address("h3")}
            assert not head.finish()["dropped"]
        finally:
            head.process.end()


@pytest.mark.parametrize("relay", [False, True], ids=["direct", "relay"])
def test_a_slow_lossy_line(tmp_path: Path, relay: bool) -> None:
    slow = {"delay_ms": 25, "loss": 0.01, "rate_mbit": 100}
    with far_head(tmp_path, size=20_000, network=slow, relay=relay) as (_, head):
        head.wait_for(10, columns=4)
        stats = head.finish()
        assert stats["workers"]["restarts"] == 0
        assert not stats["dropped"]


def test_daemons_and_workers_end_when_their_head_does(tmp_path: Path) -> None:
    with far_head(tmp_path, lease_s=4) as (net, head):
        head.wait_for(2, columns=4)
        running = net.run("h2", ["ps", "-ewwo", "args"])
        assert "farstep.launch.daemon.node_daemon" in running and "farstep.worker" in running
        head.kill_alone()
        eventually(lambda: "farstep." not in net.run("h2", ["ps", "-ewwo", "args"]), 15)
