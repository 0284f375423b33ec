"""Sends the agent to workers, publishes versions of its parameters, and sends weights and probes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence

from farstep.agents.base_weights import BaseWatch, BaseWeights, base_weights
from farstep.agents.divergence import Comparison, comparing_method, why_incomparable
from farstep.agents.policy import Policy, ship
from farstep.agents.update_gate import UpdateGate
from farstep.config.env import EnvConfig
from farstep.core import Agent, Array, BytesLike, SyncRule
from farstep.errors import AgentError, HandshakeError, WireError, WorkerError, described, typed_shortage
from farstep.head.chunks.rollouts import Rollouts, agent_structures
from farstep.head.members.handshake import preloaded
from farstep.head.members.worker_records import WorkerRecord
from farstep.head.server import Server
from farstep.head.stats.counters import Counters
from farstep.head.warnings.user_warnings import UserWarnings
from farstep.head.weights.parameters import ParameterStore
from farstep.head.weights.probes import Prober, ProbeRequest
from farstep.rollout.blocks import Layout
from farstep.rollout.sources import modules_of
from farstep.schema import Schema, differences
from farstep.sync.rules import probes_of, rows_of
from farstep.wire import messages as m
from farstep.wire.channels.memory import write_immutable
from farstep.wire.codec import pack


class Publisher:
    """The agent that workers act with, and its published versions.

    Args:
        server: The workers.
        env_config: Which weights are sent, and how chunks are divided into stages.
        rule: The workers' sync rule.
        counters: Counts the bytes of probes.
        warnings: Warns the user about how workers call and compare the agent.
        cancel_session: Called before another agent is adopted.
        serves_on_gpu: Whether acting servers act on GPUs.
    """

    def __init__(
        self,
        server: Server,
        env_config: EnvConfig,
        rule: SyncRule,
        counters: Counters,
        warnings: UserWarnings,
        cancel_session: Callable[[], None],
        serves_on_gpu: bool = False,
    ) -> None:
        self._server, self._rule, self._serves_on_gpu = server, rule, serves_on_gpu
        self._weights, self._transfer = env_config.weights, env_config.transfer
        self._counters, self._warnings = counters, warnings
        self._cancel_session = cancel_session
        self._adopting = threading.Lock()
        """Serializes threads that adopt or publish an agent."""
        self.gate = UpdateGate(lambda text: server.events.emit("warned", text))
        """Entered to read the agent's parameters between two updates. Enter it before acquiring any lock."""
        self.agent_id = 0
        self.version = 0
        """The newest published version."""
        self.first_version = 0
        """Version of the first agent's first parameters; above 0 in a resumed run."""
        self.on_published: Callable[[], None] | None = None
        """Called after `publish`, in the publishing thread."""
        self.prober: Prober | None = None
        """None if the sync rule needs no probes, or if versions of the agent cannot be compared."""
        self.agent_schemas: tuple[Schema, Schema] = ({}, {})
        """Arrays that the agent adds per row and per chunk."""
        self._agent: Agent | None = None
        self._on_cpu = False
        """Whether workers act on the CPU although they have GPUs."""
        self._answers: dict[int, m.AgentReady | WorkerError] = {}
        """For each worker, its answer to the agent that was sent last: ready, or the error."""
        self._store: ParameterStore | None = None
        self._retired: set[ParameterStore] = set()
        """Stores that are no longer used, but whose memory may not be freed yet."""
        server.outbox.before_parameters = self._refresh_host
        self._base_hash = ""
        """Content hash of the base that workers have; empty if none."""
        self._base_fd = -1
        """Descriptor of the base in shared memory; -1 if there is none."""
        self._base_bytes = 0
        self._base_watch: BaseWatch | None = None
        self._handed: dict[int, tuple[int, int, int]] = {}
        """For each worker, its last request for weights: incarnation, agent and version."""
        self._rollouts: Rollouts | None = None
        self._base_rows: Schema = {}
        self._actions: Schema = {}

    def start(self, rollouts: Rollouts, base_rows: Schema, actions: Schema) -> None:
        """Set the schemas that an agent must match; called once, when the environments' spaces are known.

        Args:
            rollouts: Stores the arrays that the agent returns.
            base_rows: Arrays of a row, without the agent's outputs.
            actions: Arrays of an action.
        """
        self._rollouts, self._base_rows, self._actions = rollouts, base_rows, actions

    def close(self) -> None:
        """Free the parameters; workers must have ended."""
        self._retire()
        self._store = None
        self._close_base()
        self._agent = self.prober = None
        self.version = 0

    def _retire(self) -> None:
        """Stop using the current store, and free all memory that acting servers no longer use."""
        if self._store is not None:
            self._retired.add(self._store)
        self._free_retired()

    def _free_retired(self) -> None:
        self._retired = {store for store in self._retired if not store.close()}

    def _refresh_host(self) -> None:
        if self._store is not None:
            self._store.refresh_host()

    def row_schema(self) -> Schema:
        """Arrays of a row with the current agent."""
        return {**self._base_rows, **self.agent_schemas[0]}

    # ---- publishing ----

    def publish(self, agent: Agent) -> int:
        """Publish the agent's parameters as a new version, and return its number."""
        with self.gate.publishing(agent), self._adopting:
            self._server.raise_failure()
            if self._agent is not None and self._agent is agent:
                self._publish(agent)
            else:
                self._adopt(agent)
            version = self.version
        if (on_published := self.on_published) is not None:
            on_published()
        return version

    def _publish(self, agent: Agent) -> None:
        self._check_base(agent)
        probes = self._evaluate_probes(agent)
        with self._server.locked():
            self._server.raise_failure()  # another thread may have closed the server
            assert self._store is not None
            self._free_retired()
            self.version = self._store.publish(agent)
            self._announce()
            late = () if self.prober is None else self.prober.late_requests([request for request, _ in probes])
            for request, answer in (*probes, *((request, {}) for request in late)):
                record = self._server.supervisor.records[request.worker]
                if record.ready and record.incarnation == request.incarnation:
                    probe = m.Probe(self.agent_id, self.version, request.indices, list(answer))
                    frames = [array.tobytes() for array in answer.values()]
                    if record.is_server:  # it does not keep rows
                        frames.append(pack([(rows.index, rows.version, dict(rows.arrays)) for rows in request.probed]))
                    self._counters.probes_sent += self._server.outbox.send(record, probe, frames)
            self._server.drain()

    def _check_base(self, agent: Agent) -> None:
        assert self._base_watch is not None
        self._base_watch.check(agent, self._base_hash)

    def _evaluate_probes(self, agent: Agent) -> Sequence[tuple[ProbeRequest, dict[str, Array]]]:
        """Evaluate the agent on rows that workers have sent. Do not hold the lock, so that chunks can arrive
        meanwhile."""
        prober, store = self.prober, self._store
        if prober is None or store is None:
            return ()
        with self._server.locked():
            requests = prober.requests()
        try:
            return list(zip(requests, prober.answers(requests), strict=True))
        except Exception as error:
            store.check(agent)  # if the parameters are the cause, this raises a clearer error
            if isinstance(error, AgentError):
                raise AgentError(f"{error} Version {self.version} stays in force.") from error
            raise AgentError(
                f"{prober.method}() of {type(agent).__name__} raised {described(error)}; "
                f"version {self.version} stays in force."
            ) from error

    def _announce(self) -> None:
        """Announce the current version to workers without shared memory."""
        if not self._server.shares_memory:
            self._server.outbox.announce(m.Newest(self.version))

    @property
    def parameters_bytes(self) -> int:
        """Size of the parameters of the current agent, with its base."""
        return 0 if self._store is None else self._store.schema.nbytes + self._base_bytes

    # ---- adopting an agent ----

    def use_servers(self, served: bool, on_cpu: bool = False) -> None:
        """Forget the agent. From the next one on, acting servers act if `served`, otherwise workers: on their GPUs if
        they have any, unless `on_cpu`."""
        with self._adopting:
            self._cancel_session()
            self._forget_agent()
            self._on_cpu = on_cpu
            with self._server.locked():
                self._server.outbox.retract(m.SendBase)
                self._server.outbox.is_served = served
            self._close_base()

    def dismiss_servers(self) -> None:
        """End the acting servers, because workers act themselves from now on."""
        self._server.dismiss_servers()

    def adopt(self, agent: Agent) -> None:
        """Make workers act with this agent and its current parameters."""
        with self._adopting:
            if self._is_current(agent):
                return  # nothing to publish, so no need to wait for updates
        with self.gate.publishing(agent), self._adopting:
            if self._is_current(agent):
                return
            if self._agent is not None and self._agent is agent:
                self._publish(agent)
            else:
                self._adopt(agent)

    def _is_current(self, agent: Agent) -> bool:
        """Whether workers act with this agent, and its parameters equal the newest version."""
        self._server.raise_failure()
        if self._store is None or self._agent is None or self._agent is not agent:
            return False
        self._check_base(agent)
        with self._server.locked():
            self._server.raise_failure()
            return not self._store.changed(agent)

    def _adopt(self, agent: Agent) -> None:
        for method in ("act", "get_parameters"):
            if not callable(getattr(agent, method, None)):
                raise AgentError(
                    f"{type(agent).__name__} has no {method}(); an agent needs act(obs) and get_parameters()."
                )
        began = time.monotonic()
        watch, base = BaseWatch(agent), base_weights(agent)
        self._base_bytes = 0 if base is None else len(base.payload)
        payload = ship(agent, base)
        first_version = self.first_version
        if self._store is not None:  # continue the version numbers; a rejected agent used none
            first_version = self._store.version + (self._agent is not None)
        readers = len(self._server.servers if self._server.outbox.is_served else self._server.records)
        store = ParameterStore(agent, self.agent_id + 1, readers, first_version, self._weights)
        self._cancel_session()
        self._forget_agent()
        with self._server.locked():
            self._store, self.version, self._base_watch = store, store.version, watch
            self.agent_id, self._answers = self.agent_id + 1, {}
            self._counters.divergence.clear()
            self._warnings.forget()
            self._announce_base(base)
            outbox = self._server.outbox
            if self._serves_on_gpu and outbox.is_served and self._server.shares_memory:
                store.share_gpu(agent, [record.worker for record in self._server.servers])
            outbox.announce(m.SendAgent(self.agent_id, self._base_hash, outbox.is_served, self._on_cpu), [payload])
            self._server.outbox.announce(store.message(), fds=[store.memory.fd])
            self._announce()
        try:
            self._server.wait(lambda: True if self._all_answered() else None, starting=True)
            self._agree(agent)
        except BaseException:
            self._forget_agent()
            raise
        self._agent = agent
        with self._server.locked():
            by_value = "<locals>" in type(agent).__qualname__  # then workers do not import its module
            modules = [] if by_value else modules_of([type(agent)])
            self._server.supervisor.launcher.preload([*preloaded(), *modules])
        self._server.handshake.start_s["agent"] = time.monotonic() - began

    def _announce_base(self, base: BaseWeights | None) -> None:
        """Send an agent's base to workers, unless they have it. Workers of this machine share one copy in memory."""
        if base is not None and base.content_hash == self._base_hash:
            return
        self._server.outbox.retract(m.SendBase)
        self._close_base()
        if base is None:
            return
        if self._server.shares_memory:
            with typed_shortage(f"the base of {len(base.payload)} bytes could not be put into shared memory"):
                self._base_fd = write_immutable([base.payload])
            self._server.outbox.base_sent += len(base.payload)
            self._server.outbox.announce(m.SendBase(base.content_hash, len(base.payload)), fds=[self._base_fd])
        else:
            self._server.outbox.announce(m.SendBase(base.content_hash), [base.payload])
        self._base_hash = base.content_hash  # last: if one of these raises, the next attempt sends the base

    def _close_base(self) -> None:
        self._base_hash = ""
        if self._base_fd >= 0:
            os.close(self._base_fd)
            self._base_fd = -1

    def _forget_agent(self) -> None:
        with self._server.locked():
            self._agent = self.prober = None
            self._server.outbox.retract(m.SendAgent, m.Parameters, m.Newest)
            self._retire()

    def _all_answered(self) -> bool:
        """Whether all present workers have answered, and at least one has (all nodes may be absent for a while)."""
        return bool(self._answers) and all(
            record.worker in self._answers for record in self._server.available.present()
        )

    def _agree(self, agent: Agent) -> None:
        """Check that all workers can use the agent, and that it returns the same arrays on all of them."""
        answers: dict[int, m.AgentReady] = {}
        for worker, answer in sorted(self._answers.items()):
            if isinstance(answer, WorkerError):
                raise answer
            answers[worker] = answer
        first = next(iter(answers.values()))
        for worker, answer in answers.items():
            found = differences(first.schema, answer.schema) + differences(first.state, answer.state)
            found += differences(first.description, answer.description)
            if found:
                raise HandshakeError(
                    f"the agent returns different arrays on worker {worker} than on another worker: {'; '.join(found)}."
                )
        assert self._rollouts is not None
        self._transfer.check(Layout(1, 1, 1, {**self._base_rows, **first.schema}, first.state).names())
        self.agent_schemas = (first.schema, first.state)
        structures, state = agent_structures(first, self._actions)
        self._rollouts.adopt(structures, state)
        if probes_of(self._rule) and not comparing_method(agent, first.schema):
            self._warnings.note_incomparable(why_incomparable(agent, first.schema))
        elif probes_of(self._rule):
            obs, action = self._rollouts.structures["obs"], structures["action"]
            comparison = Comparison(Policy(agent), obs, action, state, first.schema)
            comparison.expected = first.description
            served = zip(self._server.servers, self._server.clients(), strict=True)
            servers = list(served) if self._server.outbox.is_served else []
            self.prober = Prober(comparison, self._server.records, rows_of(self._rule), servers)
        self._warnings.note_inference(first.inference)

    # ---- messages from workers ----

    def on_agent_ready(self, record: WorkerRecord, message: m.AgentReady) -> None:
        """Store a worker's report that it can use the agent."""
        if message.agent > self.agent_id:
            raise WireError(f"a report that agent {message.agent} is ready; the last agent sent is {self.agent_id}.")
        if message.agent == self.agent_id:
            agent_structures(message, self._actions)  # raise here, where the sender is known
            self._answers[record.worker] = message

    def on_error(self, record: WorkerRecord, failure: m.Failure, error: WorkerError) -> None:
        """Store a worker's report that it cannot use the agent. If other workers already use the agent, fail the
        run."""
        if failure.agent != self.agent_id:
            return
        if self._agent is None:
            self._answers[record.worker] = error
        else:
            self._server.fail(error)  # a restarted worker cannot use the agent, but all others can

    def send_weights(self, record: WorkerRecord, message: m.WeightRequest) -> None:
        """Send the newest weights to a worker without shared memory."""
        request = (record.incarnation, message.agent, self.version)
        if self._handed.get(record.worker) == request:
            raise WireError(f"a second request for version {self.version} of the weights.")
        self._handed[record.worker] = request
        base: int = -1
        frames: list[BytesLike] = []
        if self._store is not None and message.agent == self.agent_id:
            base, frames = self._store.handover(record.worker, message.held)
        self._server.outbox.send(record, m.Weights(message.agent, self.version, base), frames)
