"""`python -m farstep.launch.daemon.node_daemon`: what every cluster engine starts, once on each node.

It connects to the head, which is the only one that listens, and starts the workers that the head asks for. Workers end
with their agent, through a pipe; an agent ends when it has not reached the head for a lease. No code of a user runs in
it, so nothing keeps it from noticing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import mmap
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import zmq

from farstep.errors import FarstepError
from farstep.launch.daemon.process import ProcessStarter, WorkerProcess
from farstep.launch.daemon.supervisor import keep_alive
from farstep.launch.engine import RESTARTS, SETUP_FAILED, TAKEN_BACK
from farstep.resources import usable_cpus
from farstep.rollout.progress import PHASE, Phase, ProgressBoard
from farstep.wire import node_messages as n
from farstep.wire.channels.dealer import DealerLink
from farstep.wire.channels.zmq import NODE
from farstep.wire.keys import KeyPair
from farstep.wire.versions import versions
from farstep.worker.bootstrap import read_bootstrap

log = logging.getLogger("farstep.node")
UNANSWERED = "the head answers at none of"


class Unreachable(FarstepError):
    """The head does not answer, or not any more."""


@dataclass
class _Child:
    """A worker that runs here."""

    process: WorkerProcess
    board: ProgressBoard
    """Where it is, which the head would like to know when it dies."""
    printed: bytearray = field(default_factory=bytearray)
    mute: bool = False
    """It has closed its output."""

    def read(self) -> None:
        new = self.process.read_output()
        self.mute = new is None
        self.printed += new or b""
        del self.printed[: -n.OUTPUT_BYTES]  # of what it prints beyond that, only the end is sent

    def fds(self) -> list[int]:
        """What to wait for; an output that was closed would be readable for ever."""
        return [self.process.exit_fd] if self.mute else [self.process.exit_fd, self.process.output_fd]


class NodeDaemon:
    """Starts and ends workers of one run on this node, as the head says."""

    def __init__(self, bootstrap: Mapping[str, Any], place: str, named: mmap.mmap | None = None) -> None:
        """`named` is shared memory that hands the daemon's name to its replacement (see `keep_alive`)."""
        self._bootstrap, self._place, self._named = bootstrap, place, named
        self._starter = ProcessStarter(1)
        self._leave_at: float | None = None
        self._told = ""
        self._status = 0
        self._be_new()

    def _be_new(self) -> None:
        self._node, self._replaces = os.urandom(8).hex(), ""
        if self._named is not None:
            self._replaces = self._named[:].decode().strip("\0")
            self._named[:] = self._node.encode()
        self._children: dict[tuple[int, int], _Child] = {}
        self._begun: dict[tuple[int, int], n.WorkerEnded | None] = {}
        """Workers that were ever started, and how they ended: an order may come twice, and an answer be lost."""
        self._running, self._known, self._comes_again = True, False, False

    def run(self) -> int:
        """Until the head says so, or is gone; the status to exit with."""
        try:
            self._stay()
            while self._comes_again and not self._told:
                self._be_new()
                self._stay()
        finally:
            self._starter.close()
        return self._status

    def _stay(self) -> None:
        link, self._address = self._connect()
        hello = self._hello()
        next_beat = 0.0
        try:
            while self._running:
                link.wait([fd for child in self._children.values() for fd in child.fds()], n.BEAT_S / 4)
                while (received := link.receive(0.0)) is not None:
                    self._handle(link, n.decode_to_node(received.frames))
                self._look_after(link)
                if self._told and self._leave_at is None:
                    _say(link, n.Leaving(self._node, self._told))
                    self._leave_at, self._status = time.monotonic() + self._grace_s, TAKEN_BACK
                if time.monotonic() >= next_beat:
                    next_beat = time.monotonic() + n.BEAT_S
                    _say(link, n.NodeBeat(self._node, self.running()) if self._known else hello)
                if self._leave_at is not None and time.monotonic() > self._leave_at:
                    log.warning("the head did not let this node go within %g s", self._grace_s)
                    break
                if link.silent_s() > self._lease_s / 2:  # the other half may have passed before it was noticed
                    raise Unreachable(f"the head at {self._address} is gone")
        finally:
            self._end_children(link)
            link.close()

    def running(self) -> list[tuple[int, int]]:
        """The workers that are here, each with its incarnation."""
        return list(self._children)

    @property
    def _lease_s(self) -> float:
        return float(self._bootstrap["lease_s"])

    @property
    def _grace_s(self) -> float:
        return float(self._bootstrap["grace_s"])

    def told_to_go(self, number: int, frame: FrameType | None) -> None:
        """The engine wants the node back."""
        self._told = self._told or signal.Signals(number).name

    @property
    def is_told_to_go(self) -> bool:
        return bool(self._told)

    # ---- the head ----

    def _connect(self) -> tuple[DealerLink, str]:
        """The first of the head's addresses that answers, which only the real head can."""
        bootstrap = self._bootstrap
        pair = KeyPair(bootstrap["public"].encode(), bootstrap["secret"].encode())
        with contextlib.ExitStack() as others:
            links: dict[str, DealerLink] = {}
            for address in bootstrap["addresses"]:
                links[address] = DealerLink(
                    address,
                    bootstrap["server_key"].encode(),
                    pair,
                    NODE,
                    send_s=0.0,
                    route=self._node.encode() + NODE,
                    lease_s=self._lease_s,
                )
                others.callback(links[address].close)
            for address, link in self._knocked(links):
                others.pop_all()
                for other in links.values():
                    if other is not link:
                        other.close()
                return link, address
        tried = ", ".join(bootstrap["addresses"])
        raise Unreachable(
            f"{UNANSWERED} {tried} (tried from {socket.gethostname()}, {bootstrap['connect_s']:g} s). "
            "Is it still running, may nodes connect there? `farstep doctor` looks; `head_address` sets another."
        )

    def _knocked(self, links: Mapping[str, DealerLink]) -> Iterator[tuple[str, DealerLink]]:
        deadline = time.monotonic() + float(self._bootstrap["connect_s"])
        while time.monotonic() < deadline and not self._told:
            for address, link in links.items():
                if link.is_connected():
                    yield address, link
            time.sleep(0.05)

    def _hello(self) -> n.NodeHello:
        who = (socket.gethostname(), os.getpid(), usable_cpus(), versions())
        failed = "".join(letter for letter in os.environ.get(SETUP_FAILED, "")[:200] if letter.isprintable())
        hello = n.NodeHello(self._node, self._bootstrap["run"], *who, self._place, self._address, failed)
        hello.replaces = self._replaces or None
        return hello

    def _handle(self, link: DealerLink, message: n.ToNode) -> None:
        self._known = True
        match message:
            case n.StartWorker():
                self._start(link, message)
            case n.KillWorker():
                if (child := self._children.get((message.worker, message.incarnation))) is not None:
                    child.process.kill()
            case n.DumpStacks():
                if (child := self._children.get((message.worker, message.incarnation))) is not None:
                    child.process.dump_stacks()
            case n.Leave() if self._running:
                log.info("leaving: %s", message.reason)
                self._running, self._comes_again = False, message.come_again
            case n.Leave():
                pass
            case n.NodeBeat():
                pass

    # ---- workers ----

    def _start(self, link: DealerLink, order: n.StartWorker) -> None:
        who = (order.worker, order.incarnation)
        if who in self._begun:
            if (ended := self._begun[who]) is not None:
                _say(link, ended)
            return
        self._begun[who] = None
        asked = json.loads(order.bootstrap)
        try:
            board = ProgressBoard(1, int(asked["envs"]))
            board.words(0)[PHASE] = Phase.CONNECT
            contents = {**asked, **board.bootstrap(0), "address": self._address, "under_agent": True}
            process = self._starter.start(contents, [board.memory.fd])
        except OSError as error:
            self._tell_end(link, n.WorkerEnded(self._node, *who, 127, repr(error)[:1000]))
            return
        self._children[who] = _Child(process, board)

    def _look_after(self, link: DealerLink) -> None:
        """Pass on what workers printed, and who ended."""
        for (worker, incarnation), child in list(self._children.items()):
            child.read()
            ended = child.process.poll()
            if ended is not None:
                child.read()
            if child.printed:
                _say(link, n.Printed(self._node, worker, incarnation, bytes(child.printed)))
                child.printed.clear()
            if ended is not None:
                who = (self._node, worker, incarnation)
                self._tell_end(link, n.WorkerEnded(*who, ended.status, ended.note, child.board.read(0)))
                child.process.close()
                child.board.close()
                del self._children[worker, incarnation]

    def _tell_end(self, link: DealerLink, ended: n.WorkerEnded) -> None:
        self._begun[ended.worker, ended.incarnation] = ended
        _say(link, ended)

    def _end_children(self, link: DealerLink) -> None:
        for child in self._children.values():
            child.process.kill()
        deadline = time.monotonic() + 5.0
        while self._children and time.monotonic() < deadline:
            self._look_after(link)
            time.sleep(0.01)


def _say(link: DealerLink, message: n.FromNode) -> None:
    """Without waiting for room: while the head is not there, what workers print would fill any."""
    with contextlib.suppress(zmq.Again):
        link.send([n.encode(message)])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m farstep.launch.daemon.node_daemon", description=__doc__)
    parser.add_argument("--bootstrap", type=Path, help="file of mode 0600 to read the bootstrap from; else from stdin")
    parser.add_argument("--place", default="", help="what the engine calls this node ($VARIABLES are expanded)")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the head's to handle
    bootstrap = read_bootstrap(None if arguments.bootstrap else sys.stdin.fileno(), arguments.bootstrap)
    restarts = int(os.environ.pop(RESTARTS, "0"))  # not for processes that workers start
    named = keep_alive(restarts, n.NAME_BYTES) if restarts else None
    agent = NodeDaemon(bootstrap, os.path.expandvars(arguments.place), named)
    signal.signal(signal.SIGTERM, agent.told_to_go)
    try:
        sys.exit(agent.run())
    except Unreachable as error:
        sys.stderr.write(f"farstep: {error}\n")
        sys.exit(TAKEN_BACK if agent.is_told_to_go else 1)


if __name__ == "__main__":
    main()
