"""Coordinators and runs of different versions refuse each other with a text; neither hangs nor tries again."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import farstep
from farstep.elastic.coordinator.coordinator import Coordinator
from farstep.elastic.coordinator.messages import PROTOCOL, Register
from farstep.elastic.coordinator.server import PACKET_BYTES, CoordinatorServer, connect, read_status, socket_path
from farstep.testing import CountingEnv

REGISTER: dict[str, Any] = {"type": "register", "workload": "a", "name": "a", "priority": 1, "minimum": 1, "wanted": 1}
"""As version 1 sends it."""


def launch(name: str) -> None:
    source = {"type": "factory", "env_name": CountingEnv, "envs_per_node": 2}
    farstep.ClusterEnv(source, farstep.LocalConfig(workers_per_node=1, coordinator=name)).launch()


def exchange(client: socket.socket, message: dict[str, Any]) -> Any:
    client.send(msgspec.msgpack.encode(message))
    return msgspec.msgpack.decode(client.recv(PACKET_BYTES))


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Path]:
    server = CoordinatorServer(tmp_path / "c", slots=1)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield tmp_path / "c"
    finally:
        server.stop()
        thread.join()


@contextlib.contextmanager
def peer(folder: Path, *answers: dict[str, Any]) -> Iterator[list[Any]]:
    """A coordinator of another version: it answers the first message of each connection. Yields all messages."""
    folder.mkdir(mode=0o700)
    received: list[Any] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        with socket_path(folder) as path:
            listener.bind(path)
        listener.listen()

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    with client:
                        packet = client.recv(PACKET_BYTES)
                        if not packet:
                            return
                        received.append(msgspec.msgpack.decode(packet))
                        for answer in answers:
                            workload = received[-1].get("workload", "")
                            client.send(msgspec.msgpack.encode({**answer, "workload": workload}))
                        while packet := client.recv(PACKET_BYTES):
                            received.append(msgspec.msgpack.decode(packet))

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield received
        finally:
            connect(folder, 5.0).close()  # ends the thread
            thread.join()


@pytest.mark.parametrize(
    "message",
    [REGISTER, {"type": "register", "protocol": PROTOCOL + 1, "workload": "a", "team": 1}, {"type": "status"}],
)
def test_client_of_another_version_is_refused_once_and_ignored_then(coordinator: Path, message: dict[str, Any]) -> None:
    with connect(coordinator, 5.0) as client:
        refused = exchange(client, message)
        assert refused["type"] == "refused" and refused["workload"] == message.get("workload", "")
        assert f"version {PROTOCOL} " in refused["reason"] and "same version of farstep" in refused["reason"]
        assert f"version {message.get('protocol', 1)};" in refused["reason"]
        for _ in range(3):
            client.send(msgspec.msgpack.encode({"type": "heartbeat", "workload": "a"}))
        assert read_status(str(coordinator))[1] == []
        client.setblocking(False)
        with pytest.raises(BlockingIOError):  # otherwise an old client would register again and again
            client.recv(PACKET_BYTES)


def test_run_refuses_an_older_coordinator_and_leaves(tmp_path: Path) -> None:
    grant = {"type": "grant-slots", "slots": 1, "round": 1}
    named = rf"version 1 .* version {PROTOCOL}; restart it"
    with peer(tmp_path / "c", grant) as received, pytest.raises(farstep.ConfigError, match=named):
        launch(str(tmp_path / "c"))
    assert [message["type"] for message in received] == ["register", "leave"]


def test_run_refuses_a_newer_coordinator(tmp_path: Path) -> None:
    refused = {"type": "refused", "reason": "it uses version 9"}
    with peer(tmp_path / "c", refused), pytest.raises(farstep.ConfigError, match="version 9"):
        launch(str(tmp_path / "c"))


def test_answer_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with peer(tmp_path / "c", {"type": "hello"}), pytest.raises(farstep.ConfigError, match="another version"):
        launch(str(tmp_path / "c"))


def test_status_of_another_version_is_refused(tmp_path: Path) -> None:
    status = {"type": "status-end", "slots": 1, "devices": 0, "lease_s": 10.0, "pid": 1}
    with peer(tmp_path / "c", status), pytest.raises(farstep.LaunchError, match=rf"version 1 .* version {PROTOCOL}"):
        read_status(str(tmp_path / "c"))


def test_state_of_another_version_is_refused_while_it_has_runs() -> None:
    coordinator = Coordinator(1)
    without_runs = coordinator.save().replace(b'"protocol":%d' % PROTOCOL, b'"protocol":1')
    assert Coordinator.load(without_runs, 1).workloads == ()
    coordinator.handle(Register("a", "a", 1, 1, 1), 0.0)
    with pytest.raises(farstep.ConfigError, match=rf"version 1 .* version {PROTOCOL}"):
        Coordinator.load(coordinator.save().replace(b'"protocol":%d' % PROTOCOL, b'"protocol":1'), 1)
