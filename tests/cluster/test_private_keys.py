"""Keys are in no arguments, environments, logs or counters, and heads listen only where they must."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from farstep.testing import TableAgent
from farstep.wire.keys import KeyPair, Tokens
from tests.cluster.checks import cluster, worker_pids


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
def test_keys_are_in_no_argument_environment_log_or_counter(
    transport: str, issued: dict[tuple[int, int], KeyPair], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with cluster(workers=2, transport=transport) as env:
        env.collect(TableAgent(), steps=4)
        seen = [caplog.text, repr(env.stats()), repr(env), repr(issued)]
        pids = worker_pids()
        for pid in pids:
            folder = Path(f"/proc/{pid}")
            seen += [(folder / name).read_text(errors="replace") for name in ("cmdline", "environ")]
    assert len(issued) == len(pids) == 2
    for pair in issued.values():
        for secret in (pair.secret, Tokens(pair).fresh(), pair.route, pair.derived(b"bulk").hex().encode()):
            assert not any(secret.decode() in text for text in seen)


def listening() -> set[tuple[str, str]]:
    """Inode and address, in hexadecimal, of each TCP socket on which this process listens."""
    tables = [Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6")]
    own = {str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.exists() or fd.is_symlink()}
    sockets = [line.split() for table in tables for line in table.splitlines()[1:]]
    found = {(inode, local) for _, local, _, state, *_, inode in (s[:10] for s in sockets) if state == "0A"}
    return {(inode, local) for inode, local in found if f"socket:[{inode}]" in own}


def test_a_local_run_listens_on_loopback_only() -> None:
    before = listening()
    with cluster(workers=1, transport="tcp") as env:
        env.launch()
        addresses = [local.partition(":")[0] for _, local in listening() - before]
        assert addresses == ["0100007F", "0100007F"]  # for messages, and for bulk data


def test_a_run_with_shared_memory_does_not_listen_at_all() -> None:
    before = listening()
    with cluster(workers=1) as env:
        env.launch()
        assert listening() == before
