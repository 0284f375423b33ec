"""Rollouts of one agent at a time: ships it to workers, opens sessions of tickets, puts batches together."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import gymnasium
import numpy as np

from farstep.agents.divergence import Comparison, comparing_method, why_incomparable
from farstep.agents.policy import Policy, ship
from farstep.agents.update_gate import UpdateGate
from farstep.batch import Batch, Part
from farstep.config.env import EnvConfig
from farstep.config.launch import LaunchConfig
from farstep.core import Agent, Array, BytesLike, Received
from farstep.errors import AgentError, ClosedError, HandshakeError, WireError, WorkerError, described
from farstep.head.chunks.incoming_chunks import EarlyPart
from farstep.head.chunks.rollouts import ChunkInfo, Rollouts, agent_structures, base_rows, key_of
from farstep.head.chunks.send_queue import SendQueue
from farstep.head.members.broadcast import Broadcast
from farstep.head.members.resuming import ReplayResult, replay_episodes
from farstep.head.members.saved_state import check_saved
from farstep.head.members.worker_records import ResetRequest, WorkerRecord
from farstep.head.server import Server
from farstep.head.stats import Counters
from farstep.head.tickets import AcceptedChunk, FeedPlan, IssuedTicket
from farstep.head.user_warnings import UserWarnings
from farstep.head.weights.parameters import ParameterStore
from farstep.head.weights.probes import Prober, ProbeRequest
from farstep.rollout.blocks import Layout
from farstep.rollout.program import Program
from farstep.rollout.sources import Source
from farstep.schema import Schema, Structure, differences, space_schema
from farstep.sync import AAPS, Always
from farstep.sync.rules import probes_of, rows_of
from farstep.wire import messages as m
from farstep.wire.compression import available

Space = gymnasium.spaces.Space[Any]
OnPart = Callable[[EarlyPart], None]
"""Told of each complete stage of each worker's chunk, in whichever thread reads: it must neither wait nor raise."""
T = TypeVar("T")


@dataclass(frozen=True)
class Request:
    """What the call under way asked for."""

    steps: int = 0
    num_chunks: int | None = None
    rollouts: int = 1
    """Chunks per worker in a batch, if `num_chunks` is None."""
    infos: bool = False
    reset: ResetRequest | None = None
    incarnations: tuple[int, ...] = ()
    """Of all workers, when it was made."""
    on_part: OnPart | None = None
    feed: FeedPlan | None = None
    """Chunks are taken one by one, by a workflow."""


