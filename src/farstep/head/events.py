"""The events of a run: stores the latest, and passes each one to the `farstep` logger and to subscribers."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from typing import SupportsFloat

from farstep.errors import ConfigError, FarstepError, WorkerError, described, typed_shortage
from farstep.event import EVENT_KINDS, RUN_FAILED, Emit, Event, EventKind, check_kind, traceback_of

log = logging.getLogger("farstep")
MAX_EVENTS = 1_000
"""Latest events that are kept in memory."""
_MAX_TEXT, _MAX_TRACEBACK = 4_000, 16_000
"""Most characters of an event's text and traceback; longer ones are cut, since a peer may have written them."""
_COMPARED_TEXT = 500
"""Characters of two failures that must be equal for the failures to count as equal."""
MAX_UNREAD = 10_000
"""Events that may wait for a slow subscriber; further ones are dropped and counted."""
_CLOSE_S = 5.0
"""Seconds that a subscriber has to read the remaining events when its subscription is closed."""
_TICK_S = 1e-6
"""Smallest difference between the times of two events."""
_INFO = frozenset({"joined", "restarted", "parked", "scaled", "announced", "checkpointed", "loaded", "evaluated"})
"""Kinds that are logged at level INFO; the others are warnings."""


class EventLog:
    """The events of one run. All methods may be called from any thread, and from a signal handler.

    A subscriber reads in a thread of its own, so that a slow or failing one delays nothing. The logger is called in the
    emitting thread, as by any other use of `logging`.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant, since a signal handler may emit
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._counts: Counter[EventKind] = Counter()
        self._subscriptions: list[Subscription] = []
        self._relay: Callable[[Event], None] | None = None
        self._last = 0.0
        self._failed = False
        """Whether the error that ends the run was emitted."""
        self._retried: Counter[str] = Counter()
        """How often each failure was emitted by `emit_retry`."""

    def emit(
        self,
        kind: EventKind,
        text: str,
        *,
        worker: int | None = None,
        node: str = "",
        traceback: str = "",
        logged: bool = True,
    ) -> None:
        """Record an event. Never raises, and never waits for a subscriber.

        Args:
            kind: What happened.
            text: One sentence.
            worker: Index of the worker, if it concerns one.
            node: Name of the host, if it concerns one.
            traceback: For a failure, its traceback or the output of the process.
            logged: Whether to pass it to the logger; False if an exception tells the user.
        """
        with contextlib.suppress(Exception):  # also a text that is not a string, and a logging handler that raises
            event = Event(
                time=0.0,
                kind=kind,
                text=_start_of(_encodable(text), _MAX_TEXT),
                worker=None if worker is None else int(worker),
                node=_encodable(node),
                traceback=_end_of(_encodable(traceback), _MAX_TRACEBACK),
            )
            with self._lock:
                self._last = max(time.time(), self._last + _TICK_S)  # also if the clock was set back
                event = replace(event, time=self._last)
                self._events.append(event)
                self._counts[kind] += 1
                for subscription in self._subscriptions:
                    subscription.put(event)
            if logged and self._relay is not None:
                self._relay(event)
            elif logged:
                log.log(logging.INFO if kind in _INFO else logging.WARNING, "%s", event.text, stacklevel=2)

    def relay(self, emit: Emit, prefix: str) -> None:
        """From now on pass events to another run instead of the logger, except the failure that ends this run.

        Args:
            emit: Emits an event of the other run. It gets no worker, since the other run has workers of its own.
            prefix: Start of their texts.
        """
        self._relay = lambda event: emit(
            event.kind, f"{prefix}{event.text}", node=event.node, traceback=event.traceback
        )

    def emit_retry(self, error: WorkerError) -> None:
        """Emit a failure of an environment that the run survives. Of equal failures, only the 1st, 10th, 100th and so
        on are logged."""
        key = error.message[:_COMPARED_TEXT]
        with self._lock:
            if len(self._retried) >= MAX_EVENTS and key not in self._retried:
                self._retried.clear()  # an environment may put a different number into each message
            self._retried[key] += 1
            times = self._retried[key]
        so_far = f" ({times} such failures so far)" if times > 1 else ""
        self.emit(
            "warned",
            f"{str(error).splitlines()[0]}{so_far}; continuing with the next episodes",
            worker=error.where.worker,
            node=error.where.host,
            traceback=error.evidence,
            logged=times == 10 ** (len(str(times)) - 1),
        )

    def emit_failure(self, error: Exception) -> None:
        """Emit the error that ends the run; only the first, and not logged, since it is raised."""
        with self._lock:
            if self._failed:
                return
            self._failed = True
        told = str(error) if isinstance(error, FarstepError) else described(error)
        first, _, rest = told.partition("\n")
        worker, node, traceback = None, "", traceback_of(error)
        if isinstance(error, WorkerError):
            worker, node, traceback = error.where.worker, error.where.host, error.evidence
        elif isinstance(error, FarstepError):  # that of a launcher quotes the logs of nodes after its first line
            traceback = rest.strip() or (traceback_of(error.__cause__) if error.__cause__ else "")
        self.emit("warned", f"{RUN_FAILED}{first}", worker=worker, node=node, traceback=traceback, logged=False)

    @contextlib.contextmanager
    def emitting_failure(self) -> Iterator[None]:
        """Context manager: emit an error that is raised inside, since it ends the run."""
        try:
            yield
        except Exception as error:
            self.emit_failure(error)
            raise

    def events(self, kinds: EventKind | Collection[EventKind] | None = None, since: float = 0.0) -> list[Event]:
        """Return the stored events of these kinds (None: all) that are later than `since`, oldest first.

        Raises:
            ConfigError: A kind is unknown, or an argument has a wrong type.
        """
        if not isinstance(since, SupportsFloat):
            raise ConfigError(f"since is {since!r}; expected Unix time in seconds, such as the time of an event.")
        if not isinstance(kinds, str | Iterable | None):
            raise ConfigError(f"kinds is {kinds!r}; expected a kind of event, such as 'lost', or a list of kinds.")
        chosen = EVENT_KINDS if kinds is None else (kinds,) if isinstance(kinds, str) else tuple(kinds)
        for kind in chosen:
            check_kind(kind)
        with self._lock:
            stored = list(self._events)
        return [event for event in stored if event.time > since and event.kind in chosen]

    def counts(self) -> dict[EventKind, int]:
        """Return how many events of each kind were emitted, including those that are no longer stored."""
        with self._lock:
            return {kind: self._counts[kind] for kind in EVENT_KINDS}

    def subscribe(self, read: Callable[[Event], None]) -> Subscription:
        """Call `read` with every stored event and every later one, in order, in a thread of its own.

        Args:
            read: If it raises, it gets no more events, and the failure is emitted as `warned`.

        Returns:
            The subscription; close it to end the thread.

        Raises:
            ResourceError: No thread can be started.
        """
        subscription = Subscription(self, read)
        with typed_shortage("the thread of a subscriber to events could not be started"):
            subscription.start()
        with self._lock:
            for event in self._events:
                subscription.put(event)
            self._subscriptions.append(subscription)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        """Pass no further events to a subscription."""
        with self._lock, contextlib.suppress(ValueError):
            self._subscriptions.remove(subscription)


class Subscription:
    """Passes events to one subscriber, in a thread; made by `EventLog.subscribe`."""

    def __init__(self, events: EventLog, read: Callable[[Event], None]) -> None:
        self._events, self._read = events, read
        self._unread: queue.SimpleQueue[Event | None] = queue.SimpleQueue()  # reentrant, for signal handlers
        self._dropped = 0
        self._thread = threading.Thread(target=self._run, daemon=True, name="farstep-events")

    def start(self) -> None:
        self._thread.start()

    def put(self, event: Event) -> None:
        """Queue an event, or drop it if too many are unread; the caller holds the lock of the log."""
        if self._unread.qsize() >= MAX_UNREAD:
            self._dropped += 1
        else:
            self._unread.put(event)

    def close(self) -> None:
        """Let the subscriber read the remaining events, for a few seconds at most, and end its thread."""
        self._events.unsubscribe(self)
        self._unread.put(None)
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while (event := self._unread.get()) is not None:
            try:
                self._read(event)
            except Exception as error:
                self._events.unsubscribe(self)
                self._events.emit(
                    "warned",
                    f"a reader of events failed and gets no more of them: {described(error)}",
                    traceback=traceback_of(error),
                )
                return
            if self._dropped and self._unread.empty():
                dropped, self._dropped = self._dropped, 0
                self._events.emit("warned", f"a reader of events is too slow: {dropped} events were dropped for it")


def _encodable(text: str) -> str:
    """Escape what UTF-8 cannot encode (lone surrogates, from undecodable bytes), so that any reader can write it."""
    return str(text).encode("utf-8", "backslashreplace").decode()


def _start_of(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]} [{len(text) - limit} characters left out]"


def _end_of(text: str, limit: int) -> str:
    """The end of a traceback has the error, and the end of an output what was printed last."""
    return text if len(text) <= limit else f"[{len(text) - limit} characters left out]\n{text[-limit:]}"
