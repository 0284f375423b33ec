"""Emulates a slow network on one machine: two hosts joined by a link of a given rate and delay.

    with open_link(bytes_per_second=50e6) as link:
        server = link.start("far", serve, port)              # a function or, with link.command, a program
        client = link.start("near", fetch, link.address(port))

The hosts are network namespaces joined by a veth pair with a token bucket (``tc tbf``) at each end; ``tc netem`` adds
the delay. The rate includes headers: a TCP stream gets 0.956 of it. If namespaces are not permitted, or a delay is
needed and the kernel has no netem, a relay in Python throttles TCP streams instead, with the same interface and a rate
without headers. Servers listen on ``link.far_host``, and the near side reaches them at ``link.address(port)``; the link
ends the processes that were started through it.

    python benchmarks/link.py                                # shows that 50 MB/s is 50 MB/s
"""

from __future__ import annotations

import argparse
import ctypes
import os
import queue
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

from children import run_script
from rich.console import Console
from rich.table import Table

Side = Literal["near", "far"]
Kind = Literal["namespaces", "relay"]

CLONE_NEWNET = 0x40000000
NAMESPACES = Path("/run/netns")
PREFIX = "farstep-link-"
HOSTS: dict[Side, str] = {"near": "10.77.1.1", "far": "10.77.1.2"}
LOOPBACK = "127.0.0.1"
BURST_S = 0.005
"""Size of the token bucket, as seconds of the link's rate; kernels refill it a few hundred times a second."""
MIN_BURST_BYTES = 128 * 1024
"""Smallest bucket: one packet before segmentation (64 KiB)."""
QUEUE_MS = 100
"""Packets that wait longer than this are dropped, as by a router."""
PIECE_BYTES = 64 * 1024
SPAWN = get_context("spawn")


class LinkError(Exception):
    """The link cannot be created; the message names what is missing."""


class Link:
    """Two hosts and the processes on them; created by ``open_link``."""

    kind: Kind
    far_host: str
    """Address on which a server on the far side listens."""

    def __init__(self) -> None:
        self._started: list[BaseProcess] = []

    def address(self, port: int) -> tuple[str, int]:
        """Address at which the near side reaches ``port`` of the far side."""
        raise NotImplementedError

    def command(self, side: Side, line: list[str]) -> list[str]:
        """The command ``line``, changed to run on ``side``."""
        raise NotImplementedError

    def start(self, side: Side, function: Callable[..., object], *arguments: Any) -> BaseProcess:
        """Run ``function``, which must be importable, in a process on ``side``; it ends with the link at the latest."""
        process = SPAWN.Process(target=_enter, args=(self._namespace(side), function, arguments), daemon=True)
        process.start()
        self._started.append(process)
        return process

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.join()

    def _namespace(self, side: Side) -> str | None:
        return None


class NamespaceLink(Link):
    kind: Kind = "namespaces"
    far_host = HOSTS["far"]

    def __init__(self, bytes_per_second: float, delay_s: float) -> None:
        super().__init__()
        missing = [program for program in ("ip", "tc", "nsenter") if shutil.which(program) is None]
        if missing:
            raise LinkError(f"{', '.join(missing)} not found; install iproute2 and util-linux")
        remove_stale_namespaces()
        owner = f"{PREFIX}{os.getpid()}-{time.monotonic_ns() // 1000 % 10**6}"
        self._names: dict[Side, str] = {side: f"{owner}-{side}" for side in HOSTS}
        try:
            self._build(bytes_per_second, delay_s)
        except BaseException:
            self.close()
            raise

    def _build(self, bytes_per_second: float, delay_s: float) -> None:
        near, far = self._names["near"], self._names["far"]
        for name in (near, far):
            tool("ip", "netns", "add", name)
        tool("ip", "link", "add", "veth0", "netns", near, "type", "veth", "peer", "name", "veth0", "netns", far)
        burst = int(max(bytes_per_second * BURST_S, MIN_BURST_BYTES))
        for side, name in self._names.items():
            tool("ip", "-n", name, "address", "add", f"{HOSTS[side]}/24", "dev", "veth0")
            tool("ip", "-n", name, "link", "set", "lo", "up")
            tool("ip", "-n", name, "link", "set", "veth0", "up")
            bucket = ("rate", f"{bytes_per_second * 8:.0f}bit", "burst", str(burst), "latency", f"{QUEUE_MS}ms")
            tool("tc", "-n", name, "qdisc", "add", "dev", "veth0", "root", "handle", "1:", "tbf", *bucket)
            if delay_s:
                delay = ("delay", f"{delay_s * 1e6:.0f}us", "limit", "100000")
                try:
                    tool("tc", "-n", name, "qdisc", "add", "dev", "veth0", "parent", "1:1", "netem", *delay)
                except LinkError as error:
                    raise LinkError(f"no delay without netem ({error})") from None

    def address(self, port: int) -> tuple[str, int]:
        return self.far_host, port

    def command(self, side: Side, line: list[str]) -> list[str]:
        return ["nsenter", f"--net={NAMESPACES / self._names[side]}", *line]

    def close(self) -> None:
        super().close()
        for name in self._names.values():
            if (NAMESPACES / name).exists():
                tool("ip", "netns", "delete", name)

    def _namespace(self, side: Side) -> str | None:
        return str(NAMESPACES / self._names[side])


