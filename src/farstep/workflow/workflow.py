"""Workflows: an algorithm as a set of triggers on one buffer (ARTOS).

    workers ─ chunks ─► buffer ─ triggers ─► consumers (yours) ─ publish ─► workers

`run` is a loop: insert a chunk into the buffer, update the ledger, call the consumers whose triggers fire. The loop
sleeps until a chunk arrives, a deadline passes, or another thread (e.g. of a consumer) wakes it.
"""

from __future__ import annotations

import contextlib
import copy
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from farstep.agents.update_gate import UpdateGate
from farstep.batch import Batch, is_final
from farstep.buffer.replay import Buffer
from farstep.cluster_env import ClusterEnv, collector_for
from farstep.config.env import check_count, is_number
from farstep.core import Agent, Array, Nested
from farstep.elastic.scaling import Rule, Scaling, no_effect
from farstep.errors import ClosedError, ConfigError, FarstepError, counted, described
from farstep.head.chunks.incoming_chunks import EarlyPart
from farstep.head.collector import Collector
from farstep.head.feed import Feed
from farstep.head.tickets.records import AcceptedChunk, DropCause
from farstep.workflow.binding import bind_buffer, check_limiter, check_triggers
from farstep.workflow.consumers import Consumer, ConsumerThread, Guard, Publisher, name_of
from farstep.workflow.counters import buffer_counters, limiter_counters, trigger_counters
from farstep.workflow.delivery import Direct, LocalQueue
from farstep.workflow.objects import ModelBlock
from farstep.workflow.rollout_requests import RolloutRequests
from farstep.workflow.run_state import RunState
from farstep.workflow.triggers import DataKeyTrigger
from farstep.workflow.triggers.dispatch import Delivery, Dispatcher
from farstep.workflow.triggers.ledger import Actor, Ledger
from farstep.workflow.triggers.messages import Message
from farstep.workflow.triggers.trigger import Trigger, leaves_of

_STEPS = 32  # steps per chunk if no trigger has a size
_REMOTE_S = 0.05  # seconds between two checks of consumers in other processes
_UNTIL_S = 0.5  # seconds between calls of `until`: its condition may change without waking the loop


