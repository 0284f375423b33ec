"""Starts workers on the nodes of a cluster. An engine starts a node daemon on each node; the daemons start workers.

A block is a range of workers that run on the same node. When a node connects, it gets the first free block. Workers of
a block without a node are queued. The block of a lost node goes to the next node that connects.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import zmq

from farstep.config.launch import EngineConfig
from farstep.core import UNKNOWN_STATUS, Ended, Launcher, Received, Started
from farstep.errors import UNKNOWN_HOST, ConfigError, LaunchError, WireError, counted
from farstep.event import Emit
from farstep.launch.acting_plan import ActingPlan
from farstep.launch.addresses import own_addresses
from farstep.launch.daemon.process import ProcessStarter, import_path
from farstep.launch.engines.engine import Engine
from farstep.launch.groups import Groups
from farstep.launch.hub import HubLink, admit, admit_worker, drain
from farstep.launch.nodes import Node, RemoteWorker, send_to_node
from farstep.rollout.progress import PHASE, Phase, copy_words, private_words
from farstep.wire import node_messages as n
from farstep.wire.channels.zmq import NODE, Hub
from farstep.wire.versions import OTHER_VERSIONS, mismatches

_FILES_PER_PEER, _OTHER_FILES = 8, 1024
"""Descriptors for each worker, or for each node whose daemon relays for its workers, and for all else."""
_SAME_VERSIONS = "Install the same versions on all nodes."
_DO_NOT_PIN = "Or leave cpu_affinity='off'."
_DO_NOT_DUMP = "Or leave park_method='suspend'."
_MAX_REFUSED = 64
"""Maximum number of refused hosts that are stored and emitted, because a peer could invent any number of hosts."""
_SILENT_S = 3 * n.BEAT_S
"""If the engine reports that a node has ended, the node is declared lost after this many seconds of silence."""


class ClusterLauncher(Launcher):
    """Requests nodes from an engine, and starts and watches workers on them."""

    shares_memory = False
    driven = False

    def __init__(
        self, config: EngineConfig, plan: ActingPlan, envs: int, modules: Sequence[str], engine: Engine, emit: Emit
    ) -> None:
        self._config, self._envs, self._modules, self._engine, self._emit = config, envs, modules, engine, emit
        self._further: Sequence[str] = ()
        """Modules that zygotes import beside `modules`, since the run has adopted an agent that needs them."""
        self._plan, self._per_node = plan, plan.num_workers // config.most_nodes
        self.run = os.urandom(8).hex()
        self.connected: dict[str, Node] = {}
        """Connected nodes, by the name that their node daemon chose."""
        self._blocks: list[Node | None] = [None] * config.most_nodes
        self._queued: dict[int, RemoteWorker] = {}
        self._wanted = config.nodes
        self.groups = Groups(engine, config, self._daemon_bootstrap, emit)
        self._ticked_at = self._enough_at = time.monotonic()
        self._next_beat, self._stopping = 0.0, False
        self.refused: dict[str, tuple[str, str]] = {}
        """Hosts whose nodes were refused: why, and what to do."""
        peers = config.most_nodes if config.relay else plan.num_workers + plan.num_servers
        _raise_file_limit(_FILES_PER_PEER * peers, emit)
        self._invalid: Counter[int] = Counter()
        """Number of invalid messages of each group."""
        self._refusal: LaunchError | None = None
        """The error about a refused node. It ends the run unless enough other nodes are connected."""
        self._changed: dict[int, None] = {}
        """Workers that have printed or ended since the last call of `changed`."""
        self._changed_fd = -1
        """Readable if there are any."""
        self._starter: ProcessStarter | None = None
        """Starts acting servers on this machine."""
        try:
            self._addresses = engine.listen_on()
            self.hub = self._listen(self._addresses)
            self._changed_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            if plan.is_on_head:
                self._starter = ProcessStarter(
                    config.cpus_per_worker,
                    config.start_method,
                    modules,
                    config.timeouts.connect_s,
                    partial(emit, "warned"),
                )
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

    # ---- core.Launcher ----

    def prepare(self) -> None:
        self.groups.request(self._wanted)

    def preload(self, modules: Sequence[str]) -> None:
        self._further = modules
        if self._starter is not None:
            self._starter.preload(modules, import_path())

    def start(self, worker: int, incarnation: int, run: str) -> Started:
        listen = [f"tcp://{address}:*" for address in self._addresses]
        bootstrap = admit_worker(self.hub, worker, incarnation, run, self._envs) | {
            "transport": "tcp",
            "threads": self._config.cpus_per_worker,
            "encrypted": self._config.encrypted,
            "gpu": self._config.gpu_of(worker % self._per_node),
            "rank": worker % self._per_node,
            "preload": {"modules": list(self._further), "path": import_path()},
            **self._plan.bootstrap(worker, listen=listen),
        }
        words = private_words(self._envs)
        if self._starter is not None and self._plan.is_server(worker):
            words[PHASE] = Phase.CONNECT
            process = self._starter.start({**bootstrap, "address": self.hub.address})
            return Started(process, HubLink(self.hub, worker), words, socket.gethostname())
        encoded = json.dumps(bootstrap).encode()
        handle = RemoteWorker(worker, incarnation, encoded, words, self._notify, self._forget_worker)
        node = self._node_for(worker)
        if node is None or node.leaving:
            words[PHASE] = Phase.QUEUED
            self._queued[worker] = handle
        else:
            node.start(handle, time.monotonic())
        return Started(handle, HubLink(self.hub, worker), words, node.host if node else UNKNOWN_HOST)

    def filenos(self) -> Sequence[int]:
        return [*self.hub.filenos(), self._changed_fd]

    def _notify(self, worker: int) -> None:
        """Note that a worker has printed or ended, and wake the event loop."""
        if not self._changed:
            os.eventfd_write(self._changed_fd, 1)
        self._changed[worker] = None

    def changed(self) -> Sequence[int]:
        if not self._changed:
            return ()
        os.eventfd_read(self._changed_fd)
        changed, self._changed = list(self._changed), {}
        return changed

    def drain(self, receive: Callable[[int, Received], None]) -> bool:
        def dispatch(peer: int, received: Received) -> None:
            if peer >= 0:
                receive(peer, received)
                return
            group = -1 - peer
            try:
                self._on_message(group, n.decode_from_node(received.frames), receive)
            except WireError as error:
                if (versions := n.versions_in(received.frames)) and (different := mismatches(versions)):
                    self._refuse("(unnamed)", f"{OTHER_VERSIONS}: {'; '.join(different)}", _SAME_VERSIONS)
                else:
                    self._on_invalid(group, error)

        return drain(self.hub, dispatch)

    def tick(self) -> None:
        now = time.monotonic()
        paused_s, self._ticked_at = max(0.0, now - self._ticked_at - 1.0), now
        for node in list(self.connected.values()):
            node.heard_at += paused_s  # silence does not count while the head was not reading
            silent_s, status = now - node.heard_at, self.groups[node.group].status
            if silent_s > self._config.lease_s:
                self._lose(node, f"was silent for {self._config.lease_s:g} s")
            elif silent_s > _SILENT_S and status.has_ended(node.place):  # a node that still sends messages is not lost
                self._lose(node, f"is lost: {status.text}")
        if now >= self._next_beat:
            self._next_beat = now + n.BEAT_S
            self.hub.service()
            for node in self.connected.values():
                node.send(n.NodeBeat(node.name))
        if self._stopping:
            return
        connected, fewest = sum(node is not None for node in self._blocks), self._config.fewest_nodes
        is_enough = connected >= fewest and not self._missing_names()
        if is_enough:
            self._enough_at, self._refusal = now, None
        elif self._refusal is not None:  # first: that the refused node has ended explains nothing
            raise self._refusal
        self.groups.request_missing(self._wanted, now)
        if not is_enough and now - self._enough_at > self._config.queue_s:
            if connected >= fewest:
                reason = "; ".join(dict.fromkeys([self.waiting(), self._missing_names_text()]))
            else:
                found = f"{connected} of at least {counted(fewest, 'node')} connected"
                reason = f"{found} within queue_s={self._config.queue_s:g} s: {self.waiting()}"
            raise LaunchError(f"{reason}.\n{self.logs()}".rstrip())

    def stop(self) -> None:
        self._stopping = True
        for handle in list(self._queued.values()):
            handle.kill()

    def scale(self, nodes: int) -> None:
        """Change the number of nodes: request more nodes, or drain and release the nodes with the last blocks."""
        for node in self._blocks[nodes:]:
            if node is not None and any(map(node.is_named, self._plan.named_nodes)):
                raise ConfigError(
                    f"{node} cannot be released, because acting servers run on it (inference has "
                    f"where={list(self._plan.named_nodes)!r}); keep {counted(node.block + 1, 'node')} or more."
                )
        before, self._wanted = self._wanted, nodes
        self.groups.reset_retries()
        for node in self._blocks[nodes:]:
            if node is not None:
                node.released = True
                self._drain_node(node)
        self.groups.cancel_unneeded(nodes)
        if nodes > before:
            self.groups.request(nodes - before)
            self._start_queued()
        if nodes != before:
            self._emit("scaled", f"scaled from {before} to {counted(nodes, 'node')}")

    def make_room(self, workers: int) -> None:
        if (needed := -(-workers // self._per_node)) > self._wanted:
            self.scale(needed)

    def waiting(self) -> str:
        """The engine's report on nodes that are not connected yet; empty if all are connected."""
        if not (missing := sum(node is None for node in self._blocks[: self._wanted])):
            return self._missing_names_text()
        status = self.groups.status()
        wanted = counted(self._wanted, "node")
        return f"{missing} of {wanted} not connected yet{f': {status}' if status else ''}"

    def spare(self) -> int:
        rolling = (worker for worker in self._queued if worker < self._plan.num_workers)
        return sum(self._plan.node_of(worker) >= self._wanted for worker in rolling)

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

    def on_disk(self) -> dict[int, int]:
        workers = [(worker, node) for node in self.connected.values() for worker in node.workers.values()]
        found = {worker.worker: node.on_disk.get(worker.worker, 0) for worker, node in workers if worker.suspended}
        return {worker: size for worker, size in found.items() if size}

    def expected(self) -> int:
        """Number of nodes that are connected or may still connect without another request."""
        return self.groups.expected()

    def logs(self) -> str:
        """The paths of the node daemons' logs, and the last lines of each."""
        return self.groups.logs()

    def close(self) -> None:
        for node in self.connected.values():
            node.send(n.Leave("the run has ended"))
        self.groups.end()
        self._engine.close()
        if self._starter is not None:
            self._starter.close()
        self.hub.close(linger_ms=1000)
        os.close(self._changed_fd)

    # ---- nodes ----

    def _daemon_bootstrap(self, group: int) -> bytes:
        """The bootstrap of a group's node daemons. They share a key and the peer number -1 - group; workers have 0, 1,
        ..."""
        bootstrap = admit(self.hub, -1 - group, 0) | {
            "run": self.run,
            "addresses": self.hub.addresses,
            "lease_s": self._config.lease_s,
            "connect_s": self._config.timeouts.connect_s,
            "grace_s": self._engine.grace_s,
            "start_method": self._config.start_method,
            "modules": list(self._modules),
            "cpu_affinity": self._config.cpu_affinity,
            "cpus_per_worker": self._config.cpus_per_worker,
            "workers": self._per_node,
            "park_method": self._config.park_method,
        }
        return json.dumps(bootstrap).encode()

    def _on_message(self, group: int, message: n.FromNode, receive: Callable[[int, Received], None]) -> None:
        node = self.connected.get(message.node)
        if isinstance(message, n.NodeHello):
            if node is None:
                self._admit(group, message)
            return
        if node is not None and node.group != group:
            self._on_invalid(group, WireError("it names a node of another group."))
            return
        if node is None:
            # The node was declared lost or never admitted, and its workers' keys are revoked: make it end its workers.
            send_to_node(self.hub, message.node, n.Leave("this node was declared lost", come_again=True))
            return
        node.heard_at = time.monotonic()
        match message:
            case n.NodeBeat():
                node.reconcile(set(message.workers), set(message.suspended), node.heard_at)
                node.on_disk = message.on_disk
                node.store_progress(message, receive)
            case n.Printed():
                if (worker := node.worker(message.worker, message.incarnation)) is not None:
                    worker.printed(message.data)
            case n.NotOnDisk():
                text = f"worker {message.worker} on {node.host} is parked, but stays in memory: {message.reason}"
                self._emit("warned", text, worker=message.worker, node=node.host)
            case n.WorkerEnded():
                if (worker := node.worker(message.worker, message.incarnation)) is not None:
                    copy_words(message.words, worker.words)
                    if message.blameless and worker.poll() is None:
                        text = f"worker {message.worker} on {node.host} is replaced: {message.note}"
                        self._emit("lost", text, worker=message.worker, node=node.host)
                    worker.end(Ended(message.status, message.note, blameless=node.leaving or message.blameless))
            case n.Leaving():
                text = f"{node} is being reclaimed by its engine ({message.reason}): draining its workers"
                self._emit("requeued", text, node=node.host)
                self._drain_node(node)

    def _on_invalid(self, group: int, error: WireError) -> None:
        """Emit the 1st, 2nd, 4th, 8th, ... invalid message, so that a broken peer cannot fill the log."""
        self._invalid[group] += 1
        if self._invalid[group].bit_count() == 1:
            number = self._invalid[group]
            self._emit("warned", f"a node daemon sent a message that cannot be accepted ({number}): {error}")

    def _refuse(self, host: str, why: str, remedy: str) -> None:
        """Refuse a node whose versions differ from the head's, or whose workers cannot be pinned or written to disk.

        Args:
            host: The node.
            why: The predicate of a sentence about the node.
            remedy: What the user can do.
        """
        text = f"the node {host} {why}. {remedy}"
        if self._config.fewest_nodes == self._config.nodes:
            self._refusal = LaunchError(text)
        if host not in self.refused and len(self.refused) < _MAX_REFUSED:
            self._emit("warned", f"{text} Continuing without it.", node=host)
            self.refused[host] = (why, remedy)

    def _admit(self, group: int, hello: n.NodeHello) -> None:
        if hello.run != self.run:
            raise WireError("it belongs to another run.")
        if group >= len(self.groups):  # the engine started this node although the request raised an error
            send_to_node(self.hub, hello.node, n.Leave("this node was not requested"))
            return
        different = "; ".join(mismatches(hello.versions))
        cannot = hello.cannot_pin or hello.cannot_park
        if different or cannot:
            why = f"{OTHER_VERSIONS}: {different}" if different else f"cannot be used: {cannot.removesuffix('.')}"
            remedy = _SAME_VERSIONS if different else _DO_NOT_PIN if hello.cannot_pin else _DO_NOT_DUMP
            send_to_node(self.hub, hello.node, n.Leave(f"this node {why}"))
            self.groups[group].rejected(hello.node, hello.place)
            self._refuse(hello.host, why, remedy)
            return
        killed = self.connected.get(hello.replaces or "")
        if killed is not None and killed.group == group:
            self._lose(killed, "lost its daemon, which was restarted on the same node")
        free = next((i for i, held in enumerate(self._blocks[: self._wanted]) if held is None), None)
        if free is None or self.groups[group].is_cancelled:
            self.groups[group].rejected(hello.node, hello.place)
            send_to_node(self.hub, hello.node, n.Leave("the run has all the nodes it needs"))
            return
        node = Node(
            hub=self.hub,
            name=hello.node,
            group=group,
            host=hello.host,
            pid=hello.pid,
            place=hello.place,
            address=hello.address,
            heard_at=time.monotonic(),
            block=free,
            relay=self._relay_keys(hello.node),
        )
        self.connected[node.name] = self._blocks[free] = node
        self.groups[group].joined(hello.place)
        node.send(n.NodeBeat(node.name))
        self._emit("joined", f"{node} connected, with {hello.cpus} cores", node=node.host)
        if hello.setup_failed:
            text = f"{node}: the setup command {hello.setup_failed!r} failed; continuing anyway"
            self._emit("warned", text, node=node.host)
        self._start_queued()

    def _missing_names(self) -> list[str]:
        """The nodes on which acting servers are to run that are not connected."""
        return [name for name in self._plan.named_nodes if self._named(name) is None]

    def _named(self, name: str) -> Node | None:
        """A connected node of this name that is not about to leave."""
        return next((node for node in self.connected.values() if node.is_named(name) and not node.leaving), None)

    def _missing_names_text(self) -> str:
        """What is missing for acting servers on named nodes, and what to do; empty if these nodes are connected."""
        if not (names := self._missing_names()):
            return ""
        connected = ", ".join(sorted(node.host for node in self.connected.values()))
        return (
            f"acting servers are to run on {' and '.join(names)}, but the connected nodes are {connected}; name some "
            "of these in where of ServedInference"
        )

    def _node_for(self, worker: int) -> Node | None:
        """The node of a worker or acting server; None if it is not connected."""
        if name := self._plan.node_name_of(worker):
            return self._named(name)
        return self._blocks[self._plan.node_of(worker)]

    def _start_queued(self) -> None:
        """Start queued workers whose block now has a node."""
        for worker, handle in list(self._queued.items()):
            node = self._node_for(worker)
            if node is not None and not node.leaving:
                del self._queued[worker]
                node.start(handle, time.monotonic())

    def _drain_node(self, node: Node) -> None:
        node.leaving = True
        for worker in node.workers.values():
            worker.leaving = True
        self._release(node)

    def _lose(self, node: Node, why: str) -> None:
        """Declare a node lost: revoke the keys of its workers, mark them as ended, and free its block."""
        self._emit("lost", f"{node} {why}", node=node.host)
        self._forget_node(node)
        self.groups[node.group].left(node.place, for_good=True)
        for worker in node.workers.values():
            worker.end(Ended(UNKNOWN_STATUS, f"its {node} {why}", blameless=True))

    def _relay_keys(self, name: str) -> n.RelayKeys | None:
        """Keys for the daemon of a new node, if daemons are to relay."""
        if not self._config.relay:
            return None
        pair = self.hub.admit_relay(name.encode() + NODE)
        return n.RelayKeys(pair.public, pair.secret, self.hub.bulk_port)

    def _forget_node(self, node: Node) -> None:
        """Free the block of a node, and revoke its key."""
        del self.connected[node.name]
        self._blocks[node.block] = None
        if node.relay is not None:
            self.hub.expel_relay(node.relay.public)

    def _forget_worker(self, worker: RemoteWorker) -> None:
        """Remove an ended worker after the head has closed its handle."""
        self._queued.pop(worker.worker, None)
        node = worker.node
        if node is not None and node.workers.get(worker.worker) is worker:
            del node.workers[worker.worker]
            self._release(node)

    def _release(self, node: Node) -> None:
        """Release a draining node when its workers have ended."""
        if node.leaving and not node.workers and node.name in self.connected:
            node.send(n.Leave("its workers are done"))
            self._forget_node(node)
            self.groups[node.group].left(node.place, for_good=node.released)


def _raise_file_limit(count: int, emit: Emit) -> None:
    """Raise the soft limit on open files for `count` connections, and warn if the hard limit is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (needed if hard == resource.RLIM_INFINITY else min(needed, hard), hard)
        )
    if hard != resource.RLIM_INFINITY and hard < needed:
        emit("warned", f"this process may open {hard} files; {needed} may be needed: raise the limit (ulimit -n)")
