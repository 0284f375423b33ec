"""`python -m farstep.launch.daemon.node_daemon`: the process that an engine starts on each node.

The daemon connects to the head, and starts, watches and ends workers as the head requests. With `relay`, it also passes
messages between its workers and the head, and reports their progress. If the daemon ends, a pipe
ends its workers. If the head is silent for the duration of the lease, the daemon ends. It runs no user code that could
block these checks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import mmap
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import zmq

from farstep.errors import FarstepError, LaunchError, WireError
from farstep.launch.daemon.affinity import CoreAssignment, assign_cores
from farstep.launch.daemon.criu import Criu, working_criu
from farstep.launch.daemon.dumpable_worker import DumpableWorker
from farstep.launch.daemon.node_worker import NodeWorker
from farstep.launch.daemon.process import ProcessStarter
from farstep.launch.daemon.supervisor import keep_alive
from farstep.launch.engines.engine import RECLAIMED, RESTARTS, SETUP_FAILED
from farstep.resources import usable_cpus
from farstep.rollout.progress import PHASE, RATE, Phase, ProgressBoard
from farstep.wire import node_messages as n
from farstep.wire.channels.dealer import DealerLink
from farstep.wire.channels.local import local_pair
from farstep.wire.channels.relay import Relay
from farstep.wire.channels.zmq import NODE
from farstep.wire.keys import KeyPair
from farstep.wire.versions import versions
from farstep.worker.connection.bootstrap import read_bootstrap

log = logging.getLogger("farstep.node")
UNANSWERED = "the head answers at none of"
_KEYS = ("server_key", "public", "secret", "bulk_port", "address")
"""Entries of a bootstrap that a worker needs only for connections of its own."""
_MESSAGES_AT_ONCE, _LAST_MESSAGES = 16, 4096
"""Maximum number of messages to read from a worker before the next worker's turn, and after its end."""
_LINGER_S = 2.0
"""Seconds to wait for the acknowledgement of an ended worker's last messages before its end is reported."""


class Unreachable(FarstepError):
    """The head does not answer, or no longer answers."""


