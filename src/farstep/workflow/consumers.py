"""Deliveries from triggers to consumers. They retain rows, drop stale messages, report updates and run threads."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

from farstep.agents.update_gate import Turn, UpdateGate
from farstep.buffer.replay import Buffer
from farstep.core import Agent
from farstep.errors import ClosedError, FarstepError
from farstep.head.tickets.records import DropCause
from farstep.workflow.delivery import Direct, LocalQueue
from farstep.workflow.rows.retention import RowRetention, rows_of, windows_of
from farstep.workflow.triggers import DataKeyTrigger
from farstep.workflow.triggers.dispatch import Delivery
from farstep.workflow.triggers.ledger import Actor, Ledger
from farstep.workflow.triggers.messages import Message, extended

Consumer = Callable[[Message], object]


class Flow(Protocol):
    """The members of `Workflow` that consumers need."""

    agent: Agent
    buffer: Buffer
    ledger: Ledger
    retention: RowRetention
    stopped: bool
    """Whether the run is ending, so that no trigger fires."""

    def is_stale(self, message: Message) -> bool:
        """Return whether the message names rows that are too old for `max_staleness`."""
        ...

    def wake(self) -> None:
        """Wake the loop of the workflow. Any thread may call this."""
        ...

    def handling(self) -> AbstractContextManager[None]:
        """Context manager: inside, a consumer thread handles a message."""
        ...


class GuardedDelivery:
    """The delivery between a trigger and a consumer.

    It retains the rows of a message until the consumer is done. It drops messages whose rows are too old. It is `full`
    while the limiter does not allow the consumer to sample.
    """

    def __init__(
        self,
        flow: Flow,
        delivery: Delivery,
        by_data: list[DataKeyTrigger],
        thread: ConsumerThread | None,
        samples: int | None,
        consumer: str,
    ) -> None:
        self._flow, self._delivery, self._thread = flow, delivery, thread
        self._consumer, self._gate = consumer, UpdateGate()
        self.consuming = [leaf for leaf in by_data if leaf.min_new is None]
        self.samples = samples or int(len(by_data) > len(self.consuming))
        self._open: list[Message] = []
        """Delivered messages that are not done."""
        self._held: dict[Actor, list[int]] = {}
        """For each actor, the first rows of its windows in the open messages."""
        self._delivered = 0
        self._last: tuple[Message, int] | None = None
        """The last message with rows that the consumer took, and the newest version at that time."""
        self._gaps: dict[Actor, int] = {}
        """For each actor, the first row after rows that were dropped instead of delivered."""

    @property
    def full(self) -> bool:
        """Whether the consumer cannot be called now."""
        buffer = self._flow.buffer
        if self._flow.stopped or (self.samples and not buffer.limiter.can_sample(self.samples)):
            return True
        if buffer.sampler.once and len(buffer) < self.samples:
            return True
        return bool(getattr(self._delivery, "full", False))

    def __call__(self, message: Message) -> bool:
        if self.consuming:
            if self.is_stale(message):
                self._finish(message, "stale")
                return True
            message = self._flow.retention.located(message, self)
            self._last = message, self._flow.ledger.versions.get("parameters", 0)
        self._delivered += 1
        message = extended(message, message_id=f"{message['trigger_id']}/{self._delivered}")
        self._open.append(message)
        for actor, start, _ in rows_of(message) if self.consuming else ():
            self._held.setdefault(actor, []).append(start)
        try:
            with self._updating(message):
                done = self._delivery(message) is not False
        except BaseException:
            self._finish(message, "")
            raise
        if done:
            self._finish(message, None)
        return done

    def is_stale(self, message: Message) -> bool:
        """Return whether the message names rows that are too old. Always False if the consumer takes no rows."""
        return bool(self.consuming) and self._flow.is_stale(message)

    def lag(self) -> int | None:
        """Return the age, in versions, of the oldest rows of the last message; None if the consumer takes no rows."""
        if self._last is None:
            return None
        message, current = self._last
        return current - min((span[0] for part in windows_of(message) for span in part["versions"]), default=current)

    # ---- updates in progress (`delivery.MessageObserver`) ----

    def watch_updates(self, gate: UpdateGate) -> None:
        """Report to the gate whenever the consumer may be changing the agent."""
        self._gate = gate
        if isinstance(self._delivery, LocalQueue):
            self._delivery.observer = self

    def _updating(self, message: Message) -> AbstractContextManager[None]:
        if not isinstance(self._delivery, Direct):
            return contextlib.nullcontext()
        return self._gate.updating(self._key(message), self._name(message), self._flow.agent)

    def begin(self, message: Message) -> None:
        """Record that the calling thread starts to handle a message."""
        self._gate.begin(self._key(message), self._name(message), self._flow.agent)

    def end(self, message: Message, raised: bool) -> None:
        """Record that a message was handled, or that handling it raised."""
        self._gate.end(self._key(message), raised)

    def _key(self, message: Message) -> tuple[int, str]:
        return id(self), message["message_id"]

    def _name(self, message: Message) -> str:
        return f"{self._consumer} of trigger {message['trigger_id']!r}"

    def finished(self) -> list[str]:
        """Free the rows of messages that became done since the last call; return the ids of their triggers."""
        found: list[str] = getattr(self._delivery, "finished", list)()
        failed: set[str] = getattr(self._delivery, "failed", set())
        done = [message for name in found for message in self._open if message["message_id"] == name]
        for message in done:
            why = None if self._thread is None else self._thread.unhandled.pop(id(message), None)
            self._finish(message, "" if why is None and message["message_id"] in failed else why)
        failed.difference_update(found)
        return [message["trigger_id"] for message in done]

    def _finish(self, message: Message, unhandled: DropCause | Literal[""] | None) -> None:
        """Free the rows of a done message.

        `unhandled` is None if the message was handled; otherwise "stale", "cancelled", or "" if the consumer raised.
        """
        if any(each is message for each in self._open):
            self._open = [each for each in self._open if each is not message]
            for actor, start, _ in rows_of(message) if self.consuming else ():
                self._held[actor].remove(start)
        if self.consuming:
            if unhandled:
                self.skip(message)
            for actor, start, _ in rows_of(message):
                # Keep the gap for later stages of the same rows.
                if self._gaps.get(actor) == start < min(leaf.next_of(actor) for leaf in self.consuming):
                    del self._gaps[actor]
            self._flow.retention.done(message)
            self._flow.retention.free({actor for actor, _, _ in rows_of(message)}, unhandled or None)
        if unhandled is None and (self.consuming or self.samples):
            self._flow.ledger.learned()

    def skip(self, message: Message) -> None:
        """Record that the rows of a message are dropped, so that the next rows follow a gap. Any thread may call
        this."""
        for actor, _, stop in rows_of(message):
            self._gaps[actor] = max(stop, self._gaps.get(actor, 0))

    # ---- rows (`rows.retention.Holder`) ----

    def holds(self, window: Mapping[str, Any], trigger_id: str | None) -> bool:
        """Return whether an unfinished message (of `trigger_id`; None: of any trigger) names these rows."""
        return any(
            (each["actor_ids"], each["start"]) == (window["actor_ids"], window["start"])
            for message in tuple(self._open)
            if trigger_id in (None, message["trigger_id"])
            for each in windows_of(message)
        )

    def gaps_before(self, window: Mapping[str, Any]) -> list[tuple[int, int]]:
        """Return (actor, first row) of each window whose preceding rows were dropped."""
        pairs = zip(window["actor_ids"], window["start"], strict=True)
        return [(actor, start) for actor, start in pairs if self._gaps.get(actor) == start]

    def unread_from(self, actor: int) -> int:
        """Return the first row of an actor that is in use, or that a later message may name."""
        found: list[int] = [*(leaf.next_of(actor) for leaf in self.consuming), *self._held.get(actor, ())]
        return min(found)

    def discard(self, state: Ledger) -> None:
        """Skip all rows that no message has named yet."""
        for leaf in self.consuming:
            for actor in state.actors:
                if leaf.next_of(actor) < state.written(actor):
                    self._gaps[actor] = state.written(actor)
            leaf.discard(state)

    def left(self, state: Ledger, actor: Actor) -> None:
        for leaf in self.consuming:
            leaf.left(state, actor)


class ConsumerThread:
    """A consumer that runs in its own thread."""

    def __init__(self, flow: Flow, consumer: Consumer, queue: LocalQueue) -> None:
        self._flow, self._consumer, self.queue = flow, consumer, queue
        self.unhandled: dict[int, DropCause | Literal[""]] = {}
        """By `id(message)`, why messages were not handled."""
        self.guard: GuardedDelivery | None = None
        self.name = ""
        """Id of the consumer's trigger."""
        self._thread: threading.Thread | None = None

    def check_ended(self) -> None:
        """Raise `ClosedError` if the thread of an earlier run is still working."""
        if self._thread is not None and self._thread.is_alive():
            raise ClosedError(f"{self} is still handling a message of an earlier run; wait until it has returned.")

    def start(self) -> None:
        self.queue.reopen()
        self._thread = threading.Thread(target=self._work, name="farstep-consumer", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while True:
            try:
                message = self.queue.take(3600.0)
            except ClosedError:
                return
            if message is not None:
                self.queue.done(message, self._handle(message))
                self._flow.wake()

    def _handle(self, message: Message) -> BaseException | None:
        """Call the consumer, unless the message became stale in the queue. Return the exception that it raised, or
        None."""
        if self.guard is not None and self.guard.is_stale(message):
            self.unhandled[id(message)] = "stale"
            self.guard.skip(message)
            return None
        try:
            with self._flow.handling():
                self._consumer(message)
        except BaseException as error:  # the thread of `run` raises it
            self.unhandled[id(message)] = ""
            return None if self._flow.buffer.is_halted and isinstance(error, ClosedError) else error
        return None

    def close(self, drop: bool) -> None:
        """Accept no more messages. With `drop`, cancel queued messages; otherwise the thread still handles them."""
        for message in self.queue.close(drop):
            self.unhandled[id(message)] = "cancelled"

    def join(self, deadline: float) -> bool:
        """Wait for the end of the thread, at most until `deadline` (`time.monotonic`). Return whether it has ended."""
        if self._thread is None:
            return True
        self._thread.join(min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX))
        return not self._thread.is_alive()

    def error(self, waited_s: float) -> FarstepError:
        """Return the error to raise if the thread has not ended `waited_s` seconds after the run."""
        return FarstepError(
            f"{self} has not returned {waited_s:g} s after the end of the run. Its thread continues. This workflow can "
            "run again after the consumer has returned. If the consumer needs more time, raise Workflow(end_s=...)."
        )

    def __str__(self) -> str:
        return f"{name_of(self._consumer)} of trigger {self.name!r}"


