"""Workers on the nodes of a cluster, whatever engine started the agents there (see `node_agent.py`).

A block is the share of a node: a range of workers. Nodes take blocks in the order in which they arrive; a worker whose
block has no node is queued. A node that is lost leaves its block to the next one.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import time
from collections import Counter
from collections.abc import Callable, Sequence

import zmq

from farstep.config.launch import EngineConfig
from farstep.core import Ended, Launcher, Received, Started
from farstep.errors import LaunchError, WireError, counted
from farstep.launch.addresses import own_addresses
from farstep.launch.engine import Engine
from farstep.launch.groups import Groups
from farstep.launch.hub import HubLink, admit, admit_worker, drain
from farstep.launch.nodes import Node, RemoteWorker, tell
from farstep.rollout.progress import PHASE, Phase, copy_words, private_words
from farstep.wire import node_messages as n
from farstep.wire.channels.zmq import Hub
from farstep.wire.versions import mismatches

log = logging.getLogger("farstep")
_FILES_PER_WORKER, _OTHER_FILES = 8, 1024
_MOST_REFUSED = 64
"""Hosts that are remembered, and logged; whoever invents more is not listened to."""
_SILENT_S = 3 * n.BEAT_S
"""A node of which nothing was heard for so long is lost if its engine says that it is over, or after its lease."""


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
        self._groups = Groups(engine, config, self._agents_bootstrap)
        self._ticked = self._enough_at = time.monotonic()
        self._next_beat, self._stopping = 0.0, False
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

    def prepare(self) -> None:
        self._groups.ask(self._wanted)

    def start(self, worker: int, incarnation: int, run: str) -> Started:
        bootstrap = admit_worker(self._hub, worker, incarnation, run, self._envs) | {
            "transport": "tcp",
            "threads": self._config.cpus_per_worker,
            "encrypted": self._config.encrypted,
            "gpu": self._config.gpu_of(worker % self._per_node),
        }
        words = private_words(self._envs)
        handle = RemoteWorker(worker, incarnation, json.dumps(bootstrap).encode(), words, self._given_up)
        node = self._blocks[worker // self._per_node]
        if node is None or node.leaving:
            words[PHASE] = Phase.QUEUED
            self._queued[worker] = handle
        else:
            node.start(handle, time.monotonic())
        return Started(handle, HubLink(self._hub, worker), words, node.host if node else "?")

    def filenos(self) -> Sequence[int]:
        return self._hub.filenos()

    def drain(self, receive: Callable[[int, Received], None]) -> bool:
        def hear(peer: int, received: Received) -> None:
            if peer >= 0:
                receive(peer, received)
                return
            group = -1 - peer
            try:
                self._hear(group, n.decode_from_node(received.frames))
            except WireError as error:
                if (versions := n.versions_in(received.frames)) and (different := mismatches(versions)):
                    self._refuse("(unnamed)", "; ".join(different))
                else:
                    self._misheard(group, error)

        return drain(self._hub, hear)

    def tick(self) -> None:
        now = time.monotonic()
        asleep_s, self._ticked = max(0.0, now - self._ticked - 1.0), now
        for node in list(self._nodes.values()):
            node.heard += asleep_s  # while nobody listened, nobody can have been heard
            silent_s, standing = now - node.heard, self._groups[node.group].standing
            if silent_s > self._config.lease_s:
                self._lose(node, f"was not heard of for {self._config.lease_s:g} s")
            elif silent_s > _SILENT_S and standing.is_over(node.place):  # who is heard of is there, whatever is said
                self._lose(node, f"is lost: {standing.text}")
        if now >= self._next_beat:
            self._next_beat = now + n.BEAT_S
            self._hub.service()
            for node in self._nodes.values():
                node.tell(n.NodeBeat(node.name))
        if self._stopping:
            return
        self._groups.ask_again(self._wanted, now)
        there, fewest = self._there(), self._config.fewest_nodes
        if there >= fewest:
            self._enough_at, self._misfit = now, None
        elif self._misfit is not None:  # with enough nodes, a run goes on without it
            raise self._misfit
        elif now - self._enough_at > self._config.queue_s:
            said = f"{there} of at least {counted(fewest, 'node')} came within queue_s={self._config.queue_s:g} s"
            raise LaunchError(f"{said}: {self.waiting()}.\n{self.logs()}".rstrip())

    def stop(self) -> None:
        self._stopping = True
        for handle in list(self._queued.values()):
            handle.kill()

    def scale(self, nodes: int) -> None:
        """Have so many nodes from now on: more are asked for, or the last blocks are given back."""
        before, self._wanted = self._wanted, nodes
        self._groups.start_over()
        for node in self._blocks[nodes:]:
            if node is not None:
                node.given_back = True
                self._drain_node(node)
        self._groups.give_back(nodes)
        if nodes > before:
            self._groups.ask(nodes - before)
            self._settle()

    def waiting(self) -> str:
        """What the engine says about nodes that are not here yet; empty if all are."""
        if not (missing := sum(node is None for node in self._blocks[: self._wanted])):
            return ""
        said = self._groups.standing()
        wanted = counted(self._wanted, "node")
        return f"{missing} of {wanted} not connected yet{f': {said}' if said else ''}"

    def spare(self) -> int:
        return sum(worker // self._per_node >= self._wanted for worker in self._queued)

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
        return self._groups.expected()

    def logs(self) -> str:
        """Where what nodes said is written, and the end of it."""
        return self._groups.logs()

    def close(self) -> None:
        for node in self._nodes.values():
            node.tell(n.Leave("the run is over"))
        self._groups.end()
        self._engine.close()
        self._hub.close(linger_ms=1000)

    # ---- nodes ----

    def _agents_bootstrap(self, group: int) -> bytes:
        """Agents of a group share a key, which is that of the peer -1 - group: workers have numbers from 0 on."""
        bootstrap = admit(self._hub, -1 - group, 0) | {
            "run": self._run,
            "addresses": self._hub.addresses,
            "lease_s": self._config.lease_s,
            "connect_s": self._config.timeouts.connect_s,
            "grace_s": self._engine.grace_s,
        }
        return json.dumps(bootstrap).encode()

    def _there(self) -> int:
        return sum(node is not None for node in self._blocks)

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
            tell(self._hub, message.node, n.Leave("this node was given up", come_again=True))
            return
        node.heard = time.monotonic()
        match message:
            case n.NodeBeat():
                node.compare(set(message.workers), node.heard)
            case n.Printed():
                if (worker := node.worker(message.worker, message.incarnation)) is not None:
                    worker.printed(message.data)
            case n.WorkerEnded():
                if (worker := node.worker(message.worker, message.incarnation)) is not None:
                    copy_words(message.words, worker.words)
                    worker.end(Ended(message.status, message.note, blameless=node.leaving))
            case n.Leaving():
                log.warning("%s is taken back (%s): its workers hand over what they have", node, message.reason)
                self._drain_node(node)

    def _misheard(self, group: int, error: WireError) -> None:
        """Said the first time, and then less and less often: whoever sends nonsense does not fill the log."""
        self._nonsense[group] += 1
        if self._nonsense[group].bit_count() == 1:
            log.warning("the agent of a node sent what cannot be accepted (%d): %s", self._nonsense[group], str(error))

    def _refuse(self, host: str, different: str) -> None:
        """Refuse a node whose versions differ from the head's."""
        said = f"the node {host} does not fit: {different}. Install the same versions on all nodes."
        if self._config.fewest_nodes == self._config.nodes:
            self._misfit = LaunchError(said)
        if host not in self.refused and len(self.refused) < _MOST_REFUSED:
            log.warning("%s Continuing without it.", said)
            self.refused[host] = different

    def _welcome(self, group: int, hello: n.NodeHello) -> None:
        if hello.run != self._run:
            raise WireError("it belongs to another run.")
        if group >= len(self._groups):  # its engine started it, and said that it could not
            tell(self._hub, hello.node, n.Leave("nobody asked for this node"))
            return
        if different := mismatches(hello.versions):
            what = "; ".join(different)
            tell(self._hub, hello.node, n.Leave(f"does not fit: {what}"))
            self._groups[group].turned_away(hello.node, hello.place)
            self._refuse(hello.host, what)
            return
        killed = self._nodes.get(hello.replaces or "")
        if killed is not None and killed.group == group:
            self._lose(killed, "lost its daemon, which was restarted on the same node")
        free = next((i for i, held in enumerate(self._blocks[: self._wanted]) if held is None), None)
        if free is None or self._groups[group].is_cancelled:
            self._groups[group].turned_away(hello.node, hello.place)
            tell(self._hub, hello.node, n.Leave("all nodes are there already"))
            return
        node = Node(
            hub=self._hub,
            name=hello.node,
            group=group,
            host=hello.host,
            pid=hello.pid,
            place=hello.place,
            address=hello.address,
            heard=time.monotonic(),
            block=free,
        )
        self._nodes[node.name] = self._blocks[free] = node
        self._groups[group].welcomed(hello.place)
        node.tell(n.NodeBeat(node.name))
        log.info("%s is there, with %d cores", node, hello.cpus)
        if hello.setup_failed:
            log.warning("%s: of its setup, %r failed; it goes on all the same", node, hello.setup_failed)
        self._settle()

    def _settle(self) -> None:
        """Start queued workers whose block has a node now."""
        for worker, handle in list(self._queued.items()):
            node = self._blocks[worker // self._per_node]
            if node is not None and not node.leaving:
                del self._queued[worker]
                node.start(handle, time.monotonic())

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
        self._groups[node.group].left(node.place, for_good=True)
        for worker in node.workers.values():
            worker.end(Ended(1, f"its {node} {why}", blameless=True))

    def _given_up(self, worker: RemoteWorker) -> None:
        """A worker's handle was given up by the head: it has ended."""
        self._queued.pop(worker.worker, None)
        node = worker.node
        if node is not None and node.workers.get(worker.worker) is worker:
            del node.workers[worker.worker]
            self._release(node)

    def _release(self, node: Node) -> None:
        """A node that is leaving may go once its workers are done."""
        if node.leaving and not node.workers and node.name in self._nodes:
            node.tell(n.Leave("its workers are done"))
            del self._nodes[node.name]
            self._blocks[node.block] = None
            self._groups[node.group].left(node.place, for_good=node.given_back)


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
