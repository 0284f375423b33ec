"""Links refuse malformed packets, and ZeroMQ links refuse peers without a key."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from farstep.errors import WireError
from farstep.wire import node_messages as n
from farstep.wire.channels.dealer import DealerLink
from farstep.wire.channels.local import LocalLink, local_pair
from farstep.wire.channels.memory import write_immutable
from farstep.wire.channels.zmq import MAIN, Hub
from farstep.wire.codec import Limits, frame_lengths
from farstep.wire.keys import KeyPair
from farstep.wire.messages import Hello, decode_from_worker, encode

pytestmark = pytest.mark.slow  # real processes

F_ADD_SEALS = 1033
SHRINK, GROW, WRITE = 2, 4, 8
IMMUTABLE = SHRINK | GROW | WRITE

# ---- local links ----


@pytest.fixture
def local() -> Iterator[tuple[LocalLink, socket.socket]]:
    """The head's link and a worker's raw socket, on which anything can be written."""
    link, raw = local_pair()
    with contextlib.closing(link), raw:
        yield link, raw


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def memory(content: bytes, size: int | None = None, seals: int = IMMUTABLE) -> int:
    fd = os.memfd_create("farstep-test", os.MFD_ALLOW_SEALING)
    os.write(fd, content)
    if size is not None:
        os.ftruncate(fd, size)
    fcntl.fcntl(fd, F_ADD_SEALS, seals)
    return fd


BROKEN = {
    "no-table": b"I",
    "half-a-table": b"I" + struct.pack("<IQ", 3, 1),
    "unknown-kind": b"X" + frame_lengths([1]) + b"x",
    "too-many-frames": b"I" + struct.pack("<I", 2**32 - 1),
    "too-long": b"I" + frame_lengths([3]) + b"abcd",
    "too-short": b"I" + frame_lengths([3]) + b"ab",
    "memory-missing": b"M" + frame_lengths([3]),
    "oversized": b"M" + frame_lengths([Limits.MESSAGE_BYTES, 1]),
    "overflowing": b"I" + frame_lengths([2**64 - 1, 2**64 - 1, 3]) + b"a",
    "truncated-by-the-kernel": b"I" + frame_lengths([150_000]) + b"a" * 150_000,
}


@pytest.mark.parametrize("packet", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("with_descriptor", [False, True], ids=["plain", "with-descriptor"])
def test_a_broken_packet_is_refused(
    local: tuple[LocalLink, socket.socket], packet: bytes, with_descriptor: bool
) -> None:
    link, raw = local
    before = descriptors()
    if with_descriptor:
        fd = memory(b"ab")  # one byte less than "memory-missing" promises
        socket.send_fds(raw, [packet], [fd])
        os.close(fd)
    else:
        raw.send(packet)
    with pytest.raises(WireError):
        link.receive(10.0)
    assert descriptors() == before


SIZE = Limits.MESSAGE_BYTES
UNFIT = {
    "shorter-than-its-table": ({"content": b"not that much"}, "of 13 bytes; its frame table says"),
    "longer-than-its-table": ({"content": b"", "size": SIZE + 1}, f"of {SIZE + 1} bytes; its frame table says"),
    "all-holes": ({"content": b"", "size": SIZE}, "of which 0 were written"),
    "nearly-all-holes": ({"content": b"x" * 4096, "size": SIZE}, "of which 4096 were written"),
    "shrinkable": ({"content": b"", "size": SIZE, "seals": GROW | WRITE}, "can still change"),
    "writable": ({"content": b"", "size": SIZE, "seals": SHRINK | GROW}, "can still change"),
}


@pytest.mark.parametrize(("made", "said"), UNFIT.values(), ids=UNFIT)
def test_memory_that_differs_from_its_announcement_is_never_read(
    local: tuple[LocalLink, socket.socket], made: dict[str, Any], said: str
) -> None:
    link, raw = local
    before, open_before = resident_bytes(), descriptors()
    fd = memory(**made)
    socket.send_fds(raw, [b"M" + frame_lengths([SIZE])], [fd])
    os.close(fd)
    with pytest.raises(WireError, match=said):
        link.receive(10.0)
    assert descriptors() == open_before
    assert resident_bytes() - before < 16 << 20


def test_file_in_place_of_a_memfd_is_refused(local: tuple[LocalLink, socket.socket], tmp_path: Path) -> None:
    link, raw = local
    (tmp_path / "file").write_bytes(b"abc")
    with (tmp_path / "file").open("rb") as file:
        socket.send_fds(raw, [b"M" + frame_lengths([3])], [file.fileno()])
    with pytest.raises(WireError, match=r"not in a memfd|can still change"):
        link.receive(10.0)


def test_an_unread_large_message_takes_no_memory(local: tuple[LocalLink, socket.socket]) -> None:
    link, raw = local
    size = 64 << 20
    fd = write_immutable([b"header", bytes(size)])
    socket.send_fds(raw, [b"M" + frame_lengths([6, size])], [fd])
    os.close(fd)
    before, open_before = resident_bytes(), descriptors()
    received = link.receive(10.0)
    assert received is not None and bytes(received.frames[0]) == b"header" and len(received.frames[1]) == size
    assert resident_bytes() - before < 16 << 20
    del received
    assert descriptors() == open_before


def test_a_large_message_must_be_in_memory(local: tuple[LocalLink, socket.socket]) -> None:
    link, raw = local
    reader, writer = os.pipe()  # reading it would block forever
    socket.send_fds(raw, [b"M" + frame_lengths([3])], [reader])
    os.close(reader)
    os.close(writer)
    with pytest.raises(WireError):
        link.receive(10.0)


def test_more_descriptors_than_a_message_has_are_refused(local: tuple[LocalLink, socket.socket]) -> None:
    link, raw = local
    before = descriptors()
    socket.send_fds(raw, [b"I" + frame_lengths([0])], [0] * 20)
    with pytest.raises(WireError):
        link.receive(10.0)
    assert descriptors() == before


def test_an_empty_packet_is_the_end_and_leaks_nothing(local: tuple[LocalLink, socket.socket]) -> None:
    link, raw = local
    before = descriptors()
    socket.send_fds(raw, [b""], [0])
    with pytest.raises(EOFError):
        link.receive(10.0)
    assert descriptors() == before


def test_received_descriptors_are_not_inherited(local: tuple[LocalLink, socket.socket]) -> None:
    link, raw = local
    socket.send_fds(raw, [b"I" + frame_lengths([0])], [0])
    received = link.receive(10.0)
    assert received is not None and not os.get_inheritable(received.fds[0])
    os.close(received.fds[0])


def test_a_head_never_waits_for_a_worker_that_does_not_read() -> None:
    link, raw = local_pair()
    before = descriptors()
    for _ in range(500):
        link.send([b"x" * 30_000])  # far more than a socket holds
    for _ in range(100):
        link.send([b"y" * 100_000])
    assert not link.flush()
    raw.close()
    link.close()
    assert descriptors() == before - 2


# ---- ZeroMQ ----


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub("tcp://127.0.0.1:*")
    yield hub
    hub.close()


def test_an_address_that_is_taken_is_an_error_and_no_hang(hub: Hub) -> None:
    with pytest.raises(zmq.ZMQError):
        Hub(hub.address)


class Client:
    """A peer that says of itself what it likes; `outcome` is what became of its connection."""

    def __init__(self, hub: Hub, pair: KeyPair | None, server_key: bytes, route: bytes = b"anybody" + MAIN) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.routing_id = route
        self.socket.reconnect_ivl = -1  # one attempt
        if pair is not None:
            self.socket.curve_serverkey = server_key
            self.socket.curve_publickey, self.socket.curve_secretkey = pair.public, pair.secret
        self._events = self.socket.get_monitor_socket()
        self.socket.connect(hub.address)
        with contextlib.suppress(zmq.Again):  # refused already
            self.socket.send_multipart([b"let me in"], flags=zmq.DONTWAIT)

    def outcome(self, hub: Hub) -> tuple[str, list[tuple[int, bytes]]]:
        """Serve the hub until the connection is settled: how, and what the hub took in."""
        taken: list[tuple[int, bytes]] = []
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            taken += [(peer.worker, bytes(received.frames[0])) for peer, received in hub.drain()]
            if taken:
                return "admitted", taken
            while self._events.poll(0):
                event = recv_monitor_message(self._events)["event"]
                if event in (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED, zmq.EVENT_HANDSHAKE_FAILED_AUTH):
                    return "refused", taken
            poll = select.poll()
            for fd in (*hub.filenos(), int(self._events.fd)):
                poll.register(fd, select.POLLIN)
            poll.poll(20)
        raise AssertionError("neither admitted nor refused")

    def close(self) -> None:
        self.socket.disable_monitor()
        self._events.close(linger=0)
        self._context.destroy(linger=0)


def settle(hub: Hub, pair: KeyPair | None, server_key: bytes | None = None) -> tuple[str, list[tuple[int, bytes]]]:
    with contextlib.closing(Client(hub, pair, server_key or hub.keys.public)) as client:
        return client.outcome(hub)


def test_an_issued_key_is_admitted(hub: Hub) -> None:
    assert settle(hub, hub.admit(5, 0)) == ("admitted", [(5, b"let me in")])


def test_an_unknown_key_is_rejected(hub: Hub) -> None:
    hub.admit(0, 0)
    for _ in range(3):
        assert settle(hub, KeyPair.fresh()) == ("refused", [])


def test_a_plain_text_client_is_rejected(hub: Hub) -> None:
    hub.admit(0, 0)
    for _ in range(3):
        assert settle(hub, None) == ("refused", [])


def test_knowing_a_public_key_is_not_enough(hub: Hub) -> None:
    issued = hub.admit(0, 0)
    assert settle(hub, KeyPair(issued.public, KeyPair.fresh().secret)) == ("refused", [])


def test_a_worker_rejects_another_head(hub: Hub) -> None:
    assert settle(hub, hub.admit(0, 0), server_key=KeyPair.fresh().public) == ("refused", [])


def test_a_key_is_revoked_with_its_worker(hub: Hub) -> None:
    old = hub.admit(0, 0)
    new = hub.admit(0, 1)
    assert settle(hub, old) == ("refused", [])
    assert settle(hub, new)[0] == "admitted"
    hub.expel(0)
    assert settle(hub, new) == ("refused", [])


def test_a_worker_cannot_send_or_receive_for_another(hub: Hub) -> None:
    victim, liar = hub.admit(1, 0), hub.admit(2, 0)
    with contextlib.closing(Client(hub, liar, hub.keys.public, route=victim.public[:16] + MAIN)) as client:
        assert client.outcome(hub) == ("admitted", [(2, b"let me in")])  # it is what its key says
        hub.send(1, [b"for worker 1"])
        hub.send(2, [b"for worker 2"])
        assert client.socket.poll(30_000)
        assert client.socket.recv_multipart() == [b"for worker 2"]


def test_a_secret_is_not_printed() -> None:
    pair = KeyPair.fresh()
    assert pair.secret.decode() not in repr(pair)


def test_the_name_of_a_connection_cannot_be_guessed(hub: Hub) -> None:
    """A peer that connects by a name gets the messages to it, so no part of a name can be overheard."""
    victim, liar = hub.admit(1, 0), hub.admit(2, 0)
    with contextlib.closing(DealerLink(hub.address, hub.keys.public, victim, MAIN)) as link:
        link.send([b"here"])
        deadline = time.monotonic() + 30
        while not [peer for peer, _ in hub.drain()]:
            assert time.monotonic() < deadline
        with contextlib.closing(Client(hub, liar, hub.keys.public, route=victim.public[:16] + MAIN)) as client:
            assert client.outcome(hub) == ("admitted", [(2, b"let me in")])
            hub.send(1, [b"for worker 1"])
            received = link.receive(30.0)
            assert received is not None and bytes(received.frames[0]) == b"for worker 1"
            assert not client.socket.poll(0)
    assert victim.secret not in victim.route and victim.public[:16] not in victim.route


def test_reading_is_bounded_while_a_peer_keeps_sending(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farstep.wire.channels.zmq.DRAIN_S", 0.0)
    with contextlib.closing(DealerLink(hub.address, hub.keys.public, hub.admit(0, 0), MAIN)) as link:
        for _ in range(100):
            link.send([b"again"])
        deadline = time.monotonic() + 30
        read, stopped = 0, False
        while read < 100:
            read += len(list(hub.drain()))
            stopped = stopped or hub.has_more
            assert time.monotonic() < deadline
        assert stopped


@pytest.mark.parametrize("text", ["two\nlines", "\x1b[2J", "\r", "\x9b", "\u2028", "a" * 2000])
def test_names_that_would_add_a_log_line_are_refused(text: str) -> None:
    hello = Hello(0, 0, "run", text, 1, {})
    with pytest.raises(WireError):
        decode_from_worker([encode(hello)])
    with pytest.raises(WireError):
        decode_from_worker([encode(Hello(0, 0, "run", "host", 1, {text: "1"}))])
    for message in (
        n.NodeHello("0" * 16, "run", text, 1, 1, {}),
        n.NodeHello("0" * 16, "run", "host", 1, 1, {}, text),
        n.NodeHello("0" * 16, "run", "host", 1, 1, {}, "", text),
        n.NodeHello(text, "run", "host", 1, 1, {}),
        n.Leaving("0" * 16, text),
        n.WorkerEnded("0" * 16, 0, 0, 0, text),
    ):
        with pytest.raises(WireError):
            n.decode_from_node([n.encode(message)])


PEERS = """
import time
import zmq
from farstep.wire.channels.dealer import DealerLink
from farstep.wire.channels.zmq import MAIN, Hub

