"""The acting server: a process that holds one copy of the policy and acts for workers.

The head starts, supervises and restarts it like a worker, and sends it the agent and its weights. Workers of the same
host connect to it over an abstract Unix socket, if they are of the same user and have the run's secret. Other workers
connect over the network, with keys that the head issues (see `network.py`).
"""

from __future__ import annotations

import hmac
import os
import pickle
import socket
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from farstep.acting import messages as am
from farstep.acting.mailbox import PULLS, WAITS, MailboxLayout
from farstep.acting.serving.arena import MAILBOXES_PER_ARENA, Arena
from farstep.acting.serving.batch_actor import BatchActor
from farstep.acting.serving.batch_runner import BatchRunner, MemoryExhausted, failed
from farstep.acting.serving.requests import (
    check_arrays,
    check_rows,
    check_saved,
    take_request,
    take_update,
)
from farstep.acting.serving.server_clients import Client, Clients
from farstep.agents.policy import FAST
from farstep.core import BytesLike, Link, Received
from farstep.errors import AgentError, WireError
from farstep.rollout.probe_rows import ProbeRows
from farstep.rollout.program import Program
from farstep.rollout.progress import CANCEL, COUNT, PHASE, Phase
from farstep.rollout.rows import Slots
from farstep.wire import messages as m
from farstep.wire.channels.doorbell import Doorbell
from farstep.wire.channels.local import LocalLink
from farstep.wire.codec import pack, unpack
from farstep.wire.versions import versions
from farstep.worker.connection.inbox import Inbox
from farstep.worker.saving import seed_generators
from farstep.worker.weights.weight_messages import WeightMessages
from farstep.worker.weights.weight_sync import WeightSync

if TYPE_CHECKING:
    from farstep.acting.serving.network import NetworkListener

_SERVICE_S = 0.01
"""Maximum seconds between two polls of the sockets while the server is busy."""


