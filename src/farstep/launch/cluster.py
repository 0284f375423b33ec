"""Workers on the nodes of a cluster, whatever engine started the agents there (see `node_agent.py`).

A block is the share of a node: a range of workers. Nodes take blocks in the order in which they arrive; a worker whose
block has no node is queued. A node that is lost leaves its block to the next one.
"""

from __future__ import annotations

import json
import logging
import math
import os
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import zmq

from farstep.core import Ended, Launcher, Received, Started
from farstep.errors import LaunchError, WireError
from farstep.launch.addresses import own_addresses
from farstep.launch.engine import Engine, Group, Standing
from farstep.launch.network import HubLink
from farstep.launch_config import EngineConfig
from farstep.wire import node_messages as n
from farstep.wire.versions import mismatches
from farstep.wire.zmq import NODE, Hub
from farstep.worker.progress import PHASE, Phase, private_words

log = logging.getLogger("farstep")
_TAIL_BYTES = 16 * 1024
_UNREAD_BYTES = 1 << 20
"""Of a worker's output, at most so much waits for being logged."""
_UNSAID_S = 3.0
"""A worker that its node's agent does not mention for so long after it was asked for is asked for again, or over."""
_FILES_PER_WORKER, _OTHER_FILES = 8, 1024
_LOOK_S = 2.0
_MOST_PAUSE_S = 60.0
"""Between asking for nodes and asking again for those that did not come."""


@dataclass
class Node:
    """An agent that said hello."""

    name: str
    group: int
    host: str
    pid: int
    place: str
    heard: float
    block: int
    address: str = ""
    workers: dict[int, RemoteWorker] = field(default_factory=dict)
    leaving: bool = False

    @property
    def route(self) -> bytes:
        return self.name.encode() + NODE

    def __str__(self) -> str:
        return f"node {self.host}" + (f" ({self.place})" if self.place else "")