class PublishDelivery:
    """The delivery to `Workflow.publish`: publishes as soon as no consumer is updating the agent.

    It runs in the thread of the loop and does not block while it waits for its turn.
    """

    def __init__(self, publish: Callable[[], object], agent: Agent, wake: Callable[[], None]) -> None:
        self._publish, self._agent, self._wake = publish, agent, wake
        self._gate = UpdateGate()
        self._turn: Turn | None = None
        self._waiting: list[str] = []
        """Ids of messages that are not done."""
        self._done: list[str] = []
        """Ids of messages that became done together with a later message; `finished` has not returned them yet."""
        self._ends = self._drops = False
        self.failed: set[str] = set()
        """Ids of done messages for which nothing was published."""

    def start(self, gate: UpdateGate) -> None:
        """Start a run with its gate."""
        self._gate, self._ends, self._drops = gate, False, False

    def __call__(self, message: Message) -> bool:
        before = list(self._waiting)
        self._waiting.append(message["message_id"])
        try:
            done = self._published()
        except BaseException:
            self._waiting.clear()
            raise
        if done:
            self._waiting.clear()
            self._done += before
        return done

    def finished(self) -> list[str]:
        """Publish if it is this publisher's turn, and return the ids of the messages that are done."""
        if self._waiting and (self._published() or self._ends):
            self._done += self._waiting
            self._waiting.clear()
        done, self._done = self._done, []
        return done

    def _published(self) -> bool:
        """Publish if it is this publisher's turn; otherwise stay in the queue. Return whether it published."""
        if self._drops:
            self.failed.update(self._waiting)
            return False
        turn = self._turn = self._turn or self._gate.request(self._wake, self._agent)
        try:
            if turn.granted:
                self._publish()
            elif self._ends:
                self.failed.update(self._waiting)
            else:
                self._gate.check(turn)
        except BaseException:
            self.failed.update(self._waiting)
            self._release()
            raise
        if turn.granted or self._ends:
            self._release()
        return turn.granted

    @property
    def next_check(self) -> float | None:
        """When the loop must call `finished` even without another event (`time.monotonic`); None: never."""
        return None if self._turn is None else self._turn.next_check

    def close(self, drop: bool) -> None:
        """End the run. Leave the queue of the gate so that consumers can finish, then publish unless `drop`."""
        self._ends, self._drops = True, drop
        self._release()

    def _release(self) -> None:
        if self._turn is not None:
            self._gate.release(self._turn)
            self._turn = None


def name_of(consumer: object) -> str:
    """Return the consumer's name in errors."""
    return f"the consumer {getattr(consumer, '__qualname__', consumer)!r}"
