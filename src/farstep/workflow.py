"""Workflows: an algorithm is a table of triggers over one buffer (ARTOS).

    workers ─ chunks ─► buffer ─ triggers ─► consumers (yours) ─ publish ─► workers

`run` is one loop: take a chunk into the buffer, write down what happened, let triggers fire. It sleeps when there is
nothing to do; whoever works elsewhere (a consumer's thread) wakes it.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from farstep.batch import Batch, is_final
from farstep.buffer.dispatch import Dispatcher, Message, Passer, Trigger, leaves_of
from farstep.buffer.ledger import Ledger
from farstep.buffer.passers import Direct, LocalQueue
from farstep.buffer.replay import Buffer
from farstep.buffer.triggers import DataKeyTrigger
from farstep.buffer.windows import Windows
from farstep.cluster_env import ClusterEnv
from farstep.config import check_count
from farstep.core import Agent
from farstep.errors import ClosedError, ConfigError, FarstepError
from farstep.head.collector import Collector
from farstep.head.feed import Feed

Consumer = Callable[[Message], object]
_STEPS = 32  # of a chunk, where no trigger says what it needs
_REMOTE_S = 0.05  # how often a passer to another process is asked whether its consumer is done


class Workflow:
    """Environments, an agent, a buffer, and who is called when.

    `steps` is a chunk's length (else the smallest `size` of a `DataKeyTrigger`). Rows that a learner gets through a
    consuming trigger are at most `max_staleness` versions old; None: workers run ahead as far as the buffer has room.
    """

    def __init__(
        self,
        env: ClusterEnv,
        agent: Agent,
        buffer: Buffer,
        *,
        steps: int | None = None,
        max_staleness: int | None = None,
    ) -> None:
        self.env, self.agent, self.buffer = env, agent, buffer
        self._steps = None if steps is None else check_count("steps", steps)
        self._max_staleness = None if max_staleness is None else check_count("max_staleness", max_staleness, minimum=0)
        self.ledger = Ledger(now=time.monotonic())
        self._dispatcher = Dispatcher()
        self._windows = Windows(buffer)
        self._takers: dict[str, list[DataKeyTrigger]] = {}
        """Triggers whose messages name rows that nobody may overwrite before their consumer is done."""
        self._taken: dict[str, dict[int, int]] = {}
        """By trigger and actor, up to which row that is so."""
        self._threads: list[_Thread] = []
        self._on_demand = self._asks = False
        self._feed: Feed | None = None
        self._loop: int | None = None
        """The thread that runs it."""
        self._said: deque[Callable[[], None]] = deque()
        """What other threads did, for the loop to write down."""
        self._stopped = False

    # ---- the table ----

    def on(
        self,
        trigger: Trigger,
        consumer: Consumer | Passer,
        *,
        thread: bool = False,
        max_outstanding: int = 1,
        name: str | None = None,
    ) -> str:
        """Call `consumer(message)` whenever the trigger fires: in the thread of `run`, or in one of its own.

        A passer (`farstep.buffer.passers`) hands messages elsewhere. Returns the trigger's name.
        """
        if self._feed is not None:
            raise ConfigError("this workflow is running; register its triggers before.")
        if not callable(consumer):
            raise ConfigError(f"consumer is {consumer!r}; expected a function of the message, or a passer.")
        is_passer = hasattr(consumer, "finished")
        passer: Passer = consumer if is_passer else Direct(consumer)  # type: ignore[assignment]
        started: _Thread | None = None
        if thread and not is_passer:
            started = _Thread(consumer, LocalQueue(max_outstanding), self._wake)
            passer = started.queue
        takers = [leaf for leaf in leaves_of(trigger) if isinstance(leaf, DataKeyTrigger) and leaf.min_new is None]
        found = self._dispatcher.add(
            trigger, self._guarded(passer, takers), trigger_id=name, max_outstanding=max_outstanding
        )
        if takers:
            self._takers[found] = takers
            self._taken[found] = {}
        if started is not None:
            self._threads.append(started)
        self._asks = self._asks or (is_passer and started is None)
        self._on_demand = self._on_demand or consumer == self.next_rollout
        return found

    def _guarded(self, passer: Passer, takers: Sequence[DataKeyTrigger]) -> Passer:
        return _Guard(self, passer, bool(takers))

    # ---- what consumers do ----

    def batch(self, message: Message) -> Batch:
        """The rows that a `DataKeyTrigger`'s message names, `[size, slots, ...]`; views until the consumer returns."""
        parts = list(_windows(message))
        if len(parts) != 1:
            raise ConfigError(f"the message names {len(parts)} windows of rows; give one of message['all'].")
        part = parts[0]
        return self._windows.batch(part["actor_ids"], part["start"], part["size"])

    def publish(self, message: Message | None = None) -> int:
        """Publish the agent's parameters; fires `ObjectKeyTrigger("parameters")`. Can be a consumer itself."""
        version = self.env.publish(self.agent)
        self._say(lambda: self.ledger.published("parameters", version))
        return version

    def next_rollout(self, message: Message | None = None) -> None:
        """Let every worker roll one chunk. A workflow that has this as a consumer rolls nothing unasked."""
        if self._feed is None or not self._on_demand:
            raise ConfigError(
                "next_rollout is for a workflow that runs and has it as a consumer: "
                'flow.on(farstep.ObjectKeyTrigger("parameters"), flow.next_rollout).'
            )
        self._feed.invite()

    def announce(self, name: str, version: int) -> None:
        """Another named object has a new version: fires `ObjectKeyTrigger(name)`."""
        self._say(lambda: self.ledger.published(name, version))

    def learned(self, steps: int = 1) -> None:
        """The learner made updates: what `TimeTrigger(unit="learner_steps")` counts."""
        self._say(lambda: self.ledger.learned(steps))

    def stop(self) -> None:
        """Let `run` return after the present event; from any thread."""
        self._stopped = True
        self._wake()

    # ---- the loop ----

    def run(self, total_steps: int | None = None, until: Callable[[], bool] | None = None) -> None:
        """Roll and fire until `total_steps` environment steps have arrived (in all, over several calls), `until()` says
        so, or `stop` is called. What a consumer raises ends the run and is raised here."""
        if total_steps is not None:
            check_count("total_steps", total_steps)
        if self._feed is not None:
            raise ClosedError("this workflow is running already.")
        collector = self.env.adopt(self.agent)
        steps = self._steps or min((t.size for ts in self._takers.values() for t in ts), default=_STEPS)
        chunks = max((t.n * -(-t.size // steps) for ts in self._takers.values() for t in ts), default=1)
        self._bind(collector, steps)
        self._stopped, self._loop = False, threading.get_ident()
        with contextlib.ExitStack() as stack:
            feed = Feed(collector, steps, self._max_staleness, chunks, self._on_demand)
            stack.callback(self._end, feed)
            self._feed = feed
            for thread in self._threads:
                thread.start()
                stack.callback(thread.end)
            self.ledger.published("parameters", collector.version())
            while not self._finished(total_steps, until):
                self._step(feed, steps)

    def _finished(self, total_steps: int | None, until: Callable[[], bool] | None) -> bool:
        self._fire()
        steps = self.ledger.env_steps
        return self._stopped or (total_steps is not None and steps >= total_steps) or (until is not None and until())

    def _step(self, feed: Feed, steps: int) -> None:
        """Wait for the next event and write it down."""
        deadline = self._dispatcher.deadline(self.ledger)
        wait_until = math.inf if deadline is None else deadline
        if self._asks and self._dispatcher.waiting:  # another process cannot wake us
            wait_until = min(wait_until, time.monotonic() + _REMOTE_S)
        if wait_until == math.inf and not self._dispatcher.waiting:
            self._check_life(feed, steps)
        taken = feed.take(lambda worker: self._has_room(worker, steps, feed), wait_until)
        if taken is None:
            return
        arrived, batch = taken
        worker = arrived.order.worker
        start = self.ledger.written(worker)
        self.buffer.insert(batch)
        if self._takers:
            self._windows.add(worker, start, batch)
        feed.stored(arrived)
        self.ledger.wrote(worker, steps, arrived.version, envs=batch.shape[1])
        if not self._takers:
            feed.consumed(1)

    def _fire(self) -> None:
        while self._said:
            self._said.popleft()()
        self.ledger.tick(time.monotonic())
        self._dispatcher.check(self.ledger)
        while self._said:
            self._said.popleft()()
            self._dispatcher.check(self.ledger)

    def _bind(self, collector: Collector, steps: int) -> None:
        """Let the buffer take its arrays from the environment."""
        if self.buffer.is_bound:
            return
        schema, structures = collector.row_schema()
        schema = {name: spec for name, spec in schema.items() if not is_final(name)}
        self.buffer.bind(schema, self.env.num_envs, structures)
        rows = self.buffer.store.rows
        needed = max([steps, *(-(-t.size // steps) * steps for ts in self._takers.values() for t in ts)])
        if rows < needed:
            raise ConfigError(
                f"the buffer has room for {rows} rows of each of {self.env.num_envs} environments; {needed} are needed "
                f"at a time. Raise capacity to at least {needed * self.env.num_envs}."
            )

    def _has_room(self, worker: int, steps: int, feed: Feed) -> bool:
        """Whether a worker's next chunk overwrites nothing that somebody is still to read, and the limiter agrees."""
        if not self.buffer.limiter.can_insert(steps * feed.seat(worker).num_envs):
            return False
        if not self._takers:
            return True
        return self.ledger.written(worker) + steps - self._unread_from(worker) <= self.buffer.store.rows

    def _unread_from(self, worker: int) -> int:
        return min(taken.get(worker, 0) for taken in self._taken.values())

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

    def _is_stale(self, message: Message) -> bool:
        if self._max_staleness is None:
            return False
        current = self.ledger.versions.get("parameters", 0)
        oldest = min((span[0] for part in _windows(message) for span in part["versions"]), default=current)
        return current - oldest > self._max_staleness

    def _consumed(self, message: Message, stale: bool = False) -> None:
        """A message's rows can be overwritten."""
        taken = self._taken.get(message["trigger_id"])
        if taken is None:
            return
        freed = 0
        for part in _windows(message):
            for actor, start in zip(part["actor_ids"], part["start"], strict=True):
                taken[actor] = start + part["size"]
                freed += self._windows.forget(actor, self._unread_from(actor))
        if self._feed is not None and freed:
            self._feed.consumed(freed, stale)

    # ---- threads ----

    def _say(self, what: Callable[[], None]) -> None:
        """Write down what happened: now, or, from another thread, by the loop."""
        if self._loop in (None, threading.get_ident()):
            what()
        else:
            self._said.append(what)
            self._wake()

    def _wake(self) -> None:
        if self._feed is not None:
            with contextlib.suppress(OSError):  # it ended meanwhile
                self._feed.wake()

    def _end(self, feed: Feed) -> None:
        self._feed, self._loop = None, None
        feed.close()


class _Guard:
    """A passer that keeps a message's rows until its consumer is done, and drops what is too old for it."""

    def __init__(self, flow: Workflow, passer: Passer, takes_rows: bool) -> None:
        self._flow, self._passer, self._takes = flow, passer, takes_rows
        self._open: deque[Message] = deque()

    @property
    def full(self) -> bool:
        return bool(getattr(self._passer, "full", False))

    def __call__(self, message: Message) -> bool:
        if self._takes and self._flow._is_stale(message):
            self._flow._consumed(message, stale=True)
            return True
        done = self._passer(message) is not False
        if done:
            self._finish(message)
        else:
            self._open.append(message)
        return done

    def finished(self) -> list[str]:
        found: list[str] = getattr(self._passer, "finished", list)()
        for trigger_id in found:
            message = next(m for m in self._open if m["trigger_id"] == trigger_id)
            self._open.remove(message)
            self._finish(message)
        return found

    def _finish(self, message: Message) -> None:
        if self._takes:
            self._flow._consumed(message)
            self._flow.ledger.learned()


class _Thread:
    """A consumer in a thread of its own."""

    def __init__(self, consumer: Consumer, queue: LocalQueue, wake: Callable[[], None]) -> None:
        self._consumer, self.queue, self._wake = consumer, queue, wake
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._work, name="farstep-consumer", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while True:
            try:
                message = self.queue.take(3600.0)
            except ClosedError:
                return
            if message is None:
                continue
            try:
                self._consumer(message)
            except BaseException as error:  # raised by the loop, where the caller is
                self.queue.done(message, error)
            else:
                self.queue.done(message)
            self._wake()

    def end(self) -> None:
        """Let it finish what it does; nothing more is taken."""
        self.queue.close()
        if self._thread is not None:
            self._thread.join()


def _windows(message: Message) -> Iterator[Mapping[str, Any]]:
    """The parts of a message that name rows."""
    if "all" in message:
        for part in message["all"]:
            yield from _windows(part)
    elif "actor_ids" in message:
        yield message
