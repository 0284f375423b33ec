"""Throughput of one connection over loopback: plain TCP and farstep's bulk connection.

    python benchmarks/bulk.py [--rounds 5] [--megabytes 4]

One process sends messages of one size to another, as fast as that receives them. Plain TCP reads them into one buffer;
farstep keeps unconfirmed messages, checks them on arrival and delivers each whole, in order and exactly once. Runs of
the contenders alternate.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from children import run_script
from document import header, write_document, write_markdown
from roster import BENCHMARKS
from tables import table

from farstep.wire.channels.dealer import DealerLink
from farstep.wire.channels.zmq import MAIN, Hub
from farstep.wire.keys import KeyPair

MARKS = ("<!-- bulk: begin -->", "<!-- bulk: end -->")
WARM_S = 0.5
IN_FLIGHT = 8
START_S = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds of each measurement")
    parser.add_argument("--megabytes", type=float, default=4.0, help="size of a message")
    parser.add_argument("--out", type=Path, default=BENCHMARKS / "results" / "bulk.json")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table to this file, between its marks")
    parser.add_argument("--send", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.send:
        send(json.loads(options.send))
        return 0
    size = int(options.megabytes * 2**20)
    found: dict[str, list[float]] = {"plain TCP": [], "farstep, plain": [], "farstep, encrypted": []}
    for _ in range(options.rounds):
        found["plain TCP"].append(tcp(size, options.seconds))
        for name, encrypted in (("farstep, plain", False), ("farstep, encrypted", True)):
            found[name].append(farstep(size, options.seconds, encrypted))
        print({name: round(rates[-1]) for name, rates in found.items()}, flush=True)
    document = {**header("bulk.py"), "megabytes": options.megabytes, "megabytes_per_second": found}
    write_document(options.out, document)
    text = summary(found)
    print(text)
    if options.markdown:
        write_markdown(options.markdown, text, MARKS)
    return 0


def summary(found: dict[str, list[float]]) -> str:
    ratios = {
        name: median(rate / limit for rate, limit in zip(rates, found["plain TCP"], strict=True))
        for name, rates in found.items()
    }
    rows = [
        [name, f"{median(rates):,.0f}", f"{min(rates):,.0f} to {max(rates):,.0f}", f"{ratios[name]:.2f}"]
        for name, rates in found.items()
    ]
    return table(["", "MB/s", "lowest to highest round", "ratio to plain TCP, median of the rounds"], rows)


class Meter:
    """Measures bytes per second, after a warm-up."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._began, self._bytes = seconds, 0.0, 0

    def took(self, size: int) -> float | None:
        """The rate in megabytes per second; None until it is known."""
        now = time.monotonic()
        self._began = self._began or now + WARM_S
        if now < self._began:
            return None
        self._bytes += size
        elapsed = now - self._began
        return self._bytes / elapsed / 1e6 if elapsed > self._seconds else None


def sender(asked: dict[str, object]) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, __file__, "--send", json.dumps(asked)])


def send(asked: dict[str, object]) -> None:
    """Send messages until the process is terminated."""
    data = os.urandom(int(str(asked["size"])))
    if "port" in asked:
        with socket.create_connection(("127.0.0.1", int(str(asked["port"])))) as connection:
            while True:
                connection.sendall(data)
    pair = KeyPair(str(asked["public"]).encode(), str(asked["secret"]).encode())
    options = {"bulk": str(asked["bulk"]), "encrypted": bool(asked["encrypted"])}
    link = DealerLink(str(asked["address"]), str(asked["server_key"]).encode(), pair, MAIN, **options)  # type: ignore[arg-type]
    while True:
        link.send([data])
        while link.unacknowledged > IN_FLIGHT:
            link.receive(0.001)


def tcp(size: int, seconds: float) -> float:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        process = sender({"size": size, "port": listener.getsockname()[1]})
        try:
            listener.settimeout(START_S)
            connection, _ = listener.accept()
            connection.settimeout(START_S)
            with connection:
                buffer, meter = memoryview(bytearray(size)), Meter(seconds)
                while True:
                    read = 0
                    while read < size:
                        if not (some := connection.recv_into(buffer[read:])):
                            raise RuntimeError("the sender has ended")
                        read += some
                    if (rate := meter.took(size)) is not None:
                        return rate
        finally:
            process.kill()
            process.wait()


def farstep(size: int, seconds: float, encrypted: bool) -> float:
    hub = Hub("tcp://127.0.0.1:*", reliable=True, encrypted=encrypted)
    pair = hub.admit(0, 0)
    keys = {"public": pair.public.decode(), "secret": pair.secret.decode(), "server_key": hub.keys.public.decode()}
    process = sender({"size": size, "address": hub.address, "bulk": hub.bulk_port, "encrypted": encrypted, **keys})
    poll, meter, served_at = select.poll(), Meter(seconds), 0.0
    for fd in hub.filenos():
        poll.register(fd, select.POLLIN)
    try:
        while process.poll() is None:
            for _, received in hub.drain():
                if (rate := meter.took(sum(map(len, received.frames)))) is not None:
                    return rate
            if time.monotonic() - served_at > 0.5:
                served_at = time.monotonic()
                hub.service()
            poll.poll(20)
        raise RuntimeError("the sender has ended")
    finally:
        process.kill()
        process.wait()
        hub.close()


if __name__ == "__main__":
    run_script(main)