class ClusterLauncher(Launcher):
    """The head's side of all agents of a run."""

    shares_memory = False
    driven = False

    def __init__(self, config: EngineConfig, workers: int, envs: int, engine: Engine) -> None:
        self._config, self._envs, self._engine = config, envs, engine
        self._per_node = workers // config.most_nodes
        self._run = os.urandom(8).hex()
        self._nodes: dict[str, Node] = {}
        self._blocks: list[Node | None] = [None] * config.most_nodes
        self._queued: dict[int, RemoteWorker] = {}
        self._wanted = config.nodes
        self._replacements, self._ask_at = 0, 0.0
        self._groups: dict[int, Watched] = {}
        self._ticked = self._enough_at = time.monotonic()
        self._next_beat = 0.0
        self.refused: dict[str, str] = {}
        """Hosts that came and did not fit, with what differs."""
        _allow_files(_FILES_PER_WORKER * workers)
        self._nonsense: Counter[int] = Counter()
        self._misfit: LaunchError | None = None
        """Of a node that cannot be used."""
        try:
            self._hub = self._listen(engine.listen_on())
        except BaseException:
            engine.close()
            raise

    def _listen(self, addresses: Sequence[str]) -> Hub:
        try:
            return Hub(
                [f"tcp://{address}:*" for address in addresses],
                self._config.lease_s,
                reliable=True,
                encrypted=self._config.encrypted,
            )
        except zmq.ZMQError as error:
            raise LaunchError(
                f"the head cannot listen on {' and '.join(addresses)}: {error}. head_address must name addresses of "
                f"this machine, such as {' or '.join(own_addresses())}."
            ) from error

    # ---- what the head calls ----

    def start(self, worker: int, incarnation: int, run: str) -> Started:
        if not self._groups:
            self._ask(self._wanted)
        pair = self._hub.admit(worker, incarnation)
        words = private_words(self._envs)
        bootstrap = {
            "transport": "tcp",
            "worker": worker,
            "incarnation": incarnation,
            "run": run,
            "envs": self._envs,
            "threads": self._config.cpus_per_worker,
            "bulk_port": self._hub.bulk_port,
            "encrypted": self._config.encrypted,
            "server_key": self._hub.keys.public.decode(),
            "public": pair.public.decode(),
            "secret": pair.secret.decode(),
            "gpu": self._config.gpu_of(worker % self._per_node),
        }
        handle = RemoteWorker(self, worker, incarnation, json.dumps(bootstrap).encode(), words)
        node = self._blocks[worker // self._per_node]
        if node is None or node.leaving:
            words[PHASE] = Phase.QUEUED
            self._queued[worker] = handle
        else:
            self._place(handle, node)
        return Started(handle, HubLink(self._hub, worker), words, node.host if node else "?")

    def filenos(self) -> Sequence[int]:
        return self._hub.filenos()

    def drain(self, receive: Callable[[int, Received], None]) -> bool:
        arrived = False
        for peer, received in self._hub.drain():
            arrived = True
            if peer.worker >= 0:
                receive(peer.worker, received)
                continue
            try:
                self._hear(-1 - peer.worker, n.decode_from_node(received.frames))
            except WireError as error:
                self._misheard(-1 - peer.worker, error)
        return arrived or self._hub.has_more

    def tick(self) -> None:
        now = time.monotonic()
        asleep_s, self._ticked = max(0.0, now - self._ticked - 1.0), now
        for node in list(self._nodes.values()):
            node.heard += asleep_s  # while nobody listened, nobody can have been heard
            if now - node.heard > self._config.lease_s:
                self._lose(node, f"was not heard of for {self._config.lease_s:g} s")
            elif not (standing := self._groups[node.group].standing).nodes:
                self._lose(node, f"is lost: {standing.text}")
        if now >= self._next_beat:
            self._next_beat = now + n.BEAT_S
            self._hub.service()
            for node in self._nodes.values():
                self._hub.send_to(node.route, [n.encode(n.NodeBeat(node.name))])
        self._look_at_groups()
        there, fewest = sum(node is not None for node in self._blocks), self._config.fewest_nodes
        if there >= fewest:
            self._enough_at, self._misfit = now, None
        elif self._misfit is not None:  # with enough nodes, a run goes on without it
            raise self._misfit
        elif now - self._enough_at > self._config.queue_s:
            raise LaunchError(
                f"{there} of at least {fewest} nodes came within queue_s={self._config.queue_s:g} s: {self.waiting()}."
            )

    def scale(self, nodes: int) -> None:
        """Have so many nodes from now on: more are asked for, or the last blocks are given back."""
        before, self._wanted = self._wanted, nodes
        self._replacements, self._ask_at = 0, 0.0
        for node in self._blocks[nodes:]:
            if node is not None:
                self._drain_node(node)
        if nodes > before:
            self._ask(nodes - before)
            self._settle()

    def waiting(self) -> str:
        """What the engine says about nodes that are not here yet; empty if all are."""
        if not (missing := sum(node is None for node in self._blocks[: self._wanted])):
            return ""
        said = "; ".join(group.standing.text for group in self._groups.values() if group.standing.nodes)
        return f"{missing} of {self._wanted} nodes not there yet{f': {said}' if said else ''}"

    def nodes(self) -> list[dict[str, object]]:
        return [
            {
                "host": node.host,
                "pid": node.pid,
                "place": node.place,
                "address": node.address,
                "workers": sorted(node.workers),
            }
            for node in self._blocks
            if node is not None
        ]

    def expected(self) -> int:
        """Nodes that are there, or may come without being asked for again."""
        there = sum(node is not None for node in self._blocks)
        return max(there, sum(max(0, watched.standing.nodes - watched.lost) for watched in self._groups.values()))

    def logs(self) -> str:
        """Where what nodes said is written, and the end of it."""
        return "\n".join(text for watched in self._groups.values() if (text := watched.group.logs()))

    def close(self) -> None:
        for node in self._nodes.values():
            self._hub.send_to(node.route, [n.encode(n.Leave("the run is over"))])
        for watched in self._groups.values():
            watched.end()
        self._engine.close()
        self._hub.close(linger_ms=1000)

    # ---- groups ----

    def _ask(self, nodes: int) -> None:
        number = len(self._groups)
        pair = self._hub.admit(-1 - number, 0)
        bootstrap = {
            "run": self._run,
            "addresses": self._hub.addresses,
            "server_key": self._hub.keys.public.decode(),
            "public": pair.public.decode(),
            "secret": pair.secret.decode(),
            "lease_s": self._config.lease_s,
            "connect_s": self._config.timeouts.connect_s,
            "grace_s": self._engine.grace_s,
        }
        self._groups[number] = Watched(self._engine.ask(nodes, json.dumps(bootstrap).encode()), nodes)

    def _look_at_groups(self) -> None:
        """Nodes that are over are asked for again, unless none of their group ever came: then something is wrong."""
        expected = self.expected()
        missing = self._wanted - expected
        now = time.monotonic()
        if not self._groups or missing <= 0:
            return
        fewest = self._config.fewest_nodes
        given_up = math.isinf(self._ask_at)
        if now < self._ask_at and not (given_up and expected < fewest):
            return
        over = [watched for watched in self._groups.values() if not watched.standing.nodes]
        last = (over or list(self._groups.values()))[-1]
        self._ask_at = now + min(_MOST_PAUSE_S, 2.0**self._replacements)
        self._replacements += 1
        hopeless = not last.served or self._replacements > self._config.restart_budget
        if hopeless and expected < fewest:
            logs = last.group.logs()
            raise LaunchError(f"{last.standing.text}, and {missing} nodes are missing.\n{logs}".rstrip())
        if self._replacements > self._config.restart_budget:
            log.warning("%s; going on with %d nodes", last.standing.text, expected)
            self._ask_at = math.inf
            return
        log.warning("%s; asking for %d nodes again", last.standing.text, missing)
        try:
            self._ask(missing)
        except LaunchError as error:  # an engine that was there may be there again soon
            log.warning("%s Going on with %d nodes for now.", error, expected)

    # ---- nodes ----

    def _hear(self, group: int, message: n.FromNode) -> None:
        node = self._nodes.get(message.node)
        if isinstance(message, n.NodeHello):
            if node is None:
                self._welcome(group, message)
            return
        if node is not None and node.group != group:
            self._misheard(group, WireError("it speaks for a node of others."))
            return
        if node is None:
            # Given up, or never let in: whatever it runs is fenced off by its keys, and it is told to end it.
            self._hub.send_to(message.node.encode() + NODE, [n.encode(n.Leave("this node was given up"))])
            return
        node.heard = time.monotonic()
        match message:
            case n.NodeBeat():
                self._compare(node, {(worker, incarnation) for worker, incarnation in message.workers})
            case n.Printed():
                if (worker := self._worker(node, message)) is not None:
                    worker.printed(message.data)
            case n.WorkerEnded():
                if (worker := self._worker(node, message)) is not None:
                    worker.end(Ended(message.status, message.note, blameless=node.leaving))
            case n.Leaving():
                log.warning("%s is taken back (%s): its workers hand over what they have", node, message.reason)
                self._drain_node(node)

    def _misheard(self, group: int, error: WireError) -> None:
        """Said the first time, and then less and less often: whoever sends nonsense does not fill the log."""
        self._nonsense[group] += 1
        if self._nonsense[group].bit_count() == 1:
            log.warning("the agent of a node sent what cannot be accepted (%d): %s", self._nonsense[group], str(error))

    def _worker(self, node: Node, message: n.Printed | n.WorkerEnded) -> RemoteWorker | None:
        worker = node.workers.get(message.worker)
        return worker if worker is not None and worker.incarnation == message.incarnation else None

    def _welcome(self, group: int, hello: n.NodeHello) -> None:
        if hello.run != self._run:
            raise WireError("it belongs to another run.")
        route = hello.node.encode() + NODE
        if different := mismatches(hello.versions):
            self._hub.send_to(route, [n.encode(n.Leave(f"does not fit: {'; '.join(different)}"))])
            said = (
                f"the node {hello.host} does not fit: {'; '.join(different)}. Install the same versions on all nodes."
            )
            if self._config.fewest_nodes == self._config.nodes:
                self._misfit = LaunchError(said)
            if hello.host not in self.refused:
                log.warning("%s Going on without it.", said)
            self.refused[hello.host] = "; ".join(different)
            return
        free = next((i for i, held in enumerate(self._blocks[: self._wanted]) if held is None), None)
        if free is None:
            self._hub.send_to(route, [n.encode(n.Leave("all nodes are there already"))])
            return
        node = Node(hello.node, group, hello.host, hello.pid, hello.place, time.monotonic(), free, hello.address)
        self._nodes[node.name] = self._blocks[free] = node
        self._groups[group].welcomed()
        self._hub.send_to(route, [n.encode(n.NodeBeat(node.name))])
        log.info("%s is there, with %d cores", node, hello.cpus)
        self._settle()

    def _settle(self) -> None:
        """Start queued workers whose block has a node now."""
        for worker, handle in list(self._queued.items()):
            node = self._blocks[worker // self._per_node]
            if node is not None and not node.leaving:
                del self._queued[worker]
                self._place(handle, node)

    def _place(self, handle: RemoteWorker, node: Node) -> None:
        handle.words[PHASE] = Phase.CONNECT
        handle.node, handle.asked_at = node, time.monotonic()
        node.workers[handle.worker] = handle
        self._hub.send_to(node.route, [n.encode(handle.order)])

    def _compare(self, node: Node, running: set[tuple[int, int]]) -> None:
        """Messages may be lost when a connection breaks; what the agent says it runs is what counts."""
        now = time.monotonic()
        for worker in node.workers.values():
            if (worker.worker, worker.incarnation) in running:
                worker.seen = True
            elif worker.poll() is None and now - worker.asked_at > _UNSAID_S:
                if worker.seen:
                    worker.end(Ended(1, "its end was not reported"))
                else:
                    worker.asked_at = now
                    self._hub.send_to(node.route, [n.encode(worker.order)])

    def _drain_node(self, node: Node) -> None:
        node.leaving = True
        for worker in node.workers.values():
            worker.leaving = True
        self._release(node)

    def _lose(self, node: Node, why: str) -> None:
        """Whatever it still does, its keys are void: nothing of it is accepted any more."""
        log.warning("%s %s", node, why)
        del self._nodes[node.name]
        self._blocks[node.block] = None
        if not self._engine.tells_lost:
            self._groups[node.group].lost += 1
        for worker in node.workers.values():
            worker.end(Ended(1, f"its {node} {why}", blameless=True))

    def left(self, worker: RemoteWorker) -> None:
        """A worker's handle was given up by the head: it has ended."""
        self._queued.pop(worker.worker, None)
        node = worker.node
        if node is not None and node.workers.get(worker.worker) is worker:
            del node.workers[worker.worker]
            self._release(node)

    def _release(self, node: Node) -> None:
        """A node that is leaving may go once its workers are done."""
        if node.leaving and not node.workers and node.name in self._nodes:
            self._hub.send_to(node.route, [n.encode(n.Leave("its workers are done"))])
            del self._nodes[node.name]
            self._blocks[node.block] = None

    def tell(self, node: Node, message: n.ToNode) -> None:
        self._hub.send_to(node.route, [n.encode(message)])


def _allow_files(count: int) -> None:
    """Connections and descriptors of many workers are more than most systems allow at first; up to a limit, one may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (needed if hard == resource.RLIM_INFINITY else min(needed, hard), hard)
        )
    if hard != resource.RLIM_INFINITY and hard < needed:
        log.warning("this process may open %d files; %d may be needed: raise the limit (ulimit -n)", hard, needed)


class RemoteWorker:
    """A worker that an agent runs, or will run (see `core.WorkerHandle`)."""

    def __init__(
        self, launcher: ClusterLauncher, worker: int, incarnation: int, bootstrap: bytes, words: memoryview
    ) -> None:
        self._launcher, self.worker, self.incarnation, self.words = launcher, worker, incarnation, words
        self.order = n.StartWorker(worker, incarnation, bootstrap)
        self.node: Node | None = None
        self.asked_at, self.seen, self.leaving = 0.0, False, False
        # Readable when there is something to know, as descriptors of a local process are.
        self.exit_fd, self.output_fd = (os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(2))
        self._new, self._tail = b"", b""
        self._ended: Ended | None = None

    @property
    def pid(self) -> int:
        return 0  # said by the worker itself, when it is there

    def poll(self) -> Ended | None:
        return self._ended

    def end(self, how: Ended) -> None:
        if self._ended is None:
            self._ended = how
            os.eventfd_write(self.exit_fd, 1)

    def kill(self) -> None:
        if self.node is None:
            self.end(Ended(0))
        elif self._ended is None:
            self._launcher.tell(self.node, n.KillWorker(self.worker, self.incarnation))

    def dump_stacks(self) -> None:
        if self.node is not None:
            self._launcher.tell(self.node, n.DumpStacks(self.worker, self.incarnation))

    def printed(self, data: bytes) -> None:
        self._new = (self._new + data)[-_UNREAD_BYTES:]
        os.eventfd_write(self.output_fd, 1)

    def read_output(self) -> bytes | None:
        try:
            os.eventfd_read(self.output_fd)
        except BlockingIOError:
            return b""
        new, self._new = self._new, b""
        self._tail = (self._tail + new)[-_TAIL_BYTES:]
        return new

    def output(self) -> str:
        self.read_output()
        return self._tail.decode(errors="replace")

    def close(self) -> None:
        self._launcher.left(self)
        os.close(self.exit_fd)
        os.close(self.output_fd)


class Watched:
    """A group, asked now and then how it is by a thread: engines take their time to answer."""

    def __init__(self, group: Group, nodes: int) -> None:
        self.group = group
        self.standing = Standing("asked for", nodes)
        self.served = False
        """Whether an agent of it ever came."""
        self.lost = 0
        """Nodes of it that were lost, and have not come back."""
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="farstep-engine")
        self._thread.start()

    def welcomed(self) -> None:
        """An agent of it came, perhaps again: SLURM starts a job that lost its nodes once more."""
        self.served, self.lost = True, max(0, self.lost - 1)

    def _watch(self) -> None:
        while self.standing.nodes:
            try:
                self.standing = self.group.standing()
            except Exception as error:  # an engine that cannot be asked may still have nodes for us
                self.standing = Standing(f"the engine does not answer: {error}", self.standing.nodes)
            if self._end.wait(_LOOK_S):
                return

    def end(self) -> None:
        self._end.set()
        self.group.cancel()
