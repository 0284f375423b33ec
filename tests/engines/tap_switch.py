"""An Ethernet switch in user space, with delay, loss and rates: `python tap_switch.py DELAY_MS NETWORK...`.

NETWORK is the descriptor of a network namespace, in which an interface `eth0` appears. Ports are counted from 0; "up"
on stdout says that all are there. A line on stdin is one of `cut PORT 0|1`, `cut_pair PORT PORT 0|1`,
`limit PORT MBIT|0` and `lose PORT|-1 FRACTION` (-1: of all), and is answered by "ok". It ends when stdin does.

It exists because tc's netem, which does the same, is a kernel module that not every machine has.
"""

from __future__ import annotations

import fcntl
import os
import random
import select
import struct
import sys
import time
from collections import deque
from typing import Any

from tests.engines.guard import CLONE_NEWNET, call

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x2, 0x1000
MAX_FRAME_BYTES = 1600
FRAMES_AT_ONCE = 64
"""As many are read from one port before others get their turn."""
QUEUE_S = 0.1
"""What would wait longer than this for a port's rate is dropped, as by a router with that much memory."""


class Link:
    """One direction of a port: frames pass one after another, at its rate."""

    def __init__(self) -> None:
        self.bytes_per_s = 0.0
        self._free_at = 0.0

    def passes_at(self, now: float, num_bytes: int) -> float | None:
        """When a frame that comes now has passed; None if it is dropped."""
        if not self.bytes_per_s:
            return now
        begins = max(now, self._free_at)
        if begins - now > QUEUE_S:
            return None
        self._free_at = begins + num_bytes / self.bytes_per_s
        return self._free_at


class Port:
    """A host's end of the switch."""

    def __init__(self, network: int) -> None:
        call("setns", network, CLONE_NEWNET)
        self.tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(self.tap, TUNSETIFF, struct.pack("16sH", b"eth0", IFF_TAP | IFF_NO_PI))
        self.sent, self.received = Link(), Link()
        self.underway: deque[tuple[float, bytes]] = deque()
        """Frames that this host sent, and when each is at the other side: in order, as the delay never changes."""
        self.arriving: deque[tuple[float, bytes]] = deque()
        """Frames on their way through this host's link, and when each comes out of it."""
        self.is_cut = False
        self.cut_from: set[int] = set()
        self.loss = 0.0


class TapSwitch:
    """Learns addresses and ports from frames, like a hardware switch."""

    def __init__(self, delay_s: float, networks: list[int]) -> None:
        self._delay_s, self._loss = delay_s, 0.0
        self._ports = [Port(network) for network in networks]
        self._places: dict[bytes, int] = {}
        self._lossy = False

    def run(self) -> None:
        poller = select.epoll()
        by_descriptor = {port.tap: number for number, port in enumerate(self._ports)}
        for descriptor in (*by_descriptor, 0):
            poller.register(descriptor, select.EPOLLIN)
        print("up", flush=True)
        while True:
            due = min(
                (queue[0][0] for port in self._ports for queue in (port.underway, port.arriving) if queue), default=None
            )
            for descriptor, _ in poller.poll(None if due is None else max(0.0, due - time.monotonic())):
                if descriptor:
                    self._take(by_descriptor[descriptor])
                else:
                    line = os.read(0, 4096)
                    if not line:
                        return
                    for command in line.decode().splitlines():
                        self._obey(*command.split())
            self._deliver(time.monotonic())

    def _take(self, number: int) -> None:
        """Frames that a host has sent."""
        port, now = self._ports[number], time.monotonic()
        for _ in range(FRAMES_AT_ONCE):
            try:
                frame = os.read(port.tap, MAX_FRAME_BYTES)
            except (BlockingIOError, OSError):  # none left; or the interface is down
                return
            self._places[frame[6:12]] = number
            passes_at = port.sent.passes_at(now, len(frame))
            if passes_at is not None:
                port.underway.append((passes_at + self._delay_s, frame))

    def _deliver(self, now: float) -> None:
        """Frames whose time has come."""
        for number, port in enumerate(self._ports):
            while port.underway and port.underway[0][0] <= now:
                due, frame = port.underway.popleft()
                place = self._places.get(frame[:6])
                for target in range(len(self._ports)) if place is None else (place,):
                    if target != number and not self._is_lost(number, target):
                        passes_at = self._ports[target].received.passes_at(max(due, now), len(frame))
                        if passes_at is not None:
                            self._ports[target].arriving.append((passes_at, frame))
        for port in self._ports:
            while port.arriving and port.arriving[0][0] <= now:
                try:
                    os.write(port.tap, port.arriving.popleft()[1])
                except OSError:
                    pass  # the interface is down

    def _is_lost(self, source: int, target: int) -> bool:
        sender, receiver = self._ports[source], self._ports[target]
        if sender.is_cut or receiver.is_cut or target in sender.cut_from:
            return True
        return self._lossy and any(loss and random.random() < loss for loss in (self._loss, sender.loss, receiver.loss))

    def _obey(self, what: str, *words: str) -> None:
        port: Any = None if words[0] == "-1" else self._ports[int(words[0])]
        match what, words:
            case "cut", (_, is_cut):
                port.is_cut = is_cut == "1"
            case "cut_pair", (a, b, is_cut):
                for one, other in ((a, b), (b, a)):
                    others = self._ports[int(one)].cut_from
                    others.add(int(other)) if is_cut == "1" else others.discard(int(other))
            case "limit", (_, mbit):
                port.sent.bytes_per_s = port.received.bytes_per_s = float(mbit) * 1e6 / 8
            case "lose", (_, fraction):
                if port is None:
                    self._loss = float(fraction)
                else:
                    port.loss = float(fraction)
                self._lossy = self._loss > 0 or any(port.loss for port in self._ports)
        print("ok", flush=True)


if __name__ == "__main__":
    TapSwitch(float(sys.argv[1]) / 1e3, [int(network) for network in sys.argv[2:]]).run()