class RelayLink(Link):
    """Both hosts are this one; a relay process delays what the near side sends and receives."""

    kind: Kind = "relay"
    far_host = LOOPBACK

    def __init__(self, bytes_per_second: float, delay_s: float) -> None:
        super().__init__()
        self._limits = (bytes_per_second, delay_s)

    def address(self, port: int) -> tuple[str, int]:
        ours, theirs = SPAWN.Pipe()
        self.start("near", relay, theirs, port, *self._limits)
        if not ours.poll(60):
            raise LinkError("the relay process did not start within 60 s")
        return LOOPBACK, int(ours.recv())

    def command(self, side: Side, line: list[str]) -> list[str]:
        return line


@contextmanager
def open_link(bytes_per_second: float, delay_s: float = 0.0, kind: Kind | None = None) -> Iterator[Link]:
    """A link for the duration of the with-block, with a one-way delay of ``delay_s``; by default with namespaces."""
    if bytes_per_second <= 0 or delay_s < 0:
        raise ValueError(
            f"got {bytes_per_second} bytes/s and a delay of {delay_s} s; expected a rate above 0, a delay of at least 0"
        )
    link: Link
    try:
        link = (RelayLink if kind == "relay" else NamespaceLink)(bytes_per_second, delay_s)
    except LinkError:
        if kind is not None:
            raise
        link = RelayLink(bytes_per_second, delay_s)
    try:
        yield link
    finally:
        link.close()


def remove_stale_namespaces() -> None:
    """Remove the namespaces that killed processes left behind."""
    for path in NAMESPACES.glob(f"{PREFIX}*"):
        owner = path.name.removeprefix(PREFIX).partition("-")[0]
        if owner.isdigit() and not Path("/proc", owner).exists():
            with suppress(LinkError):  # another process may have removed it
                tool("ip", "netns", "delete", path.name)


def tool(*line: str) -> None:
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        raise LinkError(f"{line[0]}: {said[0] if said else f'exit status {done.returncode}'}")