class Workflow:
    """Connects environments, an agent and a buffer, and calls consumers when their triggers fire.

    Args:
        env: The environments.
        agent: The agent. Workers act with it, and `publish` publishes its parameters.
        buffer: Receives all rows.
        steps: Steps of each environment per chunk. None: the smallest `size` of a `DataKeyTrigger`, otherwise 32.
        max_staleness: Maximum age in versions of rows that a consuming trigger delivers. None: any age; workers roll
            while the buffer has room.
        end_s: Maximum time in seconds that `publish` and the end of a run wait for consumers to return; default 300.
        scaling: Rule that chooses the number of workers after each update (`ledger.learner_steps`): one of
            `farstep.elastic`, or a function of its `Signals`. It reads the noise scale from the object `noise_scale`,
            which a consumer publishes with `put`. None: the number of workers does not change.

    Raises:
        ConfigError: An argument is invalid.

    Attributes:
        env: As above.
        agent: As above.
        buffer: As above.
        objects: The newest versions of the objects that `put` published.
        ledger: Counters, to read: `env_steps`, `learner_steps`, `versions`, and more for triggers.

    Example:
        def update(message):
            learn(agent, flow.batch(message))
            flow.publish()

        flow = farstep.Workflow(env, agent, farstep.Buffer(64 * 128, farstep.FullBatch()))
        flow.on(farstep.DataKeyTrigger(n="all", size=128), update)
        flow.on(farstep.ObjectKeyTrigger("parameters"), flow.next_rollout)
        flow.run(total_steps=1_000_000)
    """

    def __init__(
        self,
        env: ClusterEnv,
        agent: Agent,
        buffer: Buffer,
        *,
        steps: int | None = None,
        max_staleness: int | None = None,
        end_s: float = 300.0,
        scaling: Rule | None = None,
    ) -> None:
        if not isinstance(env, ClusterEnv):
            raise ConfigError(
                f"Workflow's env is {env!r}; expected a farstep.ClusterEnv. make_vec is for "
                "loops that choose the actions themselves."
            )
        if not isinstance(buffer, Buffer):
            raise ConfigError(f"Workflow's buffer is {buffer!r}; expected a farstep.Buffer(capacity, sampler).")
        self.env, self.agent, self.buffer = env, agent, buffer
        self._steps = None if steps is None else check_count("steps", steps)
        self._max_staleness = None if max_staleness is None else check_count("max_staleness", max_staleness, minimum=0)
        if not is_number(end_s) or end_s < 0:
            raise ConfigError(f"end_s is {end_s!r}; expected a number of seconds.")
        self._end_s = end_s
        self.objects = ModelBlock()
        self._scaling = None if scaling is None else Scaling(scaling, env.num_workers)
        self._scaled_at: int | None = None
        """Number of updates when the scaling rule last chose; None before the first run."""
        self._scaling_problem = "" if scaling is None else no_effect(scaling, env.num_workers)
        """Why the rule has no effect, until the run was warned of it."""
        self._dispatcher = Dispatcher()
        self._by_data: list[DataKeyTrigger] = []
        self._consuming: list[DataKeyTrigger] = []
        """Triggers that consume rows. Rows that their messages name are not overwritten before the consumer is done."""
        self._reading: list[str] = []
        """Names of the triggers of consumers that read rows, in the order of `RowRetention.holders`."""
        self._state = RunState(agent, buffer, self._max_staleness, self._consuming, self._freed)
        self.ledger: Ledger = self._state.ledger
        self._requests = RolloutRequests(self._state, self._by_data, self._consuming, env.num_workers, env.emit_event)
        self._most_samples = 0
        self._threads: list[ConsumerThread] = []
        self._updaters: list[Guard] = []
        """Guards of consumers that may change the agent."""
        self._publishers: list[Publisher] = []
        self._guards: list[tuple[str, Guard]] = []
        """The name of each trigger, and the delivery to its consumer."""
        self._refused_at: float | None = None
        """Since when the limiter has refused the waiting chunk; None if no chunk waits."""
        self._full_at: float | None = None
        """When the buffer had no room for a chunk, because consumers had not read the rows that it would overwrite."""
        self._full_s = 0.0
        """Seconds for which chunks waited for room, without those since `_full_at`."""
        self._has_deliveries = self._keyed_elsewhere = False
        self.on_chunk: Callable[[Batch], None] | None = None
        """Called with each chunk after its rows were inserted, in the thread of `run`, e.g. for statistics. The batch
        is valid only during the call. Unlike a trigger that takes rows, it works with every buffer."""
        self._last_chunks: Array | None = None
        """For each slot, the last delivered chunk at the end of the last run. Other calls may collect between runs."""
        self._loop: int | None = None
        """Identifier of the thread in `run`."""
        self._calls: deque[Callable[[], None]] = deque()
        """Calls that change the ledger. Other threads queue them, and the loop executes them."""

    @property
    def stopped(self) -> bool:
        """Whether the run has ended or is ending, so that no trigger fires."""
        return self._state.stopped

    # ---- registering consumers ----

    def on(
        self,
        trigger: Trigger,
        consumer: Consumer | Delivery,
        *,
        thread: bool = False,
        max_outstanding: int = 1,
        samples: int | None = None,
        updates: bool = True,
        name: str | None = None,
    ) -> str:
        """Call `consumer(message)` whenever the trigger fires.

        Args:
            trigger: When to call the consumer.
            consumer: A function of the message, or a `Delivery` (`farstep.workflow.delivery`), e.g. to another process.
            thread: Call the consumer in its own thread instead of the thread of `run`; default False.
            max_outstanding: Maximum number of unfinished messages; until one is done, the trigger does not fire.
                Default 1.
            samples: Number of rows that the consumer samples at once. The consumer is called only when the buffer's
                limiter allows this many. None: 1 if the trigger is for replay, otherwise 0.
            updates: Whether the consumer may change the agent. If so, publishing waits until the consumer has returned.
                Default True. Use False for a consumer that only evaluates or logs.
            name: The trigger's name in errors and messages. None: its class and a number, e.g. `TimeTrigger-1`.

        Returns:
            The trigger's name.

        Raises:
            ConfigError: The workflow is running, or an option does not fit the consumer.
        """
        if self._state.feed is not None:
            raise ConfigError("this workflow is running; register triggers before run().")
        if not callable(consumer):
            raise ConfigError(f"consumer is {consumer!r}; expected a function of the message, or a Delivery.")
        is_delivery = hasattr(consumer, "finished")
        if thread and is_delivery:
            raise ConfigError(f"{consumer!r} already delivers messages elsewhere; leave out thread=True.")
        delivery: Delivery = consumer if is_delivery else Direct(consumer)  # type: ignore[assignment]
        started: ConsumerThread | None = None
        publisher: Publisher | None = None
        if consumer == self.publish and not thread:
            delivery = publisher = Publisher(self.publish, self.agent, self._state.wake)
        if thread:
            started = ConsumerThread(self._state, consumer, LocalQueue(max_outstanding))
            delivery = started.queue
        by_data = [leaf for leaf in leaves_of(trigger) if isinstance(leaf, DataKeyTrigger)]
        samples = None if samples is None else check_count("samples", samples)
        guard = Guard(self._state, delivery, by_data, started, samples, name_of(consumer))
        found = self._dispatcher.add(trigger, guard, trigger_id=name, max_outstanding=max_outstanding)
        self._guards.append((found, guard))
        self._by_data += by_data
        if guard.takers:
            guard.discard(self.ledger)  # a new consumer does not get rows of earlier runs
            self._consuming += guard.takers
            self._state.retention.holders.append(guard)
            self._reading.append(found)
        self._most_samples = max(self._most_samples, guard.samples)
        self._updaters += [guard] if updates else []
        self._publishers += [publisher] if publisher is not None else []
        if started is not None:
            started.guard, started.name = guard, found
            self._threads.append(started)
        self._has_deliveries = self._has_deliveries or is_delivery
        keyed = any(leaf.stages != (None,) for leaf in by_data)
        self._keyed_elsewhere |= keyed and is_delivery and not isinstance(consumer, LocalQueue)
        self._requests.on_demand = self._requests.on_demand or consumer == self.next_rollout
        return found

    # ---- for consumers ----

    def batch(self, message: Message) -> Batch:
        """Return the rows that a `DataKeyTrigger`'s message names. The arrays are valid until the consumer returns.

        Args:
            message: The message that the consumer received.

        Returns:
            A batch of shape `[size, slots]`.

        Raises:
            ConfigError: `message` does not name one window of rows.
            FarstepError: The consumer has returned, or its trigger does not consume rows.
        """
        if not isinstance(message, Mapping):
            raise ConfigError(f"batch got {message!r}; expected the message that a DataKeyTrigger's consumer is given.")
        return self._state.retention.batch(message)

    def backlog(self) -> dict[str, int]:
        """Return how many rows each consumer still has to process.

        Returns:
            For each trigger, by name: the largest number of unprocessed rows of any environment slot.
        """
        return dict(zip(self._reading, self._state.retention.backlog(), strict=False))

    def publish(self, message: Message | None = None) -> int:
        """Publish the agent's parameters, which fires `ObjectKeyTrigger("parameters")`. May be used as a consumer.

        The published parameters are consistent: the call waits until all other consumers that update the agent have
        returned (see `updates` of `on`). If a consumer calls it in the middle of its own update, the current parameters
        are published.

        Args:
            message: Ignored; it allows registering this method as a consumer.

        Returns:
            The new version.

        Raises:
            PublishTimeout: A consumer did not return within `end_s` seconds.
            ClosedError: The cluster was closed, or a consumer raised in the middle of an update and ended the run.
        """
        version = self.env.publish(self.agent)
        self._in_loop(lambda: self.ledger.published("parameters", version))
        return version

    def next_rollout(self, message: Message | None = None) -> None:
        """Let every present worker roll one window (the largest of all consuming triggers), or one chunk without such
        triggers.

        If this method is a consumer, workers roll only when it is called. If a worker is absent during the call, it
        rolls when it joins. With `DataKeyTrigger(n="all")`, it waits for the next call instead, unless too few
        requested workers remain for `min_nodes`.

        Args:
            message: Ignored; it allows registering this method as a consumer.

        Raises:
            ConfigError: The workflow is not running, or this method is not one of its consumers.
        """
        if self._state.feed is None or not self._requests.on_demand:
            raise ConfigError(
                "next_rollout works only while the workflow runs, and if it is a consumer: "
                'flow.on(farstep.ObjectKeyTrigger("parameters"), flow.next_rollout).'
            )
        self._in_loop(self._request_rollout)

    def _request_rollout(self) -> None:
        self._rescale()  # first, so that workers that are unparked take part in this rollout
        if (feed := self._state.feed) is not None:
            self._requests.request(feed)

    def _rescale(self) -> None:
        """Let the scaling rule choose the number of workers, if there was an update since it last chose."""
        updates = self.ledger.learner_steps
        if self._scaling is None or updates == self._scaled_at:
            return
        if self._scaling_problem:
            self.env.emit_event("warned", self._scaling_problem)
            self._scaling_problem = ""
        before, is_first = self._scaling.workers, self._scaled_at is None
        self._scaled_at = updates
        window = max((leaf.size for leaf in self._consuming), default=self._chunk_steps)
        rows = window * self.env.num_envs / self.env.num_workers
        noise_scale = self.objects.number("noise_scale")
        fewest = max((leaf.min_actors or 1 for leaf in self._by_data), default=1)  # with fewer, a trigger never fires
        workers = self._scaling.choose(updates, rows, self._unread_fraction(), noise_scale, fewest)
        if is_first or workers != before:
            self.env.scale(workers=workers)

    def _unread_fraction(self) -> float | None:
        """Return the fraction of the buffer that holds rows which a consumer has not read; None for replay."""
        if not self._consuming:
            return None
        return min(1.0, max(self._state.retention.backlog(), default=0) * self.env.num_envs / self.buffer.capacity)

    def put(self, name: str, value: Nested) -> int:
        """Publish another object, such as a noise scale or a target network. This fires `ObjectKeyTrigger(name)`.

        `flow.objects.read(name)` returns the object; another process can map it by `flow.objects.path(name)`.

        Args:
            name: Name of the object; not `parameters`.
            value: A number, an array, a tensor, or a nesting of these.

        Returns:
            The new version of the object.

        Raises:
            ConfigError: The name is invalid.
        """
        if not isinstance(name, str) or not name:
            raise ConfigError(f"put got the name {name!r}; expected a string, like the key of an ObjectKeyTrigger.")
        if name == "parameters":
            raise ConfigError("the agent's parameters are published with publish(); choose another name.")
        version = self.objects.publish(name, value)
        self._in_loop(lambda: self.ledger.published(name, version))
        return version

    def learned(self, steps: int = 1) -> None:
        """Count further updates of the learner for `TimeTrigger(unit="learner_steps")`.

        Each handled message of a `DataKeyTrigger` counts as one update automatically.

        Args:
            steps: Number of updates; default 1.

        Raises:
            ConfigError: `steps` is not a positive integer.
        """
        steps = check_count("steps", steps)
        self._in_loop(lambda: self.ledger.learned(steps))

    def stop(self) -> None:
        """End the current `run`; no trigger fires any more. Any thread may call this."""
        self._state.stopped = True
        self._state.wake()

    # ---- the loop ----

    def run(self, total_steps: int | None = None, until: Callable[[], bool] | None = None) -> None:
        """Collect rows and call consumers until a condition holds, `stop` is called, or a consumer raises.

        At the end, consumer threads finish their messages. Rows that no trigger has taken, and chunks in progress, are
        dropped; `stats` counts them as cancelled.

        Args:
            total_steps: Stop after this many environment steps, summed over all runs of this workflow. None: no limit.
            until: Function without arguments; stop when it returns True. None: no such condition.

        Raises:
            ConfigError: An option does not fit the environments or the buffer.
            ClosedError: This workflow is already running.
            Exception: Any exception that a consumer raised.
        """
        if total_steps is not None:
            check_count("total_steps", total_steps)
        if until is not None and not callable(until):
            raise ConfigError(f"until is {until!r}; expected a function without arguments that returns a bool.")
        state = self._state
        if state.feed is not None:
            raise ClosedError("this workflow is already running.")
        for thread in self._threads:
            thread.check_ended()
        state.stopped, state.agent = False, self.agent
        collector = state.collector = collector_for(self.env, self.agent)
        steps = self._chunk_steps
        self._bind(collector, steps)
        self._rescale()
        plan = self._requests.plan(steps, self._max_staleness)
        failure: BaseException | None = None
        try:
            with collector.server.locked():  # defers Ctrl-C until the feed exists and can be closed below
                state.feed = feed = Feed(collector, steps, plan, self._fires_early(steps))
                last_chunks = collector.last_chunks()
                known = self._last_chunks is not None
                self._requests.update(feed)
                self._continues: Array = last_chunks == self._last_chunks if known else np.zeros(len(last_chunks), bool)
            self._loop = self.buffer.gate.inserting_thread = threading.get_ident()
            self.buffer.gate.on_room, self.buffer.gate.refused_rows = state.wake, None
            collector.workflow_counters = self._counters
            self._watch_updates(collector.gate)
            self._dispatcher.resume(self.ledger, time.monotonic())
            for thread in self._threads:
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

    def _watch_updates(self, gate: UpdateGate) -> None:
        """Make publishers wait while a consumer is updating the agent."""
        gate.limit_s = self._end_s
        self.buffer.gate.between_updates = gate.between_updates
        for guard in self._updaters:
            guard.watch_updates(gate)
        for publisher in self._publishers:
            publisher.start(gate)

    def _finished(self, total_steps: int | None, until: Callable[[], bool] | None) -> bool:
        self._fire()
        steps = self.ledger.env_steps
        return self.stopped or (total_steps is not None and steps >= total_steps) or (until is not None and until())

    def _step(self, feed: Feed, steps: int, wait_until: float) -> None:
        """Wait for the next event, and store the chunk if one has arrived."""
        deadline = self._dispatcher.deadline(self.ledger)
        wait_until = min(wait_until, math.inf if deadline is None else deadline)
        waiting = self._dispatcher.outstanding()
        if self._has_deliveries and waiting:  # a consumer in another process cannot wake the loop
            wait_until = min(wait_until, time.monotonic() + _REMOTE_S)
        checks = (publisher.next_check for publisher in self._publishers)
        wait_until = min([wait_until, self._requests.warn_at, *(check for check in checks if check is not None)])

        def check() -> None:
            if deadline is None and not waiting:
                self._check_progress(feed, steps)

        def wanted(worker: int) -> bool:
            return self._has_room(worker, steps, feed)

        feed.take(wanted, wait_until, check, self._store, self._store_early, self.buffer.locked())

    def _store(self, accepted: AcceptedChunk, batch: Batch) -> None:
        worker = accepted.ticket.worker
        batch = replace(batch, continues=batch.continues & self._continues[batch.slots])
        self._continues[batch.slots] = True
        self._requests.arrived(worker)
        ticket = accepted.ticket.seq
        self._state.void_lost()
        self.buffer.insert(batch, timeout_s=0)
        self._note_admitted()
        self._state.retention.add(worker, ticket, accepted.version, batch)
        if self.on_chunk is not None:
            self.on_chunk(batch)
        if self._state.feed is not None:
            self._requests.drop_if_absent(worker, self._state.feed)

    def _store_early(self, early: EarlyPart) -> None:
        """Record keys of a chunk that arrived before the rest. The rows of the chunk are not in the buffer yet."""
        issued, batch = early.ticket, early.part.so_far
        self._state.void_lost()
        if self._state.feed is not None and self._state.feed.is_live(issued.seq):
            batch = replace(batch, continues=batch.continues & self._continues[batch.slots])
            self._state.retention.ahead.add(issued.worker, issued.seq, early.key, early.version, batch)

    def _fire(self) -> None:
        """Update the ledger, and call the consumers whose triggers fire."""
        if self._state.collector is not None:  # includes versions published with env.publish
            self.ledger.published("parameters", self._state.collector.version())
        if self._state.feed is not None:
            self._requests.update(self._state.feed)
        while self._calls:
            self._calls.popleft()()
        self.ledger.tick(time.monotonic())
        self._dispatcher.check(self.ledger)
        while self._calls:
            self._calls.popleft()()
            self._dispatcher.check(self.ledger)
        if not self.stopped:
            self._rescale()
        self._requests.warn_if_absent(self.ledger.now)

    def _fires_early(self, steps: int) -> bool:
        """Return whether triggers may fire for keys that arrive before the rest of their chunk.

        The rows of such keys are not in the buffer yet, so a window must be exactly one chunk, and consumers must run
        in this process.
        """
        keyed = [leaf for leaf in self._by_data if leaf.stages != (None,)]
        taken = all(leaf.min_new is None and leaf.size == steps for leaf in keyed)
        return bool(keyed) and taken and not self._keyed_elsewhere

    def bind(self) -> None:
        """Launch the workers and allocate the buffer's arrays, unless this is done. Otherwise `run` does it.

        Raises:
            ConfigError: An option does not fit the environments or the buffer.
        """
        self._bind(collector_for(self.env, self.agent), self._chunk_steps)

    @property
    def _chunk_steps(self) -> int:
        return self._steps or min((leaf.size for leaf in self._consuming), default=_STEPS)

    def _bind(self, collector: Collector, steps: int) -> None:
        """Allocate the buffer's arrays for the rows of the environments; reject options that would deadlock."""
        schema, structures = collector.row_schema()
        schema = {name: spec for name, spec in schema.items() if not is_final(name)}
        self.ledger.keys = tuple(schema)
        check_triggers(self._by_data, schema, self.env.num_workers, self._requests.on_demand)
        bind_buffer(self.buffer, schema, structures, self.env.num_envs, self._consuming, steps)
        chunk_rows = steps * max(record.num_envs for record in collector.server.records)
        check_limiter(self.buffer, chunk_rows, self._most_samples)

    def _has_room(self, worker: int, steps: int, feed: Feed) -> bool:
        """Return whether a worker's next chunk may be inserted: the limiter allows it, and no needed row is
        overwritten."""
        rows, refused = steps * feed.record(worker).num_envs, self.buffer.gate.refused_rows
        if not self.buffer.limiter.can_insert(rows):
            self._refused_at = self._refused_at or time.monotonic()
            self.buffer.gate.refused_rows = rows if refused is None else min(rows, refused)
            return False
        if not self._state.retention.has_room(worker, steps):
            self._full_at = self._full_at or time.monotonic()
            return False
        return True

    def _note_admitted(self) -> None:
        """Count the time for which the limiter refused chunks, or they had no room; `Buffer.insert` did not wait."""
        if self._refused_at is not None:
            self.buffer.waited_s["insert"] += time.monotonic() - self._refused_at
            self._refused_at = self.buffer.gate.refused_rows = None
        if self._full_at is not None:
            self._full_s += time.monotonic() - self._full_at
            self._full_at = None

    def _counters(self) -> dict[str, Any]:
        """Return the counters of buffer, limiter and triggers for `ClusterEnv.stats`; from any thread."""
        refused_at, full_at, collector, now = self._refused_at, self._full_at, self._state.collector, time.monotonic()
        assert collector is not None
        num_envs: dict[Actor, int] = {record.worker: record.num_envs for record in collector.server.records}
        return {
            "buffer": buffer_counters(self.buffer, self._full_s + (0.0 if full_at is None else now - full_at)),
            "limiter": limiter_counters(self.buffer, 0.0 if refused_at is None else now - refused_at),
            "workflow": trigger_counters(self._dispatcher, self._guards, self.ledger, num_envs),
        }

    def _check_progress(self, feed: Feed, steps: int) -> None:
        """Raise `FarstepError` if the workflow is in a deadlock."""
        parked = ""
        if feed.num_parked:
            are, them = ("is", "it") if feed.num_parked == 1 else ("are", "them")
            parked = f" {counted(feed.num_parked, 'worker')} {are} parked; "
            parked += f"env.scale(workers={self.env.num_workers}) unparks {them}."
        if not feed.under_way:
            raise FarstepError(
                "the workflow is in a deadlock: no worker is rolling, no chunk is waiting and no trigger has a "
                f"deadline. Check that a trigger calls next_rollout, and that a consumer publishes.{parked}"
            )
        if (waiting := feed.waiting) and not any(self._has_room(worker, steps, feed) for worker in waiting):
            raise FarstepError(
                "the workflow is in a deadlock: chunks have arrived, but the buffer has no room for them "
                f"({self.buffer.limiter}; {len(self.buffer)} of {self.buffer.capacity} rows), and no trigger that "
                f"would free rows can fire. Widen the limiter, raise capacity, or lower a trigger's n or size.{parked}"
            )

    def _freed(self, worker: int, chunks: int, dropped: DropCause | None) -> None:
        """Handle chunks that are no longer needed; `dropped` is the reason if they were not consumed."""
        if dropped is not None:
            self._requests.dropped(worker, chunks)
        if self._state.feed is not None:
            self._state.feed.consumed(worker, chunks, dropped)

    # ---- threads ----

    def _in_loop(self, call: Callable[[], None]) -> None:
        """Execute a call that changes the ledger. If another thread runs the loop, queue the call for that thread."""
        if self._loop in (None, threading.get_ident()):
            call()
        else:
            self._calls.append(call)
            self._state.wake()

    def _end(self, feed: Feed, failure: BaseException | None) -> None:
        """End the run. If `failure` is None, raise the first error of a consumer, with all other errors as notes."""
        errors: list[BaseException] = []
        try:
            deadline = time.monotonic() + self._end_s
            for publisher in self._publishers:
                publisher.close(drop=failure is not None)
            with self.buffer.halted():  # wakes threads that wait for rows
                if self._state.collector is not None:
                    self._state.collector.gate.ending_run()
                for thread in self._threads:
                    thread.close(drop=failure is not None)
                late = [thread.error(self._end_s) for thread in self._threads if not thread.join(deadline)]
            self._state.stopped = True  # `_fire` below only updates the ledger
            errors += [*self._dispatcher.settle(), *late]
            with contextlib.suppress(Exception) if failure is not None else contextlib.nullcontext():
                self._fire()
        finally:
            try:
                self._state.retention.discard(set(range(self.env.num_workers)))
            finally:
                self._note_admitted()
                if self._state.collector is not None:
                    final = self._counters()  # without references to this workflow and its buffer
                    self._state.collector.workflow_counters = lambda: copy.deepcopy(final)
                self._state.feed = self._loop = self.buffer.gate.inserting_thread = self.buffer.gate.on_room = None
                self.buffer.gate.between_updates, self.buffer.gate.refused_rows = contextlib.nullcontext, 0
                feed.close()
                if self._state.collector is not None:
                    self._state.collector.gate.end_run()
                    self._last_chunks = self._state.collector.last_chunks()
        raised = failure or (errors.pop(0) if errors else None)
        if raised is not None:
            for error in errors:
                raised.add_note(f"A consumer also failed: {described(error)}")
        if raised is not failure and raised is not None:
            raise raised
