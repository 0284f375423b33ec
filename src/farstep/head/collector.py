"""Collects batches: opens a session of tickets for each call, and assembles the chunks that arrive."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import gymnasium
import numpy as np

from farstep.batch import Batch, Part
from farstep.config.env import EnvConfig
from farstep.config.inference import ServedInference
from farstep.config.launch import EngineConfig, InProcessConfig, LaunchConfig
from farstep.core import Agent, Array, Received
from farstep.errors import ClosedError, WorkerError
from farstep.head.chunks.chunk_intake import ChunkIntake
from farstep.head.chunks.continuity import Continuity
from farstep.head.chunks.rollouts import Rollouts, base_rows, key_of
from farstep.head.events import EventLog
from farstep.head.inference_choice import Inference, InferenceChoice
from farstep.head.members.broadcast import Broadcast
from farstep.head.members.worker_records import ResetRequest, WorkerRecord
from farstep.head.request import OnPart, Request
from farstep.head.saving.resuming import ReplayResult, replay_episodes
from farstep.head.saving.saved_state import check_saved
from farstep.head.server import Server
from farstep.head.stats.counters import Counters
from farstep.head.tickets.records import AcceptedChunk, FeedPlan, IssuedTicket
from farstep.head.warnings.user_warnings import UserWarnings
from farstep.head.weights.publisher import Publisher
from farstep.rollout.program import Program
from farstep.rollout.sources import Source
from farstep.schema import Schema, Structure, space_schema
from farstep.sync.rules import rule_of, threshold_of
from farstep.wire import messages as m
from farstep.wire.compression import available

Space = gymnasium.spaces.Space[Any]
T = TypeVar("T")


class Collector:
    """Collects rollouts for a `ClusterEnv`; the client of its `Server`."""

    def __init__(self, env_config: EnvConfig, config: LaunchConfig, seed: int, events: EventLog) -> None:
        rule = rule_of(env_config.sync, env_config.kl_threshold)
        self._transfer, self._info_keys = env_config.transfer, env_config.info_keys
        serving, is_auto = env_config.serving, False
        if env_config.inference == "auto" and not isinstance(config, InProcessConfig):
            serving, is_auto = ServedInference(device="cuda" if config.gpus_per_node else "cpu"), True
        program = Program(
            Source.of(env_config),
            rule,
            "eager" if env_config.inference == "eager" else "auto",
            env_config.weights,
            self._transfer,
            env_config.compression,
            tuple(available()),
            seed=seed,
            stagger=env_config.stagger,
            num_slots=config.most_nodes * env_config.envs_per_node,
            serving=serving,
            is_serving_optional=is_auto,
        )
        self.server = Server(
            config,
            program,
            env_config.envs_per_node,
            seed,
            config.restart_budget,
            self,
            events,
            release_idle=env_config.release_idle,
            prewarm=env_config.prewarm,
        )
        self._num_workers = len(self.server.records)
        self.counters = Counters(self._num_workers)
        self.kl_threshold = threshold_of(rule)
        """The divergence above which workers pull weights; None: they do not pull by divergence."""
        self._warnings = UserWarnings(rule, env_config.weights, env_config.label, events.emit)
        self._continuity = Continuity(self.server.records)
        # With a lower precision, servers load weights into a float32 policy in main memory.
        on_gpu = serving is not None and serving.device == "cuda" and serving.dtype == "float32"
        self.publisher = Publisher(self.server, env_config, rule, self.counters, self._warnings, self.end, on_gpu)
        copies = self._num_workers // (config.most_nodes if isinstance(config, EngineConfig) else 1)
        start = ResetRequest([seed] * self.server.records[-1].stop, None, None)
        has_gpus = config.gpus_per_node > 0
        self.choice = InferenceChoice(self.publisher, self._warnings, copies, has_gpus, events.emit, start, is_auto)
        """Decides whether acting servers act, with `inference="auto"`."""
        self._intake = ChunkIntake(
            self.server, self.publisher, self.counters, self._warnings, self._continuity, self._transfer.max_senders
        )
        self.gate = self.publisher.gate
        self.workflow_counters: Callable[[], dict[str, Any]] = dict
        """Returns the counters of the last workflow, for `snapshot`."""
        self._rollouts: Rollouts | None = None
        self._broadcast = Broadcast(self.server, without_lost=True)

    def start(self, on_begun: Callable[[], None] | None = None) -> tuple[Space, Space]:
        """Start the workers and return the observation and action space of one environment. Call `on_begun` before
        the wait for the workers."""
        observation_space, action_space = self.server.start(on_begun)
        obs, self._obs_schema = space_schema(observation_space, "obs")
        _, action_schema = space_schema(action_space, "action")
        self._action_space = action_space
        remote = not self.server.shares_memory
        self._rollouts = Rollouts(self.server.records, obs, self._obs_schema, remote, self._transfer)
        self.publisher.start(self._rollouts, base_rows(self._obs_schema, info_keys=self._info_keys), action_schema)
        self._intake.start(self._rollouts)
        return observation_space, action_space

    def close(self) -> None:
        """Stop all workers and free all resources; idempotent."""
        self.gate.close()
        try:
            self.server.close()
        finally:
            if self._rollouts is not None:
                self._rollouts.close()
            self.publisher.close()

    def snapshot(self) -> dict[str, Any]:
        """The counters for `ClusterEnv.stats`."""
        with self.server.locked():
            found = self.counters.snapshot(self.server, self.version(), self.inference)
        return found | self.workflow_counters()

    @property
    def inference(self) -> str:
        """How workers call the agent: `fast`, or the reason why not."""
        return self._warnings.inference

    def version(self) -> int:
        """The newest published version."""
        return self.publisher.version

    def publish(self, agent: Agent) -> int:
        """Publish the agent's parameters as a new version, and return its number."""
        self._choose_inference(agent)
        with self.counters.learner.measure("publish"):
            return self.publisher.publish(agent)

    def adopt(self, agent: Agent) -> None:
        """Make workers act with this agent and its current parameters."""
        self._choose_inference(agent)
        with self.counters.learner.measure("publish"):
            self.publisher.adopt(agent)

    def _choose_inference(self, agent: Agent) -> None:
        self.choice.decide(agent, self.one_batch, self.reset, self.server.slots.kept)

    # ---- requests ----

    def one_batch(self, steps: int, *, infos: bool = False, rollouts: int = 1) -> Batch:
        """Collect a batch of `rollouts` chunks of every worker."""
        request = self.open(Request(steps, None, rollouts, infos), None, 1)
        try:
            return self._next_batch(request)
        finally:
            self.end(request)

    def reset(self, request: ResetRequest) -> Batch:
        """Reset environments, also those of parked workers, and return a batch of the other ones without rows."""
        self.choice.note_reset(request)
        opened = self.open(Request(infos=True, reset=request), None, 1)
        try:
            batch = self._next_batch(opened)
        finally:
            self.end(opened)
        with self.server.locked():  # another thread may have called `scale` meanwhile
            was_reset = set(batch.slots.tolist())
            records, parked = self.server.records, opened.parked | self.server.tickets.presence.parked_or_retiring
            missed = {worker for worker in parked if records[worker].first not in was_reset}
        if any(parts := [_reset_arguments(request, r) if r.worker in missed else None for r in records]):
            self._broadcast.call("reset", *parts)
        return batch

    def parts(self, steps: int) -> Generator[Part, None, Batch]:
        """Collect one batch: yield each worker's parts as they arrive, and return the batch."""
        arrived: deque[Part] = deque()
        request = self.open(Request(steps, on_part=lambda early: arrived.append(early.part)), None, 1)

        def next_part() -> Part | bool | None:
            """Return the next part, True after the last part, or None while waiting."""
            if arrived:
                return arrived.popleft()
            return True if self.server.tickets.round_is_complete() else None

        try:
            while isinstance(part := self._wait(request, next_part), Part):
                yield part
            return self._next_batch(request)
        finally:
            self.end(request)

    def stream(self, steps: int, max_staleness: int, num_chunks: int | None, rollouts: int = 1) -> Iterator[Batch]:
        """Yield batches without end; closing the iterator cancels the request."""
        request = self.open(Request(steps, num_chunks, rollouts), max_staleness, None)
        try:
            while True:
                yield self._next_batch(request)
                with self.server.locked():
                    if request is self._intake.request:
                        self.server.tickets.release()
        finally:
            self.end(request)

    def open_feed(self, steps: int, feed: FeedPlan, on_part: OnPart | None) -> Request:
        """Open a request for a workflow, which gets the chunks one by one from `take_chunk`."""
        windows = self._num_workers if feed.windows is None else feed.windows
        request = Request(steps, windows * feed.chunks, on_part=on_part, feed=feed)
        return self.open(request, feed.max_staleness, None)

    def take_chunk(self, request: Request, wanted: Callable[[int], bool]) -> tuple[AcceptedChunk, Batch] | None:
        """Return the first unread chunk of a `wanted` worker, with views of its rows; None if there is none."""
        if request is not self._intake.request:
            raise _superseded()
        assert self._rollouts is not None
        self.server.grant()
        accepted = self.server.tickets.take_one(wanted, self.version())
        if accepted is None:
            self.server.grant()  # replaces chunks that were dropped as stale
            return None
        batch = self._rollouts.chunk(accepted, request.steps, self._continuity.deliver(accepted, request.steps))
        self.counters.batch(batch, [accepted], self.version())
        return accepted, batch

    def end_feed(self, request: Request) -> None:
        """Cancel the request of a feed."""
        self.end(request)

    # ---- saving and resuming ----

    def save(self) -> list[Any]:
        """The state of each worker, for `resume` in another process; None for a worker that is being restarted."""
        self.end()
        return self._broadcast.call("save", ())

    def check_saved(self, agent: Agent, saved: object, actions: Sequence[Mapping[str, Array]]) -> None:
        """Raise `Refused` if `resume` cannot use this state."""
        check_saved(saved, actions, agent, self._obs_schema, self._action_space)

    def resume(
        self,
        agent: Agent,
        version: int,
        root: int,
        workers: Sequence[Any],
        actions: Sequence[Mapping[str, Array]],
        inference: Inference | None = None,
    ) -> None:
        """Restore the state that `save` returned. Reset slots whose episodes cannot be replayed.

        Args:
            agent: The agent to act with.
            version: Version of its parameters.
            root: Seed of the slots that are reset.
            workers: What `save` returned.
            actions: For each slot, the actions of its current episode.
            inference: What was chosen with `inference="auto"`.
        """
        self.publisher.first_version = version
        self.choice.keep(inference)
        self.adopt(agent)
        emit = self.server.events.emit
        results = replay_episodes(self.server.records, self._broadcast, root, workers, actions, emit)
        for record in self.server.records:  # the first chunk of a replayed slot continues the saved rows
            self._continuity.last[record.columns] = np.where(
                results[record.columns] == ReplayResult.SAME, key_of(record, 0), -1
            )
        if (failed := results == ReplayResult.NONE).any():
            self.reset(ResetRequest([root] * len(failed), None if failed.all() else failed, None))

    def last_chunks(self) -> Array:
        """For each slot, the key of the last delivered chunk; -1 if the next chunk does not continue it."""
        return self._continuity.last.copy()

    # ---- sessions of tickets ----

    def open(self, request: Request, max_staleness: int | None, batches: int | None) -> Request:
        """Cancel the current request, and open a session of tickets for the new request."""
        tickets = self.server.tickets
        try:
            with self.server.locked():
                self.server.raise_failure()
                self.end()
                plan = request.num_chunks, request.feed, request.rollouts
                self._set_layout(max(request.steps, 1), tickets.lanes_needed(max_staleness, *plan))
                if request.reset is not None:
                    self._note_reset(request.reset)
                incarnations = tuple(record.incarnation for record in self.server.records)
                parked = tickets.presence.parked_or_retiring
                request = self._intake.request = replace(request, incarnations=incarnations, parked=parked)
                tickets.open(max_staleness, request.num_chunks, batches, request.feed, request.rollouts)
                self.server.slots.begin_session(one_batch=batches == 1)
            return request
        except BaseException:  # Ctrl-C that `locked` has deferred: the caller cannot end a request that it does not get
            self.end(request)
            raise

    def row_schema(self) -> tuple[Schema, dict[str, Structure]]:
        """The arrays of a row with the current agent, and how they are nested."""
        assert self._rollouts is not None
        return self.publisher.row_schema(), self._rollouts.structures

    def _set_layout(self, steps: int, lanes: int) -> None:
        """Allocate blocks for a session if the current blocks are too small, and announce them to workers."""
        rollouts = self._rollouts
        assert rollouts is not None
        if message := rollouts.fit(lanes, steps, self.publisher.row_schema(), self.publisher.agent_schemas[1]):
            assert rollouts.memory is not None
            self.server.outbox.announce(message, fds=[rollouts.memory.fd])

    def _note_reset(self, reset: ResetRequest) -> None:
        """Record the seeds for restarted workers, and that the next rows of reset slots do not continue earlier
        rows."""
        chosen = np.ones(len(self._continuity.last), bool) if reset.mask is None else reset.mask
        self._continuity.interrupt(chosen)
        for record in self.server.records:
            record.clock = record.clock if reset.mask is not None else 0
            for i, root in enumerate(reset.part(record).seeds or ()):
                if root is not None and chosen[record.first + i]:
                    record.roots[i], record.resume[i] = root, 0

    def end(self, request: Request | None = None) -> None:
        """Cancel the current request. If `request` is given and is not the current one, do nothing."""
        with self.server.locked():
            if self.server.tickets.is_open and (request is None or request is self._intake.request):
                self.server.cancel()
                self._intake.end()

    def _next_batch(self, request: Request) -> Batch:
        try:
            return self._assembled(request)
        except BaseException:
            self._continuity.interrupt()  # Ctrl-C may have discarded a batch that counted as delivered
            raise

    def _assembled(self, request: Request) -> Batch:
        server, rollouts = self.server, self._rollouts
        assert rollouts is not None
        began, dropped = time.monotonic(), server.tickets.dropped["stale"]

        def next_chunks() -> list[AcceptedChunk] | None:
            if (batch := server.tickets.take(self.version())) is None:
                self._free_lanes(request, rollouts)
                self._warnings.note_starving(
                    request, time.monotonic() - began, server.tickets.dropped["stale"] - dropped
                )
            return batch

        with server.locked():  # no ticket may be issued before the batch is copied: it could overwrite the lanes
            accepted = self._wait(request, next_chunks)
            return self._batch(request, accepted, rollouts)

    def _free_lanes(self, request: Request, rollouts: Rollouts) -> None:
        """Copy unread chunks out of the lanes of workers that need them for further chunks of the batch."""
        for accepted in self.server.tickets.chunks_to_copy():
            rows = rollouts.chunk(accepted, request.steps, np.zeros(0, bool)).copy()
            self.server.tickets.copied(accepted, replace(accepted.info, rows=rows))

    def _batch(self, request: Request, accepted: Sequence[AcceptedChunk], rollouts: Rollouts) -> Batch:
        with self.counters.learner.measure("prepare"):
            continues = np.concatenate([self._continuity.deliver(a, request.steps) for a in accepted])
            one_round = request.num_chunks is None and request.rollouts == 1
            whole = one_round and len(accepted) == self._num_workers
            batch = (rollouts.batch if whole else rollouts.copied)(accepted, request.steps, continues)
            self.counters.batch(batch, accepted, self.version())
            return batch

    def _wait(self, request: Request, poll: Callable[[], T | None]) -> T:
        """Wait until `poll` returns something, and return it. Issue tickets meanwhile."""
        server = self.server

        def poll_and_grant() -> T | None:
            if request is not self._intake.request:
                raise _superseded()
            if (result := poll()) is None:
                server.grant()
            return result

        with self.counters.learner.measure("wait"), server.locked():
            if request is self._intake.request:
                server.grant()
            return server.wait(poll_and_grant)

    # ---- callbacks of the server (see `client.Client`) ----

    def make_ticket(self, issued: IssuedTicket) -> tuple[m.Ticket, list[Any]]:
        request, record = self._intake.request, self.server.records[issued.worker]
        if not self.server.shares_memory:
            self.counters.workers.issued(issued.worker, time.monotonic())
        reset = None if request.reset is None else request.reset.part(record)
        if reset is not None and record.incarnation != request.incarnations[record.worker]:
            reset.seeds = (
                None  # a restarted worker started with these seeds, and may have skipped an episode that crashes it
            )
        one_version = self.server.tickets.one_version
        return m.Ticket(
            issued.seq, issued.lane, request.steps, issued.min_version, reset, request.infos, one_version
        ), []

    def on_message(self, record: WorkerRecord, message: m.FromWorker, received: Received) -> None:
        match message:
            case m.Chunk():
                self._intake.take_chunk(record, message, received)
            case m.Part():
                self._intake.take_part(record, message, received)
            case m.RequestSend():
                self._intake.queue_send(record, message)
            case m.AgentReady():
                self.publisher.on_agent_ready(record, message)
            case m.Reply():
                self._broadcast.replied(record, message, received)
            case m.WeightRequest():
                self.publisher.send_weights(record, message)

    def on_parked(self, record: WorkerRecord) -> None:
        self.counters.forget(record.worker)

    def on_lost(self, record: WorkerRecord) -> None:
        self._broadcast.lost(record)
        self._intake.forget(record)
        self.counters.forget(record.worker)

    def on_error(self, record: WorkerRecord, failure: m.Failure, error: WorkerError) -> None:
        self._broadcast.failed(record, failure, error)
        self.publisher.on_error(record, failure, error)


def _reset_arguments(request: ResetRequest, record: WorkerRecord) -> tuple[Any, ...] | None:
    """The arguments of `Host.reset` for one worker; None if none of its environments is reset."""
    mask = None if request.mask is None else request.mask[record.columns]
    if mask is not None and not mask.any():
        return None
    return mask, request.part(record).seeds, request.rest


def _superseded() -> ClosedError:
    return ClosedError("another call on this ClusterEnv ended this one; make one call at a time.")