class ActingServer:
    """Serves one copy of the policy.

    Args:
        link: Connection to the head.
        identity: Number, incarnation and run, as for a worker.
        words: Progress words, as for a worker.
        address: Name of the abstract socket to listen on.
        secret: The secret that workers must have.
        has_gpu: Whether to act on the GPU.
        network: Accepts workers over the network; None: workers are on this host.
    """

    def __init__(
        self,
        link: Link,
        identity: tuple[int, int, str],
        words: memoryview,
        address: str,
        secret: str,
        has_gpu: bool,
        network: NetworkListener | None = None,
    ) -> None:
        self._secret = secret
        self._link, self._identity, self._words, self._has_gpu = link, identity, words, has_gpu
        self._inbox = Inbox(link, words)
        self._sync = WeightSync(words)
        self._weights = WeightMessages(link, self._inbox, self._sync)
        self._weights.server_number = identity[0]
        self._clients = Clients(link, address, network, self._answer)
        self._program: Program | None = None
        self._payload = b""
        self._arenas: list[Arena] = []
        self._runner = BatchRunner(self._arenas, self._sync, words, network is None)
        self._reply: am.Joined | None = None
        self._rejection: am.Failed | None = None
        """Why the current agent cannot be used."""
        self._running = True
        self._is_replacement = identity[1] > 0
        """Whether this process replaces another one, and has not loaded the agent yet."""
        self._next_service = 0.0

    def serve(self) -> None:
        """Act until `Stop`.

        Raises:
            EOFError: The head closed the connection.
            SystemExit: Memory ran out. The head got the reason.
        """
        try:
            self._serve()
        except MemoryExhausted as error:
            failure = error.failure
            kind = MemoryError.__name__  # also for the errors of torch
            self._link.send([m.encode(m.Failure(failure.message, failure.traceback, failure.phase, kind))])
            raise SystemExit(1) from error

    def _serve(self) -> None:
        worker, incarnation, run = self._identity
        self._words[PHASE] = Phase.CONNECT
        hello = m.Hello(worker, incarnation, run, socket.gethostname(), os.getpid(), versions())
        self._link.send([m.encode(hello)])
        timeout_s = 0.0
        while self._running:
            self._words[COUNT] += 1
            if self._clients.read_network():
                timeout_s = 0.0
            if timeout_s > 0 or time.monotonic() >= self._next_service:
                self._service(timeout_s)
            timeout_s = self._runner.run(until=self._next_service)

    def close(self) -> None:
        """Close all connections."""
        self._clients.close()

    def _service(self, timeout_s: float) -> None:
        """Wait for a doorbell or a message, and handle all messages."""
        self._clients.wait(timeout_s)
        self._next_service = time.monotonic() + _SERVICE_S
        while self._running and (received := self._inbox.receive(0.0)) is not None:
            self._handle(m.decode_from_head(received.frames), received)

    # ---- messages of the head ----

    def _handle(self, message: m.FromHead, received: Received) -> None:
        match message:
            case m.Welcome():
                self._construct(message, received.frames[1])
            case m.SendAgent():
                self._adopt(message, bytes(received.frames[1]))
            case m.SendBase() | m.Parameters() | m.Newest():
                if isinstance(message, m.Parameters) and message.agent == self._weights.agent_id:
                    self._runner.digest = message.digest
                self._weights.handle(message, received)
            case m.Cancel():
                self._words[CANCEL] = message.upto
            case m.Probe() if self._runner.actor is not None and message.agent == self._weights.agent_id:
                self._compare(message, received, self._runner.actor)
            case m.AdmitClient():
                self._clients.admit(message)
            case m.DropClient():
                self._clients.drop(message.worker)
            case m.Refuse() | m.Stop():
                self._running = False
            case _:
                pass  # for workers only, or an answer to a request that was given up

    def _compare(self, probe: m.Probe, received: Received, actor: BatchActor) -> None:
        """Compare the current weights with the version of a probe."""
        if (probing := self._sync.probing) is None:
            return
        *frames, rows = received.frames[1:]
        probing.recent.clear()
        for index, version, arrays in unpack(rows):
            probing.recent.add(ProbeRows(index, version, arrays))
        try:
            self._sync.compare(probe, frames, actor)
        except Exception as error:
            self._runner.probe_error = error

    def _construct(self, message: m.Welcome, program: BytesLike) -> None:
        sys.path[:] = list(dict.fromkeys(message.path + sys.path))
        self._program = pickle.loads(program)
        self._sync.rule = self._program.sync
        self._weights.config = self._program.weights
        for module in message.preload:
            __import__(module)
        self._words[PHASE] = Phase.IDLE
        self._link.send([m.encode(m.Ready(b"", b"", listening=self._clients.listening))])

    def _adopt(self, message: m.SendAgent, payload: bytes) -> None:
        """Use this agent from now on; it is loaded when the first worker joins with its observations."""
        self._weights.new_agent(message)
        self._weights.agent_id, self._payload = message.agent, payload
        self._reply = self._rejection = None
        self._runner.reset()
        clients = list(self._clients)
        for client in clients:  # before any of them joins again, because workers may still write to the old arenas
            client.forget_groups()
        for client in clients:
            if client.waiting is not None:
                join, received = client.waiting
                client.waiting = None
                self._join(client, join, received)

    # ---- messages of workers ----

    def _answer(self, client: Client, message: am.FromClient, received: Received) -> None:
        if isinstance(message, am.Join):
            client.is_authenticated = hmac.compare_digest(message.proof, am.proof(self._secret, "worker"))
        if not client.is_authenticated:
            raise WireError("a process without the secret of this run.")
        try:
            match message:
                case am.Join():
                    self._join(client, message, received)
                case am.Act() | am.Update():
                    self._take(client, message, received)
                case am.Save():
                    assert self._runner.actor is not None
                    self._call(client, self._runner.actor.save_groups, client.groups)
                case am.Restore():
                    assert self._runner.actor is not None and self._reply is not None
                    num_envs = sum(group.num_envs for group in client.groups)
                    saved = check_saved(unpack(received.frames[1]), self._reply.state, num_envs)
                    self._call(client, self._runner.actor.restore_groups, client.groups, saved)
                case am.Prioritize():
                    assert self._runner.actor is not None
                    self._words[PHASE] = Phase.ACT
                    rows = check_rows(unpack(received.frames[1]), sum(group.num_envs for group in client.groups))
                    self._call(client, self._runner.actor.policy.priorities, rows)
                case am.Explain():
                    if client.failure is None:
                        raise WireError("a worker asked why a request failed, but none did.")
                    client.link.send([am.encode(client.failure)])
        except (EOFError, OSError, WireError, MemoryExhausted):
            raise
        except Exception as error:
            client.link.send([am.encode(failed(error, self._words))])
        finally:
            self._words[PHASE] = Phase.IDLE

    def _take(self, client: Client, message: am.Act | am.Update, received: Received) -> None:
        """Take what a worker has sent over the network instead of writing it into shared memory."""
        if client.doorbell is not None:
            raise WireError(f"{type(message).__name__} of a worker that shares memory with this server.")
        if client.mailbox is None:
            return  # of the last agent: the worker joins again
        if isinstance(message, am.Act):
            take_request(client.mailbox, message, received.frames[1])
        else:
            take_update(client.mailbox, message)

    def _call(self, client: Client, function: Callable[..., object], *arguments: object) -> None:
        """Send a worker what a function of the agent returns or raises.

        An `OSError` that the function raises is the agent's, and says nothing about the connection.
        """
        try:
            frames = [am.encode(am.Done()), pack(function(*arguments))]
        except Exception as error:
            frames = [am.encode(failed(error, self._words))]
        client.link.send(frames)

    def _join(self, client: Client, join: am.Join, received: Received) -> None:
        client.forget_groups()
        agent_id = self._weights.agent_id
        if join.agent > agent_id or self._program is None:
            client.waiting = (join, received)
            return
        if join.agent < agent_id:
            error = AgentError(f"agent {join.agent} was replaced by agent {agent_id}.")
            client.link.send([am.encode(failed(error, self._words))])
            return
        current = check_arrays(unpack(received.frames[1]), join.obs_schema, sum(join.groups))
        if self._runner.actor is None and self._rejection is None:
            self._words[PHASE] = Phase.LOAD
            try:
                self._load(join, current)
                self._is_replacement = False
            except Exception as error:
                self._rejection = self._rejected(error)
            self._words[PHASE] = Phase.IDLE
        if self._rejection is not None:
            client.link.send([am.encode(self._rejection)])
            return
        assert self._runner.actor is not None and self._reply is not None
        layout = MailboxLayout(join.groups, join.obs_schema, self._reply.schema, self._reply.state, MAILBOXES_PER_ARENA)
        arena = client.attach(layout, self._arenas, join, self._runner.actor)
        arena.mailbox_words[PULLS][client.mailbox_index] = self._runner.total_pulls
        joined = msgspec.structs.replace(self._reply, pulls=self._runner.total_pulls)
        if not isinstance(client.link, LocalLink):
            arena.group_words[WAITS][arena.mailbox_of_group == client.mailbox_index] = 1
            client.link.send([am.encode(joined)])
            return
        joined.mailbox_index, joined.num_mailboxes = client.mailbox_index, MAILBOXES_PER_ARENA
        client.doorbell = Doorbell.create()
        client.link.send([am.encode(joined)], [arena.memory.fd, self._clients.doorbell.fd, client.doorbell.fd])

    def _rejected(self, error: Exception) -> am.Failed:
        """What to tell workers if the agent cannot be loaded."""
        try:
            return failed(error, self._words)
        except MemoryExhausted as exhausted:
            if self._is_replacement:  # memory sufficed for the process that this one replaces, so a retry may succeed
                raise
            return exhausted.failure

    def _load(self, join: am.Join, current: dict[str, Any]) -> None:
        """Load the agent and try it on a worker's observations."""
        program, had_torch = self._program, "torch" in sys.modules
        assert program is not None and program.serving is not None
        slots = Slots(join.first, list(join.roots), list(join.episodes))
        obs = unpack(join.obs)
        dtype, max_batch = program.serving.dtype, program.serving.max_batch
        base = self._weights.base[1]
        actor = BatchActor(self._payload, obs, slots, program.weights, self._has_gpu, base, dtype, max_batch)
        if torch := sys.modules.get("torch"):
            threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
            if not had_torch:
                torch.set_num_threads(threads)
            if actor.policy.is_torch and actor.policy.device is None and threads > 1:
                actor.use_threads(threads)
            if self._has_gpu and actor.policy.is_torch and actor.policy.device is None:
                raise AgentError(
                    "inference has device='cuda', but torch finds no GPU on this node; use device='cpu', or a node "
                    "with a GPU."
                )
        seed_generators(program.seed, join.first, self._identity[1])
        self._words[PHASE] = Phase.ACT
        schema, state, structure = actor.dry_run(current, join.action_schema)
        actor.prepare(join.obs_schema, schema)
        how = "fast" if actor.policy.note == FAST else actor.policy.note
        precision = f", {dtype}" if dtype != "float32" else ""
        note = f"served on {actor.policy.device or 'cpu'}{precision}, {how}"
        parts = (pack(actor.structure), pack(actor.recorded))
        proof = am.proof(self._secret, "server")
        description = self._sync.start_probing(actor, obs, schema, structure)
        self._reply = am.Joined(
            schema, *parts, state, pack(structure), note, actor.has_priorities, proof, description=description
        )
        self._runner.actor, self._runner.options = actor, program.serving
