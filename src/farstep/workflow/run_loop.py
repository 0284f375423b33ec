"""The loop of a running workflow.

It inserts a chunk into the buffer, updates the ledger and calls the consumers whose triggers fire. The loop sleeps
until a chunk arrives, a deadline passes, or another thread (e.g. of a consumer) wakes it.
"""

from __future__ import annotations

import contextlib
import copy
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from farstep.agents.update_gate import UpdateGate
from farstep.batch import Batch, is_final
from farstep.buffer.bound_arrays import internals_of
from farstep.buffer.replay import Buffer
from farstep.cluster_env import ClusterEnv, collector_for
from farstep.core import Agent, Array
from farstep.elastic.scaling import Rule
from farstep.errors import ClosedError, FarstepError, counted, described
from farstep.head.chunks.incoming_chunks import EarlyPart
from farstep.head.collector import Collector
from farstep.head.feed import Feed
from farstep.head.tickets.records import AcceptedChunk, DropCause
from farstep.workflow.autoscaler import Autoscaler
from farstep.workflow.binding import bind_buffer, check_limiter, check_triggers
from farstep.workflow.counters import buffer_counters, limiter_counters, trigger_counters
from farstep.workflow.objects import ModelBlock
from farstep.workflow.registry import Registry
from farstep.workflow.rollout_requests import RolloutRequests
from farstep.workflow.run_state import RunState
from farstep.workflow.triggers.ledger import Actor

_STEPS = 32  # steps per chunk if no trigger has a size
_REMOTE_S = 0.05  # seconds between two checks of consumers in other processes
_UNTIL_S = 0.5  # seconds between calls of `until`: its condition may change without waking the loop