class Collector:
    """The server's client that stands behind a `ClusterEnv`."""

    def __init__(self, env_config: EnvConfig, config: LaunchConfig, seed: int) -> None:
        by_threshold = Always() if env_config.kl_threshold is None else AAPS(env_config.kl_threshold)
        self._rule, self._weights = env_config.sync or by_threshold, env_config.weights
        self._transfer = env_config.transfer
        self._send_queue = SendQueue(self._transfer.in_turn)
        program = Program(
            Source.of(env_config),
            self._rule,
            env_config.inference,
            env_config.weights,
            self._transfer,
            env_config.compression,
            tuple(available()),
            seed=seed,
            stagger=env_config.stagger,
            num_slots=config.most_nodes * env_config.envs_per_node,
        )
        self.server = Server(config, program, env_config.envs_per_node, seed, config.restart_budget, self)
        self._num_workers = len(self.server.records)
        self.counters = Counters(self._num_workers)
        self._warnings = UserWarnings(self._rule, self._weights)
        self._adopting = threading.Lock()
        """Of several threads with an agent, one after the other."""
        self.gate = UpdateGate()
        """Entered to read the agent's parameters between updates, before any lock is taken."""
        self._agent: Agent | None = None
        self._agent_id = 0
        self._answers: dict[int, m.AgentReady | WorkerError] = {}
        self._store: ParameterStore | None = None
        self._prober: Prober | None = None
        self._agent_schemas: tuple[Schema, Schema] = ({}, {})
        self._request = Request()
        self._rollouts: Rollouts | None = None
        self._handed: dict[int, tuple[int, int, int]] = {}
        """Per worker, the weights that it last requested: incarnation, agent and version."""
        self._followed = np.full(self.server.records[-1].stop, -1, np.int64)
        """Per slot, the last chunk that was handed to the learner (`ChunkInfo.key`)."""
        self._broadcast = Broadcast(self.server, without_lost=True)
        self._first_version = 0
        """What versions are counted from: a run that is resumed goes on counting."""
        self.told: Callable[[], None] | None = None
        """Called when a version was published, in whichever thread did it."""

    def start(self) -> tuple[Space, Space]:
        """Start the workers; the spaces of one environment."""
        observation_space, action_space = self.server.start()
        obs, self._obs_schema = space_schema(observation_space, "obs")
        _, self._action_schema = space_schema(action_space, "action")
        self._action_space = action_space
        remote = not self.server.shares_memory
        self._rollouts = Rollouts(self.server.records, obs, self._obs_schema, remote, self._transfer)
        return observation_space, action_space

    def close(self) -> None:
        """End all workers and free everything; idempotent."""
        self.gate.close()
        try:
            self.server.close()
        finally:
            if self._rollouts is not None:
                self._rollouts.close()
            if self._store is not None:
                self._store.close()
                self._store = None
            self._agent = self._prober = None

    def snapshot(self) -> dict[str, Any]:
        with self.server.locked():
            return self.counters.snapshot(self.server, self.version(), self.inference)

    @property
    def inference(self) -> str:
        """How workers call the agent."""
        return self._warnings.inference

    # ---- the agent ----

    def version(self) -> int:
        """The newest published version."""
        return self._store.version if self._store is not None else 0

    def publish(self, agent: Agent) -> int:
        """A new version from the agent's parameters."""
        with self.gate.publishing(agent), self._adopting:
            self.server.raise_failure()
            if self._agent is not None and self._agent is agent:
                self._publish(agent)
            else:
                self._adopt(agent)
            version = self.version()
        if (told := self.told) is not None:
            told()
        return version

    def _publish(self, agent: Agent) -> None:
        probes = self._ask(agent)
        with self.server.locked():
            self.server.raise_failure()  # another thread may have closed it meanwhile
            assert self._store is not None
            version = self._store.publish(agent)
            self._announce()
            for question, answer in probes:
                record = self.server.records[question.worker]
                if record.ready and record.incarnation == question.incarnation:
                    probe = m.Probe(self._agent_id, version, question.indices, list(answer))
                    self.counters.probes_sent += self.server.send(record, probe, [a.tobytes() for a in answer.values()])
            self.server.drain()

    def _ask(self, agent: Agent) -> Sequence[tuple[ProbeRequest, dict[str, Array]]]:
        """What the agent says of rows that workers have sent, without the lock: chunks go on arriving meanwhile."""
        prober, store = self._prober, self._store
        if prober is None or store is None:
            return ()
        with self.server.locked():
            questions = prober.questions()
        try:
            return list(zip(questions, prober.answers(questions), strict=True))
        except Exception as error:
            store.check(agent)  # if its parameters are to blame, say so
            if isinstance(error, AgentError):
                raise AgentError(f"{error} Version {self.version()} stays in force.") from error
            raise AgentError(
                f"{prober.method}() of {type(agent).__name__} raised {described(error)}; "
                f"version {self.version()} stays in force."
            ) from error

    def adopt(self, agent: Agent) -> None:
        """Make workers act with this agent and its present parameters."""
        with self._adopting:
            if self._is_current(agent):
                return  # nothing to publish, so no update to wait for
        with self.gate.publishing(agent), self._adopting:
            if self._is_current(agent):
                return
            if self._agent is not None and self._agent is agent:
                self._publish(agent)
            else:
                self._adopt(agent)

    def _is_current(self, agent: Agent) -> bool:
        """Whether workers act with this agent, and its parameters are the newest version's."""
        self.server.raise_failure()
        if self._store is None or self._agent is None or self._agent is not agent:
            return False
        with self.server.locked():
            self.server.raise_failure()
            return not self._store.changed(agent)

    def _adopt(self, agent: Agent) -> None:
        for method in ("act", "get_parameters"):
            if not callable(getattr(agent, method, None)):
                raise AgentError(
                    f"{type(agent).__name__} has no {method}(); an agent needs act(obs) and get_parameters()."
                )
        began = time.monotonic()
        payload = ship(agent)
        first_version = self._first_version
        if self._store is not None:  # go on counting; one that was refused used no number
            first_version = self._store.version + (self._agent is not None)
        store = ParameterStore(agent, self._agent_id + 1, self._num_workers, first_version, self._weights)
        self._end()
        self._forget_agent()
        with self.server.locked():
            self._store, self._agent_id, self._answers = store, self._agent_id + 1, {}
            self.counters.divergence.clear()
            self._warnings.forget()
            self.server.tell(m.SendAgent(self._agent_id), [payload])
            self.server.tell(store.message(), fds=[store.memory.fd])
            self._announce()
        try:
            self.server.wait(lambda: True if self._all_answered() else None, starting=True)
            self._agree(agent)
        except BaseException:
            self._forget_agent()
            raise
        self._agent = agent
        self.server.start_s["agent"] = time.monotonic() - began

    def _forget_agent(self) -> None:
        with self.server.locked():
            self._agent = self._prober = None
            self.server.untell(m.SendAgent, m.Parameters, m.Newest)
            if self._store is not None:
                self._store.close()

    def _all_answered(self) -> bool:
        """By every present worker, and by at least one: all nodes may be absent for some time."""
        return bool(self._answers) and all(record.worker in self._answers for record in self.server.present())

    def _agree(self, agent: Agent) -> None:
        """All workers' copies of the agent must be usable and return the same arrays."""
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
                    f"the agent returns other arrays on worker {worker} than on another: {'; '.join(found)}."
                )
        assert self._rollouts is not None
        self._transfer.check(Layout(1, 1, 1, {**base_rows(self._obs_schema), **first.schema}, first.state).names())
        self._agent_schemas = (first.schema, first.state)
        structures, state = agent_structures(first, self._action_schema)
        self._rollouts.adopt(structures, state)
        if probes_of(self._rule) and not comparing_method(agent, first.schema):
            self._warnings.note_incomparable(why_incomparable(agent, first.schema))
        elif probes_of(self._rule):
            obs, action = self._rollouts.structures["obs"], structures["action"]
            comparison = Comparison(Policy(agent), obs, action, state, first.schema)
            comparison.expected = first.description
            self._prober = Prober(comparison, self.server.records, rows_of(self._rule))
        self._warnings.note_inference(first.inference)

    def _announce(self) -> None:
        """Workers without shared memory hear of a version by message."""
        if not self.server.shares_memory:
            self.server.tell(m.Newest(self.version()))

    # ---- sessions ----

    def one_batch(
        self, steps: int, *, infos: bool = False, reset: ResetRequest | None = None, rollouts: int = 1
    ) -> Batch:
        """Collect a batch of `rollouts` chunks of every worker."""
        request = self._open(Request(steps, None, rollouts, infos, reset), None, 1)
        try:
            return self._next_batch(request)
        finally:
            self._end(request)

    def parts(self, steps: int) -> Generator[Part, None, Batch]:
        """As `one_batch`, with what is complete of each worker's chunk ahead of it."""
        found: deque[Part] = deque()
        request = self._open(Request(steps, on_part=lambda early: found.append(early.part)), None, 1)

        def look() -> Part | bool | None:
            """The next part; True after the last one; None while waiting."""
            if found:
                return found.popleft()
            return True if self.server.tickets.round_is_complete() else None

        try:
            while isinstance(part := self._wait(request, look), Part):
                yield part
            return self._next_batch(request)
        finally:
            self._end(request)

    def stream(self, steps: int, max_staleness: int, num_chunks: int | None, rollouts: int = 1) -> Iterator[Batch]:
        """Batches without end; closing the iterator cancels what is under way."""
        request = self._open(Request(steps, num_chunks, rollouts), max_staleness, None)
        try:
            while True:
                yield self._next_batch(request)
                with self.server.locked():
                    if request is self._request:
                        self.server.tickets.release()
        finally:
            self._end(request)

    def open_feed(self, steps: int, feed: FeedPlan, on_part: OnPart | None) -> Request:
        """Begin to give tickets for chunks that `take_chunk` takes one by one."""
        actors = self._num_workers if feed.actors is None else feed.actors
        request = Request(steps, actors * feed.chunks, on_part=on_part, feed=feed)
        return self._open(request, feed.max_staleness, None)

    def take_chunk(self, request: Request, wanted: Callable[[int], bool]) -> tuple[AcceptedChunk, Batch] | None:
        """The first chunk that arrived of a worker that is wanted, if there is one: views of its lane."""
        if request is not self._request:
            raise ClosedError("another call on this ClusterEnv ended this one; calls must follow each other.")
        assert self._rollouts is not None
        self.server.grant()
        accepted = self.server.tickets.take_one(wanted, self.version())
        if accepted is None:
            self.server.grant()  # what was too old is to be rolled again
            return None
        batch = self._rollouts.chunk(accepted, request.steps, self._follow(accepted, request.steps))
        self.counters.batch(batch, [accepted], self.version())
        return accepted, batch

    # ---- what outlives this process ----

    def save(self) -> list[Any]:
        """What each worker must know to go on in another process; None of one that is being replaced."""
        self._end()
        return self._broadcast.call("save", ())

    def check_saved(self, agent: Agent, saved: object, actions: Sequence[Mapping[str, Array]]) -> None:
        """Raise `Refused` if `resume` could not go on from this."""
        check_saved(saved, actions, agent, self._obs_schema, self._action_space)

    def resume(
        self, agent: Agent, version: int, root: int, workers: Sequence[Any], actions: Sequence[Mapping[str, Array]]
    ) -> None:
        """Go on where `save` was called; slots that cannot be led back begin anew, from `root`."""
        self._first_version = version
        self.adopt(agent)
        places = replay_episodes(self.server.records, self._broadcast, root, workers, actions)
        for record in self.server.records:  # its first chunk follows what was saved
            self._followed[record.columns] = np.where(
                places[record.columns] == ReplayResult.SAME, key_of(record, 0), -1
            )
        if (anew := places == ReplayResult.NONE).any():
            self.one_batch(0, reset=ResetRequest([root] * len(anew), None if anew.all() else anew, None))

    def followed(self) -> Array:
        """Per slot, which chunk was handed out last; -1: what comes next follows none."""
        return self._followed.copy()

    def end_feed(self, request: Request) -> None:
        self._end(request)

    def _open(self, request: Request, max_staleness: int | None, batches: int | None) -> Request:
        """Begin to give tickets for a request; whatever was under way is over."""
        tickets = self.server.tickets
        with self.server.locked():
            self.server.raise_failure()
            self._end()
            plan = request.num_chunks, request.feed, request.rollouts
            self._lay(max(request.steps, 1), tickets.lanes_needed(max_staleness, *plan))
            if request.reset is not None:
                self._note_reset(request.reset)
            self._request = replace(request, incarnations=tuple(record.incarnation for record in self.server.records))
            tickets.open(max_staleness, request.num_chunks, batches, request.feed, request.rollouts)
            return self._request

    def row_schema(self) -> tuple[Schema, dict[str, Structure]]:
        """The arrays of a row with the present agent, and how they nest."""
        assert self._rollouts is not None
        return {**base_rows(self._obs_schema), **self._agent_schemas[0]}, self._rollouts.structures

    def _lay(self, steps: int, lanes: int) -> None:
        """Make room for a session, and tell workers where to write."""
        rollouts = self._rollouts
        assert rollouts is not None
        rows, _ = self.row_schema()
        if lay := rollouts.fit(lanes, steps, rows, self._agent_schemas[1]):
            assert rollouts.memory is not None
            self.server.tell(lay, fds=[rollouts.memory.fd])

    def _note_reset(self, reset: ResetRequest) -> None:
        """What a worker that is replaced must start from, and that nothing continues where slots are reset."""
        chosen = np.ones(len(self._followed), bool) if reset.mask is None else reset.mask
        self._followed[chosen] = -1
        for record in self.server.records:
            record.clock = record.clock if reset.mask is not None else 0
            for i, root in enumerate(reset.part(record).seeds or ()):
                if root is not None and chosen[record.first + i]:
                    record.roots[i], record.resume[i] = root, 0

    def _end(self, request: Request | None = None) -> None:
        """Cancel what is under way; with a request, only if it is still that one."""
        with self.server.locked():
            if self.server.tickets.is_open and (request is None or request is self._request):
                self.server.cancel()
                self._send_queue.clear()
                self._request = Request()

    def _next_batch(self, request: Request) -> Batch:
        try:
            return self._assembled(request)
        except BaseException:
            self._followed[:] = -1  # a batch that was put together just before Ctrl-C reached nobody
            raise

    def _assembled(self, request: Request) -> Batch:
        server, rollouts = self.server, self._rollouts
        assert rollouts is not None
        began, dropped = time.monotonic(), server.tickets.dropped["stale"]

        def look() -> list[AcceptedChunk] | None:
            if (batch := server.tickets.take(self.version())) is None:
                self._warnings.note_starving(
                    request, time.monotonic() - began, server.tickets.dropped["stale"] - dropped
                )
            return batch

        with server.locked():  # until it is copied: a ticket given meanwhile could write into its lanes
            accepted = self._wait(request, look)
            continues = np.concatenate([self._follow(a, request.steps) for a in accepted])
            one_round = request.num_chunks is None and request.rollouts == 1
            whole = one_round and len(accepted) == self._num_workers
            batch = (rollouts.batch if whole else rollouts.copied)(accepted, request.steps, continues)
            self.counters.batch(batch, accepted, self.version())
        return batch

    def _wait(self, request: Request, look: Callable[[], T | None]) -> T:
        """What `look` finds, as soon as it does; meanwhile tickets are given."""
        began, server = time.monotonic(), self.server

        def found() -> T | None:
            if request is not self._request:
                raise ClosedError("another call on this ClusterEnv ended this one; calls must follow each other.")
            if (answer := look()) is None:
                server.grant()
            return answer

        with server.locked():
            if request is self._request:
                server.grant()
            answer = server.wait(found)
            self.counters.wait["learner"] += time.monotonic() - began
        return answer

    def _follow(self, accepted: AcceptedChunk, steps: int) -> Array:
        """For each slot of a chunk: whether its first row follows the last one that the learner was given."""
        piece: ChunkInfo = accepted.piece
        columns = self.server.records[accepted.ticket.worker].columns
        continues: Array = self._followed[columns] == piece.key - 1
        if steps:  # a reset has no rows to follow
            self._followed[columns] = piece.key
        return continues

    # ---- the server's side ----

    def make_ticket(self, issued: IssuedTicket) -> tuple[m.Ticket, list[Any]]:
        request, record = self._request, self.server.records[issued.worker]
        reset = None if request.reset is None else request.reset.part(record)
        if reset is not None and record.incarnation != request.incarnations[record.worker]:
            reset.seeds = None  # it began with them, and is perhaps past an episode that kills it
        return m.Ticket(issued.seq, issued.lane, request.steps, issued.min_version, reset, request.infos), []

    def on_message(self, record: WorkerRecord, message: m.FromWorker, received: Received) -> None:
        match message:
            case m.Chunk():
                self._take(record, message, received)
            case m.Part():
                self._take_part(record, message, received)
            case m.RequestSend() if self._transfer.in_turn is None:
                raise WireError("a request for a turn, although all workers send at once (TransferTrigger.in_turn).")
            case m.RequestSend():
                issued = self.server.tickets.outstanding(message.ticket)
                if issued is not None and issued.worker == record.worker:  # else it was taken back meanwhile
                    self._send_queue.ask(record.worker, record.incarnation, message.index)
                    self._serve_turns()
            case m.AgentReady() if message.agent > self._agent_id:
                raise WireError(f"a report that agent {message.agent} is ready; the last one sent is {self._agent_id}.")
            case m.AgentReady() if message.agent == self._agent_id:
                agent_structures(message, self._action_schema)  # refused here, where we know who said it
                self._answers[record.worker] = message
            case m.Reply():
                self._broadcast.replied(record, message, received)
            case m.WeightRequest():
                request = (record.incarnation, message.agent, self.version())
                if self._handed.get(record.worker) == request:
                    raise WireError(f"a second request for version {self.version()} of the weights.")
                self._handed[record.worker] = request
                base: int = -1
                frames: list[BytesLike] = []
                if self._store is not None and message.agent == self._agent_id:
                    base, frames = self._store.handover(record.worker, message.held)
                self.server.send(record, m.Weights(message.agent, self.version(), base), frames)

    def on_lost(self, record: WorkerRecord) -> None:
        self._broadcast.lost(record)
        self._send_queue.forget(record.worker)
        self._serve_turns()

    def on_error(self, record: WorkerRecord, failure: m.Failure, error: WorkerError) -> None:
        self._broadcast.failed(record, failure, error)
        if failure.agent != self._agent_id:
            return  # nobody wants it any more
        if self._agent is None:
            self._answers[record.worker] = error
        else:
            self.server.fail(error)  # a replaced worker cannot use the agent that all others use

    def _serve_turns(self) -> None:
        """Let workers send, as many at a time as may."""
        for worker, issued in self._send_queue.next(lambda worker: self.server.records[worker].incarnation):
            self.server.send(self.server.records[worker], m.GrantSend(issued))

    def _take(self, record: WorkerRecord, chunk: m.Chunk, received: Received) -> None:
        tickets, request = self.server.tickets, self._request
        if self._send_queue.done(record.worker):
            self._serve_turns()
        self.counters.reported(record.worker, chunk)
        if chunk.inference:
            self._warnings.note_inference(chunk.inference)
        if chunk.unmeasured:
            self._warnings.note_unmeasured(chunk.unmeasured)
        issued = tickets.outstanding(chunk.ticket)
        if issued is None or issued.worker != record.worker:
            return  # cancelled, or its worker was given up: counted then
        if chunk.syncs and chunk.divergence is not None:
            self._warnings.note_left(chunk.divergence)
        if chunk.infos and not request.infos:
            raise WireError("a chunk with infos that its ticket does not request.")
        assert self._rollouts is not None
        began = time.monotonic()
        piece = self._rollouts.take(record, issued, request.steps, chunk, received, self.version())
        if chunk.keys:
            self.counters.wait["transfer"] += time.monotonic() - began
        self.counters.received(piece.nbytes)
        tickets.accept(record.worker, chunk.ticket, chunk.passed, piece)
        if self._prober is not None and request.steps:
            self._prober.remember(record, chunk, self._rollouts.rows(record, issued.lane), request.steps)
        record.resume[:], record.clock = piece.resume, chunk.clock
        self._tell(issued, piece.stage, None, piece.ends, piece.key, chunk.passed)
        if request.num_chunks is not None:
            self.server.grant()  # whoever is quick goes on while the learner is busy

    def _take_part(self, record: WorkerRecord, part: m.Part, received: Received) -> None:
        issued = self.server.tickets.outstanding(part.ticket)
        if issued is None or issued.worker != record.worker:
            return
        if part.passed > self.version():
            raise WireError("a part whose header cannot be true.")
        assert self._rollouts is not None
        began = time.monotonic()
        ends = self._rollouts.take_part(record, issued, self._request.steps, part, received)
        self.counters.wait["transfer"] += time.monotonic() - began
        if ends is None:
            self.server.send(record, m.Taken(part.index))
        else:
            self._tell(issued, part.stage, part.stage + 1, ends, key_of(record, part.index), part.passed)

    def _tell(self, issued: IssuedTicket, stage: int, stop: int | None, ends: Array, key: int, version: int) -> None:
        """Stages of a chunk are complete: say so to whoever wants to know it before the batch is."""
        if self._request.on_part is not None:
            assert self._rollouts is not None
            continues = self._followed[self.server.records[issued.worker].columns] == key - 1
            part = self._rollouts.part(issued, self._request.steps, stage, stop, ends, continues)
            self._request.on_part(EarlyPart(issued, key, version, part))
