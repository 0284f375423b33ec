"""Measures a network from inside: `serve`, and on another host `rtt`, `loss` or `rate`, each with the address."""

from __future__ import annotations

import select
import socket
import statistics
import sys
import threading
import time

PORT = 5000
PACKETS = 400
MEASURE_S = 1.5


def serve() -> None:
    """Answers each datagram, and takes all that streams send."""
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.bind(("", PORT))
    threading.Thread(target=echo, args=(udp,), daemon=True).start()
    with socket.create_server(("", PORT)) as tcp:
        print("ready", flush=True)
        while True:
            stream, _ = tcp.accept()
            threading.Thread(target=swallow, args=(stream,), daemon=True).start()


def echo(udp: socket.socket) -> None:
    while True:
        data, sender = udp.recvfrom(2000)
        udp.sendto(data, sender)


def swallow(stream: socket.socket) -> None:
    """Says how many megabits per second came."""
    num_bytes, begins = 0, time.monotonic()
    while data := stream.recv(1 << 20):
        num_bytes += len(data)
    stream.sendall(f"{num_bytes * 8e-6 / (time.monotonic() - begins):.1f}".encode())
    stream.close()


def rtt(address: str) -> str:
    """The median in milliseconds, or "none"."""
    found: list[float] = []
    for _ in range(5):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
            udp.settimeout(1)
            begins = time.monotonic()
            udp.sendto(b"x", (address, PORT))
            try:
                udp.recv(10)
            except TimeoutError:
                if not found:
                    return "none"
                continue
            found.append(time.monotonic() - begins)
    return f"{statistics.median(found) * 1e3:.2f}"


def loss(address: str) -> str:
    """The fraction of datagrams that were not answered."""
    answered = 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        for _ in range(PACKETS):
            udp.sendto(b"x", (address, PORT))
            while select.select([udp], [], [], 0.001)[0]:  # at once: few fit into the socket's memory
                udp.recv(10)
                answered += 1
        while answered < PACKETS and select.select([udp], [], [], 1)[0]:
            udp.recv(10)
            answered += 1
    return f"{1 - answered / PACKETS:.3f}"


def rate(address: str) -> str:
    """Megabits per second of one stream."""
    with socket.create_connection((address, PORT), timeout=10) as stream:
        block, ends = bytes(1 << 16), time.monotonic() + MEASURE_S
        while time.monotonic() < ends:
            stream.sendall(block)
        stream.shutdown(socket.SHUT_WR)
        return stream.recv(100).decode()


if __name__ == "__main__":
    serve() if sys.argv[1] == "serve" else print({"rtt": rtt, "loss": loss, "rate": rate}[sys.argv[1]](sys.argv[2]))