class RunLoop:
    """Runs a workflow, possibly several times. The arguments are those of `Workflow`.

    Args:
        env: The environments.
        agent: The agent that consumers train.
        buffer: Receives all rows.
        objects: Where consumers publish objects.
        steps: Steps of each environment per chunk; None: see `Workflow`.
        max_staleness: Maximum age in versions of rows that consumers get; None: any age.
        end_s: Maximum time in seconds that `publish` and the end of a run wait for consumers to return.
        scaling: Chooses the number of workers; None: it does not change.
    """

    def __init__(
        self,
        env: ClusterEnv,
        agent: Agent,
        buffer: Buffer,
        objects: ModelBlock,
        *,
        steps: int | None,
        max_staleness: int | None,
        end_s: float,
        scaling: Rule | None,
    ) -> None:
        self._env, self._buffer, self._buffer_gate = env, buffer, internals_of(buffer).gate
        self._steps, self._max_staleness, self._end_s = steps, max_staleness, end_s
        self.registry = registry = Registry()
        self.state = RunState(agent, buffer, max_staleness, registry.consuming, self._freed)
        self.requests = RolloutRequests(
            self.state, registry.by_data, registry.consuming, env.num_workers, env.emit_event
        )
        self._autoscaler = None if scaling is None else Autoscaler(scaling, env, self.state, registry, objects)
        self._refused_at: float | None = None
        """Since when the limiter has refused the waiting chunk; None if no chunk waits."""
        self._full_at: float | None = None
        """When the buffer had no room for a chunk, because consumers had not read the rows that it would overwrite."""
        self._full_s = 0.0
        """Seconds for which chunks waited for room, without those since `_full_at`."""
        self.on_chunk: Callable[[Batch], None] | None = None
        """Called with each chunk after its rows were inserted (see `Workflow.on_chunk`)."""
        self._last_chunks: Array | None = None
        """For each slot, the last delivered chunk at the end of the last run. Other calls may collect between runs."""
        self._thread: int | None = None
        """Identifier of the thread in `run`."""
        self._calls: deque[Callable[[], None]] = deque()
        """Calls that change the ledger. Other threads queue them, and the loop executes them."""

    # ---- starting ----

    def run(self, agent: Agent, total_steps: int | None, until: Callable[[], bool] | None) -> None:
        """Collect rows and call consumers until a condition holds (see `Workflow.run`)."""
        state = self.state
        if state.feed is not None:
            raise ClosedError("this workflow is already running.")
        for thread in self.registry.threads:
            thread.check_ended()
        state.stopped, state.agent = False, agent
        collector = state.collector = collector_for(self._env, agent)
        steps = self._chunk_steps
        self._bind(collector)
        self._rescale()
        plan = self.requests.plan(steps, self._max_staleness)
        failure: BaseException | None = None
        try:
            with collector.server.locked():  # defers Ctrl-C until the feed exists and can be closed below
                state.feed = feed = Feed(collector, steps, plan, self.registry.fires_early(steps))
                last_chunks = collector.last_chunks()
                known = self._last_chunks is not None
                self.requests.update(feed)
                self._continues: Array = last_chunks == self._last_chunks if known else np.zeros(len(last_chunks), bool)
            self._thread = self._buffer_gate.inserting_thread = threading.get_ident()
            self._buffer_gate.on_room, self._buffer_gate.refused_rows = state.wake, None
            collector.workflow_counters = self._counters
            self._watch_updates(collector.gate)
            self.registry.dispatcher.resume(state.ledger, time.monotonic())
            for thread in self.registry.threads:
                thread.start()
            while not self._finished(total_steps, until):
                self._step(feed, steps, math.inf if until is None else time.monotonic() + _UNTIL_S)
        except BaseException as error:
            failure = error
            raise
        finally:
            if state.feed is not None:
                self._end(state.feed, failure)
            failure = None  # break the reference cycle between the exception and this frame

    def bind(self, agent: Agent) -> None:
        """Launch the workers and allocate the buffer's arrays, unless this is done."""
        self._bind(collector_for(self._env, agent))

    @property
    def _chunk_steps(self) -> int:
        return self._steps or min((leaf.size for leaf in self.registry.consuming), default=_STEPS)

    def _bind(self, collector: Collector) -> None:
        """Allocate the buffer's arrays for the rows of the environments; reject options that would deadlock."""
        steps = self._chunk_steps
        schema, structures = collector.row_schema()
        schema = {name: spec for name, spec in schema.items() if not is_final(name)}
        self.state.ledger.keys = tuple(schema)
        check_triggers(self.registry.by_data, schema, self._env.num_workers, self.requests.on_demand)
        bind_buffer(self._buffer, schema, structures, self._env.num_envs, self.registry.consuming, steps)
        chunk_rows = steps * max(record.num_envs for record in collector.server.records)
        check_limiter(self._buffer, chunk_rows, self.registry.most_samples)

    def _watch_updates(self, gate: UpdateGate) -> None:
        """Make publishers wait while a consumer is updating the agent."""
        gate.limit_s = self._end_s
        self._buffer_gate.between_updates = gate.between_updates
        for guard in self.registry.updaters:
            guard.watch_updates(gate)
        for publisher in self.registry.publishers:
            publisher.start(gate)

    # ---- one step ----

    def _finished(self, total_steps: int | None, until: Callable[[], bool] | None) -> bool:
        self._fire()
        steps = self.state.ledger.env_steps
        return (
            self.state.stopped or (total_steps is not None and steps >= total_steps) or (until is not None and until())
        )

    def _step(self, feed: Feed, steps: int, wait_until: float) -> None:
        """Wait for the next event, and store the chunk if one has arrived."""
        deadline = self.registry.dispatcher.deadline(self.state.ledger)
        wait_until = min(wait_until, math.inf if deadline is None else deadline)
        waiting = self.registry.dispatcher.outstanding()
        if self.registry.has_deliveries and waiting:  # a consumer in another process cannot wake the loop
            wait_until = min(wait_until, time.monotonic() + _REMOTE_S)
        checks = (publisher.next_check for publisher in self.registry.publishers)
        wait_until = min([wait_until, self.requests.warn_at, *(check for check in checks if check is not None)])

        def check() -> None:
            if deadline is None and not waiting:
                self._check_progress(feed, steps)

        def wanted(worker: int) -> bool:
            return self._has_room(worker, steps, feed)

        feed.take(wanted, wait_until, check, self._store, self._store_early, self._buffer_gate.lock)

    def _has_room(self, worker: int, steps: int, feed: Feed) -> bool:
        """Return whether a worker's next chunk may be inserted: the limiter allows it, and no needed row is
        overwritten."""
        rows, refused = steps * feed.record(worker).num_envs, self._buffer_gate.refused_rows
        if not self._buffer.limiter.can_insert(rows):
            self._refused_at = self._refused_at or time.monotonic()
            self._buffer_gate.refused_rows = rows if refused is None else min(rows, refused)
            return False
        if not self.state.retention.has_room(worker, steps):
            self._full_at = self._full_at or time.monotonic()
            return False
        return True

    def _check_progress(self, feed: Feed, steps: int) -> None:
        """Raise `FarstepError` if the workflow is in a deadlock."""
        parked = ""
        if feed.num_parked:
            are, them = ("is", "it") if feed.num_parked == 1 else ("are", "them")
            parked = f" {counted(feed.num_parked, 'worker')} {are} parked; "
            parked += f"env.scale(workers={self._env.num_workers}) unparks {them}."
        if not feed.under_way:
            raise FarstepError(
                "the workflow is in a deadlock: no worker is rolling, no chunk is waiting and no trigger has a "
                f"deadline. Check that a trigger calls next_rollout, and that a consumer publishes.{parked}"
            )
        waiting = feed.workers_with_unread_chunks
        if waiting and not any(self._has_room(worker, steps, feed) for worker in waiting):
            raise FarstepError(
                "the workflow is in a deadlock: chunks have arrived, but the buffer has no room for them "
                f"({self._buffer.limiter}; {len(self._buffer)} of {self._buffer.capacity} rows), and no trigger that "
                f"would free rows can fire. Widen the limiter, raise capacity, or lower a trigger's n or size.{parked}"
            )

    def _store(self, accepted: AcceptedChunk, batch: Batch) -> None:
        worker = accepted.ticket.worker
        batch = replace(batch, continues=batch.continues & self._continues[batch.slots])
        self._continues[batch.slots] = True
        self.requests.arrived(worker)
        ticket = accepted.ticket.seq
        self.state.void_lost()
        self._buffer.insert(batch, timeout_s=0)
        self._note_admitted()
        self.state.retention.add(worker, ticket, accepted.version, batch)
        if self.on_chunk is not None:
            self.on_chunk(batch)
        if self.state.feed is not None:
            self.requests.drop_if_absent(worker, self.state.feed)

    def _store_early(self, early: EarlyPart) -> None:
        """Record keys of a chunk that arrived before the rest. The rows of the chunk are not in the buffer yet."""
        issued, batch = early.ticket, early.part.so_far
        self.state.void_lost()
        if self.state.feed is not None and self.state.feed.is_live(issued.seq):
            batch = replace(batch, continues=batch.continues & self._continues[batch.slots])
            self.state.retention.partial_chunks.add(issued.worker, issued.seq, early.key, early.version, batch)

    def _note_admitted(self) -> None:
        """Count the time for which the limiter refused chunks, or they had no room; `Buffer.insert` did not wait."""
        if self._refused_at is not None:
            self._buffer.waited_s["insert"] += time.monotonic() - self._refused_at
            self._refused_at = self._buffer_gate.refused_rows = None
        if self._full_at is not None:
            self._full_s += time.monotonic() - self._full_at
            self._full_at = None

    def _freed(self, worker: int, chunks: int, dropped: DropCause | None) -> None:
        """Handle chunks that are no longer needed; `dropped` is the reason if they were not consumed."""
        if dropped is not None:
            self.requests.dropped(worker, chunks)
        if self.state.feed is not None:
            self.state.feed.consumed(worker, chunks, dropped)

    def _fire(self) -> None:
        """Update the ledger, and call the consumers whose triggers fire."""
        if self.state.collector is not None:  # includes versions published with env.publish
            self.state.ledger.published("parameters", self.state.collector.version())
        if self.state.feed is not None:
            self.requests.update(self.state.feed)
        while self._calls:
            self._calls.popleft()()
        self.state.ledger.tick(time.monotonic())
        self.registry.dispatcher.check(self.state.ledger)
        while self._calls:
            self._calls.popleft()()
            self.registry.dispatcher.check(self.state.ledger)
        if not self.state.stopped:
            self._rescale()
        self.requests.warn_if_absent(self.state.ledger.now)

    # ---- for consumers ----

    def execute(self, call: Callable[[], None]) -> None:
        """Execute a call that changes the ledger. If another thread runs the loop, queue the call for that thread."""
        if self._thread in (None, threading.get_ident()):
            call()
        else:
            self._calls.append(call)
            self.state.wake()

    def request_rollout(self) -> None:
        """Let every present worker roll one window (see `Workflow.next_rollout`). Any thread may call this."""
        self.execute(self._request_rollout)

    def _request_rollout(self) -> None:
        self._rescale()  # first, so that workers that are unparked take part in this rollout
        if (feed := self.state.feed) is not None:
            self.requests.request(feed)

    def _rescale(self) -> None:
        if self._autoscaler is not None:
            self._autoscaler.update(self._chunk_steps)

    # ---- counting ----

    def _counters(self) -> dict[str, Any]:
        """Return the counters of buffer, limiter and triggers for `ClusterEnv.stats`; from any thread."""
        refused_at, full_at, collector, now = self._refused_at, self._full_at, self.state.collector, time.monotonic()
        assert collector is not None
        num_envs: dict[Actor, int] = {record.worker: record.num_envs for record in collector.server.records}
        return {
            "buffer": buffer_counters(self._buffer, self._full_s + (0.0 if full_at is None else now - full_at)),
            "limiter": limiter_counters(self._buffer, 0.0 if refused_at is None else now - refused_at),
            "workflow": trigger_counters(self.registry.dispatcher, self.registry.guards, self.state.ledger, num_envs),
        }

    # ---- ending ----

    def _end(self, feed: Feed, failure: BaseException | None) -> None:
        """End the run. If `failure` is None, raise the first error of a consumer, with all other errors as notes."""
        errors: list[BaseException] = []
        try:
            deadline = time.monotonic() + self._end_s
            for publisher in self.registry.publishers:
                publisher.close(drop=failure is not None)
            with self._buffer_gate.halted():  # wakes threads that wait for rows
                if self.state.collector is not None:
                    self.state.collector.gate.ending_run()
                for thread in self.registry.threads:
                    thread.close(drop=failure is not None)
                late = [thread.error(self._end_s) for thread in self.registry.threads if not thread.join(deadline)]
            self.state.stopped = True  # `_fire` below only updates the ledger
            errors += [*self.registry.dispatcher.settle(), *late]
            with contextlib.suppress(Exception) if failure is not None else contextlib.nullcontext():
                self._fire()
        finally:
            try:
                self.state.retention.discard(set(range(self._env.num_workers)))
            finally:
                self._note_admitted()
                if self.state.collector is not None:
                    final = self._counters()  # without references to this workflow and its buffer
                    self.state.collector.workflow_counters = lambda: copy.deepcopy(final)
                self.state.feed = self._thread = self._buffer_gate.inserting_thread = self._buffer_gate.on_room = None
                self._buffer_gate.between_updates, self._buffer_gate.refused_rows = contextlib.nullcontext, 0
                feed.close()
                if self.state.collector is not None:
                    self.state.collector.gate.end_run()
                    self._last_chunks = self.state.collector.last_chunks()
        raised = failure or (errors.pop(0) if errors else None)
        if raised is not None:
            for error in errors:
                raised.add_note(f"A consumer also failed: {described(error)}")
        if raised is not failure and raised is not None:
            raise raised