def until(done):
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)

hub = Hub("tcp://127.0.0.1:*", lease_s=5.0)
pair = hub.admit(0, 0)
"""
WORKER_DIES = """
context = zmq.Context()
worker = context.socket(zmq.DEALER)
worker.sndhwm, worker.routing_id, worker.curve_serverkey = 0, pair.route + MAIN, hub.keys.public
worker.curve_publickey, worker.curve_secretkey = pair.public, pair.secret
worker.connect(hub.address)
worker.send(b"first")
until(lambda: list(hub.drain()))
for _ in range(20_000):
    worker.send(bytes(1000))
context.destroy(linger=0)
time.sleep(1.5)  # the head is busy for several heartbeat intervals
assert list(hub.drain())
hub.close()
"""
HEAD_DIES = """
worker = DealerLink(hub.address, hub.keys.public, pair, MAIN, lease_s=5.0)
worker.send([b"first"])
until(lambda: list(hub.drain()))
for _ in range(5000):
    hub.send(0, [bytes(1000)])
time.sleep(0.8)  # the worker is busy for one heartbeat interval
hub.close()
time.sleep(1.5)  # and for three more without a head
worker.close()
"""


@pytest.mark.parametrize("script", [WORKER_DIES, HEAD_DIES], ids=["worker", "head"])
def test_process_survives_a_peer_that_dies_while_its_messages_are_unread(script: str) -> None:
    done = subprocess.run([sys.executable, "-c", PEERS + script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_peers_connect_with_a_lease_of_days() -> None:
    lease_s = 400_000.0
    hub = Hub("tcp://127.0.0.1:*", lease_s)
    link = DealerLink(hub.address, hub.keys.public, hub.admit(0, 0), MAIN, lease_s=lease_s)
    try:
        link.send([b"hello"])
        deadline = time.monotonic() + 60
        found: list[bytes] = []
        while not found:
            assert time.monotonic() < deadline
            found = [bytes(received.frames[0]) for _, received in hub.drain()]
        assert found == [b"hello"]
    finally:
        link.close()
        hub.close()


def test_hub_that_answers_no_handshake_counts_as_reached_and_a_closed_port_does_not() -> None:
    reliable = Hub("tcp://127.0.0.1:*", reliable=True)
    with contextlib.closing(reliable), socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # it does not listen
        closed = f"tcp://127.0.0.1:{unused.getsockname()[1]}"
        pair = reliable.admit(0, 0)
        for bulk, expected in ((reliable.bulk_port, ""), (closed.rpartition(":")[2], closed)):
            link = DealerLink(reliable.address, reliable.keys.public, pair, MAIN, bulk=bulk)
            with contextlib.closing(link):
                assert link.unreached_address(0.0) == reliable.address
                deadline = time.monotonic() + 20
                while link.unreached_address(0.0) != expected:
                    assert time.monotonic() < deadline
                    link.receive(0.01)
                assert not link.is_connected()


def test_failed_reconnects_do_not_restart_the_time_without_a_connection() -> None:
    """A node daemon must leave if another program has taken the port of its head and closes every connection."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        stranger.settimeout(30.0)
        address = f"tcp://127.0.0.1:{stranger.getsockname()[1]}"
        with contextlib.closing(DealerLink(address, KeyPair.fresh().public, KeyPair.fresh(), MAIN)) as link:
            seen = []
            for _ in range(5):
                stranger.accept()[0].close()
                seen.append(link.silent_s())
            assert seen == sorted(seen), "every attempt fails after the one before, and none succeeds"


