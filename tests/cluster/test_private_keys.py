"""Where keys are not: in arguments, environments, logs and counters; and who can reach a head's sockets."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from farstep.testing import TableAgent
from farstep.wire.keys import KeyPair, Tokens
from tests.cluster.checks import cluster


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
def test_keys_are_in_no_argument_environment_log_or_counter(
    transport: str, issued: dict[tuple[int, int], KeyPair], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with cluster(workers=2, transport=transport) as env:
        env.collect(TableAgent(), steps=4)
        server = env._launched().collector.server  # noqa: SLF001
        seen = [caplog.text, repr(env.stats()), repr(env), repr(issued)]
        for record in server.records:
            folder = Path(f"/proc/{record.pid}")
            seen += [(folder / name).read_text(errors="replace") for name in ("cmdline", "environ")]
    assert len(issued) == 2
    for pair in issued.values():
        for secret in (pair.secret, Tokens(pair).fresh(), pair.route, pair.derived(b"bulk").hex().encode()):
            assert not any(secret.decode() in text for text in seen)


def test_a_local_run_listens_on_loopback_only() -> None:
    with cluster(workers=1, transport="tcp") as env:
        env.launch()
        hub = env._launched().collector.server.supervisor.launcher._hub  # type: ignore[attr-defined]  # noqa: SLF001
        ports = {int(port) for port in (hub.address.rpartition(":")[2], hub.bulk_port)}
        listening = re.findall(r"^ *\d+: (\w+):(\w+) \w+:\w+ 0A", Path("/proc/net/tcp").read_text(), re.MULTILINE)
        assert {host for host, port in listening if int(port, 16) in ports} == {"0100007F"}


def test_a_run_with_shared_memory_does_not_listen_at_all() -> None:
    def listening() -> set[str]:
        tables = [Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6")]
        own = {str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.exists() or fd.is_symlink()}
        inodes = {line.split()[9] for table in tables for line in table.splitlines()[1:] if line.split()[3] == "0A"}
        return {inode for inode in inodes if f"socket:[{inode}]" in own}

    before = listening()
    with cluster(workers=1) as env:
        env.launch()
        assert listening() == before
