"""A node daemon whose head is silent or whose messages were lost."""

from __future__ import annotations

import contextlib
import errno
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from farstep.errors import WireError
from farstep.launch.daemon.node_daemon import NodeDaemon
from farstep.launch.daemon.node_worker import NodeWorker
from farstep.launch.daemon.process import ProcessStarter
from farstep.launch.engines.engine import RECLAIMED
from farstep.launch.hub import admit
from farstep.launch.nodes import send_to_node
from farstep.rollout.progress import ProgressBoard
from farstep.wire import node_messages as n
from farstep.wire.channels import local
from farstep.wire.channels.local import LocalLink, local_pair
from farstep.wire.channels.memory import write_immutable
from farstep.wire.channels.zmq import Hub
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
    "park_method": "suspend",
}
START = n.StartWorker(0, 3, json.dumps({"envs": 1, "rank": 0, "preload": {"modules": [], "path": []}}).encode())


def messages(hub: Hub) -> Iterator[Any]:
    """The messages of node daemons that arrive within 60 seconds."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for _, received in hub.drain():
            yield n.decode_from_node(received.frames)
        time.sleep(0.01)


def test_end_of_a_worker_is_reported_again_until_the_head_received_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head repeats a request if it has heard nothing of the worker."""
    starts = mock.Mock(side_effect=OSError("no memory"))
    monkeypatch.setattr(ProcessStarter, "start", starts)
    with contextlib.closing(Hub("tcp://127.0.0.1:*", reliable=True)) as hub:
        daemon = NodeDaemon({**BOOTSTRAP, "addresses": [hub.address], **admit(hub, -1, 0)}, "")
        serving = threading.Thread(target=daemon.run)
        serving.start()
        said = messages(hub)
        node = next(message.node for message in said if isinstance(message, n.NodeHello))
        try:
            for _ in range(2):
                send_to_node(hub, node, START)
                ended = next(message for message in said if isinstance(message, n.WorkerEnded))
                assert (ended.worker, ended.incarnation, ended.status) == (0, 3, 127)
                assert "no memory" in ended.note
        finally:
            send_to_node(hub, node, n.Leave("the end"))
            serving.join(60)
    assert starts.call_count == 1


def test_worker_that_the_zygote_refused_does_not_use_the_restart_budget() -> None:
    """Its replacement starts cold, and must not use the restart budget."""
    with contextlib.closing(Hub("tcp://127.0.0.1:*", reliable=True)) as hub:
        zygote = {"start_method": "zygote", "modules": ["no_such_module"]}
        daemon = NodeDaemon({**BOOTSTRAP, **zygote, "addresses": [hub.address], **admit(hub, -1, 0)}, "")
        serving = threading.Thread(target=daemon.run)
        serving.start()
        said = messages(hub)
        node = next(message.node for message in said if isinstance(message, n.NodeHello))
        try:
            send_to_node(hub, node, START)
            ended = next(message for message in said if isinstance(message, n.WorkerEnded))
        finally:
            send_to_node(hub, node, n.Leave("the end"))
            serving.join(60)
    assert (ended.note, ended.blameless) == ("the process that forks workers could not start it", True)


def test_daemon_that_is_reclaimed_while_it_reconnects_ends_with_its_status() -> None:
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


def test_a_message_that_cannot_be_sent_ends_only_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, because the daemon has too many open files for a moment."""
    links = [local_pair() for _ in range(3)]
    workers = [NodeWorker(number, mock.Mock(), mock.Mock(), link=ours) for number, (ours, _) in enumerate(links)]
    write, errors = write_immutable, [None, OSError(errno.EMFILE, "Too many open files"), None]

    def scarce(frames: Any) -> int:
        if (error := errors.pop(0)) is not None:
            raise error
        return write(frames)

    monkeypatch.setattr(local, "write_immutable", scarce)
    for worker in workers:
        worker.pass_on([bytes(100_000)])
        worker.pass_on()
    received = [LocalLink(theirs) for _, theirs in links]
    for number, link in enumerate(received):
        if number == 1:
            with pytest.raises(EOFError):
                link.receive(60)
        else:
            assert (message := link.receive(60)) is not None and len(message.frames[0]) == 100_000
    assert [worker.process.kill.called for worker in workers] == [False, True, False]  # type: ignore[attr-defined]
    for worker, link in zip(workers, received, strict=True):
        worker.close_link()
        link.close()


def test_heartbeat_with_too_many_workers_is_refused() -> None:
    most = [(worker, 0) for worker in range(n.MOST_WORKERS)]
    assert n.decode_from_node([n.encode(n.NodeBeat("0" * 16, most))]) == n.NodeBeat("0" * 16, most)
    with pytest.raises(WireError):
        n.decode_from_node([n.encode(n.NodeBeat("0" * 16, [*most, (0, 1)]))])


def test_closed_output_of_a_worker_is_not_read_again() -> None:
    """Otherwise its daemon would poll a closed pipe in a busy loop."""
    starter = ProcessStarter(1)
    board = ProgressBoard(1, 1)
    try:
        process = starter.start({"transport": "none", **board.bootstrap(0)}, [board.memory.fd])
        child = NodeWorker(0, process, board)
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