class Relay:
    """Forwards TCP connections to a port, and can break all of them."""

    def __init__(self, port: int) -> None:
        self._port, self._pairs = port, list[tuple[socket.socket, socket.socket]]()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                pair = self._server.accept()[0], socket.create_connection(("127.0.0.1", self._port))
                self._pairs.append(pair)
                for source, target in (pair, pair[::-1]):
                    threading.Thread(target=self._forward, args=(source, target), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)

    def break_connections(self) -> None:
        pairs, self._pairs = self._pairs, []
        for each in itertools.chain(*pairs):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.break_connections()


def test_worker_that_waits_notices_at_once_that_its_connection_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only when it next checks its connections: until then, the head does not resend what was lost."""
    monkeypatch.setattr("farstep.wire.channels.dealer.CHECK_S", 3600.0)
    hub = Hub("tcp://127.0.0.1:*", reliable=True)
    relay = Relay(int(hub.address.rpartition(":")[2]))
    pair = hub.admit(0, 0)
    link = DealerLink(relay.address, hub.keys.public, pair, MAIN, bulk=hub.bulk_port)
    received: list[Any] = []

    def worker() -> None:
        link.send([b"hello"])
        for _ in range(2):
            received.append(link.receive(60.0))

    thread = threading.Thread(target=worker)

    def until(count: int) -> None:
        deadline = time.monotonic() + 30
        while len(received) < count and time.monotonic() < deadline:
            for _ in hub.drain():
                hub.send(0, [b"first"])
            time.sleep(0.005)
        assert len(received) == count

    try:
        thread.start()
        until(1)
        relay.break_connections()
        hub.send(0, [b"second"])  # lost with the connection, or kept until it is restored
        until(2)
        assert [bytes(message.frames[0]) for message in received] == [b"first", b"second"]
    finally:
        thread.join(60)
        link.close()
        relay.close()
        hub.close()