def _enter(namespace: str | None, function: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    """Call ``function`` in ``namespace``; os.setns exists only from Python 3.12 on."""
    if namespace is not None:
        with Path(namespace).open() as handle:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(handle.fileno(), CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    function(*arguments)


class Bucket:
    """One direction of a relay's link, shared by all its streams."""

    def __init__(self, bytes_per_second: float) -> None:
        self._bytes_per_second = bytes_per_second
        self._free_at = 0.0
        self._lock = threading.Lock()

    def passed_at(self, count: int) -> float:
        """Time at which ``count`` bytes that arrive now have passed the link."""
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + count / self._bytes_per_second
            return self._free_at


def relay(answer: Any, port: int, bytes_per_second: float, delay_s: float) -> None:
    """Forward TCP streams to ``port`` until killed; ``answer`` receives the port to connect to."""
    there, back = Bucket(bytes_per_second), Bucket(bytes_per_second)
    with socket.create_server((LOOPBACK, 0)) as listener:
        # Small buffers; otherwise megabytes would leave the sender before the link has carried any.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * PIECE_BYTES)
        answer.send(listener.getsockname()[1])
        while True:
            near, _ = listener.accept()
            far = socket.socket()
            far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * PIECE_BYTES)
            far.connect((LOOPBACK, port))
            for source, target, bucket in ((near, far, there), (far, near, back)):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                pieces: queue.Queue[tuple[float, bytes]] = queue.Queue()
                threading.Thread(target=_receive, args=(source, pieces, bucket, delay_s), daemon=True).start()
                threading.Thread(target=_send, args=(target, pieces), daemon=True).start()


def _receive(source: socket.socket, pieces: queue.Queue[tuple[float, bytes]], bucket: Bucket, delay_s: float) -> None:
    data = b"-"
    while data:
        try:
            data = source.recv(PIECE_BYTES)
        except OSError:
            data = b""
        passed_at = bucket.passed_at(len(data))
        pieces.put((passed_at + delay_s, data))
        # Read no further ahead of the link than this, so that the sender keeps the rest (backpressure).
        time.sleep(max(0.0, passed_at - time.monotonic() - BURST_S))


def _send(target: socket.socket, pieces: queue.Queue[tuple[float, bytes]]) -> None:
    alive = True
    while True:
        due, data = pieces.get()
        time.sleep(max(0.0, due - time.monotonic()))
        if not data:
            with suppress(OSError):
                target.shutdown(socket.SHUT_WR)
            return
        if alive:
            try:
                target.sendall(data)
            except OSError:
                alive = False  # the receiver has closed; discard the rest


def measure_as_server(answer: Any, host: str, seconds: float) -> None:
    """Echo single bytes, then receive a stream, then send one; reports the port, then the rate received."""
    with socket.create_server((host, 0)) as listener:
        answer.send(listener.getsockname()[1])
        stream, _ = listener.accept()
        with stream:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(20):
                stream.sendall(stream.recv(1))
            answer.send(rate_of(stream))
        stream, _ = listener.accept()
        with stream:
            pour(stream, seconds)


def measure_as_client(answer: Any, address: tuple[str, int], seconds: float) -> None:
    """The client of `measure_as_server`; reports the median round trip and the rate received."""
    with connect(address) as stream:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        round_trips = []
        for _ in range(20):
            began = time.perf_counter()
            stream.sendall(b"-")
            stream.recv(1)
            round_trips.append(time.perf_counter() - began)
        answer.send(sorted(round_trips)[10])
        pour(stream, seconds)
    with connect(address) as stream:
        answer.send(rate_of(stream))


def connect(address: tuple[str, int]) -> socket.socket:
    return socket.create_connection(address, timeout=60)


def pour(stream: socket.socket, seconds: float) -> None:
    ends = time.monotonic() + seconds
    block = bytes(PIECE_BYTES)
    while time.monotonic() < ends:
        stream.sendall(block)
    stream.shutdown(socket.SHUT_WR)


def rate_of(stream: socket.socket) -> float:
    """Bytes per second until the end of the stream, without the first half second (TCP slow start)."""
    counted_from = time.monotonic() + 0.5
    began = ended = 0.0
    total = 0
    while data := stream.recv(1 << 20):
        ended = time.monotonic()
        if began:
            total += len(data)
        elif ended >= counted_from:
            began = ended
    return total / (ended - began) if ended > began else 0.0


def measure(link: Link, seconds: float) -> tuple[float, float, float]:
    """Measure bytes per second in both directions, and the round trip in seconds."""
    server, servers_end = SPAWN.Pipe()
    client, clients_end = SPAWN.Pipe()
    link.start("far", measure_as_server, servers_end, link.far_host, seconds)
    link.start("near", measure_as_client, clients_end, link.address(answer_of(server)), seconds)
    round_trip_s, there, back = answer_of(client), answer_of(server), answer_of(client)
    return there, back, round_trip_s


def answer_of(connection: Any) -> Any:
    if not connection.poll(120):
        raise LinkError("no answer from the other side within 120 s")
    return connection.recv()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[10, 50, 200], help="MB/s (10^6 bytes)")
    parser.add_argument("--delay-ms", type=float, default=10.0, help="one-way delay of the runs with a delay")
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds of a stream in each direction")
    options = parser.parse_args()
    shown = Table("link", "wanted, MB/s", "delay, ms", "there, MB/s", "back, MB/s", "round trip, ms")
    kinds: tuple[Kind, ...] = ("namespaces", "relay")
    for kind in kinds:
        cases = [*((rate, 0.0) for rate in options.rates), (50.0, options.delay_ms)]
        for rate, delay_ms in cases:
            wanted = (kind, f"{rate:g}", f"{delay_ms:g}")
            try:
                with open_link(rate * 1e6, delay_ms / 1e3, kind) as link:
                    there, back, round_trip_s = measure(link, options.seconds)
            except LinkError as error:
                shown.add_row(*wanted, str(error))
            else:
                shown.add_row(*wanted, f"{there / 1e6:.1f}", f"{back / 1e6:.1f}", f"{round_trip_s * 1e3:.2f}")
    Console().print(shown)
    return 0


if __name__ == "__main__":
    run_script(main)
