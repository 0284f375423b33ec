"""A node daemon where its head is silent, or messages were lost."""

from __future__ import annotations

import errno
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import zmq

from farstep.errors import WireError
from farstep.launch.daemon.node_daemon import NodeDaemon, _Child
from farstep.launch.daemon.process import ProcessStarter
from farstep.launch.engines.engine import RECLAIMED
from farstep.rollout.progress import ProgressBoard
from farstep.wire import node_messages as n
from farstep.wire.channels import local
from farstep.wire.channels.local import LocalLink, local_pair
from farstep.wire.channels.memory import write_immutable
from farstep.wire.keys import KeyPair

HEAD = KeyPair.fresh()
OWN = KeyPair.fresh()
BOOTSTRAP = {
    "run": "r",
    "addresses": ["tcp://127.0.0.1:9"],
    "server_key": HEAD.public.decode(),
    "public": OWN.public.decode(),
    "secret": OWN.secret.decode(),
    "lease_s": 10.0,
    "connect_s": 60.0,
    "grace_s": 1.0,
    "start_method": "cold",
    "modules": [],
    "cpu_affinity": "off",
    "cpus_per_worker": 1,
    "workers": 1,
}
ORDER = n.StartWorker(0, 3, json.dumps({"envs": 1, "rank": 0}).encode())


class Link:
    """Takes down what is said; `full` is one whose other side has gone."""

    def __init__(self, full: bool = False) -> None:
        self.said: list[Any] = []
        self._full = full

    def send(self, frames: list[bytes]) -> None:
        if self._full:
            raise zmq.Again
        self.said.append(n.decode_from_node(frames))


def failing_daemon(monkeypatch: pytest.MonkeyPatch) -> NodeDaemon:
    """One that cannot start processes."""
    daemon = NodeDaemon(BOOTSTRAP, "")
    daemon._address = "tcp://127.0.0.1:9"  # noqa: SLF001
    monkeypatch.setattr(daemon._starter, "start", lambda *_: (_ for _ in ()).throw(OSError("no memory")))  # noqa: SLF001
    return daemon


def test_an_end_that_the_head_did_not_hear_of_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    daemon, deaf, link = failing_daemon(monkeypatch), Link(full=True), Link()
    daemon._handle(deaf, ORDER)  # type: ignore[arg-type]  # noqa: SLF001
    daemon._handle(link, ORDER)  # type: ignore[arg-type]  # noqa: SLF001
    daemon._starter.close()  # noqa: SLF001
    assert [(type(said), said.worker, said.incarnation, said.status) for said in link.said] == [
        (n.WorkerEnded, 0, 3, 127)
    ]
    assert "no memory" in link.said[0].note


def test_a_daemon_that_is_reclaimed_while_it_looks_for_its_head_says_so_by_its_status() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "farstep.launch.daemon.node_daemon"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as daemon:
        assert daemon.stdin is not None and daemon.stderr is not None
        daemon.stdin.write(json.dumps(BOOTSTRAP))
        daemon.stdin.close()
        try:
            deadline = time.monotonic() + 60
            while not handles(daemon.pid, signal.SIGTERM):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            daemon.send_signal(signal.SIGTERM)
            status = daemon.wait(60)
        finally:
            daemon.kill()
        said = daemon.stderr.read()
    assert status == RECLAIMED, said
    assert "farstep: the head answers at none of" in said


def handles(pid: int, number: signal.Signals) -> bool:
    found = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return found is not None and bool(int(found[1], 16) >> number - 1 & 1)


class MessagesOfTheHead:
    """A relay to which the head has sent one large message for each worker."""

    def __init__(self, workers: int) -> None:
        self._messages = [((worker, 0), [bytes(100_000)]) for worker in range(workers)]

    def service(self) -> None: ...

    def messages(self) -> Any:
        while self._messages:
            yield self._messages.pop(0)


def test_a_message_that_cannot_be_sent_ends_only_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, because the daemon has too many open files for a moment."""
    daemon, links = NodeDaemon(BOOTSTRAP, ""), [local_pair() for _ in range(3)]
    children = [_Child(mock.Mock(), mock.Mock(), link=ours) for ours, _ in links]
    daemon._children = {(worker, 0): child for worker, child in enumerate(children)}  # noqa: SLF001
    write, errors = write_immutable, [None, OSError(errno.EMFILE, "Too many open files"), None]

    def scarce(frames: Any) -> int:
        if (error := errors.pop(0)) is not None:
            raise error
        return write(frames)

    monkeypatch.setattr(local, "write_immutable", scarce)
    daemon._relay_messages(MessagesOfTheHead(3), set())  # type: ignore[arg-type]  # noqa: SLF001
    received = [LocalLink(theirs) for _, theirs in links]
    for worker, link in enumerate(received):
        if worker == 1:
            with pytest.raises(EOFError):
                link.receive(60)
        else:
            assert (message := link.receive(60)) is not None and len(message.frames[0]) == 100_000
    assert [child.process.kill.called for child in children] == [False, True, False]  # type: ignore[attr-defined]
    for child, link in zip(children, received, strict=True):
        if child.link is not None:
            child.link.close()
        link.close()
    daemon._starter.close()  # noqa: SLF001


def test_more_workers_than_a_node_can_have_are_not_listened_to() -> None:
    most = [(worker, 0) for worker in range(n.MOST_WORKERS)]
    assert n.decode_from_node([n.encode(n.NodeBeat("0" * 16, most))]) == n.NodeBeat("0" * 16, most)
    with pytest.raises(WireError):
        n.decode_from_node([n.encode(n.NodeBeat("0" * 16, [*most, (0, 1)]))])


def test_a_worker_that_closes_its_output_is_not_asked_for_it_again() -> None:
    """Or its daemon would find it readable for ever."""
    starter = ProcessStarter(1)
    board = ProgressBoard(1, 1)
    try:
        process = starter.start({"transport": "none", **board.bootstrap(0)}, [board.memory.fd])
        child = _Child(process, board)
        assert child.fds() == [process.exit_fd, process.output_fd]
        process.kill()
        deadline = time.monotonic() + 60
        while process.poll() is None or not child.closed_output:
            child.read()
            assert time.monotonic() < deadline
        assert child.fds() == [process.exit_fd]
        process.close()
    finally:
        starter.close()
        board.close()
