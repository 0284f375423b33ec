"""Starts workers on the nodes of a cluster. An engine starts a node daemon on each node; the daemons start workers.

A block is a range of workers that run on the same node. When a node connects, it gets the first free block; with ssh,
host k gets block k if it is free, so that runs with the same hosts number their nodes in the same way (see
`head/slots/placement.py`). Workers of a block without a node are queued. The block of a lost node goes to the next node
that connects.

Nodes that run only acting servers have no block. An engine object of their own provides them.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial

import zmq

from farstep.config.launch import EngineConfig, SSHConfig
from farstep.core import UNKNOWN_STATUS, Ended, Launcher, Received, Started
from farstep.errors import UNKNOWN_HOST, ConfigError, LaunchError, WireError, counted
from farstep.event import Emit
from farstep.launch.acting_plan import ActingPlan
from farstep.launch.addresses import own_addresses
from farstep.launch.daemon.process import ProcessStarter, import_path
from farstep.launch.engines.engine import Engine
from farstep.launch.groups import Groups, WatchedGroup
from farstep.launch.hub import HubLink, admit, admit_worker, drain, raise_file_limit
from farstep.launch.nodes import NO_BLOCK, Node, RemoteWorker, host_of, send_to_node
from farstep.launch.refusals import Refusals, objection_to
from farstep.launch.server_nodes import ServerNodes, not_connected
from farstep.rollout.progress import PHASE, Phase, copy_words, private_words
from farstep.wire import node_messages as n
from farstep.wire.channels.zmq import NODE, Hub

_SILENT_S = 3 * n.BEAT_S
"""If the engine reports that a node has ended, the node is declared lost after this many seconds of silence."""


class ClusterLauncher(Launcher):
    """Requests nodes from an engine, and starts and watches workers on them.

    Args:
        config: How many nodes have workers, and what all nodes have in common.
        plan: Maximum number of workers, and the acting servers.
        envs: Maximum number of environments per worker.
        modules: Modules that workers need, for zygotes.
        engine: Provides the nodes with workers.
        emit: Receives events about nodes.
        server_hosts: The nodes that run only acting servers, by name.
        server_engine: Provides these nodes; None if there are none.
    """

    shares_memory = False
    driven = False

    def __init__(
        self,
        config: EngineConfig,
        plan: ActingPlan,
        envs: int,
        modules: Sequence[str],
        engine: Engine,
        emit: Emit,
        *,
        server_hosts: Sequence[str] = (),
        server_engine: Engine | None = None,
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
        self._engines = [engine] if server_engine is None else [engine, server_engine]
        numbers = itertools.count()
        self.groups = Groups(engine, config, self._daemon_bootstrap, emit, numbers=numbers)
        server_groups = Groups(
            self._engines[-1],
            config,
            lambda group: self._daemon_bootstrap(group, has_workers=False),
            emit,
            fewest=len(server_hosts),
            numbers=numbers,
        )
        self._servers = ServerNodes(plan.named_nodes, server_hosts, server_groups, self.connected, config)
        self._ticked_at = self._enough_at = time.monotonic()
        self._next_beat, self._stopping = 0.0, False
        self.refusals = Refusals(config, emit)
        peers = config.most_nodes if config.relay else plan.num_workers + plan.num_servers
        raise_file_limit(peers, emit)
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
            self._close_engines()
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
        self._servers.request()

    def preload(self, modules: Sequence[str]) -> None:
        self._further = modules
        if self._starter is not None:
            self._starter.preload(modules, import_path())

    def start(self, worker: int, incarnation: int, run: str) -> Started:
        listen = [f"tcp://{address}:*" for address in self._addresses]
        has_workers = self._plan.node_name_of(worker) not in self._servers.hosts
        bootstrap = admit_worker(self.hub, worker, incarnation, run, self._envs) | {
            "transport": "tcp",
            "threads": self._config.cpus_per_worker,
            "encrypted": self._config.encrypted,
            "gpu": self._config.gpu_of(worker % self._per_node),
            "rank": worker % self._per_node,
            "preload": {"modules": list(self._further), "path": import_path()},
            **self._plan.bootstrap(worker, listen=listen, has_workers=has_workers),
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
                is_server = group in self._servers.groups
                self.refusals.add_message(group, received.frames, error, is_server=is_server)

        return drain(self.hub, dispatch)

    def tick(self) -> None:
        now = time.monotonic()
        paused_s, self._ticked_at = max(0.0, now - self._ticked_at - 1.0), now
        for node in list(self.connected.values()):
            node.excuse(paused_s, now)
            silent_s, status = now - node.heard_at, self._group(node.group).status
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
        has_servers = self._servers.check_names(others_connected=connected >= self._wanted)
        is_enough = connected >= fewest and has_servers
        if is_enough:
            self._enough_at, self.refusals.error = now, None
        elif self.refusals.error is not None:  # first: that the refused node has ended explains nothing
            raise self.refusals.error
        self.groups.request_missing(self._wanted, now)
        self._servers.request_missing(now)
        if not is_enough and now - self._enough_at > self._config.queue_s:
            found, reason = f"{connected} of at least {counted(fewest, 'node')} connected", self.waiting()
            if connected >= fewest:
                found = "the nodes of acting servers did not connect"
                if (wrong := self._servers.wrong_names()) not in reason:
                    reason = f"{reason}; {wrong}"
            text = f"{found} within queue_s={self._config.queue_s:g} s: {reason}"
            raise LaunchError(f"{text}.\n{self.logs()}".rstrip())

    def stop(self) -> None:
        self._stopping = True
        for handle in list(self._queued.values()):
            handle.kill()

    def scale(self, nodes: int) -> None:
        """Change the number of nodes: request more nodes, or drain and release the nodes with the last blocks."""
        for node in self._blocks[nodes:]:
            if node is not None and self._servers.is_shared(node):
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

    def make_room(self, workers: int) -> int:
        if (needed := -(-workers // self._per_node)) > self._wanted:
            self.scale(needed)
        return self._wanted

    def waiting(self) -> str:
        """The engine's report on nodes that are not connected yet; empty if all are connected."""
        if missing := sum(node is None for node in self._blocks[: self._wanted]):
            text = not_connected(f"{missing} of {counted(self._wanted, 'node')}", self.groups)
        else:
            text = self._servers.wrong_names()
        return "; ".join(filter(None, [text, self._servers.waiting()]))

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
            for node in [*self._blocks, *self._servers.without_workers()]
            if node is not None
        ]

    def on_disk(self) -> dict[int, int]:
        workers = [(worker, node) for node in self.connected.values() for worker in node.workers.values()]
        found = {worker.worker: node.on_disk.get(worker.worker, 0) for worker, node in workers if worker.suspended}
        return {worker: size for worker, size in found.items() if size}

    def expected(self) -> int:
        """Number of nodes with workers that are connected or may still connect without another request."""
        return self.groups.expected()

    def logs(self) -> str:
        """The paths of the node daemons' logs, and the last lines of each."""
        return "\n".join(filter(None, [self.groups.logs(), self._servers.groups.logs()]))

    def close(self) -> None:
        for node in self.connected.values():
            node.send(n.Leave("the run has ended"))
        self.groups.end()
        self._servers.groups.end()
        self._close_engines()
        if self._starter is not None:
            self._starter.close()
        self.hub.close(linger_ms=1000)
        os.close(self._changed_fd)

    def _close_engines(self) -> None:
        for engine in self._engines:
            engine.close()

    # ---- nodes ----

    def _groups_of(self, group: int) -> Groups:
        return self._servers.groups if group in self._servers.groups else self.groups

    def _group(self, number: int) -> WatchedGroup:
        return self._groups_of(number)[number]

    def _daemon_bootstrap(self, group: int, has_workers: bool = True) -> bytes:
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
            "cpu_affinity": self._config.cpu_affinity if has_workers else "off",  # acting servers are not pinned
            "cpus_per_worker": self._config.cpus_per_worker,
            "workers": self._per_node if has_workers else 0,
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
            self.refusals.invalid(group, WireError("it names a node of another group."))
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
                then = "its acting servers act until it ends" if node.block == NO_BLOCK else "draining its workers"
                text = f"{node} is being reclaimed by its engine ({message.reason}): {then}"
                self._emit("requeued", text, node=node.host)
                self._drain_node(node)

    def _admit(self, group: int, hello: n.NodeHello) -> None:
        if hello.run != self.run:
            raise WireError("it belongs to another run.")
        if group not in self._groups_of(group):  # the engine started this node although the request raised an error
            send_to_node(self.hub, hello.node, n.Leave("this node was not requested"))
            return
        if (objection := objection_to(hello)) is not None:
            why, remedy = objection
            send_to_node(self.hub, hello.node, n.Leave(f"this node {why}"))
            self._group(group).rejected(hello.node, hello.place)
            self.refusals.add(hello.host, why, remedy, is_server=group in self._servers.groups)
            return
        killed = self.connected.get(hello.replaces or "")
        if killed is not None and killed.group == group:
            self._lose(killed, "lost its daemon, which was restarted on the same node")
        free = self._free_block(group, hello.place)
        if free is None or self._group(group).is_cancelled:
            self._group(group).rejected(hello.node, hello.place)
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
        self.connected[node.name] = node
        if free != NO_BLOCK:
            self._blocks[free] = node
        self._group(group).joined(hello.place)
        node.send(n.NodeBeat(node.name))
        purpose = ", for acting servers" if free == NO_BLOCK else ""
        self._emit("joined", f"{node} connected, with {hello.cpus} cores{purpose}", node=node.host)
        if hello.setup_failed:
            text = f"{node}: the setup command {hello.setup_failed!r} failed; continuing anyway"
            self._emit("warned", text, node=node.host)
        self._start_queued()

    def _free_block(self, group: int, place: str) -> int | None:
        """The block for a new node of a group; None if the node is not needed."""
        if group in self._servers.groups:
            return NO_BLOCK if len(self._servers.without_workers()) < len(self._servers.hosts) else None
        free = [i for i, held in enumerate(self._blocks[: self._wanted]) if held is None]
        hosts = self._config.hosts if isinstance(self._config, SSHConfig) else ()
        own = [i for i in free if i < len(hosts) and hosts[i] == host_of(place)]
        return next(iter([*own, *free]), None)

    def _node_for(self, worker: int) -> Node | None:
        """The node of a worker or acting server; None if it is not connected."""
        if name := self._plan.node_name_of(worker):
            return self._servers.find(name)
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
        self._group(node.group).left(node.place, for_good=True)
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
        if node.block != NO_BLOCK:
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
            self._group(node.group).left(node.place, for_good=node.released)
