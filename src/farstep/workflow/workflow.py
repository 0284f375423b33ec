"""Workflows: an algorithm is a table of triggers over one buffer (ARTOS).

    workers ─ chunks ─► buffer ─ triggers ─► consumers (yours) ─ publish ─► workers

`run` is one loop: take a chunk into the buffer, write down what happened, let triggers fire. It sleeps when there is
nothing to do; whoever works elsewhere (a consumer's thread) wakes it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import numpy as np

from farstep.agents.update_gate import UpdateGate
from farstep.batch import Batch, is_final
from farstep.buffer.replay import Buffer
from farstep.cluster_env import ClusterEnv, collector_for
from farstep.config.env import check_count, is_number
from farstep.core import Agent, Array, Nested
from farstep.errors import ClosedError, ConfigError, FarstepError, described, unknown_name
from farstep.head.chunks.incoming_chunks import EarlyPart
from farstep.head.collector import Collector
from farstep.head.feed import Feed
from farstep.head.tickets.records import AcceptedChunk, FeedPlan
from farstep.workflow.consumers import Consumer, ConsumerThread, Guard, Publisher, name_of
from farstep.workflow.delivery import Direct, LocalQueue
from farstep.workflow.dispatch import Delivery, Dispatcher, Message, Trigger, leaves_of
from farstep.workflow.ledger import Ledger
from farstep.workflow.objects import ModelBlock
from farstep.workflow.row_retention import RowRetention, windows_of
from farstep.workflow.triggers import DataKeyTrigger

log = logging.getLogger("farstep")
_STEPS = 32  # of a chunk, where no trigger says what it needs
_REMOTE_S = 0.05  # how often a passer to another process is asked whether its consumer is done
_ABSENT_S = 5.0  # seconds without the workers that a trigger needs until a warning names the trigger
_UNTIL_S = 0.5  # how often `until` is asked at least: what it looks at may change where nobody wakes the loop


class Workflow:
    """Environments, an agent, a buffer, and who is called when.

    `steps` is a chunk's length (else the smallest `size` of a `DataKeyTrigger`). Rows that a learner gets through a
    consuming trigger are at most `max_staleness` versions old; None: workers run ahead as far as the buffer has room.
    A run that ends, and a publisher, wait at most `end_s` seconds for consumers to return from their messages.
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
    ) -> None:
        if not isinstance(env, ClusterEnv):
            raise ConfigError(
                f"Workflow's env is {env!r}; expected a farstep.ClusterEnv, whose workers act by themselves. make_vec "
                "is for a loop that steps."
            )
        if not isinstance(buffer, Buffer):
            raise ConfigError(f"Workflow's buffer is {buffer!r}; expected a farstep.Buffer(capacity, sampler).")
        self.env, self.agent, self.buffer = env, agent, buffer
        self._steps = None if steps is None else check_count("steps", steps)
        self._chunk_steps = self._steps or _STEPS
        self._max_staleness = None if max_staleness is None else check_count("max_staleness", max_staleness, minimum=0)
        if not is_number(end_s) or end_s < 0:
            raise ConfigError(f"end_s is {end_s!r}; expected a number of seconds.")
        self._end_s = end_s
        self.objects = ModelBlock()
        self.ledger = Ledger(now=time.monotonic())
        self._dispatcher = Dispatcher()
        self._takers: list[DataKeyTrigger] = []
        """Those of the table whose messages name rows that nobody may overwrite before their consumer is done."""
        self.holdings = RowRetention(buffer, self.ledger, self._takers, self._freed)
        self._reading: list[str] = []
        """The names of their triggers, one for each holder of rows."""
        self._by_data: list[DataKeyTrigger] = []
        self._most_samples = 0
        self._threads: list[ConsumerThread] = []
        self._updaters: list[Guard] = []
        """Those whose consumers may change the agent."""
        self._publishers: list[Publisher] = []
        self._on_demand = self._asks = self._keyed_elsewhere = False
        self._owed: Counter[int] = Counter()
        """Per worker, chunks that it was asked for and that have not arrived, over several runs."""
        self._present: frozenset[int] = frozenset()
        self._invited: frozenset[int] | None = None
        """With `_waits_for_all`, workers of the rollout that was last requested; None: none was requested."""
        self._waits_for_all = False
        """Whether a trigger takes the rows of all present workers, instead of those of a number of them."""
        self._quorum, self._warn_at = 1, math.inf
        self._followed: Array | None = None
        """Per slot, the last chunk that was handed out when a run ended: others may roll between runs."""
        self._collector: Collector | None = None
        self._feed: Feed | None = None
        self._loop: int | None = None
        """The thread that runs it."""
        self._said: deque[Callable[[], None]] = deque()
        """What other threads did, for the loop to write down."""
        self.stopped = False
        """Nothing fires any more."""

    # ---- the table ----

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
            consumer: A function of the message, or a passer (`farstep.workflow.delivery`), which delivers elsewhere.
            thread: Call the consumer in a thread of its own instead of the thread of `run`.
            max_outstanding: Messages that may be unfinished at a time; the trigger does not fire beyond that.
            samples: Rows that the consumer samples at once; it is called only when the buffer's limiter would give
                them. None: one row if the trigger is for replay.
            updates: Whether the consumer may change the agent; publishing waits until it has returned from its message.
                False for a consumer that only evaluates or logs.
            name: The trigger's name in errors and messages; None: its class and a number, e.g. `TimeTrigger-1`.

        Returns:
            The trigger's name.

        Raises:
            ConfigError: The workflow is running, or an option does not fit the consumer.
        """
        if self._feed is not None:
            raise ConfigError("this workflow is running; register its triggers before.")
        if not callable(consumer):
            raise ConfigError(f"consumer is {consumer!r}; expected a function of the message, or a passer.")
        is_passer = hasattr(consumer, "finished")
        if thread and is_passer:
            raise ConfigError(f"{consumer!r} hands messages elsewhere by itself; leave out thread=True.")
        passer: Delivery = consumer if is_passer else Direct(consumer)  # type: ignore[assignment]
        started: ConsumerThread | None = None
        publisher = Publisher(self.publish, self.agent, self.wake) if consumer == self.publish and not thread else None
        if publisher is not None:
            passer = publisher
        if thread:
            started = ConsumerThread(self, consumer, LocalQueue(max_outstanding))
            passer = started.queue
        by_data = [leaf for leaf in leaves_of(trigger) if isinstance(leaf, DataKeyTrigger)]
        samples = None if samples is None else check_count("samples", samples)
        guard = Guard(self, passer, by_data, started, samples, name_of(consumer))
        found = self._dispatcher.add(trigger, guard, trigger_id=name, max_outstanding=max_outstanding)
        self._by_data += by_data
        if guard.takers:
            guard.discard(self.ledger)  # rows of runs before are not for it
            self._takers += guard.takers
            self.holdings.holders.append(guard)
            self._reading.append(found)
        self._most_samples = max(self._most_samples, guard.samples)
        self._updaters += [guard] if updates else []
        self._publishers += [publisher] if publisher is not None else []
        if started is not None:
            started.guard, started.name = guard, found
            self._threads.append(started)
        self._asks = self._asks or is_passer
        keyed = any(leaf.stages != (None,) for leaf in by_data)
        self._keyed_elsewhere |= keyed and is_passer and not isinstance(consumer, LocalQueue)
        self._on_demand = self._on_demand or consumer == self.next_rollout
        return found

    # ---- what consumers do ----

    def batch(self, message: Message) -> Batch:
        """The rows that a `DataKeyTrigger`'s message names, `[size, slots, ...]`; views until the consumer returns."""
        if not isinstance(message, Mapping):
            raise ConfigError(f"batch got {message!r}; expected the message that a DataKeyTrigger's consumer is given.")
        return self.holdings.batch(message)

    def backlog(self) -> dict[str, int]:
        """For each trigger whose consumer reads rows, how many it is not done with, of the slot with most."""
        return dict(zip(self._reading, self.holdings.backlog(), strict=False))

    def publish(self, message: Message | None = None) -> int:
        """Publish the agent's parameters; fires `ObjectKeyTrigger("parameters")`. Can be a consumer itself.

        Publishes a whole snapshot: waits until the other consumers have returned from their messages (see `updates` of
        `on`). A consumer that calls it in the middle of its own update publishes the parameters as they are.

        Args:
            message: Ignored, so that this method can be registered as a consumer.

        Returns:
            The new version.

        Raises:
            PublishTimeout: A consumer did not return within `end_s` seconds.
            ClosedError: The cluster was closed, or a consumer raised in the middle of an update and ended the run.
        """
        version = self.env.publish(self.agent)
        self._say(lambda: self.ledger.published("parameters", version))
        return version

    def next_rollout(self, message: Message | None = None) -> None:
        """Let every present worker roll the largest window of a consuming trigger, or one chunk if there is none.

        In a workflow that has this method as a consumer, workers roll only when it is called. An absent worker rolls
        when it joins; with `DataKeyTrigger(n="all")` it waits for the next call instead, unless fewer than `min_nodes`
        requires are left of the workers that were asked.

        Args:
            message: Ignored, so that this method can be registered as a consumer.

        Raises:
            ConfigError: The workflow is not running, or does not have this method as a consumer.
        """
        if self._feed is None or not self._on_demand:
            raise ConfigError(
                "next_rollout is for a workflow that runs and has it as a consumer: "
                'flow.on(farstep.ObjectKeyTrigger("parameters"), flow.next_rollout).'
            )
        self._say(self._invite)

    def _invite(self) -> None:
        if self._feed is not None:
            self._note_members(self._feed)
            if self._waits_for_all:
                self._invited = self._present
            self._ask(self._present if self._waits_for_all else range(self.env.num_workers), self._feed)
            self._tell_members()

    def _ask(self, workers: Iterable[int], feed: Feed, untaken: int = 0) -> None:
        """Let these workers roll a window, of which `untaken` chunks have been rolled before."""
        chunks = max((-(-leaf.size // self._chunk_steps) for leaf in self._takers), default=1) - untaken
        if chunks > 0:
            self._owed.update(dict.fromkeys(workers, chunks))
            feed.invite(workers, chunks)

    def _untaken(self, worker: int, feed: Feed) -> int:
        """Chunks of a worker that no trigger has taken, from before it left: another window would be one too many."""
        rows = min((self.ledger.written(worker) - leaf.start_of(worker) for leaf in self._takers), default=0)
        return rows // self._chunk_steps + feed.pending(worker)

    def put(self, name: str, value: Nested) -> int:
        """Publish another object under a name (a noise scale, a target network): fires `ObjectKeyTrigger(name)`.

        `flow.objects.read(name)` gets it; another process does by `flow.objects.path(name)`.
        """
        if not isinstance(name, str) or not name:
            raise ConfigError(f"put got the name {name!r}; expected a string, as ObjectKeyTrigger's.")
        if name == "parameters":
            raise ConfigError("the agent's parameters are published with publish(); choose another name.")
        version = self.objects.publish(name, value)
        self._say(lambda: self.ledger.published(name, version))
        return version

    def learned(self, steps: int = 1) -> None:
        """The learner made further updates: what `TimeTrigger(unit="learner_steps")` counts, beside one for every
        message of a `DataKeyTrigger` that was handled."""
        steps = check_count("steps", steps)
        self._say(lambda: self.ledger.learned(steps))

    def stop(self) -> None:
        """Let the present `run` return: no trigger fires any more; from any thread."""
        self.stopped = True
        self.wake()

    # ---- the loop ----

    def run(self, total_steps: int | None = None, until: Callable[[], bool] | None = None) -> None:
        """Roll and fire until `total_steps` environment steps have arrived (in all, over several calls), `until()` says
        so, or `stop` is called. What a consumer raises ends the run and is raised here.

        Threads of consumers finish what they were handed, and rows that no trigger took are dropped, as those that are
        on their way; `stats` counts them as cancelled.
        """
        if total_steps is not None:
            check_count("total_steps", total_steps)
        if until is not None and not callable(until):
            raise ConfigError(f"until is {until!r}; expected a function without arguments that says when to stop.")
        if self._feed is not None:
            raise ClosedError("this workflow is running already.")
        for thread in self._threads:
            thread.check_ended()
        self.stopped = False
        collector = self._collector = collector_for(self.env, self.agent)
        steps = self._steps or min((leaf.size for leaf in self._takers), default=_STEPS)
        self._chunk_steps = steps
        self._bind(collector, steps)
        counts = [leaf.n for leaf in self._takers if leaf.n is not None]
        self._waits_for_all = len(counts) < len(self._takers)
        plan = FeedPlan(
            self._max_staleness,
            None if self._waits_for_all else max(counts, default=1),
            max((_most_chunks(leaf.size, steps) for leaf in self._takers), default=1),
            self._owed if self._on_demand else None,
        )
        failure: BaseException | None = None
        try:
            with collector.server.locked():  # a Ctrl-C comes when the feed is there, and is closed below
                self._feed = feed = Feed(collector, steps, plan, self._fires_early(steps))
                followed = collector.followed()
                known = self._followed is not None
                self._note_members(feed)
                self._follows: Array = followed == self._followed if known else np.zeros(len(followed), bool)
            self._loop = self.buffer.inserting_thread = threading.get_ident()
            self.buffer.on_room = self.wake
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
            if self._feed is not None:
                self._end(self._feed, failure)
            failure = None  # else it and this frame would keep each other alive

    def _watch_updates(self, gate: UpdateGate) -> None:
        """Keep publishers waiting while a consumer is in the middle of an update."""
        gate.limit_s = self._end_s
        self.buffer.between_updates = gate.between_updates
        for guard in self._updaters:
            guard.watch_updates(gate)
        for publisher in self._publishers:
            publisher.start(gate)

    def _finished(self, total_steps: int | None, until: Callable[[], bool] | None) -> bool:
        self._fire()
        steps = self.ledger.env_steps
        return self.stopped or (total_steps is not None and steps >= total_steps) or (until is not None and until())

    def _step(self, feed: Feed, steps: int, wait_until: float) -> None:
        """Wait for the next event and write it down."""
        deadline = self._dispatcher.deadline(self.ledger)
        wait_until = min(wait_until, math.inf if deadline is None else deadline)
        waiting = self._dispatcher.outstanding()
        if self._asks and waiting:  # another process cannot wake us
            wait_until = min(wait_until, time.monotonic() + _REMOTE_S)
        checks = (publisher.next_check for publisher in self._publishers)
        wait_until = min([wait_until, self._warn_at, *(check for check in checks if check is not None)])

        def check() -> None:
            if deadline is None and not waiting:
                self._check_life(feed, steps)

        def wanted(worker: int) -> bool:
            return self._has_room(worker, steps, feed)

        feed.take(wanted, wait_until, check, self._store, self._store_early, self.buffer.locked())

    def _store(self, accepted: AcceptedChunk, batch: Batch) -> None:
        worker = accepted.ticket.worker
        batch = replace(batch, continues=batch.continues & self._follows[batch.slots])
        self._follows[batch.slots] = True
        self._owed[worker] = max(0, self._owed[worker] - 1)
        ticket = accepted.ticket.seq
        self._void_lost()
        self.buffer.insert(batch, timeout_s=0)
        self.holdings.add(worker, ticket, accepted.version, batch)
        if worker not in self._present and self._feed is not None:  # it has left, and this was the last of it
            self._drop_rest(worker, self._feed)

    def _store_early(self, early: EarlyPart) -> None:
        """Some keys of a chunk are here: those are written down, the rows not yet in the buffer."""
        issued, batch = early.ticket, early.part.so_far
        self._void_lost()
        if self._feed is not None and self._feed.is_live(issued.seq):
            batch = replace(batch, continues=batch.continues & self._follows[batch.slots])
            self.holdings.ahead.add(issued.worker, issued.seq, early.key, early.version, batch)

    def _void_lost(self) -> None:
        """Discard the early parts of chunks that were dropped."""
        if self._feed is not None:
            self.holdings.ahead.void(self._feed.voided())

    def _fire(self) -> None:
        if self._collector is not None:  # also what was published past us, by env.publish
            self.ledger.published("parameters", self._collector.version())
        if self._feed is not None:
            self._note_members(self._feed)
        while self._said:
            self._said.popleft()()
        self.ledger.tick(time.monotonic())
        self._dispatcher.check(self.ledger)
        while self._said:
            self._said.popleft()()
            self._dispatcher.check(self.ledger)
        if self.ledger.now >= self._warn_at:
            self._warn_at = math.inf
            self._warn_of_absent()

    # ---- present workers ----

    def _note_members(self, feed: Feed) -> None:
        """Note which workers have joined and left."""
        if (members := feed.members()) is None:
            return
        self._present, self._quorum = members.present, members.quorum
        self._warn_at = time.monotonic() + _ABSENT_S
        self._void_lost()
        for worker in members.departed:
            if self._invited is not None:
                self._invited -= {worker}
            self._drop_rest(worker, feed)
        self._replace_invited(feed)
        self._tell_members()

    def _drop_rest(self, worker: int, feed: Feed) -> None:
        """A worker has left. If a trigger does not wait for it, drop its incomplete window, and request nothing from it
        until it is back."""
        if self._waits_for_all:
            self.holdings.left(worker)
            self._owed[worker] = 0
            feed.withdraw(worker)

    def _replace_invited(self, feed: Feed) -> None:
        """Request a rollout from workers that have joined if too few of those asked are left for a trigger to fire."""
        if self._invited is None:
            return
        needed = max([self._quorum, *(leaf.n for leaf in self._takers if leaf.n is not None)])
        if len(self._invited & self._present) < needed <= len(self._present):
            joined = self._present - self._invited
            self._invited |= joined
            for worker in joined:
                self._ask([worker], feed, self._untaken(worker, feed))

    def _tell_members(self) -> None:
        """Tell triggers which workers to wait for: with `next_rollout`, only those whose rollout was requested."""
        asked = self._present if self._invited is None else self._invited & self._present
        self.ledger.members(asked, self._quorum)

    def _warn_of_absent(self) -> None:
        """Name triggers that cannot fire until workers join."""
        for trigger in self._by_data:
            needed = self._quorum if trigger.n is None else trigger.n
            if needed > len(self._present) and not trigger.is_warm:
                log.warning(
                    "%r waits for %d workers, but %d of at most %d are present, so it cannot fire until others join. "
                    "%s",
                    trigger,
                    needed,
                    len(self._present),
                    self.env.num_workers,
                    "min_nodes requires them."
                    if trigger.n is None
                    else 'DataKeyTrigger(n="all", ...) waits only for those that are present.',
                )

    def _fires_early(self, steps: int) -> bool:
        """Whether to tell triggers of keys that are here before their chunk is: a window is a chunk then, and its
        consumer finds it without the buffer."""
        keyed = [leaf for leaf in self._by_data if leaf.stages != (None,)]
        taken = all(leaf.min_new is None and leaf.size == steps for leaf in keyed)
        return bool(keyed) and taken and not self._keyed_elsewhere

    def _bind(self, collector: Collector, steps: int) -> None:
        """Let the buffer take its arrays from the environment; refuse what could only come to a standstill."""
        schema, structures = collector.row_schema()
        schema = {name: spec for name, spec in schema.items() if not is_final(name)}
        buffer, num_envs = self.buffer, self.env.num_envs
        self.ledger.keys = tuple(schema)
        for trigger in self._by_data:
            if trigger.n is not None and trigger.n > self.env.num_workers:
                raise ConfigError(
                    f"{trigger!r} waits for {trigger.n} actors; there are {self.env.num_workers} workers. Lower n, or "
                    'wait for all present workers with n="all".'
                )
            for name in (name for stage in trigger.stages for name in stage or ()):
                if name not in schema:
                    raise ConfigError(unknown_name(f"key of {trigger!r}", name, schema))
        if buffer.is_cyclic and not buffer.is_bound:
            buffer.bind(schema, num_envs, structures)
        if self._takers:
            buffer.keep_in_place()
        if buffer.is_cyclic:
            if buffer.store.columns != num_envs or (self._takers and dict(buffer.schema) != schema):
                raise ConfigError(
                    f"the buffer has {buffer.store.columns} columns for {', '.join(buffer.schema)}; the environment "
                    f"has {num_envs} slots and {', '.join(schema)}. Leave out spec, or make a new buffer."
                )
            needed = max([steps, *(leaf.size + steps - math.gcd(leaf.size, steps) for leaf in self._takers)])
            if buffer.store.rows < needed:
                raise ConfigError(
                    f"the buffer has room for {buffer.store.rows} rows of each of {num_envs} environments; {needed} "
                    f"are needed at a time. Raise capacity to at least {needed * num_envs}."
                )
        if self._most_samples > buffer.limiter.most_samples():
            raise ConfigError(
                f"a consumer samples {self._most_samples} rows at once, and this limiter never gives so many "
                f"({buffer.limiter}); widen it, or sample fewer."
            )
        chunk = steps * max(record.num_envs for record in collector.server.records)
        if buffer.limiter.never_inserts(chunk):
            raise ConfigError(
                f"a chunk of {chunk} rows never fits this limiter ({buffer.limiter}); widen it, or make chunks shorter "
                "(steps=...)."
            )

    def _has_room(self, worker: int, steps: int, feed: Feed) -> bool:
        """Whether a worker's next chunk overwrites nothing that somebody is still to read, and the limiter agrees."""
        if not self.buffer.limiter.can_insert(steps * feed.record(worker).num_envs):
            return False
        return self.holdings.has_room(worker, steps)

    def _check_life(self, feed: Feed, steps: int) -> None:
        """Refuse to wait for what cannot come."""
        if not feed.under_way:
            raise FarstepError(
                "the workflow stands still: no worker rolls, nothing is under way and no trigger waits for time. Is a "
                "trigger missing that calls next_rollout, or does nobody publish?"
            )
        if (waiting := feed.waiting) and not any(self._has_room(worker, steps, feed) for worker in waiting):
            raise FarstepError(
                f"the workflow stands still: chunks have arrived and the buffer has no room for them "
                f"({self.buffer.limiter}; {len(self.buffer)} of {self.buffer.capacity} rows), and no trigger fires "
                "that would make some. Widen the limiter, raise capacity, or lower a trigger's n or size."
            )

    # ---- consumed rows ----

    def is_stale(self, message: Message) -> bool:
        """Whether a message names rows that are more than `max_staleness` versions old."""
        if self._max_staleness is None or self._collector is None:
            return False
        current = self._collector.version()
        oldest = min((span[0] for part in windows_of(message) for span in part["versions"]), default=current)
        return current - oldest > self._max_staleness

    def _freed(self, worker: int, chunks: int, dropped: str | None) -> None:
        if dropped is not None and self._on_demand:
            self._owed[worker] += chunks
        if self._feed is not None:
            self._feed.consumed(worker, chunks, dropped)

    # ---- threads ----

    def _say(self, what: Callable[[], None]) -> None:
        """Write down what happened: now, or, from another thread, by the loop."""
        if self._loop in (None, threading.get_ident()):
            what()
        else:
            self._said.append(what)
            self.wake()

    def wake(self) -> None:
        """Let the loop look again; from any thread."""
        if (feed := self._feed) is not None:
            feed.wake()

    def _end(self, feed: Feed, failure: BaseException | None) -> None:
        """Stop everything. All that consumers raised is this run's: the first is raised, unless something else is."""
        errors: list[BaseException] = []
        try:
            deadline = time.monotonic() + self._end_s
            for publisher in self._publishers:
                publisher.close(drop=failure is not None)
            with self.buffer.halted():  # a thread that waits there for rows would do so for long
                if self._collector is not None:
                    self._collector.gate.ending_run()
                for thread in self._threads:
                    thread.close(drop=failure is not None)
                late = [thread.error(self._end_s) for thread in self._threads if not thread.join(deadline)]
            self.stopped = True  # nothing fires; what threads did is written down
            errors += [*self._dispatcher.settle(), *late]
            with contextlib.suppress(Exception) if failure is not None else contextlib.nullcontext():
                self._fire()
        finally:
            try:
                self.holdings.discard(set(range(self.env.num_workers)))
            finally:
                self._feed = self._loop = self.buffer.inserting_thread = self.buffer.on_room = None
                self.buffer.between_updates = contextlib.nullcontext
                feed.close()
                if self._collector is not None:
                    self._collector.gate.end_run()
                    self._followed = self._collector.followed()
        raised = failure or (errors.pop(0) if errors else None)
        if raised is not None:
            for error in errors:
                raised.add_note(f"Besides, a consumer failed: {described(error)}")
        if raised is not failure and raised is not None:
            raise raised


def _most_chunks(size: int, steps: int) -> int:
    """How many chunks of `steps` rows some of a sequence of windows of `size` rows touch."""
    return 1 + -(-(size - math.gcd(size, steps)) // steps)