class NodeDaemon:
    """Starts, watches and ends workers of one run on this node, as the head requests."""

    def __init__(self, bootstrap: Mapping[str, Any], place: str, shared_name: mmap.mmap | None = None) -> None:
        """Create a daemon that is not connected yet.

        Args:
            bootstrap: The head's addresses, keys, `lease_s`, `connect_s`, `grace_s`, and how to start workers.
            place: The name of this node in the engine.
            shared_name: Memory that passes the daemon's name to its replacement (see `keep_alive`).
        """
        self._bootstrap, self._place, self._shared_name = bootstrap, place, shared_name
        cores, self._cannot_pin = _assignment(bootstrap)
        self._criu, self._cannot_park = _criu(bootstrap)
        how = (bootstrap["start_method"], bootstrap["modules"], bootstrap["connect_s"])
        self._starter = ProcessStarter(1, *how, assignment=cores)
        self._leave_at: float | None = None
        self._reclaimed_by = ""
        """The signal with which the engine reclaimed the node; empty if the engine has not reclaimed it."""
        self._status = 0
        self._reset()

    def _reset(self) -> None:
        """Choose a new name and forget all workers."""
        self._node, self._replaces = os.urandom(8).hex(), ""
        if self._shared_name is not None:
            self._replaces = self._shared_name[:].decode().strip("\0")
            self._shared_name[:] = self._node.encode()
        self._children: dict[tuple[int, int], NodeWorker] = {}
        self._started: dict[tuple[int, int], n.WorkerEnded | None] = {}
        """All workers ever started, and how they ended. Needed because start messages may repeat and replies may be
        lost."""
        self._running, self._is_known, self._reconnects = True, False, False
        self._relay: Relay | None = None

    def run(self) -> int:
        """Serve until the head ends this daemon. Return the exit status.

        Raises:
            Unreachable: The head did not answer, or was silent for the duration of the lease.
        """
        try:
            self._serve()
            while self._reconnects and not self._reclaimed_by:
                self._reset()
                self._serve()
        finally:
            self._starter.close()
            if self._criu is not None:
                self._criu.close()
        return self._status

    def _serve(self) -> None:
        link, self._address = self._connect()
        hello = self._hello()
        next_beat = 0.0
        try:
            while self._running:
                ready = self._wait(link)
                while (received := link.receive(0.0)) is not None:
                    if len(received.frames) == 1:
                        self._handle(link, n.decode_to_node(received.frames))
                    elif self._relay is not None:
                        self._relay.receive(received.frames)
                if self._relay is not None:
                    self._relay_messages(self._relay, ready)
                self._report_workers(link, ready)
                if self._reclaimed_by and self._leave_at is None:
                    _send(link, n.Leaving(self._node, self._reclaimed_by))
                    self._leave_at, self._status = time.monotonic() + self._grace_s, RECLAIMED
                if time.monotonic() >= next_beat:
                    next_beat = time.monotonic() + n.BEAT_S
                    _send(link, self._beat() if self._is_known else hello)
                if self._leave_at is not None and time.monotonic() > self._leave_at:
                    log.warning("the head did not release this node within %g s", self._grace_s)
                    break
                # The channel may take half a lease to notice a broken connection, so allow only the other half here.
                if link.silent_s() > self._lease_s / 2:
                    raise Unreachable(f"the head at {self._address} no longer answers")
        finally:
            self._end_children(link)
            if self._relay is not None:
                self._relay.close()
                self._relay = None
            link.close()

    def _wait(self, link: DealerLink) -> set[int]:
        """Wait until something is to be done. Return the descriptors of workers that are readable."""
        fds = [fd for child in self._children.values() for fd in child.fds()]
        if self._relay is None:
            return link.wait(fds, n.BEAT_S / 4)
        if not self._relay.has_backlog:
            fds += [child.link.fileno() for child in self._children.values() if child.link is not None]
        return self._relay.wait(fds, n.BEAT_S / 4)

    def _beat(self) -> n.NodeBeat:
        suspended = [key for key, child in self._children.items() if child.suspended]
        on_disk = {key[0]: child.disk_bytes for key, child in self._children.items() if child.disk_bytes}
        returning = [key for key, child in self._children.items() if child.is_returning]
        return n.NodeBeat(self._node, self.running(), suspended, self.progress(), on_disk, returning)

    def progress(self) -> list[list[int]]:
        """The progress words of each worker, in the order of `running`, if this daemon relays for them."""
        if self._relay is None:
            return []
        for key, child in self._children.items():
            if math.isfinite(rate := self._relay.rate(key)):
                child.board.write(0, RATE, int(rate))
        return [child.board.read(0) for child in self._children.values()]

    def running(self) -> list[tuple[int, int]]:
        """Number and incarnation of each worker on this node."""
        return list(self._children)

    @property
    def _lease_s(self) -> float:
        return float(self._bootstrap["lease_s"])

    @property
    def _grace_s(self) -> float:
        return float(self._bootstrap["grace_s"])

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Signal handler: the engine reclaims the node, so drain the workers and exit."""
        self._reclaimed_by = self._reclaimed_by or signal.Signals(number).name

    @property
    def is_reclaimed(self) -> bool:
        return bool(self._reclaimed_by)

    # ---- the head ----

    def _connect(self) -> tuple[DealerLink, str]:
        """Connect to the first of the head's addresses that answers. A peer without the head's key cannot answer."""
        bootstrap = self._bootstrap
        pair = _pair(bootstrap)
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
            for address, link in self._answering(links):
                others.pop_all()
                for other in links.values():
                    if other is not link:
                        other.close()
                return link, address
        tried = ", ".join(bootstrap["addresses"])
        raise Unreachable(
            f"{UNANSWERED} {tried} (tried from {socket.gethostname()}, {bootstrap['connect_s']:g} s). "
            "Check that the head is still running, and that nodes can connect to it (`farstep doctor` tests this). "
            "`head_address` sets another address."
        )

    def _answering(self, links: Mapping[str, DealerLink]) -> Iterator[tuple[str, DealerLink]]:
        deadline = time.monotonic() + float(self._bootstrap["connect_s"])
        while time.monotonic() < deadline and not self._reclaimed_by:
            for address, link in links.items():
                if link.is_connected():
                    yield address, link
            time.sleep(0.05)

    def _hello(self) -> n.NodeHello:
        machine = (socket.gethostname(), os.getpid(), usable_cpus(), versions())
        failed = "".join(letter for letter in os.environ.get(SETUP_FAILED, "")[:200] if letter.isprintable())
        hello = n.NodeHello(self._node, self._bootstrap["run"], *machine, self._place, self._address, failed)
        hello.replaces = self._replaces or None
        hello.cannot_pin, hello.cannot_park = self._cannot_pin, self._cannot_park
        return hello

    def _handle(self, link: DealerLink, message: n.ToNode) -> None:
        self._is_known = True
        match message:
            case n.StartWorker():
                self._start(link, message)
            case n.KillWorker():
                if (child := self._children.get((message.worker, message.incarnation))) is not None:
                    child.killed = True
                    child.kill()
            case n.SetSuspended():
                if (child := self._children.get((message.worker, message.incarnation))) is not None:
                    child.set_suspended(message.suspended, message.parked)
            case n.DumpStacks():
                if (child := self._children.get((message.worker, message.incarnation))) is not None:
                    child.process.dump_stacks()
            case n.Leave() if self._running:
                log.info("leaving: %s", message.reason)
                self._running, self._reconnects = False, message.come_again
            case n.Leave():
                pass
            case n.NodeBeat():
                pass

    # ---- workers ----

    def _start(self, link: DealerLink, message: n.StartWorker) -> None:
        key = (message.worker, message.incarnation)
        if key in self._started:
            if (ended := self._started[key]) is not None:
                _send(link, ended)
            return
        self._started[key] = None
        bootstrap = json.loads(message.bootstrap)
        self._starter.preload(**bootstrap.pop("preload"))
        try:
            board = ProgressBoard(1, int(bootstrap["envs"]))
            board.words(0)[PHASE] = Phase.CONNECT
            contents = {**bootstrap, **board.bootstrap(0), "address": self._address, "has_daemon": True}
            rank = int(bootstrap["rank"])
            if message.relay is None:
                child = NodeWorker(key[0], self._starter.start(contents, [board.memory.fd], rank), board)
            else:
                child = self._start_relayed(key[0], contents, board, rank)
        except OSError as error:
            self._report_end(link, n.WorkerEnded(self._node, *key, 127, repr(error)[:1000]))
            return
        self._children[key] = child
        if message.relay is not None:
            self._open_relay(link, message.relay, bootstrap).add(key, _pair(bootstrap))

    def _start_relayed(self, worker: int, bootstrap: dict[str, Any], board: ProgressBoard, rank: int) -> NodeWorker:
        """Start a worker whose messages this daemon relays. The worker gets no keys."""
        link, theirs = local_pair()
        contents = {name: value for name, value in bootstrap.items() if name not in _KEYS}
        contents |= {"transport": "relay", "link_fd": theirs.fileno()}
        try:
            with theirs:
                process = self._starter.start(contents, [theirs.fileno(), board.memory.fd], rank)
        except BaseException:
            link.close()
            raise
        if self._criu is None:
            return NodeWorker(worker, process, board, link=link)
        pipe = self._starter.death_fd
        return DumpableWorker(worker, process, board, link=link, criu=self._criu, open_death_pipe=pipe)

    # ---- the relay ----

    def _open_relay(self, link: DealerLink, keys: n.RelayKeys, bootstrap: Mapping[str, Any]) -> Relay:
        if self._relay is None:
            pair = KeyPair(keys.public, keys.secret)
            encrypted = bool(bootstrap["encrypted"])
            self._relay = Relay(link, self._address, pair, keys.bulk_port, self._lease_s, encrypted)
        return self._relay

    def _relay_messages(self, relay: Relay, ready: set[int]) -> None:
        """Pass on the messages of workers whose links are readable, and those of the head."""
        for key, child in self._children.items():
            if child.link is not None and child.link.fileno() in ready:
                self._read_link(relay, key, child, _MESSAGES_AT_ONCE)
        relay.service()
        for key, frames in relay.messages():
            if key in self._children:
                self._children[key].pass_on(frames)
        for child in self._children.values():
            child.pass_on()

    def _read_link(self, relay: Relay, key: tuple[int, int], child: NodeWorker, limit: int) -> None:
        """Pass on up to `limit` messages of a worker, and close its link at the end."""
        for _ in range(limit):
            try:
                received = child.link.receive() if child.link is not None else None
            except (EOFError, OSError, WireError) as error:
                if not isinstance(error, EOFError):
                    log.warning("worker %d sent a message that cannot be relayed: %s", key[0], error)
                    child.kill()
                child.link_ended()
                return
            if received is None:
                return
            for fd in received.fds:
                os.close(fd)  # workers send none to the head
            relay.send(key, received.frames)

    # ---- reports ----

    def _report_workers(self, link: DealerLink, ready: set[int] | None = None) -> None:
        """Send the output of workers, and the ends of workers, to the head.

        Args:
            link: The link to the head.
            ready: The readable descriptors; None: check all workers, and report ends without waiting for the relay.
        """
        children = list(self._children.items())
        for key, child in sorted(children, key=lambda item: not item[1].is_returning):  # restore before others dump
            changed = child.advance() or child.ended
            if child.problem:
                _send(link, n.NotOnDisk(self._node, *key, child.problem))
                child.problem = ""
            if ready is not None and not changed and ready.isdisjoint(child.fds()):
                continue
            child.read()
            self._check_end(key, child)
            if child.printed:
                _send(link, n.Printed(self._node, *key, bytes(child.printed)))
                child.printed.clear()
            ended = child.ended
            if ended is None or (ready is not None and self._must_wait(key, child)):
                continue
            words, blameless = child.board.read(0), ended.blameless or child.blameless
            self._report_end(link, n.WorkerEnded(self._node, *key, ended.status, ended.note, words, blameless))
            child.close()
            if self._relay is not None:
                self._relay.remove(key)
            del self._children[key]

    def _check_end(self, key: tuple[int, int], child: NodeWorker) -> None:
        """Notice the end of a process, and read what it sent and printed before."""
        if child.ended is None and (ended := child.poll()) is not None:
            child.ended, child.report_at = ended, time.monotonic() + _LINGER_S
            child.read()
            if self._relay is not None:
                self._read_link(self._relay, key, child, _LAST_MESSAGES)
                self._relay.request_ack(key)
                self._relay.service()

    def _must_wait(self, key: tuple[int, int], child: NodeWorker) -> bool:
        """Whether the head may not have received the last messages of an ended worker. It would ignore them after the
        report of the end."""
        if self._relay is None or child.killed:
            return False
        return self._relay.owes(key) and time.monotonic() < child.report_at

    def _report_end(self, link: DealerLink, ended: n.WorkerEnded) -> None:
        self._started[ended.worker, ended.incarnation] = ended
        _send(link, ended)

    def _end_children(self, link: DealerLink) -> None:
        for child in self._children.values():
            child.kill()
        deadline = time.monotonic() + 5.0
        while self._children and time.monotonic() < deadline:
            self._report_workers(link)
            time.sleep(0.01)


def _pair(bootstrap: Mapping[str, Any]) -> KeyPair:
    return KeyPair(bootstrap["public"].encode(), bootstrap["secret"].encode())


def _assignment(bootstrap: Mapping[str, Any]) -> tuple[CoreAssignment | None, str]:
    """The cores of each worker, or why workers cannot be pinned."""
    try:
        return assign_cores(bootstrap["cpu_affinity"], bootstrap["cpus_per_worker"], bootstrap["workers"]), ""
    except LaunchError as error:
        return None, str(error)[:1000]


def _criu(bootstrap: Mapping[str, Any]) -> tuple[Criu | None, str]:
    """What writes parked workers to disk, if they are to be, or why they cannot be."""
    if bootstrap["park_method"] != "criu":
        return None, ""
    try:
        return working_criu(), ""
    except LaunchError as error:
        return None, str(error)[:1000]


def _send(link: DealerLink, message: n.FromNode) -> None:
    """Send a message. If the send queue is full, drop it: the head may be unreachable while workers print."""
    with contextlib.suppress(zmq.Again):
        link.send([n.encode(message)])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m farstep.launch.daemon.node_daemon", description=__doc__)
    parser.add_argument("--bootstrap", type=Path, help="file of mode 0600 with the bootstrap; default: stdin")
    parser.add_argument("--place", default="", help="name of this node in the engine; $VARIABLES are expanded")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the head handles Ctrl-C
    bootstrap = read_bootstrap(None if arguments.bootstrap else sys.stdin.fileno(), arguments.bootstrap)
    restarts = int(os.environ.pop(RESTARTS, "0"))  # pop, because workers must not inherit it
    shared_name = keep_alive(restarts, n.NAME_BYTES) if restarts else None
    daemon = NodeDaemon(bootstrap, os.path.expandvars(arguments.place), shared_name)
    signal.signal(signal.SIGTERM, daemon.on_signal)
    try:
        sys.exit(daemon.run())
    except Unreachable as error:
        sys.stderr.write(f"farstep: {error}\n")
        sys.exit(RECLAIMED if daemon.is_reclaimed else 1)


if __name__ == "__main__":
    main()
